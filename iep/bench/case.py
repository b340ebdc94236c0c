"""One minibatch under one strategy -> what a stopwatch can time: the whole step, and its parts each by itself.

Each method makes ready what its part needs and returns the part as a callable, so that only the part is timed. The
parts are not cut out of a running step but run alone, on tensors of the shapes, types and memory format that they meet
in the step; so they need no timers inside the engine, and may add up to a little more or less than the step.

Shapes: B questions, N stems, G rows of a call, L program tokens, C H W maps of the modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from iep.batching.deferred import DeferredWeightGrads
from iep.batching.execute import execute
from iep.batching.schedulers import lower_bound
from iep.bench.strategy import Strategy
from iep.bench.workload import Minibatch
from iep.devices import autocast
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.families import family
from iep.execution_engine.family import MAP, as_column
from iep.execution_engine.placement import CLASSIFIER, STEM
from iep.execution_engine.plans import Plan

Run = Callable[[], Any]
Calls = Sequence[tuple[int, int]]
"""Op and number of rows of each module call."""


class Setting:
    """What the cases of one comparison have in common: engine, phase, devices and ready-made maps.

    `device` is where features are; a placed engine has others besides.
    """

    def __init__(self, engine: ExecutionEngine, training: bool, device: torch.device):
        self.engine, self.training, self.device = engine, training, device
        placement = engine.placement
        self._home = {part: device if placement is None else placement.device(part) for part in engine.parts}
        self.devices = (device,) if placement is None else tuple(map(torch.device, placement.devices))
        self._maps: dict[str, Tensor] = {}

    def home(self, part: str | int) -> torch.device:
        """Where a part of the engine lives, or the function of an op."""
        return self._home[part if isinstance(part, str) else self.engine.program_tokens[part]]

    @contextmanager
    def mode(self, precision: str) -> Iterator[None]:
        """Gradients only in training; computing in `precision` as `iep-train` does."""
        with ExitStack() as stack:
            stack.enter_context(nullcontext() if self.training else torch.inference_mode())
            for device in set(self.devices):
                stack.enter_context(autocast(device, precision))
            yield

    def maps(self, precision: str, count: int, feature: Tensor) -> Tensor:
        """(count, C, H, W) random maps like those that the stem makes of `feature`, (1, ...); always the same memory.

        They are made when they are first asked for, or more of them are.
        """
        made = self._maps.get(precision)
        if made is None or len(made) < count:
            with torch.no_grad(), self.mode(precision):
                like = self.engine.stem(feature.to(self.home(STEM)))
            memory_format = torch.contiguous_format if like.is_contiguous() else torch.channels_last
            kind = {"dtype": like.dtype, "device": self.device, "memory_format": memory_format}
            made = self._maps[precision] = torch.empty((count, *like.shape[1:]), **kind).normal_()
        return made[:count]


class Case:
    """One minibatch under one strategy."""

    parts = ("planning", "gather_scatter", "modules", "stem_classifier", "step")
    end_to_end = ("planning", "step")

    def __init__(self, setting: Setting, strategy: Strategy, minibatch: Minibatch):
        self.setting, self.strategy = setting, strategy
        self.engine = setting.engine
        self.programs_BL = minibatch.programs_BL
        # Without sharing every question brings its own features, as the original's data loader has it.
        self.features = minibatch.features_NCHW if strategy.sharing else minibatch.features_of_questions
        self.image_rows_B = minibatch.image_rows_B if strategy.sharing else None
        self.answers_B = minibatch.answers_B
        self.plan = self._make_plan()
        self.calls: Calls = [(group.op, len(group.nodes)) for group in self.plan.schedule]
        self.nodes = self.plan.graph.num_nodes
        self.lower_bound = lower_bound(self.plan.graph)

    def ready(self, part: str) -> Run:
        """What runs `part`, one of `parts`, with all made ready that it needs."""
        self.engine.zero_grad(set_to_none=True)
        return getattr(self, f"_{part}")()

    def _planning(self) -> Run:
        """Programs to graph, schedule and indices on the device."""
        return self._make_plan

    def _step(self) -> Run:
        """The engine's forward pass; in training also loss and backward pass."""

        def run() -> None:
            with self._mode():
                logits_BA = self.engine(self.features, self.plan, self.strategy.defer)
                loss = functional.cross_entropy(logits_BA, self.answers_B) if self.setting.training else None
            if loss is not None:
                loss.backward()

        return run

    def _modules(self) -> Run:
        """The step's module calls in its order, on ready-made arguments."""
        return run_calls(self, self.calls, self.strategy.defer)

    def _gather_scatter(self) -> Run:
        """The step's moves: `execute` with modules that hand on what they are given."""
        own, tokens = family(self.engine.family_name), self.engine.program_tokens
        stems_NCHW = self._ready(len(self.features), STEM)
        same = {op: own.takes(tokens[op]).index(own.makes(tokens[op])) for op, _ in self.calls}
        modules = {
            op: partial(_HandOn.apply if self.setting.training else _chosen, which) for op, which in same.items()
        }

        def run() -> None:
            with self._mode():
                found = execute(self.plan.layout, modules, own.inputs(stems_NCHW))
            if self.setting.training:
                maps_BCHW = found if isinstance(found, Tensor) else found[0]
                maps_BCHW.backward(self._ready(len(maps_BCHW), CLASSIFIER).detach())

        return run

    def _stem_classifier(self) -> Run:
        """Stem and classifier, with nothing between them."""
        maps_BCHW = self._ready(len(self.programs_BL), CLASSIFIER)

        def run() -> None:
            with self._mode():
                stems_NCHW = self.engine.stem(self.features.to(self.setting.home(STEM)))
                logits_BA = self.engine.classifier(maps_BCHW)
            if self.setting.training:
                gradients = self._ready(len(stems_NCHW), STEM).detach(), torch.ones_like(logits_BA)
                torch.autograd.backward([stems_NCHW, logits_BA], gradients)

        return run

    def _make_plan(self) -> Plan:
        return self.engine.plan(self.programs_BL, self.image_rows_B, self.strategy.batching, self.strategy.sharing)

    def _mode(self) -> Any:
        return self.setting.mode(self.strategy.precision)

    def _ready(self, count: int, part: str | int) -> Tensor:
        """Ready-made maps as a leaf of its own, where a part of the engine is."""
        maps = self.setting.maps(self.strategy.precision, count, self.features[:1])
        return maps.detach().to(self.setting.home(part)).requires_grad_(self.setting.training)


