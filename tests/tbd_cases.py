"""A small engine of Transparency by Design's modules and programs for it, well-formed and not."""

import torch
from batching_cases import matrix, token_matrices

from iep.models.build import build
from iep.vocab import END, NULL, START, UNK, index_tokens

UNARY = ("count", "filter_color[red]", "query_size", "relate[left]", "same_shape", "unique")
BINARY = ("equal_integer", "intersect", "less_than", "union")
TOKENS = index_tokens([*UNARY, *BINARY, "exist", "scene"])
INDEX = {token: index for index, token in enumerate(TOKENS)}


def programs(*texts):
    """Prefix programs as a matrix of tokens."""
    return matrix([[START, *(INDEX[token] for token in text.split()), END] for text in texts], pad=NULL)


WELL_FORMED = (
    "query_size unique filter_color[red] scene",
    "count union filter_color[red] scene relate[left] unique filter_color[red] scene",
    "exist same_shape unique intersect relate[left] scene filter_color[red] scene",
    "less_than count filter_color[red] scene count same_shape unique filter_color[red] scene",
    "equal_integer count scene count filter_color[red] scene",
    "count intersect filter_color[red] scene filter_color[red] scene",
)
ILL_FORMED = (
    "scene",
    "unique unique scene",
    "filter_color[red] count scene",
    "<END> filter_color[red] <UNK> scene",
    "union count filter_color[red] scene equal_integer scene filter_color[red] scene",
    "equal_integer filter_color[red] scene count unique",
    "union scene scene",
    "same_shape query_size scene",
    "count",
    "count <UNK> intersect same_shape scene <END> exist",
)
PROGRAMS_BL = programs(*WELL_FORMED, *ILL_FORMED)
"""About the same thing where they are alike, so that there is something to share."""

any_programs = token_matrices(
    len(TOKENS),
    inner=[START, END, UNK, *(INDEX[token] for token in (*UNARY, *BINARY))],
    unary=[INDEX[token] for token in UNARY],
    binary=[INDEX[token] for token in BINARY],
    max_batch=6,
    wide=10,
)


def tbd_engine(dtype=torch.float64, tokens=TOKENS, **kwargs):
    torch.manual_seed(0)
    settings = {"feature_dim": 5, "feature_height": 3, "feature_width": 4, "module_dim": 3, "stem_widths": (4,)}
    settings |= {"classifier_projection": 6, "classifier_hidden": (7,), "modules": "tbd"}
    return build("engine", {"program_tokens": tokens, "num_answers": 4} | settings | kwargs).to(dtype)


def features(count, dtype=torch.float64):
    return torch.randn(count, 5, 3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
