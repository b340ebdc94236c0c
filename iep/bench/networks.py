"""Networks whose shape is the sample's: what the comparisons of trees and of sentences have in common.

A `Way` runs a minibatch of samples: batched under a strategy, one sample after the other, or by hand. The limit is to
do the operations of the network's matrix products at the speed of the fastest product of this machine.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.batching.plans import nothing_remembered
from iep.bench.compare import MIN_SAMPLES, Case, Competitor, Fact, arithmetic_limit, seconds
from iep.bench.strategy import PHASES, Strategy
from iep.errors import InputError

PER_INSTANCE = "per instance"
ENOUGH_SAMPLES = 16
"""Where one sample runs after the other, no more are run; the time is scaled by the network's cells."""


@dataclass(frozen=True)
class Samples:
    """What a case runs.

    Attributes:
        setting: what distinguishes these samples, such as `{"batch": 64}`.
        cells: a sample -> how many applications of the network's cells it needs.
        flop: a sample -> floating-point operations of its matrix products, forward.
    """

    minibatches: Sequence[Sequence[Any]]
    setting: dict[str, int]
    cells: Callable[[Any], int]
    flop: Callable[[Any], int]


def samples_of(drawn: Sequence[Any], batch: int, cells: Callable, flop: Callable, **setting: int) -> Samples:
    """Return the first minibatches of what was drawn: at least `MIN_SAMPLES` samples, if there are so many."""
    count = max(1, min(MIN_SAMPLES, len(drawn)) // batch)
    minibatches = [drawn[number * batch : (number + 1) * batch] for number in range(count)]
    return Samples(minibatches, {**setting, "batch": batch}, cells, flop)


@dataclass(frozen=True)
class Way:
    """One way to run a minibatch of samples.

    Attributes:
        construct: samples -> what `compute` takes: graph, schedule, indices; no numbers are computed.
        compute: the forward pass and, if the second argument is true, loss and backward pass; returns the loss.
        calls: what was constructed -> how many calls of the network's cells it makes.
    """

    name: str
    construct: Callable[[Sequence[Any]], Any]
    compute: Callable[[Any, bool], Any]
    calls: Callable[[Any], int] | None = None
    phases: tuple[str, ...] = PHASES


def step(model: nn.Module, forward: Callable[[Any], Tensor], loss: Callable[[Any, Tensor], Tensor]) -> Callable:
    """Return a step of `model` for `Way.compute`: gradients are left in its parameters and not added up."""

    def compute(plan: Any, training: bool) -> Tensor | None:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            results = forward(plan)
            if not training:
                return None
            value = loss(plan, results)
            value.backward()
            return value.detach()

    return compute


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over rows."""
    return functional.cross_entropy(scores, labels, reduction="sum")


def model_ways(
    model: nn.Module, strategies: Sequence[Strategy], loss: Callable[[Sequence[Any], Tensor], Tensor]
) -> list[Way]:
    """Return `model.one`, sample by sample, each with its own backward pass, and the model under every strategy.

    No plan is remembered: every minibatch of an epoch is new. Deferral of weight gradients is for training alone.

    Args:
        loss: (samples, results of the model) -> the loss, summed over samples.
    """

    def one_by_one(samples: Sequence[Any], training: bool) -> float:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            total = 0.0
            for sample in samples:
                results = model.one(sample)
                if training:
                    value = loss([sample], results if results.dim() > 1 else results[None])
                    value.backward()
                    total += value.item()
            return total

    def way(strategy: Strategy) -> Way:
        def construct(samples: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            with nothing_remembered():
                return model.plan(samples, scheduler=strategy.batching, sharing=strategy.sharing), samples

        def forward(planned: tuple[Any, Sequence[Any]]) -> Tensor:
            return model(planned[0], defer_weight_grads=strategy.defer)

        compute = step(model, forward, lambda planned, results: loss(planned[1], results))
        phases = ("train",) if strategy.defer else PHASES
        return Way(strategy.name, construct, compute, lambda planned: len(planned[0].schedule), phases)

    return [Way(PER_INSTANCE, list, one_by_one), *map(way, strategies)]


def network_cases(
    all_samples: Iterable[Samples], ways: Sequence[Way], phases: Sequence[str], threads: Sequence[int]
) -> Iterator[Case]:
    """Yield a case for each size, phase and number of threads."""
    for samples in all_samples:
        cells, flop = (
            mean(sum(map(count, each)) for each in samples.minibatches) for count in (samples.cells, samples.flop)
        )
        for phase, number in product(phases, threads):
            training = phase == "train"
            competitors = [_competitor(way, samples, training, cells) for way in ways if phase in way.phases]
            yield Case(
                setting={"phase": phase, "threads": number, **samples.setting},
                size=len(samples.minibatches[0]),
                competitors=[*competitors, arithmetic_limit(flop * (3 if training else 1))],
                baseline=PER_INSTANCE,
                facts={"cells": cells, "minibatches": len(samples.minibatches)},
            )


def _competitor(way: Way, samples: Samples, training: bool, cells: float) -> Competitor:
    most = ENOUGH_SAMPLES if way.name == PER_INSTANCE else None
    run = [minibatch[:most] for minibatch in samples.minibatches]
    scale = cells / mean(sum(map(samples.cells, minibatch)) for minibatch in run)

    def measure() -> dict[str, float]:
        times = []
        for minibatch in run:
            made: list[Any] = []
            constructing = seconds(lambda: made.append(way.construct(minibatch)))  # noqa: B023
            times.append((constructing, seconds(lambda: way.compute(made[0], training))))  # noqa: B023
        construction, computation = map(mean, zip(*times, strict=True))
        return {"construction": scale * construction, "computation": scale * computation}

    def facts() -> dict[str, Fact]:
        calls = mean(way.calls(way.construct(minibatch)) for minibatch in run) if way.calls else None
        calls = cells if way.name == PER_INSTANCE else calls
        return {"calls": calls, "ratio": calls and cells / calls}

    return Competitor(way.name, measure, facts=facts)


def shuffled(found: Sequence[Any], least: int, rng: np.random.Generator, where: Path, what: str) -> list[Any]:
    """Return what was found in files, in another order.

    Raises:
        InputError: it is less than the largest minibatch.
    """
    if len(found) < least:
        raise InputError(f"{where}: {len(found)} {what}, expected at least {least} for the largest of --batch-sizes")
    return [found[n] for n in rng.permutation(len(found))]
