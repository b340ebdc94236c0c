"""Prefix programs of a minibatch -> one graph of flat integer arrays, by array code without a loop over nodes.

The graph has the op of every node and the slots of its arguments. `schedulers.py` decides in which order the nodes run,
and how many at a time. The caller of `execute.py` provides the modules that compute the ops.

Shapes: B examples, L program tokens, V vocabulary, N nodes, M prefix positions of all examples' trees together.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

WORTH_NARROWING = 512
"""The number of integers from which sorting a narrower dtype is faster."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes of all examples of a minibatch, children before parents.

    Slots number the values: 0 to num_inputs - 1 are the inputs, and num_inputs + n is the result of node n. A node may
    be an argument of several others (the graph need not be a tree). Nodes have at least one argument.

    Raises:
        ValueError: a node has no argument or reads a later node.
    """

    num_inputs: int
    op: np.ndarray
    """The op of each node, (N,), 0 or greater."""
    args: np.ndarray
    """The slots of each node's arguments in order, (N, greatest number of arguments), -1 after the last."""
    example: np.ndarray
    """The example that each node belongs to, (N,)."""
    roots: np.ndarray
    """The slot of each example's result, (B,), which may be an input."""

    def __post_init__(self) -> None:
        own_slot = self.num_inputs + np.arange(self.num_nodes)
        # One argument at a time: numpy processes long rows of a matrix much faster than short ones.
        args_AN = self.args.T.copy()
        bad = (args_AN >= own_slot).any(axis=0) | ~(args_AN[:1] >= 0).any(axis=0)
        if bad.any():
            node = int(np.argmax(bad))
            raise ValueError(f"node {node} has arguments {self.args[node]}, expected slots 0 to {own_slot[node] - 1}")

    @property
    def num_nodes(self) -> int:
        """The number of nodes, N."""
        return len(self.op)

    @cached_property
    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ops in ascending order, and the position of each node's op among them, (N,)."""
        return np.unique(self.op, return_inverse=True)

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that are arguments of others, and the nodes that read them; readers ascend."""
        reader, argument = np.nonzero(self.args >= self.num_inputs)
        return self.args[reader, argument] - self.num_inputs, reader

    @cached_property
    def reads(self) -> "Links":
        """The nodes whose results each node reads, in the order of its arguments."""
        child, reader = self.edges
        return Links.of(child, np.bincount(reader, minlength=self.num_nodes))

    @cached_property
    def readers(self) -> "Links":
        """The nodes that read each node's result."""
        child, reader = self.edges
        return Links.of(reader[stable_order(child)], np.bincount(child, minlength=self.num_nodes))

    @cached_property
    def height(self) -> np.ndarray:
        """The length of the longest path from an input to each node, less one, (N,): 0 if all arguments are inputs."""
        child, reader = self.edges
        return farthest(child, reader, np.zeros(self.num_nodes, dtype=np.int64))

    @cached_property
    def distance(self) -> np.ndarray:
        """The length of the longest path from each node to one that no other node reads, (N,)."""
        child, reader = self.edges
        return farthest(reader[::-1], child[::-1], np.zeros(self.num_nodes, dtype=np.int64))


class Links(NamedTuple):
    """For each node, some other nodes: those of node n are `nodes[first[n] : first[n] + count[n]]`."""

    first: np.ndarray
    count: np.ndarray  # type: ignore[assignment]  # hides the method of tuples
    nodes: np.ndarray

    @classmethod
    def of(cls, nodes: np.ndarray, count: np.ndarray) -> "Links":
        """Return links to `nodes`, of which each node in turn has `count`."""
        return cls(np.cumsum(count) - count, count, nodes)

    def __call__(self, nodes: np.ndarray) -> np.ndarray:
        """Return the nodes that several nodes have, one after the other."""
        return self.nodes[ranges(self.first[nodes], self.count[nodes])]


