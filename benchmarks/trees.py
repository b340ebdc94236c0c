"""Generated trees that determine the structure of networks, with the shapes of those of SST and of SICK.

The Stanford Sentiment Treebank (Socher et al. 2013) has constituency trees with a label on every vertex, and SICK has
dependency trees with a word at every vertex (Tai et al. 2015, section 5.2).

Shapes: V vertices, A greatest number of children.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

SENTIMENTS = 5
"""The number of labels of the Stanford Sentiment Treebank: 0, very negative, to 4, very positive."""
SST_LEAVES, SICK_WORDS = (19.1, 9.3), (9.6, 3.2)
"""The mean and standard deviation of the words of a sentence in the Stanford Sentiment Treebank and in SICK."""
SICK_CHILDREN = 9
"""The greatest number of children in SICK's dependency trees (Zha et al. 2019, Just-in-Time Dynamic-Batching)."""


@dataclass(frozen=True, eq=False)
class Tree:
    """One tree, whose vertices are numbered with children first and the root last."""

    children: np.ndarray
    """The children of each vertex, (V, A), in order, -1 after the last."""
    words: np.ndarray
    """The index of each vertex's word, (V,), or -1."""
    label: int | float = 0
    """The label of the root."""
    labels: np.ndarray | None = None
    """The label of every vertex, (V,), or None."""

    def __len__(self) -> int:
        """Return the number of vertices, V."""
        return len(self.words)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """The parent of each vertex but the root, and its position among the parent's children."""
        children = np.argwhere(self.children >= 0)
        return list(map(tuple, children[self.children[self.children >= 0].argsort()].tolist()))

    @property
    def num_leaves(self) -> int:
        """The number of vertices without children."""
        return int((self.children < 0).all(axis=1).sum())


class TreePair(NamedTuple):
    """Two trees and the relatedness of their sentences, 1 to 5."""

    left: Tree
    right: Tree
    relatedness: float


def tree_from_parents(parents: np.ndarray, words: np.ndarray) -> Tree:
    """Return the tree in which `parents[n]` is the parent of vertex n, -1 for the root; children come first."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for vertex, parent in enumerate(parents.tolist()):
        below[parent].append(vertex)  # the root's parent, -1, is the last
    preorder, waiting = [], below[-1][:]
    while waiting:
        preorder.append(waiting.pop())
        waiting += below[preorder[-1]]
    order = np.array(preorder[::-1])
    number = np.argsort(order)
    children = np.full((len(order), max(1, *map(len, below[:-1]))), -1)
    for vertex in order.tolist():
        children[number[vertex], : len(below[vertex])] = number[below[vertex]]
    return Tree(children, words[order])


def sst_like(count: int, words: int, rng: np.random.Generator) -> list[Tree]:
    """Return binary trees of 2 to 52 leaves, distributed like the treebank's sentences; all splits are equally likely.

    Words are drawn by Zipf's law from `words`, labels uniformly.
    """
    trees = []
    for leaves in lengths(count, *SST_LEAVES, 2, 52, rng).tolist():
        children = _binary_tree(leaves, lambda size: int(rng.integers(1, size)))
        labels = rng.integers(0, SENTIMENTS, len(children))
        trees.append(Tree(children, _words_of_leaves(children, words, rng), int(labels[-1]), labels))
    return trees


def sick_like(count: int, words: int, rng: np.random.Generator) -> list[TreePair]:
    """Return pairs of dependency trees, with a word and 0 to 9 children at every vertex; SICK has 4,500 for training.

    Each word is attached to a random word that is already in the tree.
    """
    sizes = lengths(2 * count, *SICK_WORDS, 2, 32, rng).tolist()
    trees = [tree_from_parents(_attach(size, rng), zipf(size, words, rng)) for size in sizes]
    return [TreePair(*pair) for pair in zip(trees[::2], trees[1::2], rng.uniform(1, 5, count).tolist(), strict=True)]


def complete_trees(count: int, leaves: int, words: int, rng: np.random.Generator) -> list[Tree]:
    """Return complete binary trees, as for Tree-FC.

    If `leaves` is not a power of two, the halves of every split differ by at most one leaf.
    """
    children = _binary_tree(leaves, lambda size: (size + 1) // 2)
    return [Tree(children, _words_of_leaves(children, words, rng)) for _ in range(count)]


def zipf(count: int, words: int, rng: np.random.Generator) -> np.ndarray:
    """Return (count,) indices below `words`; the probability of the n-th most frequent is proportional to 1 / n."""
    share = np.cumsum(1 / np.arange(1, words + 1))
    return np.searchsorted(share, rng.random(count) * share[-1], side="right")


def lengths(count: int, mean: float, deviation: float, least: int, most: int, rng: np.random.Generator) -> np.ndarray:
    """Return gamma-distributed lengths from `least` to `most`, (count,)."""
    shape = (mean / deviation) ** 2
    return np.clip(np.rint(rng.gamma(shape, mean / shape, count)), least, most).astype(np.int64)


def _binary_tree(leaves: int, split: Callable[[int], int]) -> np.ndarray:
    """Return (2 leaves - 1, 2) children; `split` maps the leaves of a vertex to those of its first child."""
    children: list[tuple[int, int]] = []
    done: list[int] = []
    waiting = [(leaves, False)]
    while waiting:
        size, are_children_done = waiting.pop()
        if size > 1 and not are_children_done:
            first = split(size)
            waiting += [(size, True), (size - first, False), (first, False)]
            continue
        right, left = (done.pop(), done.pop()) if are_children_done else (-1, -1)
        done.append(len(children))
        children.append((left, right))
    return np.array(children)


def _words_of_leaves(children: np.ndarray, words: int, rng: np.random.Generator) -> np.ndarray:
    """Return a word for each leaf and -1 for the other vertices, (V,)."""
    return np.where(children[:, 0] < 0, zipf(len(children), words, rng), -1)


def _attach(size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the parent of each vertex, (size,), -1 for the root."""
    parents, children = np.full(size, -1), np.zeros(size, dtype=np.int64)
    order = rng.permutation(size)
    for n in range(1, size):
        free = order[:n][children[order[:n]] < SICK_CHILDREN]
        parent = free[rng.integers(len(free))]
        parents[order[n]] = parent
        children[parent] += 1
    return parents
