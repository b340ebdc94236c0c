"""Trees that determine the structure of networks: files of SST and of SICK, and generated trees of the same shapes.

The Stanford Sentiment Treebank (Socher et al. 2013) has bracketed constituency trees with a label on every vertex. SICK
has dependency trees as lists of parents (the preprocessed data of Tai et al. 2015, section 5.2).

Shapes: V vertices, A greatest number of children.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from iep.errors import InputError
from iep.runtime.reading import reading

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
    """The label of every vertex, (V,), if the data have them."""

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


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file. Only line feeds end lines.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    with reading(path, "UTF-8 text"):
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def index_words(words: Iterable[str]) -> dict[str, int]:
    """Return the indices of the distinct words in alphabetical order."""
    return {word: n for n, word in enumerate(sorted(set(words)))}


def read_sst(path: Path) -> tuple[list[Tree], int]:
    """Return the binary trees of a file and the number of words.

    Each line is a bracketed tree, such as `(3 (2 It) (4 works))`; empty lines are skipped.

    Raises:
        InputError: the file cannot be read, or a line is not such a tree; the message names line and token.
    """
    parsed = [_parse_sst(line, f"{path}, line {n}") for n, line in enumerate(read_lines(path), 1) if line.strip()]
    if not parsed:
        raise InputError(f"{path}: no trees, expected one a line, such as (3 (2 It) (4 works))")
    index = index_words(word for _, words, _ in parsed for word in words if word is not None)
    trees = [
        Tree(np.array(children), np.array([index.get(word, -1) for word in words]), labels[-1], np.array(labels))
        for children, words, labels in parsed
    ]
    return trees, len(index)


def _parse_sst(line: str, where: str) -> tuple[list[tuple[int, int]], list[str | None], list[int]]:
    """Return the children, the word and the label of every vertex, children first."""
    children, words, labels = [], [], []
    stack: list[list[int | str]] = [[]]  # the label of each open vertex, then its word or its children's numbers
    for number, token in enumerate(re.findall(r"[()]|[^() ]+", line), 1):
        if token == "(":
            stack.append([])
        elif token != ")":
            stack[-1].append(token)
        else:
            match stack.pop():
                case ["0" | "1" | "2" | "3" | "4" as label, str(word)]:
                    children.append((-1, -1))
                    words.append(word)
                case ["0" | "1" | "2" | "3" | "4" as label, int(left), int(right)]:
                    children.append((left, right))
                    words.append(None)
                case _:
                    what = f"a label 0 to {SENTIMENTS - 1} and a word or two vertices in brackets"
                    raise InputError(f"{where}, token {number}: {token!r} ends no vertex, expected {what}")
            labels.append(int(label))
            stack[-1].append(len(labels) - 1)
    if stack != [[len(labels) - 1]]:
        raise InputError(f"{where}: expected one tree, such as (3 (2 It) (4 works))")
    return children, words, labels


def read_sick(directory: Path) -> tuple[list[TreePair], int]:
    """Return pairs of dependency trees, with a word at every vertex, and the number of words.

    Line n of the files `a.toks`, `a.parents`, `b.toks`, `b.parents` and `sim.txt` belongs to pair n: words separated by
    spaces; for each word the position of its parent, from 1, 0 for the root and -1 for words outside of the tree; and
    the relatedness, a number.

    Raises:
        InputError: a file cannot be read, files have different numbers of lines, or a line is not of that form; the
            message names the line.
    """
    names = ("a.toks", "a.parents", "b.toks", "b.parents", "sim.txt")
    columns = [read_lines(directory / name) for name in names]
    if len({len(lines) for lines in columns}) > 1:
        found = ", ".join(f"{len(lines)} in {name}" for name, lines in zip(names, columns, strict=True))
        raise InputError(f"{directory}: expected as many lines in every file, found {found}")
    index = index_words(word for line in (*columns[0], *columns[2]) for word in line.split(" "))
    pairs = []
    for number, (*sides, similar) in enumerate(zip(*columns, strict=True), 1):
        try:
            left, right = (_sick_tree(*sides[n : n + 2], index) for n in (0, 2))
            pairs.append(TreePair(left, right, float(similar)))
        except ValueError as error:
            raise InputError(f"{directory}, line {number}: {error}") from None
    return pairs, len(index)


def _sick_tree(sentence: str, heads: str, index: dict[str, int]) -> Tree:
    words, parents = sentence.split(" "), np.array([int(head) for head in heads.split()])
    if len(words) != len(parents) or parents.min() < -1 or parents.max() > len(words):
        raise ValueError(f"parents {heads!r}, expected a position -1 to {len(words)} for each of {len(words)} words")
    used = np.flatnonzero(parents >= 0)
    position = np.full(len(words) + 1, -2)
    position[0], position[used + 1] = -1, np.arange(len(used))
    return tree_from_parents(position[parents[used]], np.array([index[words[n]] for n in used]))


def tree_from_parents(parents: np.ndarray, words: np.ndarray) -> Tree:
    """Return the tree in which `parents[n]` is the parent of vertex n, -1 for the root; its vertices are in post-order.

    Raises:
        ValueError: the parents do not form a tree.
    """
    below: list[list[int]] = [[] for _ in range(len(parents) + 2)]
    for vertex, parent in enumerate(parents.tolist()):
        below[parent].append(vertex)  # the root's parent, -1, is the last
    preorder, waiting = [], below[-1][:]
    while waiting:
        preorder.append(waiting.pop())
        waiting += below[preorder[-1]]
    if len(below[-1]) != 1 or len(preorder) < len(parents):
        raise ValueError("the parents have cycles or several roots, expected a tree")
    order = np.array(preorder[::-1])
    number = np.argsort(order)
    children = np.full((len(order), max(1, *map(len, below[:-2]))), -1)
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
