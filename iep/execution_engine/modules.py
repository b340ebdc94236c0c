"""The modules of Johnson et al. 2017 and what an engine that is made of them runs: the family `iep`.

A program's tokens are residual blocks, or, with two arguments, a projection and a residual block (Inferring and
Executing Programs, section 3.2 and the supplementary material). Which module runs when is `iep/batching/`.

Shapes: B programs, L tokens, G rows of a module's call, C H W feature maps.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.reference import run_prefix
from iep.execution_engine.family import Family, scene_token
from iep.execution_engine.norms import make_norm
from iep.programs import arities, arity
from iep.vocab import NULL, START

SCENES = ("module", "stem")


class UnaryModule(nn.Module):
    """Residual block of two 3x3 convolutions: (G, C, H, W) -> (G, C, H, W).

    Args:
        dim: C.
        residual: add the block's input to its output before the last ReLU.
        norm: of `iep.execution_engine.norms.NORMS`, after each convolution.
    """

    def __init__(self, dim: int, residual: bool = True, norm: str = "none"):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.bn1, self.bn2 = make_norm(norm, dim), make_norm(norm, dim)
        self.residual = residual

    def forward(self, x_GCHW: Tensor) -> Tensor:
        """The block's output."""
        inner_GCHW = self.conv1(x_GCHW)
        inner_GCHW = functional.relu(inner_GCHW if self.bn1 is None else self.bn1(inner_GCHW))
        inner_GCHW = self.conv2(inner_GCHW)
        inner_GCHW = inner_GCHW if self.bn2 is None else self.bn2(inner_GCHW)
        return functional.relu(x_GCHW + inner_GCHW if self.residual else inner_GCHW)


class BinaryModule(nn.Module):
    """Two maps (G, C, H, W), in order, concatenated and projected to one, then a residual block.

    The arguments are those of the block.
    """

    def __init__(self, dim: int, residual: bool = True, norm: str = "none"):
        super().__init__()
        self.proj = nn.Conv2d(2 * dim, dim, kernel_size=1)
        self.res_block = UnaryModule(dim, residual, norm)

    def forward(self, first_GCHW: Tensor, second_GCHW: Tensor) -> Tensor:
        """The block's output."""
        both = torch.cat([first_GCHW, second_GCHW], dim=1)
        return self.res_block(functional.relu(self.proj(both)))


def make_module(token: str, dim: int, residual: bool, norm: str) -> nn.Module:
    """The module of a program token."""
    return (BinaryModule if arity(token) == 2 else UnaryModule)(dim, residual, norm)


def modules_run(program_tokens: Sequence[str], scene: str) -> dict[int, str]:
    """Op -> token of every token that can run: all but `<NULL>`, `<START>`, and `scene` where it is the stem's output.

    Raises:
        ValueError: `scene` is unknown, or no token.
    """
    leaf = scene_token(program_tokens)
    never_run = {NULL, START, leaf} if _scene_is_input(scene) else {NULL, START}
    return {op: token for op, token in enumerate(program_tokens) if op not in never_run}


def program_graph(
    programs_BL: np.ndarray | Tensor, program_tokens: Sequence[str], scene: str, input_B: np.ndarray | None
) -> Graph:
    """The graph of programs over one input, a stem, for each; every value is a map."""
    return graph_from_prefix(
        programs_BL,
        arities(program_tokens),
        leaf=scene_token(program_tokens),
        skip=START,
        pad=NULL,
        leaf_is_input=_scene_is_input(scene),
        input_B=input_B,
    )


def run_one(
    program_L: Sequence[int],
    program_tokens: Sequence[str],
    scene: str,
    modules: Mapping[int, nn.Module],
    stem_1CHW: Tensor,
) -> Tensor:
    """(1, C, H, W): one program, one module at a time."""
    return run_prefix(
        program_L,
        arity=lambda token: arity(program_tokens[token]),
        run=lambda token, *arguments: modules[token](*arguments),
        input_value=stem_1CHW,
        leaf=scene_token(program_tokens),
        skip=START,
        pad=NULL,
        leaf_is_input=_scene_is_input(scene),
    )


def _scene_is_input(scene: str) -> bool:
    if scene not in SCENES:
        raise ValueError(f"scene is {scene!r}, expected one of {', '.join(SCENES)}")
    return scene == "stem"


IEP = Family(make_module, modules_run, program_graph, run_one)
