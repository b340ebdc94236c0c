"""What `iep-bench tree-fc` measures: one layer at every vertex of complete binary trees, in every way."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from iep.bench.contest import Way
from iep.bench.hand_trees import HandTreeFC
from iep.bench.hand_ways import tree_fc_by_hand
from iep.bench.model_ways import batched_ways, per_instance
from iep.bench.samples import tree_fc_samples
from iep.bench.strategy import Strategy
from iep.bench.workload_run import Case
from iep.workloads.tree_fc import TreeFC
from iep.workloads.trees import Tree, complete_trees


def tree_fc_cases(
    strategies: Sequence[Strategy],
    seed: int,
    leaves: Sequence[int],
    batch_size: int,
    width: int,
    words: int,
    with_per_instance: bool,
) -> tuple[str, Iterator[Case]]:
    """A description, and a case for each size of tree, the smallest first."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    ways = tree_fc_ways(*tree_fc_models(words, width), strategies, with_per_instance)
    description = f"Tree-FC, width {width}, {words} words, complete binary trees"
    return description, (
        (tree_fc_samples(complete_trees(batch_size, size, words, rng), batch_size, width), ways)
        for size in sorted(leaves)
    )


def tree_fc_models(words: int, width: int) -> tuple[TreeFC, HandTreeFC]:
    """As `tree_lstm.binary_models`."""
    model, hand = TreeFC(words, width), HandTreeFC(words, width)
    hand.load_state_dict(model.state_dict())
    return model, hand


def tree_fc_ways(
    model: TreeFC, hand: HandTreeFC, strategies: Sequence[Strategy], with_per_instance: bool = False
) -> list[Way]:
    """As `tree_lstm.binary_ways`."""
    alone = [per_instance(model, _no_targets, _sum)] if with_per_instance else []
    return [*alone, *batched_ways(model, strategies, _no_targets, _sum), tree_fc_by_hand(hand)]


def _no_targets(trees: Sequence[Tree]) -> Tensor:
    return torch.empty(len(trees), 0)


def _sum(roots: Tensor, _: Tensor) -> Tensor:
    return roots.sum()
