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

from iep.bench.compare import MIN_SAMPLES, Case, Competitor, Fact, arithmetic_limit, seconds
from iep.bench.strategy import PHASES, Strategy
from iep.dynamic.remembered import nothing_remembered
from iep.errors import InputError

PER_INSTANCE = "per instance"
ENOUGH_SAMPLES = 16
"""Where one sample runs after the other, no more are run; the time is scaled by the network's cells."""
Loss = Callable[[Any, Tensor], Tensor]
"""(samples or what was constructed of them, results) -> the loss, summed over samples."""
Minibatches = Sequence[Sequence[Any]]


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


@dataclass(frozen=True)
class Network:
    """A network, and the ways to run it, the one by hand last.

    Attributes:
        cells: a sample -> how many applications of the network's cells it needs.
        flop: a sample -> floating-point operations of its matrix products, forward.
    """

    model: nn.Module
    ways: Sequence[Way]
    cells: Callable[[Any], int]
    flop: Callable[[Any], int]


def step(model: nn.Module, forward: Callable[[Any], Tensor], loss: Loss) -> Callable[[Any, bool], Tensor]:
    """Return a step of `model` for `Way.compute`: gradients are left in its parameters and not added up."""

    def compute(plan: Any, training: bool) -> Tensor:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            value = forward(plan)
            if training:
                value = loss(plan, value)
                value.backward()
            return value.detach()

    return compute


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy, summed over rows."""
    return functional.cross_entropy(scores, labels, reduction="sum")


def model_ways(model: nn.Module, strategies: Sequence[Strategy], loss: Loss) -> list[Way]:
    """Return `model.one`, sample by sample, each with its own backward pass, and the model under every strategy.

    No plan is remembered: every minibatch of an epoch is new. Deferral of weight gradients is for training alone.
    """

    def one_by_one(samples: Sequence[Any], training: bool) -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        with torch.inference_mode(not training):
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
        phases = PHASES[:1] if strategy.defer else PHASES
        return Way(strategy.name, construct, compute, lambda planned: len(planned[0].schedule), phases)

    return [Way(PER_INSTANCE, list, one_by_one), *map(way, strategies)]


def minibatches_of(samples: Sequence[Any], size: int) -> Minibatches:
    """Return the first minibatches: at least `MIN_SAMPLES` samples, if there are so many."""
    count = max(1, min(MIN_SAMPLES, len(samples)) // size)
    return [samples[number * size : (number + 1) * size] for number in range(count)]


def network_cases(
    network: Network, sized: Iterable[tuple[dict[str, int], Minibatches]], phases: Sequence[str], threads: Sequence[int]
) -> Iterator[Case]:
    """Yield a case for the minibatches of each size, given with its name, each phase and each number of threads."""
    for size, minibatches in sized:
        cells, flop = (mean(sum(map(of, each)) for each in minibatches) for of in (network.cells, network.flop))
        for phase, number in product(phases, threads):
            competitors = [
                _competitor(way, network, minibatches, phase == "train") for way in network.ways if phase in way.phases
            ]
            competitors.append(arithmetic_limit(flop * (3 if phase == "train" else 1)))
            facts = {"cells": cells, "minibatches": len(minibatches)}
            setting = {"phase": phase, "threads": number, **size}
            yield Case(setting, len(minibatches[0]), competitors, PER_INSTANCE, facts)


def _competitor(way: Way, network: Network, minibatches: Minibatches, training: bool) -> Competitor:
    alone = way.name == PER_INSTANCE
    run = [minibatch[: ENOUGH_SAMPLES if alone else None] for minibatch in minibatches]
    cells, of_run = (mean(sum(map(network.cells, each)) for each in some) for some in (minibatches, run))

    def measure() -> dict[str, float]:
        times = []
        for minibatch in run:
            made: list[Any] = []
            constructing = seconds(lambda: made.append(way.construct(minibatch)))  # noqa: B023
            times.append((constructing, seconds(lambda: way.compute(made[0], training))))  # noqa: B023
        construction, computation = map(mean, zip(*times, strict=True))
        return {"construction": cells / of_run * construction, "computation": cells / of_run * computation}

    def facts() -> dict[str, Fact]:
        calls = (
            mean(way.calls(way.construct(minibatch)) for minibatch in run) if way.calls else cells if alone else None
        )
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
