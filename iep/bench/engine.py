"""What `iep-bench engine` compares: the execution engine under every strategy, and its limit, as a whole and in parts.

The parts are not cut out of a running step but run alone, on tensors of the shapes, dtypes and memory format that they
have in the step; so the engine needs no timers, and the parts may add up to a little more or less than the step.

Shapes: B questions, N stems, G rows of a call, L program tokens, C H W maps of the modules.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from iep.batching.deferred import DeferredWeightGrads
from iep.batching.schedulers import lower_bound
from iep.bench.compare import LIMIT, MIN_SAMPLES, Case, Competitor, Fact, peak_memory, seconds
from iep.bench.report import Benchmark
from iep.bench.strategy import Strategy
from iep.bench.workload import Minibatch, Workload, open_workload
from iep.config import PRECISIONS, EngineConfig
from iep.devices import autocast
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE
from iep.networks import build, engine_kwargs, place
from iep.placing import Sample, check_options, describe_engine, place_engine, resolve_home

Call = tuple[nn.Module, Sequence[Tensor], Tensor]
"""A module, its arguments and its result."""
PARTS = PLANNING, MOVES, MODULES, ENDS, STEP = "planning", "gather/scatter", "modules", "stem+classifier", "step"


class Step:
    """One minibatch under one strategy. `ready` makes a part ready, so that only the part itself is timed."""

    def __init__(self, engine: ExecutionEngine, strategy: Strategy, minibatch: Minibatch, device: torch.device):
        self.engine, self.strategy = engine, strategy
        self.devices = (device,) if engine.placement is None else tuple(map(torch.device, engine.placement.devices))
        self.programs_BL, self.answers_B = minibatch.programs_BL, minibatch.answers_B
        # Without sharing every question brings its own features, as in the data loader of the original toolkit.
        self.features = minibatch.features_NCHW if strategy.sharing else minibatch.features_of_questions()
        self.image_rows_B = minibatch.image_rows_B if strategy.sharing else None
        self.plan = self.make_plan()

    def ready(self, part: str) -> Callable[[], object]:
        """Return what runs a part."""
        self.engine.zero_grad(set_to_none=True)
        if part in (PLANNING, STEP):
            return self.make_plan if part == PLANNING else self._step
        calls = self.calls()
        if part == MOVES:
            return partial(self._moves, calls)
        ends = self.engine.stem, self.engine.classifier
        return self.replay([call for call in calls if (call[0] in ends) == (part == ENDS)], self.strategy.defer)

    def make_plan(self) -> Any:
        """Programs to graph, schedule and indices on the device."""
        families = {"families": True} if self.strategy.families else {}
        batching, sharing = self.strategy.batching, self.strategy.sharing
        return self.engine.plan(self.programs_BL, self.image_rows_B, batching, sharing, **families)

    def _step(self) -> None:
        with self._mode():
            logits_BA = self.engine(self.features, self.plan, self.strategy.defer)
            loss = functional.cross_entropy(logits_BA, self.answers_B) if self.engine.training else None
        if loss is not None:
            loss.backward()

    def calls(self) -> list[Call]:
        """Run a step, and return its calls of stem, modules and classifier."""
        found: list[Call] = []

        def record(module: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
            found.append((module, [each.detach() for each in arguments], result.detach()))

        hooks = [child.register_forward_hook(record) for child in self.engine.children()]
        try:
            with torch.no_grad(), self._mode(inference=False):
                self.engine(self.features, self.plan)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def replay(self, calls: Sequence[Call], defer: bool) -> Callable[[], None]:
        """Return what runs calls on arguments of their own; in training forward and backward."""
        training = self.engine.training
        own = [
            (module, [each.clone().requires_grad_(training) for each in given], made) for module, given, made in calls
        ]

        def run() -> None:
            with self._mode(), DeferredWeightGrads() if training and defer else nullcontext():
                results = [module(*arguments) for module, arguments, _ in own]
            if training:
                torch.autograd.backward(results, [made for *_, made in own])

        return run

    def _moves(self, calls: Sequence[Call]) -> None:
        """Run the step with modules that return one of their arguments, so that values and gradients are only moved."""
        (stem, _, stems_NCHW), *between, (classifier, (maps_BCHW,), _) = calls
        stems_NCHW = stems_NCHW.clone().requires_grad_(self.engine.training)
        hollow = {stem: lambda features: stems_NCHW, classifier: lambda maps: maps}
        for module, arguments, made in between:
            which = next(n for n, each in enumerate(arguments) if each.shape == made.shape)
            hollow[module] = partial(_HandOn.apply, which)
        for module, forward in hollow.items():
            module.forward = forward
        try:
            with self._mode():
                found = self.engine(self.features, self.plan, self.strategy.defer)
            if self.engine.training:
                found.backward(maps_BCHW)
        finally:
            for module in hollow:
                del module.forward

    @contextmanager
    def _mode(self, inference: bool | None = None) -> Iterator[None]:
        """The strategy's precision, and gradients only in training."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(not self.engine.training if inference is None else inference))
            for device in set(self.devices):
                stack.enter_context(autocast(device, self.strategy.precision))
            yield


class _HandOn(Function):
    """A module that returns one of its arguments; its gradient goes to all arguments of that shape."""

    @staticmethod
    def forward(ctx: Any, which: int, *arguments: Tensor) -> Tensor:
        ctx.alike = [argument.shape == arguments[which].shape for argument in arguments]
        return arguments[which].view_as(arguments[which])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(gradient if alike else None for alike in ctx.alike)


