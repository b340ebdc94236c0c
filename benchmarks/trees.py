"""Compare ways to run networks over trees: a binary Tree-LSTM, Tree-FC, and a child-sum Tree-LSTM in a lazy scope.

The Tree-LSTMs are those of Tai et al. 2015, for the sentiment of sentences and for the relatedness of pairs. Tree-FC,
one fully connected layer at every inner vertex, is the synthetic benchmark of Looks et al. 2017 (Deep Learning with
Dynamic Computation Graphs, section 3.1) and of Cavs (Xu et al., section 3). `one` is always the slow reference for one
sample, vertex by vertex.

Trees are generated with the shapes of those of the Stanford Sentiment Treebank (Socher et al. 2013), constituency trees
with a label on every vertex, and of SICK, dependency trees with a word at every vertex (Tai et al. 2015, section 5.2).

Shapes: B trees, P pairs, V vertices of a tree, A greatest number of children, G vertices of a call, H width of states,
C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.networks import PER_INSTANCE, Way, minibatches_of, network_cases, one_by_one, phases_of, step, ways_of
from iep.bench.compare import MIN_SAMPLES, Benchmark
from iep.bench.strategy import PHASES, Strategy
from iep.dynamic import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices, scope
from iep.dynamic.plan_cache import clear_plan_cache
from iep.kernels.layers import Linear

RATINGS = 5
"""The ratings of relatedness are 1 to 5."""
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


def lstm_state(gates: Tensor, c_children: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h and c of cells with a forget gate for each child, (G, H) each (Tai et al. 2015, equations 9 to 14).

    Args:
        gates: (G, (3 + A) H) before the nonlinearities, in the order i, o, f of each child, u.
        c_children: (G, A, H); None for cells without children.
    """
    children = () if c_children is None else c_children.unbind(1)
    width = gates.shape[1] // (3 + len(children))
    i, o, *forget = gates[:, :-width].sigmoid().split(width, dim=1)
    c = i * gates[:, -width:].tanh()
    for f, c_child in zip(forget, children, strict=True):
        c = torch.addcmul(c, f, c_child)
    return o * c.tanh(), c


