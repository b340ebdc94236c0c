"""Samples, each the edges between its vertices -> one graph for a minibatch, by array code; no loop over vertices.

What a vertex does is `vertex.py`'s; here functions are numbers, with names for the rows that they pull from outside and
for what they push there.

Shapes: S samples, V vertices of one, N of all, A greatest number of children, F functions, U rows pulled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph


@dataclass(frozen=True, eq=False)
class Edges:
    """One sample: the graph of its vertices.

    Raises:
        ValueError: these are no arrays of integers, are not of as many vertices, or the children no matrix.
    """

    children: np.ndarray
    """(V, A) the vertices that each vertex gathers from, in order, all before itself; -1 after the last."""
    function: np.ndarray | None = None
    """(V,) which of the network's functions each runs; None where there is one."""
    pulls: Mapping[str, np.ndarray] = field(default_factory=dict)
    """(V,) by name, which row of the table outside each pulls; not read where its function does not pull."""

    def __post_init__(self) -> None:
        said = self.pulls if self.function is None else {"function": self.function, **self.pulls}
        self._check("children", self.children, "(V, A)", 2)
        for name, each in said.items():
            self._check(name, each, "(V,)", 1)
            if len(each) != len(self.children):
                raise ValueError(f"{len(self.children)} vertices, but {name!r} of {len(each)}")

    @staticmethod
    def _check(name: str, array: np.ndarray, shape: str, dimensions: int) -> None:
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != dimensions:
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise ValueError(f"{name} {found}, expected an array of integers {shape}")


class Joined(NamedTuple):
    """A minibatch of samples."""

    graph: Graph
    """Its roots: the samples' last vertices, then those that push, output by output."""
    places: list[np.ndarray]
    """For each output, where it stands among the pushes of its vertices' functions."""
    pulls: np.ndarray
    """(num_inputs,) which pull each input is for."""
    rows: dict[str, np.ndarray]
    """(U,) by what is pulled."""


def join(
    samples: Sequence[Edges],
    pulls: Sequence[Sequence[str]],
    pushes: Sequence[Sequence[str]],
    sharing: bool,
    tables: Mapping[str, int],
) -> Joined:
    """The samples as one graph, in which vertices keep their order.

    Args:
        pulls: names, by function.
        pushes: names, by function.
        sharing: each row that is pulled is one input, however many vertices pull it.
        tables: how many rows the tables have that are inputs as a whole.

    Raises:
        ValueError: as `VertexNetwork.plan`.
    """
    sizes_S = np.array([len(sample.children) for sample in samples], dtype=np.int64)
    if not len(sizes_S) or not sizes_S.all():
        empty = f"sample {np.argmin(sizes_S)} has no vertices" if len(sizes_S) else "there is no sample"
        raise ValueError(f"{empty}, expected one vertex or more")
    sample_N = np.repeat(np.arange(len(sizes_S)), sizes_S)
    first_N = (sizes_S.cumsum() - sizes_S)[sample_N]
    children_NA, function_N = _children(samples), _functions(samples, len(pulls), sample_N)
    _check_children(children_NA, first_N, sample_N)

    rows, pull_of_input = {}, [np.empty(0, dtype=np.int64)]
    args = np.full((len(sample_N), max(map(len, pulls)) + children_NA.shape[1]), -1)
    num_inputs = 0
    for pull, name in enumerate(names_of(pulls)):
        place_N = _place_of(pulls, name)[function_N]
        vertices = np.flatnonzero(place_N >= 0)
        ids = _pulled(samples, name, vertices, first_N, sample_N)
        if name in tables:
            rows[name], slots = np.arange(tables[name]), ids
            if len(ids) and ids.max() >= tables[name]:
                raise ValueError(f"row {ids.max()} of {name!r} is pulled, of which there are {tables[name]}")
        else:
            rows[name], slots = np.unique(ids, return_inverse=True) if sharing else (ids, np.arange(len(ids)))
        args[vertices, place_N[vertices]] = num_inputs + slots
        num_inputs += len(rows[name])
        pull_of_input.append(np.full(len(rows[name]), pull))
    slots_NA = np.where(children_NA >= 0, children_NA + (first_N[:, None] + num_inputs), -1)
    for function, names in enumerate(pulls):
        vertices = np.flatnonzero(function_N == function)
        first = len(names)
        args[vertices, first : first + slots_NA.shape[1]] = slots_NA[vertices]
    _check_vertices(args, first_N, sample_N)

    outputs, places = [num_inputs + sizes_S.cumsum() - 1], []
    for name in names_of(pushes):
        place_N = _place_of(pushes, name)[function_N]
        vertices = np.flatnonzero(place_N >= 0)
        outputs.append(num_inputs + vertices)
        places.append(place_N[vertices])
    op = (children_NA.T >= 0).sum(axis=0) * len(pulls) + function_N
    graph = Graph(num_inputs, op, args, sample_N, np.concatenate(outputs))
    return Joined(graph, places, np.concatenate(pull_of_input), rows)