def _competitor(limit: str, steps: Sequence[Step]) -> Competitor:
    strategy, plans, devices = steps[0].strategy, [step.plan for step in steps], steps[0].devices

    def measure() -> dict[str, float]:
        return {part: mean(seconds(step.ready(part), *devices) for step in steps) for part in PARTS}

    def facts() -> dict[str, Fact]:
        return {
            "nodes": mean(plan.graph.num_nodes for plan in plans),
            "calls": mean(len(plan.schedule) for plan in plans),
            "bound": None if strategy.families else mean(lower_bound(plan.graph) for plan in plans),
            "peak_memory": peak_memory(steps[0].ready(STEP), *devices),
        }

    return Competitor(strategy.name, measure, (PLANNING, STEP), facts, limit)


def _limit(name: str, steps: Sequence[Step]) -> Competitor:
    """The same module applications with every function in one call, whatever waits on what: what no schedule beats."""

    def replayed(step: Step, part: str) -> Callable[[], None]:
        (stem, *between, classifier), together = step.calls(), {}
        for module, arguments, made in between:
            together.setdefault(module, []).append([*arguments, made])
        joined = [(module, map(torch.cat, zip(*calls, strict=True))) for module, calls in together.items()]
        step.engine.zero_grad(set_to_none=True)
        modules = [(module, given, made) for module, (*given, made) in joined]
        return step.replay([stem, classifier] if part == ENDS else modules, defer=False)

    def measure() -> dict[str, float]:
        return {part: mean(seconds(replayed(step, part), *step.devices) for step in steps) for part in (MODULES, ENDS)}

    graphs = [step.plan.graph for step in steps]
    nodes, functions = mean(graph.num_nodes for graph in graphs), mean(len(np.unique(graph.op)) for graph in graphs)
    facts = {"nodes": nodes, "calls": functions, "bound": None, "peak_memory": None}
    return Competitor(name, measure, facts=lambda: facts, limit=name)


def engine_case(
    workload: Workload,
    engine: ExecutionEngine,
    strategies: Sequence[Strategy],
    device: torch.device,
    size: int,
    **setting: str | int,
) -> Case:
    """Return the strategies, and a limit for all those that run the same nodes in the same precision.

    Raises:
        InputError: features cannot be read.
    """
    phase = setting["phase"]
    engine.train(phase == "train")
    count = max(1, min(MIN_SAMPLES, len(workload.programs_QL)) // size)
    minibatches = [workload.minibatch(number * size, size, device) for number in range(count)]
    competitors, limits = [], {}
    for strategy in dict.fromkeys(strategy.in_phase(phase) for strategy in strategies):
        alike = replace(strategy, defer=False, families=False)
        limit = replace(alike, batching=LIMIT).name
        competitors.append(_competitor(limit, [Step(engine, strategy, each, device) for each in minibatches]))
        if limit not in limits:
            limits[limit] = _limit(limit, [Step(engine, alike, each, device) for each in minibatches])
    facts: dict[str, Fact] = {"images": mean(len(each.features_NCHW) for each in minibatches), "minibatches": count}
    if engine.placement is not None:
        facts["placed on"] = ", ".join(engine.placement.labels)
    return Case({**setting, "questions": size}, size, [*competitors, *limits.values()], "vanilla", facts)


def engine_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    phases: Sequence[str],
    threads: Sequence[int],
    config: EngineConfig,
    device: str,
    placement: str,
    devices: Sequence[str],
    memory_format: str | None,
    seed: int,
    **questions: Any,
) -> Benchmark:
    """Return the comparison of strategies at every minibatch size, the small ones first, and in every phase.

    Args:
        memory_format: of the convolutions; None for what training and evaluation use.
        questions: where they come from, as for `open_workload`.

    Raises:
        InputError: there are too few questions, they have no programs, or the engine cannot be built, placed or run.
    """
    known = inspect.signature(ExecutionEngine.plan).parameters
    if any(each.families for each in strategies) and "families" not in known:
        raise InputError("this engine does not schedule over families; leave out +families")
    check_options(placement, devices, device)
    home = resolve_home(placement, devices, device)
    workload = open_workload(max(batch_sizes), seed, **questions)
    torch.manual_seed(seed)
    engine = place(build("engine", engine_kwargs(config, workload.vocab, workload.feature_shape)), home, memory_format)
    description = workload.description
    if placement != NONE:
        sample = Sample(workload.programs_QL, workload.image_idxs_Q, workload.description)
        costs = place_engine(engine, placement, devices, sample, memory_format)
        text = describe_engine(placement, engine, costs, sample, engine.planner(), max(batch_sizes), PRECISIONS[0])
        description = f"{description}\n{text}"
    counts = [{"threads": count} for count in threads] if home.type == "cpu" else [{}]
    cases = (
        engine_case(workload, engine, strategies, home, size, phase=phase, **count)
        for size, phase, count in product(sorted(batch_sizes), phases, counts)
    )
    about = {"feature_shape": workload.feature_shape, "engine": asdict(config), "memory_format": memory_format}
    about |= {"placement": None if engine.placement is None else asdict(engine.placement), "seed": seed}
    return Benchmark(description, cases, "questions", "question", home, about)
