"""What a family of modules is to the engine: the functions that it is run by.

`families.py` has those that there are.

Shapes: B programs, L tokens, C H W feature maps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from iep.batching.graph import Graph
from iep.batching.types import Types
from iep.programs import SCENE


def of_one_column(graph: Graph, program_tokens: Sequence[str]) -> None:
    """Every value is a map of the stem's shape: the graph needs no types."""


def stems_alone(stems_NCHW: Tensor) -> Tensor:
    """The stems are all the inputs."""
    return stems_NCHW


@dataclass(frozen=True)
class Family:
    """Functions of one family of modules."""

    make: Callable[[str, int, bool, str], nn.Module]
    """(token, C, residual, norm) -> the module of a program token."""
    runs: Callable[[Sequence[str], str], dict[int, str]]
    """(program tokens, scene) -> op -> token, of those that have a module."""
    graph: Callable[[np.ndarray | Tensor, Sequence[str], str, np.ndarray | None], Graph]
    """(programs_BL, program tokens, scene, input_B) -> the graph of programs, `input_B` the stem of each, from 0; None
    where program b has stem b. No tensors are made: the data loader's workers call it."""
    reference: Callable[[Sequence[int], Sequence[str], str, Mapping[int, nn.Module], Tensor], Tensor]
    """(program_L, program tokens, scene, modules by op, stem_1CHW) -> (1, C, H, W), one module at a time, sharing no
    code with the graph."""
    types: Callable[[Graph, Sequence[str]], Types | None] = of_one_column
    """(graph, program tokens) -> the columns of the graph's values; None where all are maps of the stem's shape."""
    inputs: Callable[[Tensor], Tensor | Mapping[int, Tensor]] = stems_alone
    """(stems_NCHW) -> what the graph's inputs are, as `iep.batching.execute` takes them."""


def scene_token(program_tokens: Sequence[str]) -> int:
    """The index of `scene`.

    Raises:
        ValueError: the vocabulary lacks it.
    """
    if SCENE not in program_tokens:
        raise ValueError(f"the program vocabulary {', '.join(program_tokens)} lacks {SCENE!r}")
    return list(program_tokens).index(SCENE)
