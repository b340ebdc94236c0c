"""Several ways to run the same minibatches -> rows of figures: how fast each is, and how near it comes to the limits.

The machine is shared and its speed drifts, so the ways take turns: each round times every one of them on every
minibatch, and what is compared are medians over rounds. Knows nothing of what is run: a way is a name and callables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean
from typing import Any

import torch

from iep.bench.limit import Layer, fastest_product, flop, products
from iep.bench.measure import Effort, Spread, rate, seconds, spread, turns

CPU = (torch.device("cpu"),)
INFERENCE, TRAINING = "inference", "training"
PHASES = (TRAINING, INFERENCE)
PER_INSTANCE, LIMIT, FLOP_LIMIT = "per instance", "limit: products", "limit: operations"
LIMITS = (LIMIT, FLOP_LIMIT)


@dataclass(frozen=True)
class Way:
    """One way to run a minibatch of samples."""

    name: str
    construct: Callable[[Sequence[Any]], Any]
    """From samples to what `compute` takes: graph, schedule, indices; no numbers are computed."""
    compute: Callable[[Any, bool], object]
    """The forward pass; where the second argument is true, with loss and backward pass, and its gradients left."""
    calls: Callable[[Any], int] | None = None
    """How many calls of the network's cells what was constructed makes."""
    constructed_within: Callable[[], float] | None = None
    """Seconds of the last `compute` that were construction, where it is done there."""
    phases: tuple[str, ...] = PHASES
    enough_cells: int | None = None
    """Of a minibatch: no more samples are run, where one runs after the other; the time of all is reckoned by cells."""


@dataclass(frozen=True)
class Samples:
    """What a comparison runs: minibatches of one size, and what is known of them."""

    minibatches: tuple[Sequence[Any], ...]
    layers: tuple[list[Layer], ...]
    """Products of each minibatch, for the limits."""
    cells_of: Callable[[Any], int]
    """Of one sample: how many applications of the network's cells it takes."""
    setting: dict[str, int]
    """What tells this comparison from others, such as `{"batch": 64}`."""

    @property
    def size(self) -> int:
        """Of a minibatch."""
        return len(self.minibatches[0])

    @property
    def cells(self) -> float:
        """Of a minibatch, on average."""
        return mean(map(self.count_cells, self.minibatches))

    def count_cells(self, samples: Sequence[Any]) -> int:
        return sum(map(self.cells_of, samples))

    def first(self, minibatch: Sequence[Any], enough_cells: int | None) -> Sequence[Any]:
        """As many samples of the minibatch as have so many cells, or the whole of it."""
        if enough_cells is None:
            return minibatch
        so_far = accumulate(map(self.cells_of, minibatch))
        return minibatch[: next((n for n, cells in enumerate(so_far, start=1) if cells >= enough_cells), None)]


@dataclass(frozen=True)
class Row:
    """What was measured of one way, or of a limit; of a minibatch, the mean where there are several."""

    name: str
    construction: Spread | None
    """Seconds; None of a limit."""
    computation: Spread
    """Seconds."""
    samples_per_second: Spread
    """Construction and computation together."""
    calls: float | None
    batching_ratio: float | None
    """Cells over calls."""
    speedup: float | None
    """Over `PER_INSTANCE`, where that was measured."""
    share_of_limit: float
    """Seconds that the limit's products take, over those of construction and computation."""
    share_of_flop_limit: float
    """The same of the number of operations over the machine's speed."""


@dataclass(frozen=True)
class Comparison:
    """All rows of one phase, one setting and one number of threads, measured in turns."""

    phase: str
    threads: int
    setting: dict[str, int]
    batch_size: int
    minibatches: int
    cells: float
    flop: float
    """Of the products of a minibatch."""
    flop_per_second: float
    """Of the fastest square product of this machine, measured beside the rest."""
    rows: tuple[Row, ...]


