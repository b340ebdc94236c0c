"""A layer of experts -> how long a minibatch takes in every way to run it, and how near the best comes to its bound.

As in `contest.py` the ways take turns, and what is compared are medians over rounds. Experts are drawn uniformly;
gating, which would choose them, is not run. Knows nothing of tables and files.

Shapes: T tokens, K experts each, D inputs, O outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from iep.bench.contest import TRAINING
from iep.bench.measure import Effort, Spread, seconds, spread, turns
from iep.bench.moe_bound import Bound, Probe, Speeds, bound
from iep.bench.moe_ways import BATCHED, GROUPED, LOOP, NAMES, VANILLA, ExpertsWay, uniform_experts, ways_to_run
from iep.devices import is_out_of_memory
from iep.workloads.experts import Experts

ROUND_SECONDS, ROUND_STEPS = 0.02, 200
"""Short steps are repeated within a round, for so long or so often; the first of them brings caches up to date."""


@dataclass(frozen=True)
class Setting:
    """What tells a cell of the grid from others."""

    phase: str
    threads: int
    experts: int
    tokens: int
    k: int


@dataclass(frozen=True)
class Timing:
    """What was measured of one way."""

    name: str
    seconds: Spread | None
    """Of a minibatch: of the part that was run, times `tokens` over that part. None where it was left out."""
    tokens_run: int
    """The part of the minibatch that was run."""
    speedup: float | None
    """Over `VANILLA`."""
    over_bound: float | None
    """Times the bound."""
    left_out: str | None
    """Why it was not measured."""


@dataclass(frozen=True)
class Cell:
    """One minibatch in every way."""

    setting: Setting
    active: int
    """Experts that have a token."""
    bound: Bound | None
    """None where nothing was measured."""
    over_others: float | None
    """Time of the faster one of `GROUPED` and `LOOP` over that of `BATCHED`."""
    timings: tuple[Timing, ...]

    def timing(self, name: str) -> Timing:
        return next(timing for timing in self.timings if timing.name == name)


def measure_cell(
    layer: Experts,
    setting: Setting,
    effort: Effort,
    probe: Probe,
    seed: int,
    left_out: Mapping[str, str],
    progress: Callable[[str], None] = lambda what: None,
) -> Cell:
    """Measure all ways in turns, with as many threads as PyTorch now uses, but for those that are `left_out`, with the
    reason why."""
    inputs = _Inputs(layer, setting, seed)
    subjects = [_Subject(way, inputs, effort, left_out.get(way.name, way.refusal)) for way in ways_to_run(layer)]
    for subject in subjects:
        progress(subject.way.name)
        subject.warm_up()
    running = [subject for subject in subjects if subject.left_out is None]
    speeds = Speeds()
    probe.measure(speeds)
    for subject in turns(running, effort):
        progress(subject.way.name)
        subject.measure()
        if subject is running[-1]:
            probe.measure(speeds)
    rows = setting.tokens * setting.k
    least = bound(layer.sizes, inputs.active, rows, setting.phase == TRAINING, speeds)
    return _cell(setting, inputs.active, least, {subject.way.name: subject for subject in subjects})


def empty_cell(setting: Setting, active: int, reason: str) -> Cell:
    """Where no way was run."""
    timings = tuple(Timing(name, None, 0, None, None, reason) for name in NAMES)
    return Cell(setting, active, None, None, timings)


def count_active(setting: Setting, seed: int) -> int:
    """Experts that the cell's minibatch calls."""
    return uniform_experts(setting.tokens, setting.experts, setting.k, seed).unique().numel()


class _Inputs:
    """A minibatch: random numbers, uniformly drawn experts, and the gradient that comes back."""

    def __init__(self, layer: Experts, setting: Setting, seed: int):
        device = layer.hidden_weights[0].device
        generator = torch.Generator().manual_seed(seed)
        self.device, self.training = device, setting.phase == TRAINING
        experts_TK = uniform_experts(setting.tokens, setting.experts, setting.k, seed)
        self.active = experts_TK.unique().numel()
        self.experts_TK = experts_TK.to(device)
        self.x_TD = torch.randn(setting.tokens, layer.sizes[0], generator=generator).to(device)
        self.gates_TK = torch.rand(setting.tokens, setting.k, generator=generator).to(device)
        self.gradient_TO = torch.randn(setting.tokens, layer.sizes[2], generator=generator).to(device)
        self.parameters = list(layer.parameters())


class _Subject:
    """A way while it is measured."""

    def __init__(self, way: ExpertsWay, inputs: _Inputs, effort: Effort, left_out: str | None):
        self.way, self.inputs, self.effort, self.left_out = way, inputs, effort, left_out
        tokens = len(inputs.x_TD)
        self.tokens_run = min(tokens, way.enough_tokens or tokens)
        self.scale = tokens / self.tokens_run
        self.x_TD, self.experts_TK, self.gates_TK, self.gradient_TO = (
            each[: self.tokens_run].clone()
            for each in (inputs.x_TD, inputs.experts_TK, inputs.gates_TK, inputs.gradient_TO)
        )
        self.steps, self.times, self.spent = 1, [], 0.0

    @property
    def rounds(self) -> int:
        return len(self.times)

    def warm_up(self) -> None:
        """Twice, since memory that is written for the first time is slow; left out if time or memory is short."""
        if self.left_out is not None:
            return
        try:
            took = self._step()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.left_out = str(error).splitlines()[0]
            return
        if took > self.effort.max_seconds:
            self.left_out = f"{took:.3g} s with {self.tokens_run} tokens is longer than --max-seconds"
            return
        self.steps = min(ROUND_STEPS, max(1, int(ROUND_SECONDS / self._step())))

    def measure(self) -> None:
        """One round."""
        if self.steps > 1:
            self._step()
        took = sum(self._step() for _ in range(self.steps))
        self.times.append(self.scale * took / self.steps)
        self.spent += took

    def _step(self) -> float:
        """Seconds of one step; gradients of the last are gone before it and its own after it, which takes no part."""
        if self.inputs.training:
            for tensor in (self.x_TD, self.gates_TK):
                tensor.requires_grad_().grad = None
            took = seconds(self._train, (self.inputs.device,))
            for parameter in self.inputs.parameters:
                parameter.grad = None
            return took
        with torch.inference_mode():
            return seconds(self._forward, (self.inputs.device,))

    def _forward(self) -> torch.Tensor:
        return self.way.forward(self.x_TD, self.experts_TK, self.gates_TK)

    def _train(self) -> None:
        self._forward().backward(self.gradient_TO)


def _cell(setting: Setting, active: int, least: Bound, subjects: dict[str, _Subject]) -> Cell:
    medians = {name: spread(each.times).median for name, each in subjects.items() if each.left_out is None}
    others = [medians[name] for name in (GROUPED, LOOP) if name in medians]
    timings = [
        Timing(
            name=name,
            seconds=spread(subject.times) if name in medians else None,
            tokens_run=subject.tokens_run if name in medians else 0,
            speedup=medians[VANILLA] / medians[name] if {name, VANILLA} <= medians.keys() else None,
            over_bound=medians[name] / least.seconds if name in medians else None,
            left_out=subject.left_out,
        )
        for name, subject in subjects.items()
    ]
    over_others = min(others) / medians[BATCHED] if others and BATCHED in medians else None
    return Cell(setting, active, least, over_others, tuple(timings))
