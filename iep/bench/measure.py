"""Callables -> seconds and bytes: what a stopwatch and an allocator say of them. Knows nothing of engines."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from iep.errors import InputError

MIN_REPEATS = 3


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of repeated measurements, and their number."""

    median: float
    lower: float
    upper: float
    least: float
    most: float
    repeats: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of one or more values; the quartiles are interpolated between them."""
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return Spread(median, lower, upper, min(values), max(values), len(values))


def rate(count: float, seconds: Spread) -> Spread:
    """How many a second, where `count` take `seconds`: its median is of the median time, its least of the longest."""
    times = (seconds.median, seconds.upper, seconds.lower, seconds.most, seconds.least)
    return Spread(*(count / time for time in times), seconds.repeats)


@dataclass(frozen=True)
class Effort:
    """How long to measure: rounds, and seconds after which a strategy has had enough (at least `MIN_REPEATS` rounds,
    or `repeat` where that is less).

    Raises:
        InputError: the seconds are no number, or less than 0.
    """

    repeat: int
    max_seconds: float

    def __post_init__(self) -> None:
        if not self.max_seconds >= 0:
            raise InputError(f"--max-seconds is {self.max_seconds}, expected a number of 0 or more")

    def is_enough(self, rounds: int, spent: float) -> bool:
        return rounds >= self.repeat or (spent >= self.max_seconds and rounds >= min(MIN_REPEATS, self.repeat))


class Subject(Protocol):
    """What is measured in turns with others."""

    rounds: int
    """So far."""
    spent: float
    """Seconds so far."""


_S = TypeVar("_S", bound=Subject)


def turns(subjects: Sequence[_S], effort: Effort) -> Iterator[_S]:
    """Subjects in rounds, each until it has had enough."""
    while waiting := [subject for subject in subjects if not effort.is_enough(subject.rounds, subject.spent)]:
        yield from waiting


def seconds(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """How long `run()` takes; on GPUs until all that it started there has ended."""
    _wait(devices)
    start = time.perf_counter()
    run()
    _wait(devices)
    return time.perf_counter() - start


def peak_memory(run: Callable[[], object], devices: Sequence[torch.device]) -> int | None:
    """The most bytes that `run()` holds at any moment beyond what was held before it; the sum over several GPUs. None
    where a CPU is among several devices: what their threads allocate is not seen there.

    On a GPU by PyTorch's own account (`torch.cuda.max_memory_allocated`). On a CPU the running total of all that
    PyTorch's allocator gives and takes back while `run()` is profiled: the same on every run, unlike a process's size.
    Memory that a library allocates for itself, such as a convolution's scratch space, is not seen.
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would speak of GPUs that are not there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    # The exported trace has the same events, but for a large step is gigabytes of text.
    events = record.profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))


def _wait(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
