"""What `iep-bench tree-fc` compares: one layer at every vertex of complete binary trees (Looks et al. 2017).

Shapes: B trees, G vertices of a level, H width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from iep.bench import networks
from iep.bench.networks import Samples, Way, step
from iep.bench.report import Benchmark
from iep.bench.strategy import Strategy
from iep.bench.tree_lstm import HAND, TreeLevels, levels_of
from iep.workloads.tree_fc import TreeFC
from iep.workloads.trees import Tree, complete_trees


class HandTreeFC(nn.Module):
    """relu(W [left; right] + b) at every vertex, batched by hand, with the parameters of `TreeFC`."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = nn.Linear(2 * width, width)

    def forward(self, levels: TreeLevels) -> Tensor:
        """Return (B, H) results of the roots."""
        return levels.run((self.embedding(levels.words),), self._level)[0]

    def _level(self, h: Tensor) -> tuple[Tensor]:
        return (self.inner(h.view(-1, 2 * self.width)).relu_(),)


def tree_fc_samples(trees: Sequence[Tree], batch: int, width: int) -> Samples:
    """Return minibatches of trees of one size. Leaves are vectors: no cell makes them."""
    inner = trees[0].num_leaves - 1
    flop = 4 * inner * width * width
    return networks.samples_of(trees, batch, lambda tree: inner, lambda tree: flop, leaves=inner + 1)


def tree_fc_ways(words: int, width: int, strategies: Sequence[Strategy]) -> tuple[HandTreeFC, list[Way]]:
    """Return the network by hand, and the ways to run the same weights, the one by hand last."""
    model, hand = TreeFC(words, width), HandTreeFC(words, width)
    hand.load_state_dict(model.state_dict())

    def loss(_: object, roots: Tensor) -> Tensor:
        return roots.sum()

    by_hand = Way(HAND, levels_of, step(hand, hand, loss), lambda levels: len(levels.arguments))
    return hand, [*networks.model_ways(model, strategies, loss), by_hand]


def tree_fc_benchmark(
    strategies: Sequence[Strategy],
    leaves: Sequence[int],
    batch_size: int,
    phases: Sequence[str],
    threads: Sequence[int],
    width: int,
    words: int,
    seed: int,
) -> Benchmark:
    """Return the comparison at every size of tree, the smallest first."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ways = tree_fc_ways(words, width, strategies)[1]
    trees = (complete_trees(batch_size, size, words, rng) for size in sorted(leaves))
    samples = (tree_fc_samples(each, batch_size, width) for each in trees)
    cases = networks.network_cases(samples, ways, phases, threads)
    return Benchmark(f"Tree-FC, width {width}, {words} words, complete binary trees", cases, "leaves", "tree")
