"""What `iep-bench tree-lstm` compares: a Tree-LSTM over constituency trees (binary) or dependency trees (child-sum).

By hand, binary trees are batched by levels in plain PyTorch: everything of one height runs together, leaves first. What
a level makes is ordered by the level that reads it, so that a later level's arguments are a few contiguous pieces and
one `index_select`: each value moves twice, however many levels wait for others.

Shapes: B trees or pairs, N vertices of all trees, K levels above the leaves, L leaves, G vertices of a level, H width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iep.bench import networks
from iep.bench.compare import MIN_SAMPLES
from iep.bench.networks import Network, Way, step, summed_cross_entropy
from iep.bench.report import Benchmark
from iep.bench.strategy import PHASES, Strategy
from iep.dynamic import scope
from iep.dynamic.remembered import nothing_remembered
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.tree_files import read_sick, read_sst
from iep.workloads.tree_lstm import BinaryTreeLSTM
from iep.workloads.trees import SENTIMENTS, Tree, TreePair, sick_like, sst_like

HAND = "by hand: levels"
EMBEDDING, HIDDEN, RATINGS = 300, 50, 5
"""Sizes of word vectors, of the layer before the ratings, and how many of these there are (Tai et al. 2015, 5.3)."""
States = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class TreeLevels:
    """Where the vertices of binary trees run, level by level."""

    words: Tensor
    """(L,) of the leaves."""
    pieces: tuple[tuple[int, ...], ...]
    """(K + 1, K + 1) how many results of each level, leaves first, go to each later one, and last to the roots."""
    arguments: tuple[Tensor, ...]
    """(K) rows of each level's arguments in the pieces that it reads: left, right, left, right, ..."""
    roots: Tensor
    """(B,) rows of the trees' results in the pieces that remain."""
    labels: Tensor
    """(B,)"""

    @property
    def rows(self) -> list[int]:
        """(K + 1) vertices of each level, leaves first."""
        return [sum(pieces) for pieces in self.pieces]

    def run(self, leaves: States, level: Callable[..., States]) -> States:
        """Return the roots' states.

        Args:
            leaves: the states of the leaves, (L, H) each.
            level: the children's states, (2 G, H) each, left and right in turn -> those of G vertices.
        """
        waiting: list[list[States]] = [[] for _ in range(len(self.pieces) + 1)]
        for number in range(len(self.pieces)):
            made = level(*_gather(waiting[number], self.arguments[number - 1])) if number else leaves
            parts = zip(*(each.split(self.pieces[number]) for each in made), strict=True)
            for later, states in enumerate(parts, start=number + 1):
                if len(states[0]):
                    waiting[later].append(states)
        return tuple(_gather(waiting[-1], self.roots))


def _gather(pieces: Sequence[States], rows: Tensor) -> list[Tensor]:
    return [(torch.cat(each) if len(each) > 1 else each[0]).index_select(0, rows) for each in zip(*pieces, strict=True)]


def levels_of(trees: Sequence[Tree]) -> TreeLevels:
    """Return the levels of one or more binary trees."""
    sizes_B = np.array([len(tree) for tree in trees])
    start_B = np.cumsum(sizes_B) - sizes_B
    children_N2 = np.concatenate([tree.children for tree in trees])
    inner = np.flatnonzero(children_N2[:, 0] >= 0)
    read_M2 = children_N2[inner] + np.repeat(start_B, sizes_B)[inner, None]
    height_N = np.zeros(len(children_N2), dtype=np.int64)
    while not np.array_equal(higher := height_N[read_M2].max(axis=1, initial=-1) + 1, height_N[inner]):
        height_N[inner] = higher
    top = int(height_N.max()) + 1
    reader_N = np.full(len(height_N), top)
    reader_N[read_M2] = height_N[inner, None]

    # Results in the order in which they are made, and in which they are read.
    made = np.lexsort((reader_N, height_N))
    arrived = made[np.argsort(reader_N[made], kind="stable")]
    row_N = np.empty(len(height_N), dtype=np.int64)
    first_K = np.searchsorted(reader_N[arrived], np.arange(top + 1))
    row_N[arrived] = np.arange(len(arrived)) - first_K[reader_N[arrived]]

    pieces = np.zeros((top, top + 1), dtype=np.int64)
    np.add.at(pieces, (height_N, reader_N), 1)
    pair_N2 = np.empty((len(height_N), 2), dtype=np.int64)
    pair_N2[inner] = row_N[read_M2]
    bounds = np.searchsorted(height_N[made], np.arange(top + 1)).tolist()
    words_N = np.concatenate([tree.words for tree in trees])
    return TreeLevels(
        words=torch.from_numpy(words_N[made[: bounds[1]]]),
        pieces=tuple(tuple(row[level + 1 :]) for level, row in enumerate(pieces.tolist())),
        arguments=tuple(torch.from_numpy(pair_N2[made[begin:end]].ravel()) for begin, end in pairwise(bounds[1:])),
        roots=torch.from_numpy(row_N[start_B + sizes_B - 1]),
        labels=torch.tensor([tree.label for tree in trees]),
    )


