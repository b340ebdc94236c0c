"""Workload, engine and strategies -> rows of figures: how long every strategy takes, and how near it is to the limit.

Machines are shared and their speed drifts, so the strategies of a comparison take turns: every round times each of
them once, and what is compared are medians over rounds. A minibatch of few questions says little about CLEVR's
programs, some of which are four times as long as others; so small ones are timed on as many minibatches as make up
`MIN_QUESTIONS` questions, and figures are a minibatch's mean.

Shapes: B questions of a minibatch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import torch

from iep.bench.case import Case, Limit, Setting
from iep.bench.measure import Effort, Spread, peak_memory, rate, seconds, spread, turns
from iep.bench.strategy import Strategy
from iep.bench.workload import Workload
from iep.execution_engine.engine import ExecutionEngine

PARTS = ("planning", "gather_scatter", "modules", "stem_classifier", "step")
MIN_QUESTIONS = 64
LIMIT = "limit"


@dataclass(frozen=True)
class Row:
    """What was measured of one strategy, or of a limit; a minibatch's mean where there are several minibatches."""

    strategy: str
    batching: str
    """Name of the scheduler, or `limit`."""
    sharing: bool
    defer: bool
    precision: str
    nodes: float
    calls: float
    lower_bound: float | None
    """No schedule of these programs has fewer calls. A limit has none, as it has no planning, no step and no memory."""
    seconds: dict[str, Spread | None]
    """Of a minibatch, by part; `end_to_end` is planning and step, or the sum of a limit's parts."""
    questions_per_second: Spread
    """End to end."""
    peak_memory: int | None
    """Bytes that a step holds beyond weights, features and plan; on the first minibatch."""
    speedup: dict[str, float | None]
    """How many times faster than vanilla, `end_to_end` and `modules`; None where vanilla was not measured."""
    share_of_limit: float
    """Seconds of the limit of the same nodes and precision, over those of this row, both end to end."""


@dataclass(frozen=True)
class Comparison:
    """All strategies' rows for one phase and minibatch size, measured in turns."""

    phase: str
    batch_size: int
    minibatches: int
    images: float
    """Distinct images of a minibatch."""
    baseline: str | None
    """The row that speed-ups are over."""
    devices: tuple[str, ...]
    """Those that the engine is placed on; one by itself is not named."""
    rows: tuple[Row, ...]


def compare(
    workload: Workload,
    engine: ExecutionEngine,
    strategies: Iterable[Strategy],
    phase: str,
    batch_size: int,
    effort: Effort,
    device: torch.device,
    progress: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Measure `strategies` and their limits in turns; `progress` hears what is measured next.

    Raises:
        InputError: features cannot be read.
    """
    training = phase == "train"
    engine.train(training)
    setting = Setting(engine, training, device)
    count = max(1, min(MIN_QUESTIONS, len(workload)) // batch_size)
    minibatches = [workload.minibatch(number * batch_size, batch_size).to(device) for number in range(count)]
    distinct = dict.fromkeys(strategy.in_phase(phase) for strategy in strategies)
    subjects = [_Subject(strategy, [Case(setting, strategy, each) for each in minibatches]) for strategy in distinct]
    limits = {_limit_of(subject.strategy): subject.cases for subject in reversed(subjects)}
    subjects += [_Subject(strategy, [Limit(case) for case in cases]) for strategy, cases in reversed(limits.items())]
    for subject in subjects:
        progress(subject.strategy.name)
        subject.warm_up(setting.devices)
    for subject in turns(subjects, effort):
        progress(subject.strategy.name)
        subject.measure(setting.devices)
    baseline = next((subject for subject in subjects if subject.strategy.batching == "vanilla"), None)
    measured = {subject.strategy: subject for subject in subjects}
    return Comparison(
        phase=phase,
        batch_size=batch_size,
        minibatches=count,
        images=mean(len(minibatch.features_NCHW) for minibatch in minibatches),
        baseline=None if baseline is None else baseline.strategy.name,
        devices=() if engine.placement is None else engine.placement.labels,
        rows=tuple(_row(subject, batch_size, baseline, measured[_limit_of(subject.strategy)]) for subject in subjects),
    )


def _limit_of(strategy: Strategy) -> Strategy:
    """The limit of all strategies that run the same nodes in the same precision."""
    return replace(strategy, batching=LIMIT, defer=False)


class _Subject:
    """A strategy or a limit while it is measured: its cases, one a minibatch, and their times."""

    def __init__(self, strategy: Strategy, cases: Sequence[Case | Limit]):
        self.strategy, self.cases = strategy, cases
        self.times: dict[str, list[float]] = {part: [] for part in cases[0].parts}
        self.memory: int | None = None
        self.spent = 0.0

    @property
    def rounds(self) -> int:
        return len(self.times["modules"])

    def warm_up(self, devices: Sequence[torch.device]) -> None:
        """Run every part once, untimed, and find the peak memory of a step."""
        for part in self.times:
            self.cases[0].ready(part)()
        if "step" in self.times:
            self.memory = peak_memory(self.cases[0].ready("step"), devices)

    def measure(self, devices: Sequence[torch.device]) -> None:
        """Time every part once, on every minibatch."""
        for part, times in self.times.items():
            times.append(mean(seconds(case.ready(part), devices) for case in self.cases))
            self.spent += times[-1] * len(self.cases)

    def end_to_end(self) -> list[float]:
        """Seconds of every round."""
        return [sum(times) for times in zip(*(self.times[part] for part in self.cases[0].end_to_end), strict=True)]


def _row(subject: _Subject, batch_size: int, baseline: _Subject | None, limit: _Subject) -> Row:
    strategy, cases, end_to_end = subject.strategy, subject.cases, subject.end_to_end()
    bounds = [case.lower_bound for case in cases]
    times = {part: subject.times.get(part) for part in PARTS} | {"end_to_end": end_to_end}
    speedup: dict[str, float | None] = {"end_to_end": None, "modules": None}
    if baseline is not None:
        speedup["end_to_end"] = median(baseline.end_to_end()) / median(end_to_end)
        speedup["modules"] = median(baseline.times["modules"]) / median(subject.times["modules"])
    return Row(
        strategy=strategy.name,
        batching=strategy.batching,
        sharing=strategy.sharing,
        defer=strategy.defer,
        precision=strategy.precision,
        nodes=mean(case.nodes for case in cases),
        calls=mean(len(case.calls) for case in cases),
        lower_bound=None if None in bounds else mean(bounds),
        seconds={part: None if values is None else spread(values) for part, values in times.items()},
        questions_per_second=rate(batch_size, spread(end_to_end)),
        peak_memory=subject.memory,
        speedup=speedup,
        share_of_limit=median(limit.end_to_end()) / median(end_to_end),
    )