def ranges(first: np.ndarray | int, count: np.ndarray) -> np.ndarray:
    """Return `count[n]` integers from `first[n]` for each n, one after the other."""
    return np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values, ascending."""
    values = np.sort(values)
    return values[np.diff(values, prepend=-1) != 0]


def farthest(source_E: np.ndarray, target_E: np.ndarray, start_N: np.ndarray) -> np.ndarray:
    """Return the greatest length of the paths to each node, (N,), where a path from node n begins with `start_N[n]`.

    The loop is one of Python, because a graph may have as many distances as nodes.

    Args:
        source_E, target_E: the edges, those to a node before those from it.
    """
    far = start_N.tolist()
    for source, target in zip(source_E.tolist(), target_E.tolist(), strict=True):
        if far[source] >= far[target]:
            far[target] = far[source] + 1
    return np.array(far, dtype=np.int64)


def stable_order(keys_N: np.ndarray) -> np.ndarray:
    """Return the stable sorting order of non-negative integers; small integers are sorted in linear time."""
    if len(keys_N) >= WORTH_NARROWING and keys_N.min() >= 0 and keys_N.max() < 1 << 16:
        keys_N = keys_N.astype(np.uint16)
    return keys_N.argsort(kind="stable")


def graph_from_prefix(
    tokens_BL: Any,
    arity_V: np.ndarray,
    leaf: int,
    skip: int | None = None,
    pad: int | None = None,
    leaf_is_input: bool = False,
    input_B: np.ndarray | None = None,
) -> Graph:
    """Return the graph of a matrix of prefix programs.

    Any matrix of tokens is a program (Johnson et al. 2017 run everything that their generator predicts): `skip` is left
    out everywhere, `pad` and the end of the row stand for `leaf`, and tokens after the complete tree are ignored.
    Nodes are numbered example by example, in post-order within each.

    Args:
        tokens_BL: (B, L) integers, an array or a `torch.Tensor` (this file does not import torch).
        arity_V: the number of arguments of every token, (V,); a token without arguments reads its example's input.
        leaf: the token without arguments for which `pad` and the end of the row stand.
        skip: the token that is left out.
        pad: the token that stands for `leaf`.
        leaf_is_input: `leaf` is not a node; the nodes that read it read the example's input itself.
        input_B: the input slot of every example, (B,), from 0 without gaps; None if example b has slot b.

    Raises:
        ValueError: `tokens_BL` is not a matrix of integers 0 to V - 1.
    """
    tokens_BL = _checked_tokens(tokens_BL, len(arity_V))
    input_B = np.arange(len(tokens_BL)) if input_B is None else input_B
    if skip is not None:
        tokens_BL = _without(tokens_BL, skip, leaf)
    if pad is not None:
        tokens_BL = np.where(tokens_BL == pad, leaf, tokens_BL)
    example_M, op_M = _trees(tokens_BL, arity_V, leaf)
    arity_M = arity_V[op_M]
    argument_M, end_M = _arguments_and_ends(arity_M)

    # Trees that end first are first; of trees that end together, the innermost one, which begins last.
    count = len(op_M)
    postorder = np.argsort(end_M * (count + 1) - np.arange(count))
    nodes = postorder[op_M[postorder] != leaf] if leaf_is_input else postorder
    num_inputs = int(input_B.max(initial=-1)) + 1
    slot_M = input_B[example_M]
    slot_M[nodes] = num_inputs + np.arange(len(nodes))

    args_M = np.where(argument_M >= 0, slot_M[argument_M], -1)
    args_M[:, 0] = np.where(arity_M == 0, input_B[example_M], args_M[:, 0])
    first_B = np.searchsorted(example_M, np.arange(len(tokens_BL)))
    return Graph(
        num_inputs=num_inputs,
        op=op_M[nodes],
        args=args_M[nodes],
        example=example_M[nodes],
        roots=slot_M[first_B],
    )


def _checked_tokens(tokens_BL: Any, vocabulary: int) -> np.ndarray:
    if not isinstance(tokens_BL, np.ndarray):
        tokens_BL = tokens_BL.detach().cpu().numpy()
    if tokens_BL.ndim != 2 or tokens_BL.dtype.kind not in "iu":
        raise ValueError(f"programs are {tokens_BL.shape} {tokens_BL.dtype}, expected a matrix of integers")
    bad = (tokens_BL < 0) | (tokens_BL >= vocabulary)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        token = tokens_BL[row, column]
        raise ValueError(f"program {row}, position {column}: token {token}, expected 0 to {vocabulary - 1}")
    return tokens_BL.astype(np.int64)


def _without(tokens_BL: np.ndarray, skip: int, filler: int) -> np.ndarray:
    """Return each row without `skip`, filled up with `filler` to its former length."""
    skipped = tokens_BL == skip
    kept_first = np.argsort(skipped, axis=1, kind="stable")
    return np.take_along_axis(np.where(skipped, filler, tokens_BL), kept_first, axis=1)


def _trees(tokens_BL: np.ndarray, arity_V: np.ndarray, leaf: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the example and the op of every position in a tree, (M,) each, row by row; `leaf` completes the trees."""
    # The number of expected subtrees before each position, and after the last.
    awaited = np.ones((len(tokens_BL), tokens_BL.shape[1] + 1), dtype=np.int64)
    np.cumsum(arity_V[tokens_BL] - 1, axis=1, out=awaited[:, 1:])
    awaited[:, 1:] += 1
    inside = np.minimum.accumulate(awaited, axis=1) > 0
    missing_B = np.where(inside[:, -1], awaited[:, -1], 0)

    width = missing_B.max(initial=0)
    completion = np.full((len(tokens_BL), width), leaf, dtype=tokens_BL.dtype)
    inside = np.hstack([inside[:, :-1], np.arange(width) < missing_B[:, None]])
    example_M, column_M = np.nonzero(inside)
    return example_M, np.hstack([tokens_BL, completion])[example_M, column_M]


def _arguments_and_ends(arity_M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts of each position's arguments, (M, greatest arity), -1 after the last, and its end, (M,).

    The trees are read as one long sequence. A position of arity a adds a - 1 to the number of expected subtrees, so
    that no position reduces it by more than one. The subtree at i ends, and the next one begins, where this number
    first falls to one less than it was before i.
    """
    count = len(arity_M)
    level = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(arity_M - 1, out=level[1:])
    by_level = np.sort(level * (count + 1) + np.arange(count + 1))

    def first_fall(target: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the first position after `after` at which the level is `target`."""
        target = target * (count + 1)
        return by_level[np.searchsorted(by_level, target + after, side="right")] - target

    arguments = np.full((count, max(1, arity_M.max(initial=0))), -1)
    for argument in range(arity_M.max(initial=0)):
        reader = np.flatnonzero(arity_M > argument)
        arguments[reader, argument] = first_fall(level[reader + 1] - argument, reader)
    return arguments, first_fall(level[:-1] - 1, np.arange(count))
