"""Measure the competitors of a case, and compare their times for a minibatch with a baseline and a limit.

The machine may be shared, and its speed drifts. Competitors therefore take turns: each round measures every competitor
once, and medians over rounds are compared. Results are written and drawn in `tables.py`.
"""

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from iep.runtime.devices import is_out_of_memory

LIMIT, TOTAL = "limit", "total"
MIN_REPEATS, MIN_SAMPLES = 3, 64
"""The rounds of a slow competitor, and the fewest samples of a round. A round runs several small minibatches, because
programs, trees and sentences differ much in size."""
PROBE_BYTES = 1 << 28
"""The size of the array that measures the speed of memory; it must be larger than the caches."""
CPU = torch.device("cpu")
Fact = float | str | None


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of repeated measurements, and their number."""

    median: float
    lower: float
    upper: float
    repeats: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of one or more values; quartiles are interpolated between them."""
    found = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    lower, median, upper = sorted(found)  # those of almost equal values are rounded in any order
    return Spread(median, lower, upper, len(values))


@dataclass(frozen=True)
class Effort:
    """The number of rounds, and the seconds after which `MIN_REPEATS` rounds of a competitor are enough."""

    repeat: int
    max_seconds: float


@dataclass(frozen=True)
class Competitor:
    """One way to do the work of a case.

    Attributes:
        measure: run one round, and return the seconds that each part took for a minibatch (the mean over several).
        total: the parts that add up to the whole; None for all of them.
        facts: return values that are counted rather than timed, such as calls; called once, after the last round.
        limit: the name of the competitor that this one cannot beat.
        details: return values that are in the JSON file only; called once, after the last round.
    """

    name: str
    measure: Callable[[], Mapping[str, float]]
    total: tuple[str, ...] | None = None
    facts: Callable[[], Mapping[str, Fact]] = dict
    limit: str = LIMIT
    details: Callable[[], Mapping[str, Any]] = dict


@dataclass(frozen=True)
class Case:
    """The work of one comparison.

    Attributes:
        setting: what distinguishes it from other cases, such as `{"phase": "train", "batch": 64}`.
        size: samples of a minibatch.
        baseline: the name of the competitor that speed-ups are relative to; None for no speed-ups.
        warm_up: whether to run a first round that does not count.
    """

    setting: Mapping[str, str | int]
    size: int
    competitors: Sequence[Competitor]
    baseline: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    warm_up: bool = True


@dataclass(frozen=True)
class Row:
    """The measurements of one competitor: seconds by part, and in `total`; none if it was left out."""

    name: str
    facts: Mapping[str, Fact]
    left_out: str | None
    seconds: Mapping[str, Spread] = field(default_factory=dict)
    samples_per_second: Spread | None = None
    speedup: float | None = None
    share_of_limit: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def compare(case: Case, effort: Effort) -> list[Row]:
    """Measure the competitors of a case in turns; one that runs out of memory in its first round is left out."""
    gc.collect()
    gc.freeze()  # a collection in timed code would otherwise visit all objects of the imported libraries
    rounds, left_out = _measure(case, effort)
    gc.unfreeze()
    rows = [_row(each, case, rounds[each.name], left_out.get(each.name)) for each in case.competitors]
    medians = {row.name: row.seconds[TOTAL].median for row in rows if row.seconds}
    medians = {name: median for name, median in medians.items() if median >= 1e-6}  # less is beyond the timer

    def ratio(name: str | None, row: Row) -> float | None:
        return medians[name] / medians[row.name] if {name, row.name} <= medians.keys() else None

    return [
        replace(row, speedup=ratio(case.baseline, row), share_of_limit=ratio(each.limit, row))
        for each, row in zip(case.competitors, rows, strict=True)
    ]


def _row(competitor: Competitor, case: Case, rounds: Sequence[Mapping[str, float]], left_out: str | None) -> Row:
    if left_out is not None:
        return Row(competitor.name, {}, left_out)
    parts = {part: spread([times[part] for times in rounds]) for part in rounds[0]}
    total = spread([sum(times[part] for part in competitor.total or times) for times in rounds])
    speed = Spread(*(case.size / time for time in (total.median, total.upper, total.lower)), total.repeats)
    seconds = {**parts, TOTAL: total}
    return Row(competitor.name, competitor.facts(), None, seconds, speed, details=competitor.details())


def _measure(case: Case, effort: Effort) -> tuple[dict[str, list[Mapping[str, float]]], dict[str, str]]:
    """Return the rounds of every competitor, and the reasons for which competitors were left out."""
    rounds, left_out, spent, running = defaultdict(list), {}, defaultdict(float), list(case.competitors)
    for each in case.competitors if case.warm_up else ():
        try:
            each.measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            left_out[each.name] = f"not enough memory: {(str(error).splitlines() or [''])[0]}"
            running.remove(each)
    while running:
        for each in running.copy():
            start = time.perf_counter()
            rounds[each.name].append(each.measure())
            spent[each.name] += time.perf_counter() - start
            enough = MIN_REPEATS if spent[each.name] >= effort.max_seconds else effort.repeat
            if len(rounds[each.name]) >= min(enough, effort.repeat):
                running.remove(each)
    return rounds, left_out


def seconds(run: Callable[[], object], *devices: torch.device) -> float:
    """Return the seconds that `run()` takes, including all work that it starts on GPUs."""
    gpus = {device for device in devices if device.type == "cuda"}
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    start = time.perf_counter()
    run()
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return time.perf_counter() - start


def arithmetic_limit(flop: float, moved: int = 0, device: torch.device = CPU) -> Competitor:
    """Return a limit set by the hardware: the least time for `flop` operations and for moving `moved` bytes.

    The limit is the longer of the two times. Operations run at the speed of the fastest square float32 product seen,
    and bytes move at the speed of the fastest read or copy.
    """
    side, speeds = (1024 if device.type == "cpu" else 8192), [0.0, 0.0]
    left, right, out = (torch.randn(side, side, device=device) for _ in range(3))

    def measure() -> dict[str, float]:
        product = seconds(lambda: torch.mm(left, right, out=out), device)
        speeds[0] = max(speeds[0], 2 * side**3 / product)
        if moved:
            source = torch.ones(PROBE_BYTES // 4, device=device)
            target = torch.zeros_like(source)
            read, copied = seconds(source.sum, device), seconds(lambda: target.copy_(source), device)
            speeds[1] = max(speeds[1], source.nbytes / read, 2 * source.nbytes / copied)
        return {"computation": max(flop / speeds[0], moved / speeds[1] if moved else 0.0)}

    return Competitor(LIMIT, measure)
