"""Tasks -> tensors: what a forward pass, a loss, a backward pass and an update compute (AMPNet, Gaunt et al. 2017).

Every op has an optimiser of its own. Its worker adds up the gradients of its calls, and updates the weights by itself
once it has those of `min_update_frequency` calls. Between the forward and the backward pass of a call, the weights may
therefore change. As in the paper, the backward pass uses those of its own time: if they have changed, the module runs
again on the stored arguments, so that a module with dropout draws another mask, and one with batch normalisation counts
the call's statistics twice.

Values lie in the instance's `Buffers`, as in `execute`, whose gradients this equals if one instance is in flight at a
time. Not covered: calls of op groups, weights that two ops share, and replicas of an op on several workers (AMPNet,
section 5).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from iep.asynchronous.conductor import COPY, LOSS, Begin, Conductor, Note, PlanStep, Record, WorkerTask, run_threads
from iep.batching.execute import Buffers, run_call
from iep.batching.plan import Argument, Call, Plan


@dataclass(frozen=True, eq=False)
class Instance:
    """A small minibatch."""

    plan: Plan
    """A plan by `make_placed_plan`; the positions of the devices are the workers."""
    inputs: Tensor | Mapping[int, Tensor]
    """The inputs in the form that `execute` takes, on the device of the inputs."""
    loss: Callable[..., Tensor]
    """A tensor for each of the plan's roots -> a loss of one element; it runs on the worker of the roots."""

    @cached_property
    def sources(self) -> list[tuple[tuple[int, ...], ...]]:
        """The calls whose results each argument of each call, and then each root, reads; inputs are no call."""
        plan = self.plan
        writer = [np.full(column.num_rows, -1) for column in plan.columns]

        def calls(argument: Argument) -> tuple[int, ...]:
            read = plan.rows(argument)
            rows = read.cpu().numpy() if isinstance(read, Tensor) else read
            return tuple(each for each in np.unique(writer[argument.column][rows]).tolist() if each >= 0)

        sources = []
        for number, call in enumerate(plan.calls):
            sources.append(tuple(map(calls, call.arguments)))
            for made in call.results:
                writer[made.column][made.rows] = number
        return [*sources, tuple(map(calls, plan.roots))]

    @cached_property
    def steps(self) -> list[PlanStep]:
        """The calls of the plan, copies among them, and the loss.

        Raises:
            ValueError: the plan has no roots, or a call runs the functions of an op group.
        """
        if not self.plan.roots:
            raise ValueError("the plan has no roots: an empty minibatch has no loss")
        read_by = [tuple(sorted({each for argument in arguments for each in argument})) for arguments in self.sources]
        steps, unread = [], set(range(len(self.plan.calls))).difference(*read_by)
        for call, reads in zip(self.plan.calls, read_by[:-1], strict=True):
            if call.segments is not None:
                raise ValueError(f"call of op group {call.op}: asynchronous training needs a call for each function")
            steps.append(PlanStep(max(call.op, COPY), call.results[0].column % self.plan.num_devices, reads))
        worker = self.plan.roots[0].column % self.plan.num_devices
        return [*steps, PlanStep(LOSS, worker, tuple(sorted(unread.union(read_by[-1]))))]


class Staleness(NamedTuple):
    """The number of updates of an op between the forward and the backward pass of one call."""

    op: int
    updates: int


@dataclass(frozen=True)
class Run:
    """The results of one call of `AsynchronousTrainer.run`."""

    losses: list[float]
    """The loss of each instance, in the order of admission."""
    staleness: Counter[Staleness]
    """The number of backward passes of the run, by op and by the number of updates since the forward pass."""
    updates: dict[int, int]
    """The number of updates of each op with weights."""
    seconds: float
    """The time from the beginning of the first task to the end of the last one."""
    utilisation: list[float]
    """The share of this time in which each worker ran tasks."""


Driver = Callable[[Conductor, int, Iterable[Instance], Begin, Callable[[WorkerTask], object], Note], None]
"""A function that runs the workers, with the arguments of `run_threads`."""