class Limit:
    """What no schedule can beat: a case's module applications with every op run in one call, whatever waits on what."""

    parts = end_to_end = ("modules", "stem_classifier")
    lower_bound = None

    def __init__(self, case: Case):
        self.case, self.nodes = case, case.nodes
        ops, rows = np.unique(case.plan.graph.op, return_counts=True)
        self.calls: Calls = list(zip(ops.tolist(), rows.tolist(), strict=True))

    def ready(self, part: str) -> Run:
        """As `Case.ready`."""
        return run_calls(self.case, self.calls, defer=False) if part == "modules" else self.case.ready(part)


def run_calls(case: Case, calls: Calls, defer: bool) -> Run:
    """Module calls one after the other, no two on the same ready-made arguments; in training the way back too."""
    engine, training, own = case.engine, case.setting.training, family(case.engine.family_name)
    tokens = {op: engine.program_tokens[op] for op, _ in calls}
    modules = {op: getattr(engine, token) for op, token in tokens.items()}
    takes = {op: own.takes(token) for op, token in tokens.items()}
    home = case.setting.home
    ready = case._ready(sum(rows * len(takes[op]) for op, rows in calls), STEM).detach()
    pieces = iter(ready.split([rows for op, rows in calls for _ in takes[op]]))
    arguments = [
        [_apart(column, next(pieces)).to(home(op)).requires_grad_(training) for column in takes[op]] for op, _ in calls
    ]
    gradients = [_apart(own.makes(tokens[op]), ready[:rows]).to(home(op)) for op, rows in calls] if training else []

    def run() -> None:
        deferred = DeferredWeightGrads() if training and defer else nullcontext()
        results = []
        with case._mode(), deferred:
            for (op, _), given in zip(calls, arguments, strict=True):
                result = modules[op](*given)
                if training:
                    results.append(result)
        if training:
            torch.autograd.backward(results, gradients)

    return run


def _apart(column: int, maps: Tensor) -> Tensor:
    """A tensor of its own: these maps, or attentions made of them, which lie in memory as a network's would."""
    return maps.detach() if column == MAP else as_column(column, maps).detach().contiguous()


def _chosen(which: int, *arguments: Tensor) -> Tensor:
    return arguments[which]


class _HandOn(Function):
    """A module that computes nothing: one of its arguments; on the way back its gradient to all that are like it."""

    @staticmethod
    def forward(ctx: Any, which: int, *arguments: Tensor) -> Tensor:
        ctx.alike = [argument.shape == arguments[which].shape for argument in arguments]
        return arguments[which].view_as(arguments[which])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient if alike else None for alike in ctx.alike)
