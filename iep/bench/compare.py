"""A case and its competitors -> a comparison: what each takes for a minibatch, over a baseline and a limit.

The machine is shared and its speed drifts, so competitors take turns: each round measures every one of them once, and
medians over rounds are compared. What a competitor runs is its own business. Writes and draws nothing (`report.py`).
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from iep.devices import is_out_of_memory
from iep.errors import InputError

LIMIT, TOTAL = "limit", "total"
MIN_REPEATS, MIN_SAMPLES = 3, 64
"""Rounds of a slow competitor; and samples in a round, in several minibatches where these are small, because programs,
trees and sentences differ much in size."""
PROBE_BYTES = 1 << 28
"""Copied to measure memory: no cache should hold them."""
CPU = torch.device("cpu")
Fact = float | str | None
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Spread:
    """The median and quartiles of repeated measurements, and their number."""

    median: float
    lower: float
    upper: float
    repeats: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of one or more values; quartiles are interpolated between them."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return Spread(median, lower, upper, len(values))


@dataclass(frozen=True)
class Effort:
    """How many rounds to measure, and the seconds after which a competitor needs no more than `MIN_REPEATS` of them.

    Raises:
        InputError: the seconds are not a number, or negative.
    """

    repeat: int
    max_seconds: float

    def __post_init__(self) -> None:
        if not self.max_seconds >= 0:
            raise InputError(f"--max-seconds is {self.max_seconds}, expected a number of 0 or more")

    def is_enough(self, rounds: int, spent: float) -> bool:
        """Return whether a competitor needs no further round."""
        return rounds >= self.repeat or (spent >= self.max_seconds and rounds >= MIN_REPEATS)


@dataclass(frozen=True)
class Competitor:
    """One way to do the work of a case.

    Attributes:
        measure: run one round, and return the seconds that each part took for a minibatch (the mean over several).
        total: the parts that add up to the whole; None for all of them.
        facts: return what is counted rather than timed, such as calls; called once, after the last round.
        limit: the name of the competitor that this one cannot beat.
        left_out: why it is not measured.
    """

    name: str
    measure: Callable[[], Mapping[str, float]] = dict
    total: tuple[str, ...] | None = None
    facts: Callable[[], Mapping[str, Fact]] = dict
    limit: str = LIMIT
    left_out: str | None = None


@dataclass(frozen=True)
class Case:
    """The work of one comparison.

    Attributes:
        setting: what distinguishes it from other cases, such as `{"phase": "train", "batch": 64}`. Under `threads`, it
            is run with so many threads of PyTorch.
        size: samples of a minibatch.
        baseline: the name of the competitor that speed-ups are over; there are none where it is missing.
        warm_up: whether a first round does not count.
    """

    setting: Mapping[str, str | int]
    size: int
    competitors: Sequence[Competitor]
    baseline: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    warm_up: bool = True


@dataclass(frozen=True)
class Row:
    """What was measured of one competitor: seconds by part, and `total`; nothing if it was left out."""

    name: str
    facts: Mapping[str, Fact]
    left_out: str | None
    seconds: Mapping[str, Spread] = field(default_factory=dict)
    samples_per_second: Spread | None = None
    speedup: float | None = None
    share_of_limit: float | None = None


@dataclass(frozen=True)
class Comparison:
    """The rows of one case, measured in turns."""

    case: Case
    rows: tuple[Row, ...]


def compare(case: Case, effort: Effort, progress: Progress = lambda name: None) -> Comparison:
    """Measure the competitors of a case in turns; `progress` is told which is next.

    A competitor that runs out of memory when it warms up is left out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(int(case.setting.get("threads", threads)))
    try:
        rounds, left_out = _measure(case, effort, progress)
        facts = {each.name: each.facts() for each in case.competitors if each.name not in left_out}
    finally:
        torch.set_num_threads(threads)
    rows = {each.name: Row(each.name, facts.get(each.name, {}), left_out.get(each.name)) for each in case.competitors}
    for each in case.competitors:
        if taken := rounds[each.name]:
            seconds = {part: spread([times[part] for times in taken]) for part in taken[0]}
            total = spread([sum(times[part] for part in each.total or times) for times in taken])
            speed = Spread(*(case.size / time for time in (total.median, total.upper, total.lower)), total.repeats)
            rows[each.name] = replace(rows[each.name], seconds={**seconds, TOTAL: total}, samples_per_second=speed)
    medians = {name: row.seconds[TOTAL].median for name, row in rows.items() if row.seconds}
    for each in case.competitors:
        over = {"speedup": case.baseline, "share_of_limit": each.limit}
        ratios = {
            of: medians[name] / medians[each.name] for of, name in over.items() if {name, each.name} <= medians.keys()
        }
        rows[each.name] = replace(rows[each.name], **ratios)
    return Comparison(case, tuple(rows.values()))


Rounds = dict[str, list[Mapping[str, float]]]


def _measure(case: Case, effort: Effort, progress: Progress) -> tuple[Rounds, dict[str, str]]:
    """Return the rounds of every competitor, and why some have none."""
    rounds: Rounds = {each.name: [] for each in case.competitors}
    left_out = {each.name: each.left_out for each in case.competitors if each.left_out is not None}
    spent: dict[str, float] = defaultdict(float)
    running = [each for each in case.competitors if each.name not in left_out]
    for each in running if case.warm_up else ():
        progress(each.name)
        try:
            each.measure()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            left_out[each.name] = f"not enough memory: {(str(error).splitlines() or [''])[0]}"
    running = [each for each in running if each.name not in left_out]
    while running := [each for each in running if not effort.is_enough(len(rounds[each.name]), spent[each.name])]:
        for each in running:
            progress(each.name)
            start = time.perf_counter()
            rounds[each.name].append(each.measure())
            spent[each.name] += time.perf_counter() - start
    return rounds, left_out


def seconds(run: Callable[[], object], *devices: torch.device) -> float:
    """Return how long `run()` takes; on GPUs until all that it started there has ended."""
    _wait(devices)
    start = time.perf_counter()
    run()
    _wait(devices)
    return time.perf_counter() - start


def arithmetic_limit(flop: float, moved: int = 0, device: torch.device = CPU) -> Competitor:
    """Return the least time to do so many floating-point operations and to move so many bytes: the longer of both, at
    the speed of the fastest square float32 product, read and copy that were seen."""
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


def peak_memory(run: Callable[[], object], *devices: torch.device) -> int | None:
    """Return the most bytes that `run()` holds at any moment beyond what was held before it, summed over GPUs; None for
    several devices of which one is a CPU, where other threads allocate unseen.

    On a GPU this is PyTorch's own account (`torch.cuda.max_memory_allocated`). On a CPU it is the running total of all
    that PyTorch's allocator gives and takes back while `run()` is profiled: the same on every run, unlike the size of a
    process. Memory that a library allocates for itself, such as a convolution's scratch space, is not seen.
    """
    if all(device.type == "cuda" for device in devices):
        _wait(devices)
        for device in set(devices):
            torch.cuda.reset_peak_memory_stats(device)
        before = sum(torch.cuda.memory_allocated(device) for device in set(devices))
        run()
        _wait(devices)
        return sum(torch.cuda.max_memory_allocated(device) for device in set(devices)) - before
    if len(devices) > 1:
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler warns of missing GPUs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    # The exported trace has the same events, but for a large step it is gigabytes of text.
    events = record.profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))


def _wait(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
