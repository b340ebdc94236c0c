"""What `iep-bench tree-lstm --cell child-sum` measures: a child-sum Tree-LSTM over pairs of dependency trees, one pair
after the other, and with the same code in a lazy scope (Zha et al. 2019, Just-in-Time Dynamic-Batching, section 5).

Shapes: P pairs of a minibatch, K ratings.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from iep.batching import scope
from iep.batching.lazy.report import Report
from iep.batching.plans import nothing_remembered
from iep.bench.contest import PHASES, TRAINING, Way
from iep.bench.hand_ways import step, summed_cross_entropy
from iep.bench.model_ways import per_instance
from iep.bench.samples import MIN_SAMPLES, child_sum_samples, shuffled
from iep.bench.strategy import Strategy
from iep.bench.workload_run import Case
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.tree_files import read_sick
from iep.workloads.trees import TreePair, sick_like

EMBEDDING, HIDDEN, RATINGS = 300, 50, 5
"""Sizes of word vectors, of the layer before the ratings, and how many of these there are (Tai et al. 2015, 5.3)."""


def child_sum_cases(
    strategies: Sequence[Strategy],
    seed: int,
    batch_sizes: Sequence[int],
    width: int,
    words: int,
    sick: Path | None,
    with_per_instance: bool,
) -> tuple[str, Iterator[Case]]:
    """A description, and a case for each size of minibatch, the smallest first.

    Raises:
        InputError: the pairs' files cannot be read, or have too few.
    """
    rng = np.random.default_rng(seed)
    largest = max(batch_sizes)
    if sick is None:
        pairs = sick_like(max(largest, MIN_SAMPLES), words, rng)
        origin = f"{len(pairs)} pairs of trees made like SICK's"
    else:
        pairs, word_to_idx = read_sick(sick)
        words = len(word_to_idx)
        pairs = shuffled(pairs, largest, rng, sick, "pairs")
        origin = f"pairs of trees of {sick}"
    torch.manual_seed(seed)
    ways = child_sum_ways(ChildSumTreeLSTM(words, EMBEDDING, width, RATINGS), strategies, with_per_instance)
    sizes = (EMBEDDING, width, HIDDEN, RATINGS)
    description = f"child-sum Tree-LSTM, width {width}, {words} words, {origin}"
    return description, ((child_sum_samples(pairs, size, *sizes), ways) for size in sorted(batch_sizes))


def child_sum_ways(model: ChildSumTreeLSTM, strategies: Sequence[Strategy], with_per_instance: bool) -> list[Way]:
    """One pair after the other, and in a scope under every strategy, by modules; under the last by operators too."""
    alone = [per_instance(model, _ratings, summed_cross_entropy)] if with_per_instance else []
    modules = [_in_scope(model, strategy, "module") for strategy in strategies]
    return [*alone, *modules, *(_in_scope(model, strategy, "op") for strategy in strategies[-1:])]


def _in_scope(model: ChildSumTreeLSTM, strategy: Strategy, granularity: str) -> Way:
    """No plan is remembered: every minibatch of an epoch is new."""
    ran: list[scope] = []

    def forward(pairs: Sequence[TreePair]) -> Tensor:
        options = {"share": strategy.sharing, "defer_weight_grads": strategy.defer}
        parts = (model.cell, model.similarity)
        with (
            nothing_remembered(),
            scope(*parts, granularity=granularity, scheduler=strategy.batching, **options) as batch,
        ):
            scores = [model.one(pair) for pair in pairs]
        ran[:] = [batch]
        return torch.stack([score.value for score in scores])

    def report() -> Report:
        return ran[0].report()

    def calls(pairs: Sequence[TreePair]) -> int:
        with torch.no_grad():
            forward(pairs)
        return report().calls

    return Way(
        name=f"{strategy.name}{', operators' if granularity == 'op' else ''}",
        construct=list,
        compute=step(model, forward, lambda pairs, scores: summed_cross_entropy(scores, _ratings(pairs))),
        calls=calls,
        constructed_within=lambda: report().seconds_recording + report().seconds_planning,
        phases=(TRAINING,) if strategy.defer and granularity == "module" else PHASES,
    )


def _ratings(pairs: Sequence[TreePair]) -> Tensor:
    """(P, K) how much of each rating makes up a pair's relatedness (Tai et al. 2015, section 4.2)."""
    related = torch.tensor([pair.relatedness for pair in pairs])
    return (1 - (related[:, None] - torch.arange(1, RATINGS + 1)).abs()).clamp(min=0)