def tree_lstm_by_hand(model: BinaryTreeLSTM, levels: TreeLevels) -> Tensor:
    """Return (B, classes) scores by the model's parameters (Tai et al. 2015, section 3.2)."""

    def state(gates: Tensor, *children: Tensor) -> States:
        """From gates i, o, forgets, u."""
        *_, u = gates.split(model.width, dim=1)
        i, o, *forgets = gates[:, : -model.width].sigmoid().split(model.width, dim=1)
        c_GH = i * u.tanh()
        for forget, c_child in zip(forgets, children, strict=True):
            c_GH = torch.addcmul(c_GH, forget, c_child)
        return o * c_GH.tanh(), c_GH

    def inner(h: Tensor, c: Tensor) -> States:
        return state(model.inner(h.view(-1, 2 * model.width)), c[::2], c[1::2])

    h_BH, _ = levels.run(state(model.leaf(model.embedding(levels.words))), inner)
    return model.classifier(h_BH)


def binary_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return a binary Tree-LSTM for trees, which has a cell at every vertex."""
    model = BinaryTreeLSTM(words, width, SENTIMENTS)

    def loss(trees: Sequence[Tree], scores: Tensor) -> Tensor:
        return summed_cross_entropy(scores, torch.tensor([tree.label for tree in trees]))

    def flop(tree: Tree) -> int:
        leaves, inner = tree.num_leaves, len(tree) - tree.num_leaves
        return 2 * width * (3 * leaves * width + 10 * inner * width + SENTIMENTS)

    forward = partial(tree_lstm_by_hand, model)
    compute = step(model, forward, lambda levels, scores: summed_cross_entropy(scores, levels.labels))
    by_hand = Way(HAND, levels_of, compute, lambda levels: len(levels.pieces))
    return Network(model, [*networks.model_ways(model, strategies, loss), by_hand], len, flop)


def child_sum_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return a child-sum Tree-LSTM for pairs of trees, which has a cell at every word and a score of the two sentences.

    The same code runs one pair after the other and in a lazy scope (Zha et al. 2019, Just-in-Time Dynamic-Batching,
    section 5): by modules under every strategy, by operators under the last. All of this is computation.
    """
    model = ChildSumTreeLSTM(words, EMBEDDING, width, RATINGS)

    def loss(pairs: Sequence[TreePair], scores: Tensor) -> Tensor:
        """Against how much of each rating makes up a pair's relatedness (Tai et al. 2015, section 4.2)."""
        related = torch.tensor([pair.relatedness for pair in pairs])
        ratings = (1 - (related[:, None] - torch.arange(1, RATINGS + 1)).abs()).clamp(min=0)
        return summed_cross_entropy(scores, ratings)

    def size(pair: TreePair) -> int:
        return len(pair.left) + len(pair.right)

    def flop(pair: TreePair) -> int:
        inner = size(pair) - pair.left.num_leaves - pair.right.num_leaves
        cells = 4 * size(pair) * EMBEDDING * width + (3 * inner + size(pair) - 2) * width * width
        return 2 * (cells + 2 * width * HIDDEN + HIDDEN * RATINGS)

    def in_scope(strategy: Strategy, granularity: str) -> Way:
        options = {"share": strategy.sharing, "defer_weight_grads": strategy.defer, "scheduler": strategy.batching}

        def run(pairs: Sequence[TreePair]) -> tuple[Tensor, scope]:
            with nothing_remembered(), scope(model.cell, model.similarity, granularity=granularity, **options) as batch:
                scores = [model.one(pair) for pair in pairs]
            return torch.stack([score.value for score in scores]), batch

        def calls(pairs: Sequence[TreePair]) -> int:
            with torch.no_grad():
                return run(pairs)[1].report().calls

        by_modules = granularity == "module"
        name = strategy.name if by_modules else f"{strategy.name}, operators"
        compute = step(model, lambda pairs: run(pairs)[0], loss)
        return Way(name, list, compute, calls, PHASES[:1] if strategy.defer and by_modules else PHASES)

    ways = [*networks.model_ways(model, (), loss), *(in_scope(strategy, "module") for strategy in strategies)]
    return Network(model, [*ways, *(in_scope(strategy, "op") for strategy in strategies[-1:])], size, flop)


def tree_lstm_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    cell: str,
    width: int,
    words: int,
    files: Path | None,
    seed: int,
    **measured: Any,
) -> Benchmark:
    """Return the comparison at every minibatch size, the smallest first.

    Args:
        files: of bracketed trees for a `binary` cell, or the directory of pairs for a `child-sum` one; None to have
            trees made in the sizes of theirs.
        measured: phases and threads.

    Raises:
        InputError: files cannot be read, or have too few samples.
    """
    rng, count, binary = np.random.default_rng(seed), max(*batch_sizes, MIN_SAMPLES), cell == "binary"
    what, like = ("trees", "the Stanford Sentiment Treebank's") if binary else ("pairs", "SICK's")
    if files is None:
        found = (sst_like if binary else sick_like)(count, words, rng)
        origin = f"{count} {what} made like {like}"
    else:
        found, word_to_idx = (read_sst if binary else read_sick)(files)
        found, words = networks.shuffled(found, max(batch_sizes), rng, files, what), len(word_to_idx)
        origin = f"{what} of {files}"
    torch.manual_seed(seed)
    network = (binary_network if binary else child_sum_network)(words, width, strategies)
    sized = (({"batch": size}, networks.minibatches_of(found, size)) for size in sorted(batch_sizes))
    description = f"{cell} Tree-LSTM, width {width}, {words} words, {origin}"
    return Benchmark(description, networks.network_cases(network, sized, **measured), "batch", what[:-1])
