"""Callables -> seconds and bytes: what a stopwatch and an allocator say of them. Knows nothing of engines."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


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


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """How long `run()` takes; on a GPU until all that it started there has ended."""
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def peak_memory(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that `run()` holds at any moment beyond what was held before it.

    On a GPU by PyTorch's own account (`torch.cuda.max_memory_allocated`). On a CPU the running total of all that
    PyTorch's allocator gives and takes back while `run()` is profiled: the same on every run, unlike a process's size.
    Memory that a library allocates for itself, such as a convolution's scratch space, is not seen.
    """
    if device.type == "cuda":
        _wait(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        _wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would speak of GPUs that are not there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    # The exported trace has the same events, but for a large step is gigabytes of text.
    events = record.profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    return max(accumulate((change.nbytes() for change in changes), initial=0))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