def compare(
    ways: Sequence[Way],
    samples: Samples,
    phase: str,
    threads: int,
    effort: Effort,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Measure those of `ways` that are for `phase`, and the limits, with PyTorch on so many threads."""
    torch.set_num_threads(threads)
    training = phase == TRAINING
    subjects: list[_Way | _Limit] = [_Way(way, samples, training) for way in ways if phase in way.phases]
    limit = _Limit(samples.layers, training)
    for subject in (*subjects, limit):
        progress(subject.name)
        subject.measure()
        subject.forget()  # this was to warm up
    speeds = [fastest_product()]
    for subject in turns([*subjects, limit], effort):
        progress(subject.name)
        subject.measure()
        if subject is limit:
            speeds.append(fastest_product(repeats=1))
    work = mean(flop(layers, training) for layers in samples.layers)
    times = {LIMIT: spread(limit.computation), FLOP_LIMIT: spread([work / max(speeds)])}
    baseline = next((spread(each.end_to_end()).median for each in subjects if each.name == PER_INSTANCE), None)
    rows = [_row(subject, samples, baseline, times) for subject in subjects]
    limits = [_limit_row(name, samples.size, baseline, times) for name in times]
    return Comparison(
        phase=phase,
        threads=threads,
        setting=samples.setting,
        batch_size=samples.size,
        minibatches=len(samples.minibatches),
        cells=samples.cells,
        flop=work,
        flop_per_second=max(speeds),
        rows=(*rows, *limits),
    )


class _Way:
    """A way while it is measured."""

    def __init__(self, way: Way, samples: Samples, training: bool):
        self.name, self.way, self.training = way.name, way, training
        self.minibatches = [samples.first(minibatch, way.enough_cells) for minibatch in samples.minibatches]
        cells = [map(samples.count_cells, each) for each in (samples.minibatches, self.minibatches)]
        self.scales = [all_cells / run_cells for all_cells, run_cells in zip(*cells, strict=True)]
        self.calls = samples.cells if way.name == PER_INSTANCE else None
        if way.calls is not None:
            self.calls = mean(
                scale * way.calls(way.construct(minibatch))
                for scale, minibatch in zip(self.scales, self.minibatches, strict=True)
            )
        self.forget()

    def forget(self) -> None:
        self.construction: list[float] = []
        self.computation: list[float] = []

    @property
    def rounds(self) -> int:
        return len(self.computation)

    @property
    def spent(self) -> float:
        return sum(self.end_to_end()) * len(self.minibatches) / mean(self.scales)

    def end_to_end(self) -> list[float]:
        return [sum(times) for times in zip(self.construction, self.computation, strict=True)]

    def measure(self) -> None:
        """One round: every minibatch once."""
        construction, computation = [], []
        for scale, minibatch in zip(self.scales, self.minibatches, strict=True):
            made: list[Any] = []
            constructing = seconds(lambda: made.append(self.way.construct(minibatch)), CPU)  # noqa: B023
            computing = seconds(lambda: self.way.compute(made[0], self.training), CPU)  # noqa: B023
            within = 0.0 if self.way.constructed_within is None else self.way.constructed_within()
            construction.append(scale * (constructing + within))
            computation.append(scale * (computing - within))
        self.construction.append(mean(construction))
        self.computation.append(mean(computation))


class _Limit:
    """The limit's products while they are measured."""

    name = LIMIT

    def __init__(self, layers: Sequence[list[Layer]], training: bool):
        self.layers, self.training = layers, training
        self.forget()

    def forget(self) -> None:
        self.computation: list[float] = []

    @property
    def rounds(self) -> int:
        return len(self.computation)

    @property
    def spent(self) -> float:
        return sum(self.computation) * len(self.layers)

    def measure(self) -> None:
        times = []
        for layers in self.layers:
            run = products(layers, self.training)
            run()  # memory that is written for the first time is slow
            times.append(seconds(run, CPU))
        self.computation.append(mean(times))


def _row(subject: _Way, samples: Samples, baseline: float | None, limits: dict[str, Spread]) -> Row:
    took = spread(subject.end_to_end())
    return Row(
        name=subject.name,
        construction=spread(subject.construction),
        computation=spread(subject.computation),
        samples_per_second=rate(samples.size, took),
        calls=subject.calls,
        batching_ratio=None if subject.calls is None else samples.cells / subject.calls,
        speedup=None if baseline is None else baseline / took.median,
        share_of_limit=limits[LIMIT].median / took.median,
        share_of_flop_limit=limits[FLOP_LIMIT].median / took.median,
    )


def _limit_row(name: str, size: int, baseline: float | None, limits: dict[str, Spread]) -> Row:
    took = limits[name]
    return Row(
        name=name,
        construction=None,
        computation=took,
        samples_per_second=rate(size, took),
        calls=None,
        batching_ratio=None,
        speedup=None if baseline is None else baseline / took.median,
        share_of_limit=limits[LIMIT].median / took.median,
        share_of_flop_limit=limits[FLOP_LIMIT].median / took.median,
    )
