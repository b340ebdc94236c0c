"""Trees of a minibatch -> their levels by height, as someone who batches trees by hand lays them out.

Everything of one height runs together, leaves first. What a level makes is ordered by the level that takes it, so
that a later level's arguments are a few contiguous pieces put side by side and one indexed copy: each value moves
twice, however many levels wait for others. Not the scheduler of `iep.batching`: what that is compared with.

Shapes: B trees, N vertices of all trees, K levels above the leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from iep.workloads.trees import Tree


@dataclass(frozen=True, eq=False)
class TreeLevels:
    """Where the vertices of binary trees run, level by level."""

    words: torch.Tensor
    """Of the leaves, in the order of their level."""
    pieces: tuple[tuple[int, ...], ...]
    """(K + 1, K + 1) how many results of each level, leaves first, go to each later one, the trees' results last."""
    arguments: tuple[torch.Tensor, ...]
    """(K) rows of each level's arguments among the pieces that it takes: left, right, left, right, ..."""
    roots: torch.Tensor
    """(B,) rows of the trees' results among the pieces that remain."""
    labels: torch.Tensor
    """(B,) the trees'."""

    @property
    def rows(self) -> list[int]:
        """(K + 1) vertices of each level, leaves first."""
        return [sum(pieces) for pieces in self.pieces]


def levels_of(trees: Sequence[Tree]) -> TreeLevels:
    """The levels of one or more binary trees."""
    sizes_B = np.array([len(tree) for tree in trees])
    start_B = np.cumsum(sizes_B) - sizes_B
    children_N2 = np.concatenate([tree.children for tree in trees])
    inner = np.flatnonzero(children_N2[:, 0] >= 0)
    taken_M2 = children_N2[inner] + np.repeat(start_B, sizes_B)[inner, None]
    height_N = heights(inner, taken_M2, len(children_N2))
    top = int(height_N.max()) + 1
    taker_N = np.full(len(height_N), top)
    taker_N[taken_M2] = height_N[inner, None]

    # Results as they are made, and as they arrive where they are taken.
    made = np.lexsort((taker_N, height_N))
    arrived = made[np.argsort(taker_N[made], kind="stable")]
    row_N = np.empty(len(height_N), dtype=np.int64)
    first_K = np.searchsorted(taker_N[arrived], np.arange(top + 1))
    row_N[arrived] = np.arange(len(arrived)) - first_K[taker_N[arrived]]

    pieces = np.zeros((top, top + 1), dtype=np.int64)
    np.add.at(pieces, (height_N, taker_N), 1)
    pair_N2 = np.empty((len(height_N), 2), dtype=np.int64)
    pair_N2[inner] = row_N[taken_M2]
    bounds = np.searchsorted(height_N[made], np.arange(top + 1)).tolist()
    arguments = [pair_N2[made[begin:end]].ravel() for begin, end in pairwise(bounds[1:])]
    words_N = np.concatenate([tree.words for tree in trees])
    return TreeLevels(
        words=torch.from_numpy(words_N[made[: bounds[1]]]),
        pieces=tuple(tuple(row[level + 1 :]) for level, row in enumerate(pieces.tolist())),
        arguments=tuple(map(torch.from_numpy, arguments)),
        roots=torch.from_numpy(row_N[start_B + sizes_B - 1]),
        labels=torch.tensor([tree.label for tree in trees]),
    )


def heights(inner: np.ndarray, taken_MA: np.ndarray, count: int) -> np.ndarray:
    """(count,) 0 for leaves, else one more than the highest child's.

    Args:
        inner: (M,) the vertices that are no leaves.
        taken_MA: (M, A) their children, -1 after the last.
        count: of all vertices.
    """
    height_N = np.zeros(count + 1, dtype=np.int64)
    height_N[-1] = -1
    while True:
        higher = height_N[taken_MA].max(axis=1, initial=-1) + 1
        if np.array_equal(higher, height_N[inner]):
            return height_N[:-1]
        height_N[inner] = higher
