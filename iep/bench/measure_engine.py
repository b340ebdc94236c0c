"""Measure the execution engine under every strategy, as a whole and in parts, and its limit: `iep-bench engine`.

Each part runs alone, on tensors with the shapes, dtypes and memory format that they have in a step, so that the engine
needs no timers. Besides running modules, a step moves values between calls and computes the loss.

Shapes: B questions, N stems, C H W features, A answers.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from iep.batching.deferred import DeferredWeightGrads
from iep.batching.layers import computed_by
from iep.batching.schedulers import lower_bound
from iep.bench.compare import LIMIT, MIN_SAMPLES, Benchmark, Case, Competitor, Fact, seconds
from iep.bench.strategy import BEST, Strategy
from iep.bench.workload import Minibatch, generated, read_workload
from iep.config import EngineConfig
from iep.execution_engine.choices import DEFAULT_EXECUTION
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE, Sample, check_options, describe_placement, main_device
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.build import build, fit_template, network_kwargs, place, place_engine, set_execution
from iep.runtime.devices import autocast

Call = tuple[nn.Module, Sequence[Tensor], Tensor]
"""A module, its arguments and its output."""
Run = Callable[[], object]
PLANNING, MODULES, STEP = "planning", "modules", "step"


class Step:
    """One minibatch under one strategy."""

    def __init__(self, engine: ExecutionEngine, strategy: Strategy, minibatch: Minibatch, device: torch.device):
        self.engine, self.strategy = engine, strategy
        self.devices = (device,) if engine.placement is None else tuple(map(torch.device, engine.placement.devices))
        self.programs_BL, self.answers_B = minibatch.programs_BL, minibatch.answers_B
        # Without sharing, every question has its own copy of the features, as in the original toolkit's data loader.
        self.features, self.image_rows_B = minibatch.features_NCHW, minibatch.image_rows_B if strategy.sharing else None
        if not strategy.sharing and len(self.features) < len(self.programs_BL):
            self.features = self.features[torch.from_numpy(minibatch.image_rows_B).to(device)]
        self.plan = self.make_plan()

    def parts(self) -> dict[str, Run]:
        """Return a function that runs each part, whose inputs are ready, so that only the part itself is timed."""
        parts = {PLANNING: self.make_plan, STEP: self.step}
        # A call of an op group runs several modules at once, so that no module is called by itself.
        return parts if self.plan.plan.op_groups else {**parts, MODULES: self.replay(self.calls())}

    def limit(self) -> dict[str, Run]:
        """Return the part that no schedule can beat: one call per function, without dependencies or moved values."""
        together: dict[nn.Module, list[tuple[Tensor, ...]]] = {}
        for module, arguments, result in self.calls():
            together.setdefault(module, []).append((*arguments, result))
        joined = {module: [*map(torch.cat, zip(*calls, strict=True))] for module, calls in together.items()}
        return {MODULES: self.replay([(module, given, result) for module, (*given, result) in joined.items()])}

    def make_plan(self) -> ProgramPlan:
        """Return the plan of the programs: graph, schedule and indices on the device."""
        how, execution = (self.strategy.batching, self.strategy.sharing), self.strategy.execution
        return self.engine.plan(self.programs_BL, self.image_rows_B, *how, execution=execution)

    def step(self) -> None:
        """Run a forward pass; in training, also compute the loss and run a backward pass."""
        with self._mode():
            logits_BA = self.engine(self.features, self.plan, self.strategy.defer)
            loss = functional.cross_entropy(logits_BA, self.answers_B) if self.engine.training else None
        if loss is not None:
            loss.backward()

    def count_kernels(self) -> int:
        """Return the number of kernels of a step, from the features on."""
        self.engine.zero_grad(set_to_none=True)
        return count_kernels(self.step, self.devices[0])

    def calls(self) -> list[Call]:
        """Run a forward pass, and return its module calls, including those of the stem and the classifier."""
        found: list[Call] = []

        def record(module: nn.Module, arguments: tuple[Tensor, ...], result: Tensor) -> None:
            found.append((module, [each.detach() for each in arguments], result.detach()))

        with ExitStack() as hooks, torch.no_grad(), self._mode(inference=False):
            for part in self.engine.parts:
                hooks.callback(getattr(self.engine, part).register_forward_hook(record).remove)
            self.engine(self.features, self.plan)
        return found

    def replay(self, calls: Sequence[Call]) -> Run:
        """Return a function that runs calls on copies of their arguments; in training, with a backward pass."""
        training, stem = self.engine.training, self.engine.stem
        modules, results = [module for module, *_ in calls], [result for *_, result in calls]
        arguments = [
            [each.clone().requires_grad_(training and module is not stem) for each in given]
            for module, given, _ in calls
        ]

        def run() -> None:
            with (
                self._mode(),
                computed_by(DeferredWeightGrads()) if training and self.strategy.defer else nullcontext(),
            ):
                found = [module(*given) for module, given in zip(modules, arguments, strict=True)]
            pairs = [pair for pair in zip(found, results, strict=True) if pair[0].requires_grad]
            if pairs:
                torch.autograd.backward(*zip(*pairs, strict=True))

        return run

    @contextmanager
    def _mode(self, inference: bool | None = None) -> Iterator[None]:
        """Use the strategy's precision, and compute gradients only in training."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(not self.engine.training if inference is None else inference))
            for device in set(self.devices):
                stack.enter_context(autocast(device, self.strategy.precision))
            yield


