"""The comparison of ways to run a network whose structure depends on the sample, as `trees.py` and `tagger.py` make it.

A minibatch runs one sample after the other, or batched under a strategy. A network has the methods `one`, from a sample
to its results; `plan`, from samples to their plan under a scheduler; `forward`, from the plan to all results; `loss`,
from samples and results to the loss, summed over samples; and `cells`, from a sample to the number of its cells.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from iep.bench.compare import MIN_SAMPLES, Case, Competitor, Fact, seconds
from iep.bench.strategy import PHASES, Strategy
from iep.dynamic.plan_cache import clear_plan_cache

PER_INSTANCE = "per instance"
Sized = Iterable[tuple[dict[str, int], Sequence[Sequence[Any]]]]
"""The size of minibatches by its name, and the minibatches."""


class Way(NamedTuple):
    """One way to run a minibatch of samples.

    Attributes:
        construct: samples -> the argument of `compute`: graph, schedule and indices; no tensor is computed.
        compute: the forward pass and, if the second argument is true, loss and backward pass; returns the loss.
        calls: the output of `construct` -> the number of calls of the network's cells.
    """

    construct: Callable[[Sequence[Any]], Any]
    compute: Callable[[Any, bool], Any]
    calls: Callable[[Any], int] | None = None
    phases: tuple[str, ...] = PHASES


def step(
    model: nn.Module, forward: Callable[[Any], Tensor], loss: Callable[[Any, Tensor], Tensor]
) -> Callable[[Any, bool], Tensor]:
    """Return a step of `model` for `Way.compute`; gradients replace those of the previous step.

    Args:
        forward: the output of `Way.construct` -> results.
        loss: the output of `Way.construct` and results -> the loss.
    """

    def compute(made: Any, training: bool) -> Tensor:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            value = forward(made)
            if training:
                value = loss(made, value)
                value.backward()
            return value.detach()

    return compute


def one_by_one(model: Any) -> Way:
    """Return the way to run `model.one` for each sample, each of which has its own backward pass."""

    def compute(samples: Sequence[Any], training: bool) -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        with torch.inference_mode(not training):
            for sample in samples:
                results = model.one(sample)
                if training:
                    value = model.loss([sample], results if results.dim() > 1 else results[None])
                    value.backward()
                    total += value.item()
        return total

    return Way(list, compute)


def ways_of(model: Any, strategies: Sequence[Strategy]) -> dict[str, Way]:
    """Return the ways to run a network, one by one and batched under every strategy.

    Plans are not cached, because every minibatch of an epoch is new.
    """

    def way(strategy: Strategy) -> Way:
        def construct(samples: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            clear_plan_cache()
            return model.plan(samples, strategy.batching, strategy.sharing), samples

        compute = step(
            model, lambda made: model(made[0], strategy.defer), lambda made, results: model.loss(made[1], results)
        )
        return Way(construct, compute, lambda made: len(made[0].schedule), phases_of(strategy))

    return {PER_INSTANCE: one_by_one(model)} | {each.name: way(each) for each in strategies}


def phases_of(strategy: Strategy) -> tuple[str, ...]:
    """Return the phases in which a strategy is measured; weight gradients are deferred only in training."""
    return PHASES[:1] if strategy.defer else PHASES


def minibatches_of(samples: Sequence[Any], sizes: Sequence[int]) -> Sized:
    """Yield the first minibatches of each size, with at least `MIN_SAMPLES` samples if there are so many."""
    for size in sorted(sizes):
        count = max(1, min(MIN_SAMPLES, len(samples)) // size)
        yield {"batch": size}, [samples[number * size : (number + 1) * size] for number in range(count)]


def network_cases(model: Any, ways: Mapping[str, Way], sized: Sized, phases: Sequence[str]) -> Iterator[Case]:
    """Yield a case for each phase and for the minibatches of each size."""
    for size, minibatches in sized:
        cells = mean(sum(map(model.cells, each)) for each in minibatches)
        for phase in phases:
            training = phase == "train"
            competitors = [
                _competitor(name, way, cells, minibatches, training)
                for name, way in ways.items()
                if phase in way.phases
            ]
            setting = {"phase": phase, **size, "cells": cells, "minibatches": len(minibatches)}
            yield Case(setting, len(minibatches[0]), competitors, PER_INSTANCE)


def _competitor(name: str, way: Way, cells: float, minibatches: Sequence[Sequence[Any]], training: bool) -> Competitor:
    def measure() -> dict[str, float]:
        times = []
        for minibatch in minibatches:
            made: list[Any] = []
            constructing = seconds(lambda: made.append(way.construct(minibatch)))  # noqa: B023
            times.append((constructing, seconds(lambda: way.compute(made[0], training))))  # noqa: B023
        construction, computation = map(mean, zip(*times, strict=True))
        return {"construction": construction, "computation": computation}

    def facts() -> dict[str, Fact]:
        calls = way.calls and mean(way.calls(way.construct(minibatch)) for minibatch in minibatches)
        return {"calls": calls, "ratio": calls and cells / calls}

    return Competitor(name, measure, facts=facts)
