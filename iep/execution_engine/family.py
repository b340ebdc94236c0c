"""What a family of modules is to the engine: the functions that it is run by.

`families.py` has those that there are.

Shapes: B programs, L tokens, C H W feature maps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from iep.batching.graph import Graph
from iep.batching.plan import Types
from iep.programs import NOT_USED, SCENE, ProgramTree, arity, program_tree, without

MAP, ATTENTION = 0, 1
"""Columns of values: (C, H, W), as stems are, and (1, H, W)."""
KINDS = {MAP: "an encoding", ATTENTION: "an attention"}
"""What values of a column are, for people."""


def as_column(column: int, maps_GCHW: Tensor) -> Tensor:
    """Something of the shape of a column's values, out of maps."""
    return maps_GCHW if column == MAP else maps_GCHW[:, :1]


def of_one_column(graph: Graph, program_tokens: Sequence[str], num_programs: int) -> None:
    """Every value is a map of the stem's shape: the graph needs no types."""


def stems_alone(stems_NCHW: Tensor) -> Tensor:
    """The stems are all the inputs."""
    return stems_NCHW


def maps_alone(token: str) -> tuple[int, ...]:
    """As many maps as a function has arguments; the stem where it has none."""
    return (MAP,) * max(1, arity(token))


def a_map(token: str) -> int:
    """Every function makes one."""
    return MAP


def takes_and_makes_maps(token: str) -> tuple[tuple[int, ...], int]:
    """All that every function takes and makes are maps, so that any program fits."""
    return (MAP,) * arity(token), MAP


def the_stem(stem_1CHW: Tensor) -> Tensor:
    """`scene` is the stem's output."""
    return stem_1CHW


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
    types: Callable[[Graph, Sequence[str], int], Types | None] = of_one_column
    """(graph, program tokens, B) -> the columns of the graph's values, and what a run returns: the values of the first
    B of the graph's roots, then those of all further ones, if there are any, which are attentions; None where all
    values are maps of the stem's shape."""
    inputs: Callable[[Tensor], Tensor | Mapping[int, Tensor]] = stems_alone
    """(stems_NCHW) -> what the graph's inputs are, as `iep.batching.execute` takes them."""
    takes: Callable[[str], tuple[int, ...]] = maps_alone
    """(token) -> the column of each tensor that its module takes."""
    makes: Callable[[str], int] = a_map
    """(token) -> the column of what its module returns."""
    kinds: Callable[[str], tuple[tuple[int, ...], int] | None] = takes_and_makes_maps
    """(token) -> the column of each of its function's arguments, and that of its result; None for what hands on its
    argument, and for a `scene` that stands for a value of any column."""
    scene: Callable[[Tensor], Tensor] = the_stem
    """(stem_1CHW) -> what `scene` stands for where it has no module."""
    attentions: Callable[[Graph, Sequence[str]], np.ndarray] | None = None
    """(graph, program tokens) -> slots of the attentions that a penalty counts; None for a family that makes none."""


class Misfit(NamedTuple):
    """A node of a program's tree whose value is of another column than what is to take it."""

    node: int
    """Its place in the tree's list."""
    taker: int | None
    """The node that it is an argument of; None for the root, whose value the classifier takes."""
    made: int
    wanted: int

    @property
    def words(self) -> tuple[str, str]:
        """What it makes, and what is wanted."""
        return KINDS[self.made], KINDS[self.wanted]


def misfits(tree: ProgramTree, own: Family) -> list[Misfit]:
    """The nodes whose values a family does not use, `scene`'s standing in their place, because the kind is another."""
    found = []
    made: list[int | None] = [None] * len(tree.nodes)  # None: any
    for number in tree.post_order:
        node = tree.nodes[number]
        kinds = own.kinds(node.token)
        if kinds is None:
            made[number] = made[node.arguments[0]] if node.arguments else None
            continue
        wanted, made[number] = kinds
        for argument, column in zip(node.arguments, wanted, strict=True):
            if made[argument] not in (None, column):
                found.append(Misfit(argument, number, made[argument], column))
    if made[0] not in (None, MAP):
        found.append(Misfit(0, None, made[0], MAP))
    return sorted(found)


def tree_run(tokens: Sequence[str], own: Family) -> ProgramTree:
    """The tree that prefix tokens stand for, with what a family does not use of it marked."""
    tree = program_tree(tokens)
    words = {misfit.node: misfit.words for misfit in misfits(tree, own)}
    return without(tree, {node: f"{NOT_USED}: {made}, not {wanted}" for node, (made, wanted) in words.items()})


def scene_token(program_tokens: Sequence[str]) -> int:
    """The index of `scene`.

    Raises:
        ValueError: the vocabulary lacks it.
    """
    if SCENE not in program_tokens:
        raise ValueError(f"the program vocabulary {', '.join(program_tokens)} lacks {SCENE!r}")
    return list(program_tokens).index(SCENE)
