"""Which tensors the values of a graph are: for nodes that return several tensors, or tensors of several shapes.

A node's value is one tensor or several. Tensors of one shape and dtype that are kept together are a *column*, numbered
from 0; which node reads which tensors of its arguments, and makes which, its op's `Signature` says. A graph without
types has a single column: every value is one tensor, and all have the shape of the inputs.

Shapes: N nodes, A greatest number of arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph


class Read(NamedTuple):
    """One argument of a module call of G nodes."""

    first: int
    """Which of the node's arguments it is, from 0."""
    count: int | None = None
    """None for a (G, ...) tensor; otherwise arguments `first` to `first + count - 1` side by side, (G, count, ...)."""
    field: int = 0
    """Which tensor of the argument's value."""


class Signature(NamedTuple):
    """What the module of an op takes and returns."""

    reads: tuple[Read, ...]
    """The tensors it takes, in order."""
    makes: tuple[int, ...] = (0,)
    """Columns of the tensors that it returns, in order."""


@dataclass(frozen=True, eq=False)
class Types:
    """The columns of a graph's values."""

    inputs: np.ndarray
    """(num_inputs,) column of each input, which is one tensor."""
    signatures: Mapping[int, Signature]
    """By op."""
    roots: tuple[tuple[np.ndarray, np.ndarray | int], ...]
    """What a run returns, a tensor for each: the slots, and which of their values' tensors, of one column."""
    fields: np.ndarray | None = None
    """(N, A) added to the `field` with which each argument is read."""
    parts: tuple[int, ...] = ()
    """How many tensors a column's each stands for, that are always made and read together, so that they are laid out
    once; one, where it says nothing. A module then takes and returns as many; columns are numbered anew, part by
    part."""
    arrival: np.ndarray | None = None
    """(num_inputs,) the input slots in the order in which the columns' inputs are given, column by column; None where
    they are in the order of the slots."""


def one_column(graph: Graph) -> Types:
    """Every value one tensor of the same shape; each argument is read, and the graph's roots are returned."""
    ops, first = np.unique(graph.op, return_index=True)
    arity = (graph.args[first] >= 0).sum(axis=1)
    reads = [tuple(map(Read, range(many))) for many in range(int(arity.max(initial=0)) + 1)]
    return Types(
        inputs=np.zeros(graph.num_inputs, dtype=np.int64),
        signatures={op: Signature(reads[many]) for op, many in zip(ops.tolist(), arity.tolist(), strict=True)},
        roots=((graph.roots, 0),),
    )
