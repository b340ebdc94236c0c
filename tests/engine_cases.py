"""Small engines of each set of modules, programs for them, well-formed and not, and devices to place them on."""

import copy
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import matrix, token_matrices
from device_cases import ONE_GPU, TWO_GPUS
from tiny_data import build
from torch import nn

from iep.execution_engine.assembly import place_parts
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import Placement, round_robin
from iep.execution_engine.roles import ATTENTION, MAP, Role
from iep.execution_engine.tbd import AttentionModules
from iep.programs import arity
from iep.vocab import END, NULL, SPECIAL_TOKENS, START, UNK, index_tokens

UNARY = ("count", "exist", "filter_color[red]", "query_size", "relate[left]", "same_shape", "unique")
BINARY = ("equal_integer", "greater_than", "intersect", "union")
TOKENS = index_tokens([*UNARY, *BINARY, "scene"])
INDEX = {token: index for index, token in enumerate(TOKENS)}

PAIR = 2
"""The kind of a value of two channels, (2, H, W)."""
CHANNELS = {MAP: 3, ATTENTION: 1, PAIR: 2}
OF_PAIRS = {
    "pair": Role((MAP,), PAIR),
    "apart": Role((PAIR,), ATTENTION, reads_stem=True, is_penalized=True),
    "equal_pairs": Role((PAIR, ATTENTION), PAIR),
    "equal_halves": Role((MAP, PAIR), MAP),
}


class OfPairs(nn.Module):
    """A convolution of all arguments, no two of which interchange."""

    def __init__(self, role: Role):
        super().__init__()
        self.conv = nn.Conv2d(sum(map(CHANNELS.get, role.reads)), CHANNELS[role.result], 3, padding=1)

    def forward(self, *arguments):
        return torch.sigmoid(self.conv(torch.cat(arguments, dim=1)))


class PairModules(AttentionModules):
    """The set `tbd`, and functions of a third kind of values."""

    def role(self, token):
        return OF_PAIRS.get(token) or super().role(token)

    def make(self, token):
        return OfPairs(OF_PAIRS[token]) if token in OF_PAIRS else super().make(token)

    def scene_values(self, stems_NCHW):
        pair_12HW = torch.linspace(0, 1, 2).to(stems_NCHW)[:, None, None].expand(1, 2, *stems_NCHW.shape[2:])
        return super().scene_values(stems_NCHW) | {PAIR: pair_12HW}


ENGINES = {
    "iep": {},
    "iep with context": {"scene": "stem", "module_settings": {"context": True}, "classifier_pool": 0},
    "tbd": {"modules": "tbd"},
    "pooled": {"modules": "pooled", "module_dim": 4},
    "vector": {"modules": "vector"},
    "of pairs": {"modules": "engine_cases:PairModules", "program_tokens": [*TOKENS, *OF_PAIRS]},
}
"""Settings of engines by name."""


def tokens_of(name: str) -> list[str]:
    """Return the program vocabulary of one of `ENGINES`."""
    return ENGINES[name].get("program_tokens", TOKENS)


FULL_SIZE = {"feature_dim": 1024, "feature_height": 14, "feature_width": 14}
"""The shape of the features of ResNet-101."""


def small_engine(dtype=torch.float64, **kwargs) -> ExecutionEngine:
    torch.manual_seed(0)
    sizes = {"feature_dim": 5, "feature_height": 3, "feature_width": 4, "module_dim": 3, "stem_widths": (4,)}
    sizes |= {"classifier_projection": 6, "classifier_hidden": (7,), "program_tokens": TOKENS, "num_answers": 4}
    return build("engine", sizes | kwargs).to(dtype)


def draw_norms(network: nn.Module) -> None:
    """Draw weights, biases and running statistics of batch norms, which would begin as ones and zeros."""
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, std=0.2)
            layer.running_mean.normal_(0.0, 0.3)
            layer.running_var.uniform_(0.5, 2.0)


def features(count, dtype=torch.float64):
    return torch.randn(count, 5, 3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))


def programs(*texts):
    """Return prefix programs as a matrix of tokens."""
    return matrix([[START, *(INDEX[token] for token in text.split()), END] for text in texts], pad=NULL)


PROGRAMS_BL = programs(
    "count filter_color[red] scene",
    "greater_than count scene count filter_color[red] relate[left] scene",
    "count union filter_color[red] scene relate[left] scene",
    "scene",
)

MANY_BL = programs(
    "query_size unique filter_color[red] scene",
    "count union filter_color[red] scene relate[left] unique filter_color[red] scene",
    "exist same_shape unique intersect relate[left] scene filter_color[red] scene",
    "greater_than count filter_color[red] scene count same_shape unique filter_color[red] scene",
    "equal_integer count scene count filter_color[red] scene",
    "count intersect filter_color[red] scene filter_color[red] scene",
    # These are ill-formed, for one of the families or both.
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
"""Many have subtrees in common, so that there is something to share."""


def vocabularies(name: str) -> st.SearchStrategy[list[str]]:
    """Draw vocabularies of some of the functions of one of `ENGINES`, which may be none, and `scene`."""
    functions = [token for token in tokens_of(name) if token not in (*SPECIAL_TOKENS, "scene")]
    return st.lists(st.sampled_from(functions), unique=True).map(lambda some: index_tokens([*some, "scene"]))


def programs_for(tokens: Sequence[str]) -> st.SearchStrategy[np.ndarray]:
    """Draw matrices of programs of a vocabulary."""
    inner = [index for index, token in enumerate(tokens) if index != NULL and arity(token)]
    return token_matrices(
        len(tokens),
        inner,
        unary=[index for index in inner if arity(tokens[index]) == 1 and index > UNK] or [END],
        binary=[index for index in inner if arity(tokens[index]) > 1] or [END],
        max_batch=6,
        wide=10,
    )


any_programs = programs_for(TOKENS)

ONE_KIND = [
    ("cpu", "cpu", "cpu"),
    pytest.param(("cuda:0", "cuda:0"), marks=ONE_GPU),
    pytest.param(("cuda:0", "cuda:1"), marks=TWO_GPUS),
]
DEVICE_LISTS = [
    *ONE_KIND,
    pytest.param(("cpu", "cuda:0"), marks=ONE_GPU),
    pytest.param(("cuda:0", "cpu"), marks=ONE_GPU),
]


def placed_copy(engine: ExecutionEngine, devices: tuple[str, ...], seed: int | None = None) -> ExecutionEngine:
    """Return a copy of the engine with its parts on the devices in turn, or at random, or whole on the first device.

    It is whole if there is only one device, or if the modules share their weights, which cannot be on several.
    """
    if len(devices) == 1 or engine.shared is not None:
        return copy.deepcopy(engine).to(devices[0])
    placement = round_robin(engine.parts, devices)
    if seed is not None:
        positions = np.random.default_rng(seed).integers(0, len(devices), len(engine.parts)).tolist()
        placement = Placement(devices, dict(zip(engine.parts, positions, strict=True)))
    return place_parts(copy.deepcopy(engine), placement, "channels-first")
