"""Measure planning and a step of the execution engine under every strategy: `iep-bench engine`.

Programs have CLEVR's shapes; features, answers and weights are random, which does not change the speed.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from statistics import mean

import torch
from torch.nn import functional

from iep.batching.schedulers import lower_bound
from iep.bench.compare import MIN_SAMPLES, Benchmark, Case, Competitor, Fact, seconds
from iep.bench.strategy import Strategy
from iep.bench.workload import Minibatch, generated
from iep.config import EngineConfig
from iep.execution_engine.assembly import Running, fit_template, set_execution
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import ProgramSample
from iep.execution_engine.program_plan import ProgramPlan
from iep.models.assemble import assemble
from iep.models.network import Network
from iep.runtime.devices import autocast


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

    def make_plan(self) -> ProgramPlan:
        """Return the plan of the programs: graph, schedule and indices on the device."""
        return self.engine.plan(
            self.programs_BL,
            self.image_rows_B,
            self.strategy.batching,
            self.strategy.sharing,
            execution=self.strategy.execution,
        )

    def step(self) -> None:
        """Run a forward pass; in training, also compute the loss and run a backward pass."""
        training = self.engine.training
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(not training))
            for device in set(self.devices):
                stack.enter_context(autocast(device, self.strategy.precision))
            logits_BA = self.engine(self.features, self.plan, self.strategy.defer)
            loss = functional.cross_entropy(logits_BA, self.answers_B) if training else None
        if loss is not None:
            loss.backward()


def competitor(steps: Sequence[Step]) -> Competitor:
    """Return the competitor of a strategy; a round runs the step of each minibatch."""

    def measure() -> dict[str, float]:
        planning = [seconds(each.make_plan, *each.devices) for each in steps]
        times = []
        for each in steps:
            each.engine.zero_grad(set_to_none=True)
            times.append(seconds(each.step, *each.devices))
        return {"planning": mean(planning), "step": mean(times)}

    def facts() -> dict[str, Fact]:
        graphs = [step.plan.graph for step in steps]
        return {
            "nodes": mean(graph.num_nodes for graph in graphs),
            "calls": mean(step.plan.num_calls for step in steps),
            "bound": None if steps[0].plan.plan.op_groups else mean(map(lower_bound, graphs)),
        }

    return Competitor(steps[0].strategy.name, measure, facts)


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
    questions_per_image: int,
    feature_shape: tuple[int, int, int],
) -> Benchmark:
    """Return the comparison of strategies at every minibatch size, the small ones first, and in every phase.

    Args:
        memory_format: memory format of the convolutions; None for that of training and evaluation.

    Raises:
        InputError: the engine cannot be built, placed or run as a strategy says.
    """
    running = Running(device, placement, tuple(devices), memory_format=memory_format, training="train" in phases)
    first = running.main_device
    largest = max(batch_sizes)
    workload = generated(max(largest, MIN_SAMPLES), questions_per_image, feature_shape, largest, seed)
    sample = ProgramSample(workload.programs_QL, workload.image_idxs_Q, "the generated questions")
    network = Network.new("engine", config, workload.vocab, feature_shape)
    assemble({"engine": network}, workload.vocab, running, sample=sample)
    engine = network.module
    for each in strategies:
        run_by = replace(running, execution=each.execution, precision=each.precision, defer_weight_grads=each.defer)
        set_execution(engine, run_by)
    description = f"programs of iep-synth's questions, {questions_per_image} an image, seed {seed}"

    def case(size: int, phase: str) -> Case:
        """Return the comparison of all strategies on minibatches of `size` questions."""
        training = phase == "train"
        engine.train(training)
        count = max(1, MIN_SAMPLES // size)
        minibatches = [workload.minibatch(number * size, size, first) for number in range(count)]
        # Without weight gradients there is nothing to defer, and CUDA graphs are for training.
        chosen = dict.fromkeys(
            replace(strategy, defer=strategy.defer and training)
            for strategy in strategies
            if training or strategy.execution != "cuda_graph"
        )
        sharing = {strategy.sharing for strategy in chosen if strategy.execution == "cuda_graph"}
        if sharing:  # without sharing, minibatches have more nodes
            fit_template(engine, sample, size, min(sharing))
        competitors = [competitor([Step(engine, strategy, each, first) for each in minibatches]) for strategy in chosen]
        images = mean(len(each.features_NCHW) for each in minibatches)
        setting = {"phase": phase, "questions": size, "images": images, "minibatches": count}
        return Case(setting, size, competitors, "vanilla")

    cases = (case(size, phase) for size, phase in product(sorted(batch_sizes), phases))
    return Benchmark(description, cases, "question", first)
