"""Trees that a network is built after, and made ones of the shapes that published data have.

Three kinds are made: constituency trees as in the Stanford Sentiment Treebank, dependency trees as in SICK, and
complete ones. Real ones come from `tree_files.py`. Knows nothing of models or of batching.

Shapes: V vertices, A greatest number of children.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

SENTIMENTS = 5
"""Labels of the Stanford Sentiment Treebank: 0, very negative, to 4, very positive."""
SST_LEAVES = (19.1, 9.3)
"""Words of a sentence of the Stanford Sentiment Treebank: mean and standard deviation."""
SICK_WORDS = (9.6, 3.2)
"""The same of SICK's sentences."""
SICK_CHILDREN = 9
"""The most children that a vertex of SICK's dependency trees has (Zha et al. 2019, Just-in-Time Dynamic-Batching)."""


@dataclass(frozen=True, eq=False)
class Tree:
    """One tree, its vertices numbered children first and the root last.

    Raises:
        ValueError: the arrays' lengths differ, there is no vertex, a vertex is no one's child or several's, or comes
            before a child of its own.
    """

    children: np.ndarray
    """(V, A) vertices whose results each vertex takes, in order, -1 after the last."""
    words: np.ndarray
    """(V,) index of each vertex's word, -1 where it has none."""
    label: int | float = 0
    """The root's."""
    labels: np.ndarray | None = None
    """(V,) every vertex's, where the data have them."""

    def __post_init__(self) -> None:
        count = len(self.words)
        if not count or self.children.ndim != 2 or len(self.children) != count:
            raise ValueError(f"a tree of {count} words and children {self.children.shape}, expected (V, A) and V > 0")
        vertex, place = np.nonzero(self.children >= 0)
        child = self.children[vertex, place]
        if (child >= vertex).any() or not np.array_equal(np.sort(child), np.arange(count - 1)):
            raise ValueError("every vertex of a tree but the last is the child of one, later vertex")

    def __len__(self) -> int:
        """V."""
        return len(self.words)

    @cached_property
    def inner_with_word(self) -> int | None:
        """The first vertex that has children and a word; None without any."""
        found = np.flatnonzero((self.children >= 0).any(axis=1) & (self.words >= 0))
        return int(found[0]) if len(found) else None

    @property
    def num_leaves(self) -> int:
        return int((self.children < 0).all(axis=1).sum())


@dataclass(frozen=True)
class TreePair:
    """Two trees and how related their sentences are, 1 to 5."""

    left: Tree
    right: Tree
    relatedness: float


def tree_from_parents(parents: np.ndarray, words: np.ndarray, label: int | float = 0) -> Tree:
    """The tree in which vertex n's parent is `parents[n]`, -1 for the root; numbered anew, in post-order.

    Raises:
        ValueError: the parents have a cycle.
    """
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for vertex, parent in enumerate(parents.tolist()):
        below[parent].append(vertex)  # the root's parent, -1, is the last
    preorder, waiting = [], below[-1][:]
    while waiting:
        preorder.append(waiting.pop())
        waiting += below[preorder[-1]]
    if len(preorder) < len(parents):
        raise ValueError(f"{len(parents) - len(preorder)} words are in cycles, expected a tree")
    order = np.array(preorder[::-1])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return Tree(_table([[int(place[child]) for child in below[vertex]] for vertex in order]), words[order], label)


def _table(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Rows of different lengths as a matrix, -1 after the last."""
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), max(1, lengths.max(initial=0))), -1)
    table[np.arange(table.shape[1]) < lengths[:, None]] = [each for row in rows for each in row]
    return table


def sst_like(count: int, words: int, rng: np.random.Generator) -> list[Tree]:
    """Binary trees of 2 to 52 leaves, as many as sentences of the treebank have words; every split is as likely as any.

    Words are drawn by Zipf's law from `words`, labels evenly.
    """
    trees = []
    for leaves in _lengths(count, *SST_LEAVES, most=52, rng=rng).tolist():
        children = _binary_tree(leaves, lambda size: int(rng.integers(1, size)))
        labels = rng.integers(0, SENTIMENTS, len(children))
        trees.append(Tree(children, _words_of_leaves(children, words, rng), int(labels[-1]), labels))
    return trees


def sick_like(count: int, words: int, rng: np.random.Generator) -> list[TreePair]:
    """Pairs of dependency trees, a word on every vertex, with 0 to 9 children each; SICK has 4,500 to train on.

    Words are attached one after the other to any that is in the tree already.
    """
    sizes = _lengths(2 * count, *SICK_WORDS, most=32, rng=rng).tolist()
    trees = [tree_from_parents(_attach(size, rng), zipf(size, words, rng)) for size in sizes]
    related = rng.uniform(1, 5, count).tolist()
    return [TreePair(*pair) for pair in zip(trees[::2], trees[1::2], related, strict=True)]


def complete_trees(count: int, leaves: int, words: int, rng: np.random.Generator) -> list[Tree]:
    """Complete binary trees (Tree-FC: Looks et al. 2017, Deep Learning with Dynamic Computation Graphs, section 3.1).

    Where `leaves` is no power of two, the two halves of every split differ by one leaf at most.
    """
    children = _binary_tree(leaves, lambda size: (size + 1) // 2)
    return [Tree(children, _words_of_leaves(children, words, rng)) for _ in range(count)]


def zipf(count: int, words: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) indices below `words`, the n-th commonest as likely as 1 / n."""
    share = np.cumsum(1 / np.arange(1, words + 1))
    return np.searchsorted(share, rng.random(count) * share[-1], side="right")


def _lengths(count: int, mean: float, deviation: float, most: int, rng: np.random.Generator) -> np.ndarray:
    """(count,) numbers of words, 2 to `most`, gamma-distributed."""
    shape = (mean / deviation) ** 2
    return np.clip(np.rint(rng.gamma(shape, mean / shape, count)), 2, most).astype(np.int64)


def _binary_tree(leaves: int, split: Callable[[int], int]) -> np.ndarray:
    """(2 leaves - 1, 2) children; `split` says how many leaves of a vertex's are its first child's."""
    children: list[tuple[int, int]] = []
    made: list[int] = []
    waiting = [(leaves, False)]
    while waiting:
        size, halves_made = waiting.pop()
        if size > 1 and not halves_made:
            first = split(size)
            waiting += [(size, True), (size - first, False), (first, False)]
            continue
        right, left = (made.pop(), made.pop()) if halves_made else (-1, -1)
        made.append(len(children))
        children.append((left, right))
    return np.array(children)


def _words_of_leaves(children: np.ndarray, words: int, rng: np.random.Generator) -> np.ndarray:
    """(V,)"""
    is_leaf = children[:, 0] < 0
    drawn = np.full(len(children), -1)
    drawn[is_leaf] = zipf(int(is_leaf.sum()), words, rng)
    return drawn


def _attach(size: int, rng: np.random.Generator) -> np.ndarray:
    """(size,) parents, -1 for the root's."""
    parents, children = np.full(size, -1), np.zeros(size, dtype=np.int64)
    order = rng.permutation(size)
    for n in range(1, size):
        free = order[:n][children[order[:n]] < SICK_CHILDREN]
        parent = free[rng.integers(len(free))]
        parents[order[n]] = parent
        children[parent] += 1
    return parents