class BinaryTreeNetwork(nn.Module):
    """A network with a cell at every vertex of binary trees, whose leaves have words; the first state is read out.

    Subclasses have three methods: `leaf_state`, from the vectors of words, (G, H), to the states of leaves, (G, H)
    each; `inner_state`, from the children's states, (G, 2, H) each, to those of inner vertices; and `head`, from the
    first states of the roots to the results. Their `loss` is summed over trees.
    """

    def __init__(self, words: int, width: int, states: tuple[str, ...]):
        super().__init__()
        self.states, self.embedding = states, nn.Embedding(words, width, sparse=True)
        functions = [VertexFunction(self._leaf, pulls=("word",)), VertexFunction(self._inner, gathers=states)]
        self.network = VertexNetwork(functions, states=dict.fromkeys(states, (width,)))

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        edges = [Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words}) for tree in trees]
        return self.network.plan(edges, scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the results of the trees for which the plan was made, (B, C)."""
        words = self.embedding(plan.rows["word"])
        return self.head(self.network(plan, {"word": words}, defer_weight_grads).roots[self.states[0]])

    def one(self, tree: Tree) -> Tensor:
        """Return the result of one tree, (C,)."""
        made: list[tuple[Tensor, ...]] = []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            if children[0] < 0:
                made.append(self.leaf_state(self.embedding(torch.tensor([word]))))
            else:
                pairs = zip(*(made[child] for child in children), strict=True)
                made.append(self.inner_state(*(torch.stack(pair, dim=1) for pair in pairs)))
        return self.head(made[-1][0])[0]

    def cells(self, tree: Tree) -> int:
        """Return the number of cells that run for a tree."""
        return len(tree)

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(**dict(zip(self.states, self.leaf_state(vertices.pull("word")), strict=True)))

    def _inner(self, vertices: Vertices) -> None:
        states = self.inner_state(*map(vertices.gather, self.states))
        vertices.scatter(**dict(zip(self.states, states, strict=True)))


class BinaryTreeLSTM(BinaryTreeNetwork):
    """A Tree-LSTM with a classifier of the root."""

    def __init__(self, words: int, width: int = 256, classes: int = SENTIMENTS):
        super().__init__(words, width, ("h", "c"))
        self.leaf, self.inner = Linear(width, 3 * width), Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def leaf_state(self, x_GH: Tensor) -> tuple[Tensor, ...]:
        return lstm_state(self.leaf(x_GH))

    def inner_state(self, h_G2H: Tensor, c_G2H: Tensor) -> tuple[Tensor, ...]:
        return lstm_state(self.inner(h_G2H.flatten(1)), c_G2H)

    def loss(self, trees: Sequence[Tree], scores_BC: Tensor) -> Tensor:
        """Return the cross-entropy of the trees' labels."""
        return cross_entropy(scores_BC, torch.tensor([tree.label for tree in trees]), reduction="sum")


class TreeFC(BinaryTreeNetwork):
    """Tree-FC: relu(W [left; right] + b) at every inner vertex, and word vectors at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__(words, width, ("h",))
        self.inner, self.head = Linear(2 * width, width), nn.Identity()

    def leaf_state(self, x_GH: Tensor) -> tuple[Tensor, ...]:
        return (x_GH,)

    def inner_state(self, h_G2H: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(h_G2H.flatten(1)).relu(),)

    def cells(self, tree: Tree) -> int:
        """Return the number of inner vertices; leaves have no cell."""
        return tree.num_leaves - 1

    def loss(self, trees: Sequence[Tree], roots_BH: Tensor) -> Tensor:
        """Return the sum of the roots' states."""
        return roots_BH.sum()


class ChildSumCell(nn.Module):
    """A cell: a vertex's word and its children's states -> its state h and c (Tai et al. 2015, equations 2 to 8)."""

    def __init__(self, word_width: int, width: int):
        super().__init__()
        self.word_gates, self.word_forget = nn.Linear(word_width, 3 * width), nn.Linear(word_width, width)
        self.child_gates = nn.Linear(width, 3 * width, bias=False)
        self.child_forget = nn.Linear(width, width, bias=False)

    def forward(self, word_D: Tensor, children: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return h and c of a vertex, (H,) each, given those of its children."""
        gates = self.word_gates(word_D)
        if children:
            h_AH, c_AH = map(torch.stack, zip(*children, strict=True))
            gates = gates + self.child_gates(h_AH.sum(0))
        i, o, u = gates.chunk(3)
        c = i.sigmoid() * u.tanh()
        if children:
            forget_AH = torch.sigmoid(self.word_forget(word_D) + self.child_forget(h_AH))
            c = c + (forget_AH * c_AH).sum(0)
        return o.sigmoid() * c.tanh(), c


class Similarity(nn.Module):
    """A layer from h of two sentences to the scores of ratings 1 to C (Tai et al. 2015, equation 15)."""

    def __init__(self, width: int, ratings: int, hidden: int = 50):
        super().__init__()
        self.product, self.distance = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.scores = nn.Linear(hidden, ratings)

    def forward(self, left_H: Tensor, right_H: Tensor) -> Tensor:
        """Return the scores, (C,)."""
        hidden = torch.sigmoid(self.product(left_H * right_H) + self.distance((left_H - right_H).abs()))
        return self.scores(hidden)


class ChildSumTreeLSTM(nn.Module):
    """A network for the relatedness of two sentences, with fixed word vectors as in Tai et al. 2015, section 5.3.

    The code is written for one pair of trees, and `forward` runs it for a minibatch within a lazy scope. Every vertex
    has a word and any number of children.
    """

    def __init__(self, words: int, word_width: int = 300, width: int = 150, ratings: int = RATINGS):
        super().__init__()
        self.embedding = nn.Embedding(words, word_width).requires_grad_(False)
        self.cell, self.similarity = ChildSumCell(word_width, width), Similarity(width, ratings)

    def one(self, pair: TreePair) -> Tensor:
        """Return the scores of one pair, (C,)."""
        return self.similarity(self._sentence(pair.left), self._sentence(pair.right))

    def forward(self, pairs: Sequence[TreePair], **options: object) -> tuple[Tensor, scope]:
        """Return the scores of a minibatch, (P, C), and the scope, whose options are `options`."""
        with scope(self.cell, self.similarity, **options) as batch:
            scores = [self.one(pair) for pair in pairs]
        return torch.stack([score.value for score in scores]), batch

    def cells(self, pair: TreePair) -> int:
        """Return the number of cells, one for each word of both sentences."""
        return len(pair.left) + len(pair.right)

    def loss(self, pairs: Sequence[TreePair], scores_PC: Tensor) -> Tensor:
        """Return the cross-entropy with ratings whose mean is the relatedness (Tai et al. 2015, section 4.2)."""
        related_P = torch.tensor([pair.relatedness for pair in pairs])
        ratings_PC = (1 - (related_P[:, None] - torch.arange(1, RATINGS + 1)).abs()).clamp(min=0)
        return cross_entropy(scores_PC, ratings_PC, reduction="sum")

    def _sentence(self, tree: Tree) -> Tensor:
        words_VD = self.embedding(torch.from_numpy(tree.words)).unbind()
        states: list[tuple[Tensor, Tensor]] = []
        for word_D, children in zip(words_VD, tree.children.tolist(), strict=True):
            states.append(self.cell(word_D, [states[child] for child in children if child >= 0]))
        return states[-1][0]


def scope_ways(model: ChildSumTreeLSTM, strategies: Sequence[Strategy]) -> dict[str, Way]:
    """Return the ways to run a child-sum Tree-LSTM: one pair after the other, and in a lazy scope.

    In a scope (Zha et al. 2019, Just-in-Time Dynamic-Batching, section 5), the same code runs by modules under every
    strategy, and by operators under the last one. Planning counts as computation.
    """

    def in_scope(strategy: Strategy, granularity: str) -> Way:
        options = {"share": strategy.sharing, "defer_weight_grads": strategy.defer, "scheduler": strategy.batching}

        def run(pairs: Sequence[TreePair]) -> tuple[Tensor, scope]:
            clear_plan_cache()
            return model(pairs, granularity=granularity, **options)

        def calls(pairs: Sequence[TreePair]) -> int:
            with torch.no_grad():
                return run(pairs)[1].report().calls

        phases = PHASES if granularity == "op" else phases_of(strategy)
        return Way(list, step(model, lambda pairs: run(pairs)[0], model.loss), calls, phases)

    ways = {PER_INSTANCE: one_by_one(model)} | {each.name: in_scope(each, "module") for each in strategies}
    return ways | {f"{each.name}, operators": in_scope(each, "op") for each in strategies[-1:]}


def tree_lstm(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    cell: str,
    width: int | None,
    words: int,
    phases: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the comparisons at every minibatch size, on trees like those of SST or pairs of trees like those of SICK.

    Args:
        cell: `binary` or `child-sum`.
    """
    binary, count = cell == "binary", max(*batch_sizes, MIN_SAMPLES)
    width = width or (256 if binary else 150)
    model = BinaryTreeLSTM(words, width) if binary else ChildSumTreeLSTM(words, width=width)
    ways = ways_of(model, strategies) if binary else scope_ways(model, strategies)
    samples = (sst_like if binary else sick_like)(count, words, np.random.default_rng(seed))
    cases = network_cases(model, ways, minibatches_of(samples, batch_sizes), phases)
    return Benchmark(f"{cell} Tree-LSTM, width {width}, {words} words", cases, "tree" if binary else "pair")


def tree_fc(
    strategies: Sequence[Strategy],
    leaves: Sequence[int],
    batch_size: int,
    width: int,
    words: int,
    phases: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the comparisons at every size of tree, the smallest first."""
    rng = np.random.default_rng(seed)
    sized = (({"leaves": size}, [complete_trees(batch_size, size, words, rng)]) for size in sorted(leaves))
    model = TreeFC(words, width)
    cases = network_cases(model, ways_of(model, strategies), sized, phases)
    return Benchmark(f"Tree-FC, width {width}, {words} words, complete binary trees", cases, "tree")
