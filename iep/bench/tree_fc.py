"""What `iep-bench tree-fc` compares: one layer at every vertex of complete binary trees (Looks et al. 2017)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from iep.bench import networks
from iep.bench.networks import Network, Way, step
from iep.bench.report import Benchmark
from iep.bench.strategy import Strategy
from iep.bench.tree_lstm import HAND, TreeLevels, levels_of
from iep.workloads.tree_fc import TreeFC
from iep.workloads.trees import complete_trees


def tree_fc_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return relu(W [left; right] + b) at every inner vertex. Leaves are vectors: no cell makes them."""
    model = TreeFC(words, width)

    def loss(_: Any, roots: Tensor) -> Tensor:
        return roots.sum()

    def level(h: Tensor) -> tuple[Tensor]:
        return (model.inner(h.view(-1, 2 * width)).relu(),)

    def forward(levels: TreeLevels) -> Tensor:
        return levels.run((model.embedding(levels.words),), level)[0]

    by_hand = Way(HAND, levels_of, step(model, forward, loss), lambda levels: len(levels.arguments))
    ways = [*networks.model_ways(model, strategies, loss), by_hand]
    return Network(
        model, ways, lambda tree: tree.num_leaves - 1, lambda tree: 4 * (tree.num_leaves - 1) * width * width
    )


def tree_fc_benchmark(
    strategies: Sequence[Strategy],
    leaves: Sequence[int],
    batch_size: int,
    width: int,
    words: int,
    seed: int,
    **measured: Any,
) -> Benchmark:
    """Return the comparison at every size of tree, the smallest first; `measured` are phases and threads."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    network = tree_fc_network(words, width, strategies)
    sized = (({"leaves": size}, [complete_trees(batch_size, size, words, rng)]) for size in sorted(leaves))
    cases = networks.network_cases(network, sized, **measured)
    return Benchmark(f"Tree-FC, width {width}, {words} words, complete binary trees", cases, "leaves", "tree")