def names_of(names_F: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The names that functions have, each once."""
    return tuple(dict.fromkeys(name for names in names_F for name in names))


def _children(samples: Sequence[Edges]) -> np.ndarray:
    """(N, A) children of all vertices, numbered in their sample."""
    widths = {sample.children.shape[1] for sample in samples}
    if len(widths) == 1:
        return np.concatenate([sample.children for sample in samples])
    children = np.full((sum(len(sample.children) for sample in samples), max(widths)), -1)
    start = 0
    for sample in samples:
        rows, width = sample.children.shape
        children[start : start + rows, :width] = sample.children
        start += rows
    return children


def _functions(samples: Sequence[Edges], count: int, sample_N: np.ndarray) -> np.ndarray:
    """(N,) which function each vertex runs."""
    if count == 1:
        return np.zeros(len(sample_N), dtype=np.int64)
    lacking = next((place for place, sample in enumerate(samples) if sample.function is None), None)
    if lacking is not None:
        raise ValueError(f"sample {lacking} does not say which of {count} functions its vertices run")
    function_N = np.concatenate([sample.function for sample in samples])
    if not 0 <= function_N.min() <= function_N.max() < count:
        at = int(np.argmax((function_N < 0) | (function_N >= count)))
        raise ValueError(f"sample {sample_N[at]}: function {function_N[at]}, expected 0 to {count - 1}")
    return function_N


def _place_of(names_F: Sequence[Sequence[str]], name: str) -> np.ndarray:
    """(F,) where each function has the name, -1 without it."""
    return np.array([names.index(name) if name in names else -1 for names in names_F])


def _pulled(
    samples: Sequence[Edges], name: str, vertices: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray
) -> np.ndarray:
    """The rows that some vertices pull."""
    lacking = next((place for place, sample in enumerate(samples) if name not in sample.pulls), None)
    if lacking is not None:
        raise ValueError(f"sample {lacking} does not say which rows of {name!r} its vertices pull")
    ids = np.concatenate([sample.pulls[name] for sample in samples])[vertices]
    if ids.min(initial=0) < 0:
        at = int(vertices[np.argmin(ids)])
        raise ValueError(
            f"sample {sample_N[at]}, vertex {at - first_N[at]}: its function pulls {name!r}, but it has no row"
        )
    return ids


def _check_children(children_NA: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray) -> None:
    own_N = np.arange(len(first_N)) - first_N
    children_AN = children_NA.T
    bad_N = ((children_AN >= own_N) | (children_AN < -1)).any(axis=0)
    # A vertex after a gap: -1 comes after the last.
    bad_N |= ((children_AN[1:] >= 0) & (children_AN[:-1] < 0)).any(axis=0)
    if bad_N.any():
        at = int(np.argmax(bad_N))
        raise ValueError(
            f"sample {sample_N[at]}, vertex {own_N[at]} has children {children_NA[at].tolist()}, expected vertices "
            "before it, then -1"
        )


def _check_vertices(args: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray) -> None:
    if len(args) and args[:, 0].min() < 0:
        at = int(np.argmin(args[:, 0]))
        raise ValueError(f"sample {sample_N[at]}, vertex {at - first_N[at]} neither pulls nor gathers")