class Operators(TorchDispatchMode):
    """A mode that counts the operators that compute or copy values, for each of which a GPU runs a kernel or more."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or "empty" in name or name in ("_unsafe_view", "promote_types"))
        return func(*args, **(kwargs or {}))


def count_kernels(run: Run, device: torch.device) -> int:
    """Return the number of kernels that a function runs on a GPU, or on a CPU, that of its `Operators`."""
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run()
            torch.cuda.synchronize(device)
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())
    with Operators() as operators:
        run()
    return operators.count


def competitor(steps: Sequence[Step], is_limit: bool = False) -> Competitor:
    """Return the competitor of a strategy, or the limit of strategies with the same nodes and precision."""
    strategy, devices, graphs = steps[0].strategy, steps[0].devices, [step.plan.graph for step in steps]
    limit = replace(strategy, batching=LIMIT, defer=False, execution=DEFAULT_EXECUTION).name

    def measure() -> dict[str, float]:
        times: dict[str, list[float]] = defaultdict(list)
        for step in steps:
            for part, run in (step.limit() if is_limit else step.parts()).items():
                step.engine.zero_grad(set_to_none=True)
                times[part].append(seconds(run, *devices))
        return {part: mean(values) for part, values in times.items()}

    def facts() -> dict[str, Fact]:
        nodes = mean(graph.num_nodes for graph in graphs)
        if is_limit:
            return {"nodes": nodes, "calls": mean(len(np.unique(graph.op)) for graph in graphs)}
        bound = None if steps[0].plan.plan.op_groups else mean(map(lower_bound, graphs))
        calls, kernels = (mean(map(count, steps)) for count in (lambda step: step.plan.num_calls, Step.count_kernels))
        return {"nodes": nodes, "calls": calls, "bound": bound, "kernels": kernels}

    name, total = (limit, None) if is_limit else (strategy.name, (PLANNING, STEP))
    return Competitor(name, measure, total, facts, limit)


def engine_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    phases: Sequence[str],
    config: EngineConfig,
    device: str,
    placement: str,
    devices: Sequence[str],
    memory_format: str | None,
    seed: int,
    data: Path | None,
    split: str,
    questions_per_image: int,
    feature_shape: tuple[int, int, int],
) -> Benchmark:
    """Return the comparison of strategies at every minibatch size, the small ones first, and in every phase.

    Args:
        memory_format: memory format of the convolutions; None for that of training and evaluation.
        data: directory that `iep-preprocess` wrote; None to generate questions.

    Raises:
        InputError: there are too few questions, they have no programs, or the engine cannot be built, placed or run as
            a strategy says.
    """
    check_options(placement, devices, device)
    first = main_device(placement, devices, device)
    largest = max(batch_sizes)
    if data is None:
        workload = generated(max(largest, MIN_SAMPLES), questions_per_image, feature_shape, largest, seed)
    else:
        workload = read_workload(largest, data, split)
    engine = place(
        build("engine", network_kwargs("engine", config, workload.vocab, workload.feature_shape)), first, memory_format
    )
    description = workload.description
    if placement != NONE:
        sample = Sample(workload.programs_QL, workload.image_idxs_Q, workload.description)
        costs = place_engine(engine, placement, devices, sample, memory_format)
        description += "\n" + describe_placement(placement, engine.placement, costs.work)

    for strategy in strategies:
        set_execution(engine, strategy.execution, first, strategy.precision, strategy.defer, training="train" in phases)

    def case(size: int, phase: str) -> Case:
        training = phase == "train"
        engine.train(training)
        count = max(1, min(MIN_SAMPLES, len(workload.programs_QL)) // size)
        minibatches = [workload.minibatch(number * size, size, first) for number in range(count)]
        # Without weight gradients there is nothing to defer, and CUDA graphs are for training.
        chosen = dict.fromkeys(
            replace(strategy, defer=strategy.defer and training)
            for strategy in strategies
            if training or strategy.execution != "cuda_graph"
        )
        sharing = {strategy.sharing for strategy in chosen if strategy.execution == "cuda_graph"}
        if sharing:  # without sharing, minibatches have more nodes
            fit_template(engine, Sample(workload.programs_QL, workload.image_idxs_Q, ""), size, min(sharing))
        alike = dict.fromkeys(
            replace(strategy, batching=BEST, defer=False, execution=DEFAULT_EXECUTION) for strategy in chosen
        )
        competitors = [
            competitor([Step(engine, strategy, each, first) for each in minibatches], kind is alike)
            for kind in (chosen, alike)
            for strategy in kind
        ]
        facts = {"images": mean(len(each.features_NCHW) for each in minibatches), "minibatches": count}
        return Case({"phase": phase, "questions": size}, size, competitors, "vanilla", facts)

    cases = (case(size, phase) for size, phase in product(sorted(batch_sizes), phases))
    return Benchmark(description, cases, "questions", "question", first)
