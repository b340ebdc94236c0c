"""The models of `iep.workloads` as ways to run a minibatch (`contest.py`): batched under every strategy, and one sample
after the other."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from iep.batching.plans import nothing_remembered
from iep.bench.contest import PER_INSTANCE, PHASES, TRAINING, Way
from iep.bench.hand_ways import step
from iep.bench.strategy import Strategy

ENOUGH_CELLS = 600
"""Of each minibatch, where one sample runs after the other."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""From results and targets of a minibatch, summed over samples."""
Targets = Callable[[Sequence[Any]], Tensor]
"""Of samples, as rows of the model's results are ordered."""


class _Planned(NamedTuple):
    plan: Any
    targets: Tensor


def batched_ways(model: nn.Module, strategies: Sequence[Strategy], targets: Targets, loss: Loss) -> list[Way]:
    """`model.plan(samples, scheduler=..., sharing=...)`, then `model(plan, defer_weight_grads=...)`, by strategy.

    One that defers weight gradients is measured in training alone. The last of each phase is measured twice: where
    every minibatch's shape is new, as all the others, and where it was seen before, as in the epochs after the first.
    """
    last = {strategy.defer: strategy for strategy in strategies}
    new = [_batched(model, strategy, targets, loss, is_new=True) for strategy in strategies]
    return [*new, *(_batched(model, strategy, targets, loss, is_new=False) for strategy in last.values())]


def _batched(model: nn.Module, strategy: Strategy, targets: Targets, loss: Loss, is_new: bool) -> Way:
    def construct(samples: Sequence[Any]) -> _Planned:
        with nothing_remembered() if is_new else nullcontext():
            return _Planned(
                model.plan(samples, scheduler=strategy.batching, sharing=strategy.sharing), targets(samples)
            )

    def forward(planned: _Planned) -> Tensor:
        return model(planned.plan, defer_weight_grads=strategy.defer)

    return Way(
        name=strategy.name if is_new else f"{strategy.name}, shapes seen",
        construct=construct,
        compute=step(model, forward, lambda planned, results: loss(results, planned.targets)),
        calls=lambda planned: len(planned.plan.schedule),
        phases=(TRAINING,) if strategy.defer else PHASES,
    )


def per_instance(model: nn.Module, targets: Targets, loss: Loss) -> Way:
    """`model.one(sample)` for one sample after the other, each with its own backward pass."""

    def compute(samples: Sequence[Any], training: bool) -> float:
        if not training:
            with torch.inference_mode():
                for sample in samples:
                    model.one(sample)
            return 0.0
        model.zero_grad(set_to_none=True)
        total = 0.0
        for sample in samples:
            value = loss(_rows(model.one(sample)), targets([sample]))
            value.backward()
            total += value.item()
        return total

    return Way(
        name=PER_INSTANCE,
        construct=list,
        compute=compute,
        enough_cells=ENOUGH_CELLS,
    )


def _rows(results: Tensor) -> Tensor:
    return results if results.dim() > 1 else results[None]
