"""What `iep-bench tree-lstm` measures: a binary Tree-LSTM over constituency trees, in every way.

Shapes: B trees of a minibatch, C classes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from iep.bench.contest import Way
from iep.bench.hand_trees import HandTreeLSTM
from iep.bench.hand_ways import summed_cross_entropy, tree_lstm_by_hand
from iep.bench.model_ways import batched_ways, per_instance
from iep.bench.samples import MIN_SAMPLES, shuffled, tree_lstm_samples
from iep.bench.strategy import Strategy
from iep.bench.workload_run import Case
from iep.workloads.tree_files import read_sst
from iep.workloads.tree_lstm import BinaryTreeLSTM
from iep.workloads.trees import SENTIMENTS, Tree, sst_like


def binary_cases(
    strategies: Sequence[Strategy],
    seed: int,
    batch_sizes: Sequence[int],
    width: int,
    words: int,
    sst: Path | None,
    with_per_instance: bool,
) -> tuple[str, Iterator[Case]]:
    """A description, and a case for each size of minibatch, the smallest first.

    Raises:
        InputError: the trees' file cannot be read, has a tree that is not binary, or too few.
    """
    rng = np.random.default_rng(seed)
    largest = max(batch_sizes)
    if sst is None:
        trees = sst_like(max(largest, MIN_SAMPLES), words, rng)
        origin = f"{len(trees)} trees made like the Stanford Sentiment Treebank's"
    else:
        trees, word_to_idx = read_sst(sst)
        words = len(word_to_idx)
        trees = shuffled(trees, largest, rng, sst, "trees")
        origin = f"trees of {sst}"
    torch.manual_seed(seed)
    ways = binary_ways(*binary_models(words, width), strategies, with_per_instance)
    description = f"binary Tree-LSTM, width {width}, {words} words, {origin}"
    return description, ((tree_lstm_samples(trees, size, width, SENTIMENTS), ways) for size in sorted(batch_sizes))


def binary_models(words: int, width: int) -> tuple[BinaryTreeLSTM, HandTreeLSTM]:
    """The network, and the one by hand with the same weights."""
    model, hand = BinaryTreeLSTM(words, width, SENTIMENTS), HandTreeLSTM(words, width, SENTIMENTS)
    hand.load_state_dict(model.state_dict())
    return model, hand


def binary_ways(
    model: BinaryTreeLSTM, hand: HandTreeLSTM, strategies: Sequence[Strategy], with_per_instance: bool = False
) -> list[Way]:
    """One sample after the other, batched by vertex functions under every strategy, and by hand."""
    alone = [per_instance(model, _labels, summed_cross_entropy)] if with_per_instance else []
    batched = batched_ways(model, strategies, _labels, summed_cross_entropy)
    return [*alone, *batched, tree_lstm_by_hand(hand)]


def _labels(trees: Sequence[Tree]) -> torch.Tensor:
    """(B,)"""
    return torch.tensor([tree.label for tree in trees])