class TrainedOp:
    """The module of an op, its optimiser, and the state of its updates. Only its worker uses it."""

    def __init__(self, module: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]):
        self.module = module
        self.weights = [each for each in module.parameters() if each.requires_grad]
        self.optimizer = make_optimizer(self.weights) if self.weights else None
        self.worker: int | None = None
        """The worker of its calls; None until the first instance with one."""
        self.version = self.pending = 0
        """The number of updates, and the number of calls whose gradients have been added up since the last one."""

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one call to the weights' gradients."""
        for weight, gradient in zip(self.weights, gradients, strict=True):
            if gradient is not None:
                weight.grad = gradient.clone() if weight.grad is None else weight.grad.add_(gradient)
        self.pending += 1

    def update(self) -> None:
        """Let the optimiser take a step, and clear the gradients."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version, self.pending = self.version + 1, 0


class _Kept(NamedTuple):
    """The tensors and the version of the weights that a call keeps from its forward to its backward pass."""

    arguments: list[Tensor]
    results: tuple[Tensor, ...]
    version: int


@dataclass(eq=False)
class _Active:
    """An instance in flight."""

    instance: Instance
    buffers: Buffers
    learns: list[bool]
    """Whether the results of each call depend on weights."""
    kept: dict[int, _Kept] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while gradients are added, as a copy adds them to the buffers of another worker."""

    def add_gradients(self, arguments: Sequence[Argument], gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of arguments to those of the values that they read."""
        with self.lock:
            for argument, gradient in zip(arguments, gradients, strict=True):
                self.buffers.add_gradient(argument, gradient)


class AsynchronousTrainer:
    """Trains modules asynchronously, each op on one of several workers.

    Args:
        modules: the module of each op.
        make_optimizer: the parameters of one op -> their optimiser.
        num_workers: the number of workers, which is that of the devices of the plans.
        max_active_keys: the greatest number of instances in flight.
        min_update_frequency: the number of calls after which an op is updated, for all ops or by op; None to leave
            updates to `flush_every` and `update`.
        flush_every: the number of instances after which no new one is admitted until nothing is in flight and every op
            is updated. One is synchronous training on the workers. None never to wait.
        context: returns a context in which modules and losses run, on whatever thread, such as that of autocast.

    Raises:
        ValueError: ops share a parameter.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        num_workers: int,
        max_active_keys: int = 1,
        min_update_frequency: Mapping[int, int] | int | None = None,
        flush_every: int | None = None,
        context: Callable[[], AbstractContextManager] = nullcontext,
    ):
        owner: dict[nn.Parameter, int] = {}
        for op, module in modules.items():
            for parameter in module.parameters():
                if owner.setdefault(parameter, op) != op:
                    raise ValueError(f"ops {owner[parameter]} and {op} share a parameter, expected different ones")
        self.ops = {op: TrainedOp(module, make_optimizer) for op, module in modules.items()}
        each = min_update_frequency
        self.min_update_frequency = dict(each) if isinstance(each, Mapping) else dict.fromkeys(self.ops, each)
        self.num_workers, self.max_active_keys, self.flush_every = num_workers, max_active_keys, flush_every
        self.context = context
        self.in_flight: dict[int, _Active] = {}
        """The values and gradients of every instance in flight."""
        self._losses, self._staleness = dict[int, float](), Counter[Staleness]()

    def run(
        self,
        instances: Iterable[Instance],
        driver: Driver = run_threads,
        note: Note = lambda _: None,
        update: bool = False,
    ) -> Run:
        """Train on the instances in order, and return when nothing is in flight.

        Args:
            driver: how the workers run.
            note: gets the record of every task when it is done, on any thread, but one at a time.
            update: then update every op that has gradients, as with `flush_every`. Otherwise, gradients that are too
                few for an update stay in the parameters' `grad` for the next run.

        Raises:
            ValueError: a plan has no roots, op groups or another number of devices than there are workers, or places
                an op on another worker than before.
        """
        self._losses, self._staleness = {}, Counter()
        conductor = Conductor(self.max_active_keys, self.flush_every)
        before = {op: state.version for op, state in self.ops.items() if state.weights}
        busy, first, last = [0.0] * self.num_workers, float("inf"), 0.0

        def done(record: Record) -> None:
            nonlocal first, last
            busy[record.worker] += record.end - record.start
            first, last = min(first, record.start), max(last, record.end)
            if record.task.instance not in conductor.in_flight:
                del self.in_flight[record.task.instance]
            note(record)

        try:
            driver(conductor, self.num_workers, instances, self._begin, self._compute, done)
        finally:
            self.in_flight.clear()
        if self.flush_every or update:
            self.update()
        losses = [self._losses[number] for number in sorted(self._losses)]
        updates = {op: self.ops[op].version - version for op, version in before.items()}
        seconds = max(0.0, last - first)
        utilisation = [each / seconds if seconds else 0.0 for each in busy]
        return Run(losses, self._staleness, updates, seconds, utilisation)

    def update(self) -> None:
        """Update every op that has gradients. Nothing may be in flight."""
        assert not self.in_flight
        for state in self.ops.values():
            if state.weights and state.pending:
                state.update()

    def _begin(self, number: int, instance: Instance) -> list[PlanStep]:
        """Write the inputs of an instance into its buffers, and return its steps."""
        plan = instance.plan
        if self.flush_every and number % self.flush_every == 0:
            self.update()
        if plan.num_devices != self.num_workers:
            raise ValueError(f"a plan for {plan.num_devices} devices, expected one for {self.num_workers} workers")
        steps, learns = instance.steps, list[bool]()
        for step in steps[:-1]:
            has_weights = step.op != COPY and bool(self._at(step).weights)
            learns.append(has_weights or any(learns[each] for each in step.reads))
        buffers, inputs = Buffers(plan), instance.inputs
        given = {0: inputs} if isinstance(inputs, Tensor) else inputs
        buffers.write(plan.inputs, [given[made.column // plan.num_devices] for made in plan.inputs])
        self.in_flight[number] = _Active(instance, buffers, learns)
        return steps

    def _at(self, step: PlanStep) -> TrainedOp:
        """Return the op of a step; all its steps are on the worker of the first one.

        Raises:
            ValueError: the step is on another worker.
        """
        state = self.ops[step.op]
        if state.worker is None:
            state.worker = step.worker
        if state.worker != step.worker:
            raise ValueError(f"op {step.op} is on worker {step.worker}, but was on {state.worker} before")
        return state

    def _compute(self, task: WorkerTask) -> None:
        """Compute a task of an instance in flight."""
        active = self.in_flight[task.instance]
        if task.call == len(active.instance.plan.calls):
            self._loss(task.instance, active)
        elif task.is_backward:
            self._backward(active, task.call)
        else:
            self._forward(active, task.call)

    def _arguments(self, active: _Active, reads: Sequence[Argument], call: int) -> list[Tensor]:
        """Return the arguments of a call, or the roots, as leaves of a graph of their own."""
        arguments = [active.buffers.read(each).detach() for each in reads]
        for argument, sources in zip(arguments, active.instance.sources[call], strict=True):
            argument.requires_grad_(argument.is_floating_point() and any(active.learns[each] for each in sources))
        return arguments

    def _run_module(self, active: _Active, call: Call, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the module of a call on leaves, with its current weights."""
        with torch.enable_grad(), self.context():
            return run_call(active.instance.plan, {call.op: self.ops[call.op].module}, call, arguments)

    def _forward(self, active: _Active, number: int) -> None:
        call = active.instance.plan.calls[number]
        if call.op < 0:  # a copy keeps nothing
            arguments = [active.buffers.read(each) for each in call.arguments]
            active.buffers.write(call.results, run_call(active.instance.plan, {}, call, arguments))
            return
        arguments = self._arguments(active, call.arguments, number)
        results = self._run_module(active, call, arguments)
        if active.learns[number]:
            active.kept[number] = _Kept(arguments, results, self.ops[call.op].version)
        active.buffers.write(call.results, [each.detach() for each in results])

    def _loss(self, number: int, active: _Active) -> None:
        plan = active.instance.plan
        roots = self._arguments(active, plan.roots, len(plan.calls))
        with torch.enable_grad(), self.context():
            loss = active.instance.loss(*roots)
        self._losses[number] = loss.item()
        active.add_gradients(plan.roots, differentiate([loss], [torch.ones_like(loss)], roots))

    def _backward(self, active: _Active, number: int) -> None:
        plan = active.instance.plan
        call = plan.calls[number]
        if not active.learns[number]:
            return
        with active.lock:
            gradients = [active.buffers.gradient(each) for each in call.results]
        if call.op < 0:
            devices = [plan.columns[each.column].device for each in call.arguments]
            of_arguments = [None if each is None else each.to(to) for each, to in zip(gradients, devices, strict=True)]
        else:
            of_arguments = self._differentiate(active, number, gradients)
        active.add_gradients(call.arguments, of_arguments)

    def _differentiate(self, active: _Active, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a call's arguments, and add those of its weights to the op's, which may update it."""
        call, kept = active.instance.plan.calls[number], active.kept.pop(number)
        state, results = self.ops[call.op], kept.results
        if kept.version != state.version:
            results = self._run_module(active, call, kept.arguments)
        found = differentiate(results, gradients, [*kept.arguments, *state.weights])
        if state.weights:
            self._staleness[Staleness(call.op, state.version - kept.version)] += 1
            state.add(found[len(kept.arguments) :])
            frequency = self.min_update_frequency[call.op]
            if frequency is not None and state.pending >= frequency:
                state.update()
        return found[: len(kept.arguments)]


def differentiate(
    results: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradients of leaves, given those of the results; None where a leaf needs none or has none."""
    pairs = zip(results, gradients, strict=True)
    known = [(result, grad.to(result.dtype)) for result, grad in pairs if grad is not None and result.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found: Iterator[Tensor | None] = iter(())
    if known and wanted:
        outputs, grads = zip(*known, strict=True)
        found = iter(torch.autograd.grad(outputs, wanted, grads, allow_unused=True))
    return [next(found, None) if leaf.requires_grad else None for leaf in leaves]
