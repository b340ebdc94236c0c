"""Edges between the vertices of each sample -> one graph for a minibatch, by array code without loops over vertices.

Here functions are numbers, with names for the inputs from which they pull rows and for the outputs that they push.
`vertex.py` runs the functions.

Shapes: S samples, V vertices of one, N of all, A greatest number of children, F functions, U rows pulled.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph


@dataclass(frozen=True, eq=False)
class Edges:
    """The graph of the vertices of one sample.

    Raises:
        ValueError: a field is not an array of integers of the documented shape.
    """

    children: np.ndarray
    """The vertices from which each vertex gathers, (V, A), in order, all before itself; -1 after the last."""
    function: np.ndarray | None = None
    """The number of each vertex's function, (V,); may be None for a network of one function."""
    pulls: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The row that each vertex pulls, (V,) by input; ignored if the vertex's function does not pull this input."""

    def __post_init__(self) -> None:
        _check_integers("children", self.children, "(V, A)")
        each = self.pulls if self.function is None else {"function": self.function, **self.pulls}
        for name, array in each.items():
            _check_integers(name, array, "(V,)")
            if len(array) != len(self.children):
                raise ValueError(f"{len(self.children)} vertices, but {name!r} of {len(array)}")


def _check_integers(name: str, array: np.ndarray, shape: str) -> None:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != len(shape.split()):
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} {found}, expected an array of integers {shape}")


class Joined(NamedTuple):
    """The graph of a minibatch of samples."""

    graph: Graph
    """The graph, whose roots are the last vertex of each sample, then for each output the vertices that push it."""
    fields: list[np.ndarray]
    """The index of each output among the results of the functions of the vertices that push it."""
    pulls: np.ndarray
    """The index, in `names_of`, of the input of which each input of the graph is a row, (num_inputs,)."""
    rows: dict[str, np.ndarray]
    """The rows of each input, (U,)."""


def join(
    samples: Sequence[Edges],
    pulls: Sequence[Sequence[str]],
    pushes: Sequence[Sequence[str]],
    results: Sequence[Sequence[str]],
    sharing: bool,
) -> Joined:
    """Return one graph of all samples, in which vertices keep their order.

    Args:
        pulls: the names of inputs, by function.
        pushes: the names of outputs, by function.
        results: the names of all states and outputs that a function computes, by function.
        sharing: a row of an input is one input of the graph, even if several vertices pull it.

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

    rows, pull_of_input, num_inputs = {}, [np.empty(0, dtype=np.int64)], 0
    args = np.full((len(sample_N), max(map(len, pulls)) + children_NA.shape[1]), -1)
    for pull, name in enumerate(names_of(pulls)):
        argument_N = _index_of(name, pulls)[function_N]
        vertices = np.flatnonzero(argument_N >= 0)
        ids = _pulled(samples, name, vertices, first_N, sample_N)
        rows[name], slots = np.unique(ids, return_inverse=True) if sharing else (ids, np.arange(len(ids)))
        args[vertices, argument_N[vertices]] = num_inputs + slots
        num_inputs += len(rows[name])
        pull_of_input.append(np.full(len(rows[name]), pull))
    slots_NA = np.where(children_NA >= 0, children_NA + (first_N[:, None] + num_inputs), -1)
    for function, names in enumerate(pulls):
        vertices, first = np.flatnonzero(function_N == function), len(names)
        args[vertices, first : first + slots_NA.shape[1]] = slots_NA[vertices]
    if args[:, 0].min() < 0:
        at = int(np.argmin(args[:, 0]))
        raise ValueError(f"{_vertex(at, first_N, sample_N)} neither pulls nor gathers")

    outputs, fields = [num_inputs + sizes_S.cumsum() - 1], []
    for name in names_of(pushes):
        vertices = np.flatnonzero(_index_of(name, pushes)[function_N] >= 0)
        outputs.append(num_inputs + vertices)
        fields.append(_index_of(name, results)[function_N[vertices]])
    op = (children_NA.T >= 0).sum(axis=0) * len(pulls) + function_N
    graph = Graph(num_inputs, op, args, sample_N, np.concatenate(outputs))
    return Joined(graph, fields, np.concatenate(pull_of_input), rows)


def names_of(names_F: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the distinct names of all functions, in the order in which they first occur."""
    return tuple(dict.fromkeys(name for names in names_F for name in names))


def _index_of(name: str, names_F: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the index of the name among those of each function, (F,), or -1."""
    return np.array([names.index(name) if name in names else -1 for names in names_F])


def _children(samples: Sequence[Edges]) -> np.ndarray:
    """Return the children of all vertices, (N, A), as numbers within their samples."""
    widths = {sample.children.shape[1] for sample in samples}
    if len(widths) == 1:
        return np.concatenate([sample.children for sample in samples])
    children, first = np.full((sum(len(sample.children) for sample in samples), max(widths)), -1), 0
    for sample in samples:
        rows, width = sample.children.shape
        children[first : first + rows, :width] = sample.children
        first += rows
    return children


def _functions(samples: Sequence[Edges], count: int, sample_N: np.ndarray) -> np.ndarray:
    """Return the function of each vertex, (N,)."""
    if count == 1:
        return np.zeros(len(sample_N), dtype=np.int64)
    missing = next((index for index, sample in enumerate(samples) if sample.function is None), None)
    if missing is not None:
        raise ValueError(f"sample {missing} does not say which of {count} functions its vertices run")
    function_N = np.concatenate([sample.function for sample in samples])
    if not 0 <= function_N.min() <= function_N.max() < count:
        at = int(np.argmax((function_N < 0) | (function_N >= count)))
        raise ValueError(f"sample {sample_N[at]}: function {function_N[at]}, expected 0 to {count - 1}")
    return function_N


def _pulled(
    samples: Sequence[Edges], name: str, vertices: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray
) -> np.ndarray:
    """Return the rows of an input that the given vertices pull."""
    missing = next((index for index, sample in enumerate(samples) if name not in sample.pulls), None)
    if missing is not None:
        raise ValueError(f"sample {missing} does not say which rows of {name!r} its vertices pull")
    ids = np.concatenate([sample.pulls[name] for sample in samples])[vertices]
    if ids.min(initial=0) < 0:
        at = int(vertices[np.argmin(ids)])
        raise ValueError(f"{_vertex(at, first_N, sample_N)}: its function pulls {name!r}, but it has no row")
    return ids


def _check_children(children_NA: np.ndarray, first_N: np.ndarray, sample_N: np.ndarray) -> None:
    own_N, children_AN = np.arange(len(first_N)) - first_N, children_NA.T
    bad_N = ((children_AN >= own_N) | (children_AN < -1)).any(axis=0)
    bad_N |= ((children_AN[1:] >= 0) & (children_AN[:-1] < 0)).any(axis=0)  # a vertex after -1
    if bad_N.any():
        at = int(np.argmax(bad_N))
        where, children = _vertex(at, first_N, sample_N), children_NA[at].tolist()
        raise ValueError(f"{where} has children {children}, expected vertices before it, then -1")


def _vertex(at: int, first_N: np.ndarray, sample_N: np.ndarray) -> str:
    return f"sample {sample_N[at]}, vertex {at - first_N[at]}"
