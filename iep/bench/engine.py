"""What `iep-bench engine` compares: the execution engine under every strategy, and its limit, as a whole and in parts.

The parts are not cut out of a running step but run alone, on tensors of the shapes, dtypes and memory format that they
have in the step; so the engine needs no timers, and the parts may add up to a little more or less than the step.

Shapes: B questions, N stems, G rows of a call, L program tokens, C H W maps of the modules.
"""

from collections import defaultdict
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
from iep.bench.strategy import BEST, Strategy
from iep.bench.workload import Minibatch, Workload, open_workload
from iep.config import PRECISIONS, EngineConfig
from iep.devices import autocast
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE, Sample, check_options, describe_engine, main_device
from iep.execution_engine.program_plan import ProgramPlan
from iep.networks import build, engine_kwargs, place, place_engine

Call = tuple[nn.Module, Sequence[Tensor], Tensor]
"""A module, its arguments and its result."""
Run = Callable[[], object]
PLANNING, MOVES, MODULES, ENDS, STEP = "planning", "gather/scatter", "modules", "stem+classifier", "step"


class Step:
    """One minibatch under one strategy."""

    def __init__(self, engine: ExecutionEngine, strategy: Strategy, minibatch: Minibatch, device: torch.device):
        self.engine, self.strategy = engine, strategy
        self.devices = (device,) if engine.placement is None else tuple(map(torch.device, engine.placement.devices))
        self.programs_BL, self.answers_B = minibatch.programs_BL, minibatch.answers_B
        # Without sharing every question brings its own features, as in the data loader of the original toolkit.
        self.features = minibatch.features_NCHW if strategy.sharing else minibatch.features_of_questions()
        self.image_rows_B = minibatch.image_rows_B if strategy.sharing else None
        self.plan = self.make_plan()

    def parts(self) -> dict[str, Run]:
        """Return what runs each part, with all ready that it needs, so that only the part itself is timed."""
        ends, modules = self.calls()
        parts = {PLANNING: self.make_plan, MOVES: partial(self._moves, ends, modules)}
        parts |= {MODULES: self.replay(modules), ENDS: self.replay(ends), STEP: self.step}
        # A call of a family runs several modules at once, none of which is called by itself.
        return {part: run for part, run in parts.items() if not self.strategy.families or part not in (MOVES, MODULES)}

    def limit(self) -> dict[str, Run]:
        """Return what no schedule beats: every function in one call, whatever waits on what, and nothing moved."""
        ends, modules = self.calls()
        together: dict[nn.Module, list[tuple[Tensor, ...]]] = {}
        for module, arguments, result in modules:
            together.setdefault(module, []).append((*arguments, result))
        joined = {module: [*map(torch.cat, zip(*calls, strict=True))] for module, calls in together.items()}
        calls = [(module, given, result) for module, (*given, result) in joined.items()]
        return {MODULES: self.replay(calls), ENDS: self.replay(ends)}

    def make_plan(self) -> ProgramPlan:
        """Programs to graph, schedule and indices on the device."""
        how, families = (self.strategy.batching, self.strategy.sharing), self.strategy.families
        return self.engine.plan(self.programs_BL, self.image_rows_B, *how, families=families)

    def step(self) -> None:
        """Run the engine forward; in training also loss and backward."""
        with self._mode():
            logits_BA = self.engine(self.features, self.plan, self.strategy.defer)
            loss = functional.cross_entropy(logits_BA, self.answers_B) if self.engine.training else None
        if loss is not None:
            loss.backward()

    def calls(self) -> tuple[list[Call], list[Call]]:
        """Run a step, and return its calls of stem and classifier, and those of modules."""
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
        return [found[0], found[-1]], found[1:-1]

    def replay(self, calls: Sequence[Call]) -> Run:
        """Return what runs calls on arguments of their own; in training forward and backward."""
        training = self.engine.training
        modules, results = [module for module, *_ in calls], [result for *_, result in calls]
        arguments = [[each.clone().requires_grad_(training) for each in given] for _, given, _ in calls]

        def run() -> None:
            with self._mode(), DeferredWeightGrads() if training and self.strategy.defer else nullcontext():
                found = [module(*given) for module, given in zip(modules, arguments, strict=True)]
            if training:
                torch.autograd.backward(found, results)

        return run

    def _moves(self, ends: Sequence[Call], modules: Sequence[Call]) -> None:
        """Run the step with modules that return one of their arguments, so that values and gradients are only moved."""
        (stem, _, stems_NCHW), (classifier, (maps_BCHW,), _) = ends
        stems_NCHW = stems_NCHW.clone().requires_grad_(self.engine.training)
        hollow = {stem: lambda features: stems_NCHW, classifier: lambda maps: maps}
        for module, arguments, result in modules:
            which = next(n for n, each in enumerate(arguments) if each.shape == result.shape)
            hollow[module] = partial(_HandOn.apply, which)
        try:
            for module, forward in hollow.items():
                module.forward = forward
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
        gradient = gradient.clone()  # it is a part of the buffer that it is added to
        return None, *(gradient if alike else None for alike in ctx.alike)


def competitor(steps: Sequence[Step], is_limit: bool = False) -> Competitor:
    """Return a strategy, or the limit of those that run the same nodes in the same precision."""
    strategy, devices, graphs = steps[0].strategy, steps[0].devices, [step.plan.graph for step in steps]
    limit = replace(strategy, batching=LIMIT, defer=False, families=False).name

    def measure() -> dict[str, float]:
        times: dict[str, list[float]] = defaultdict(list)
        for step in steps:
            for part, run in (step.limit() if is_limit else step.parts()).items():
                step.engine.zero_grad(set_to_none=True)
                times[part].append(seconds(run, *devices))
        return {part: mean(values) for part, values in times.items()}

    def facts() -> dict[str, Fact]:
        calls = [len(np.unique(step.plan.graph.op)) if is_limit else len(step.plan.schedule) for step in steps]
        bound = None if is_limit or strategy.families else mean(map(lower_bound, graphs))
        steps[0].engine.zero_grad(set_to_none=True)
        memory = None if is_limit else peak_memory(steps[0].step, *devices)
        nodes = mean(graph.num_nodes for graph in graphs)
        return {"nodes": nodes, "calls": mean(calls), "bound": bound, "peak_memory": memory}

    name, total = (limit, None) if is_limit else (strategy.name, (PLANNING, STEP))
    return Competitor(name, measure, total, facts, limit)


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
    chosen = dict.fromkeys(strategy.in_phase(phase) for strategy in strategies)
    alike = dict.fromkeys(replace(strategy, batching=BEST, defer=False, families=False) for strategy in chosen)
    competitors = [
        competitor([Step(engine, strategy, each, device) for each in minibatches], kind is alike)
        for kind in (chosen, alike)
        for strategy in kind
    ]
    facts: dict[str, Fact] = {"images": mean(len(each.features_NCHW) for each in minibatches), "minibatches": count}
    if engine.placement is not None:
        facts["placed on"] = ", ".join(engine.placement.labels)
    return Case({**setting, "questions": size}, size, competitors, "vanilla", facts)


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
    check_options(placement, devices, device)
    home = main_device(placement, devices, device)
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
