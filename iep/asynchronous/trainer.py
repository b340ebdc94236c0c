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
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from iep.asynchronous.conductor import COPY, LOSS, Conductor, PlanStep, WorkerTask
from iep.asynchronous.drivers import Begin, Note, Record, run_threads
from iep.asynchronous.processes import Peers
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


class _Clock:
    """Adds up the times of tasks, and passes their records on."""

    def __init__(self, num_workers: int, pass_on: Note):
        self.busy, self.first, self.last, self.pass_on = [0.0] * num_workers, float("inf"), 0.0, pass_on

    def note(self, record: Record) -> None:
        self.busy[record.worker] += record.end - record.start
        self.first, self.last = min(self.first, record.start), max(self.last, record.end)
        self.pass_on(record)


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

    def state(self) -> dict[str, Any]:
        """Return all that changes in training, for other processes."""
        optimizer = self.optimizer.state_dict() if self.optimizer else None
        gradients = [weight.grad for weight in self.weights]
        counts = {"version": self.version, "pending": self.pending}
        return counts | {"module": self.module.state_dict(), "optimizer": optimizer, "gradients": gradients}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the `state` of another process."""
        self.version, self.pending = state["version"], state["pending"]
        self.module.load_state_dict(state["module"])
        for weight, gradient in zip(self.weights, state["gradients"], strict=True):
            weight.grad = gradient
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])


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
    arrived: dict[int, list[Tensor]] = field(default_factory=dict)
    """The values of each copy that reads a call of another process."""
    remaining: int = 0
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
        peers: the processes that are the other workers; None if all workers are in this process.
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
        peers: Peers | None = None,
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
        self.peers, self.context = peers, context
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

        With `peers`, every process calls this with the same instances, and all have the same weights, optimiser states
        and results at the end.

        Args:
            driver: how the workers run, if there are no `peers`.
            note: gets the record of every task of this process when it is done, on any thread, but one at a time.
            update: then update every op that has gradients, as with `flush_every`. Otherwise, gradients that are too
                few for an update stay in the parameters' `grad` for the next run.

        Raises:
            PeerError: another process has failed, has ended, or is silent; `peers` cannot be used any more.
            ValueError: a plan has no roots, op groups or another number of devices than there are workers, or places
                an op on another worker than before.
        """
        self._losses, self._staleness, clock = {}, Counter(), _Clock(self.num_workers, note)
        where = () if self.peers is None else (self.peers.rank, self.peers.size)
        conductor = Conductor(self.max_active_keys, self.flush_every, *where)
        before = {op: state.version for op, state in self.ops.items() if state.weights}
        try:
            if self.peers is None:
                driver(conductor, self.num_workers, instances, self.begin, self.compute, clock.note)
            else:
                own = partial(self._own, self.peers.rank, clock, update)
                self._merge(self.peers.rank, clock, self.peers.drive(self, conductor, instances, clock.note, own))
        finally:
            self.in_flight.clear()
        if self.peers is None and (self.flush_every or update):
            self.update()
        losses = [self._losses[number] for number in sorted(self._losses)]
        updates = {op: self.ops[op].version - version for op, version in before.items()}
        seconds = max(0.0, clock.last - clock.first)
        utilisation = [busy / seconds if seconds else 0.0 for busy in clock.busy]
        return Run(losses, self._staleness, updates, seconds, utilisation)

    def update(self) -> None:
        """Update every op that has gradients. Nothing may be in flight."""
        assert not self.in_flight
        for state in self.ops.values():
            if state.weights and state.pending:
                state.update()

    def begin(self, number: int, instance: Instance) -> list[PlanStep]:
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
        remaining = sum(self.peers is None or step.worker == self.peers.rank for step in steps)
        if remaining:
            self.in_flight[number] = _Active(instance, buffers, learns, remaining=remaining)
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

    def compute(self, task: WorkerTask) -> list[Tensor | None]:
        """Compute a task of an instance in flight, and return the gradients that go to another process, if any."""
        leaving: list[Tensor | None] = []
        active = self.in_flight[task.instance]
        if task.call == len(active.instance.plan.calls):
            self._loss(task.instance, active)
        elif task.is_backward:
            leaving = self._backward(active, task.call)
        else:
            self._forward(active, task.call)
        if task.is_backward:
            with active.lock:
                active.remaining -= 1
                if not active.remaining:
                    del self.in_flight[task.instance]
        return leaving

    def _arguments(self, active: _Active, reads: Sequence[Argument], call: int) -> list[Tensor]:
        """Return the arguments of a call, or the roots, as leaves of a graph of their own."""
        arguments = [active.buffers.read(each).detach() for each in reads]
        for argument, sources in zip(arguments, active.instance.sources[call], strict=True):
            argument.requires_grad_(argument.is_floating_point() and any(active.learns[each] for each in sources))
        return arguments

    def _compute(self, active: _Active, call: Call, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the module of a call on leaves, with its current weights."""
        with torch.enable_grad(), self.context():
            return run_call(active.instance.plan, {call.op: self.ops[call.op].module}, call, arguments)

    def _forward(self, active: _Active, number: int) -> None:
        call = active.instance.plan.calls[number]
        if call.op < 0:  # a copy keeps nothing
            arguments = active.arrived.get(number) or [active.buffers.read(each) for each in call.arguments]
            active.buffers.write(call.results, run_call(active.instance.plan, {}, call, arguments))
            return
        arguments = self._arguments(active, call.arguments, number)
        results = self._compute(active, call, arguments)
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

    def _backward(self, active: _Active, number: int) -> list[Tensor | None]:
        plan = active.instance.plan
        call = plan.calls[number]
        if not active.learns[number]:
            return [None] * len(call.arguments) if number in active.arrived else []
        with active.lock:
            gradients = [active.buffers.gradient(each) for each in call.results]
        if call.op < 0:
            devices = [plan.columns[each.column].device for each in call.arguments]
            of_arguments = [None if each is None else each.to(to) for each, to in zip(gradients, devices, strict=True)]
            if number in active.arrived:
                return of_arguments
        else:
            of_arguments = self._differentiate(active, number, gradients)
        active.add_gradients(call.arguments, of_arguments)
        return []

    def _differentiate(self, active: _Active, number: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of a call's arguments, and add those of its weights to the op's, which may update it."""
        call, kept = active.instance.plan.calls[number], active.kept.pop(number)
        state, results = self.ops[call.op], kept.results
        if kept.version != state.version:
            results = self._compute(active, call, kept.arguments)
        found = differentiate(results, gradients, [*kept.arguments, *state.weights])
        if state.weights:
            self._staleness[Staleness(call.op, state.version - kept.version)] += 1
            state.add(found[len(kept.arguments) :])
            frequency = self.min_update_frequency[call.op]
            if frequency is not None and state.pending >= frequency:
                state.update()
        return found[: len(kept.arguments)]

    def outgoing(self, number: int, copy: int) -> list[Tensor]:
        """Return the values that a copy in another process reads."""
        active = self.in_flight[number]
        return [active.buffers.read(each) for each in active.instance.plan.calls[copy].arguments]

    def incoming(self, number: int, copy: int, is_backward: bool, tensors: list[Any]) -> None:
        """Take the values that a copy here reads, or the gradients that a copy in another process has computed."""
        active = self.in_flight[number]
        if not is_backward:
            active.arrived[copy] = tensors
            return
        active.add_gradients(active.instance.plan.calls[copy].arguments, tensors)

    def _own(self, rank: int, clock: _Clock, update: bool) -> tuple[Any, ...]:
        """Return what only this process knows at the end of a run: the state of its ops, and results."""
        if self.flush_every or update:
            self.update()
        states = {op: each.state() for op, each in self.ops.items() if each.worker == rank}
        return states, self._losses, self._staleness, clock.busy[rank], clock.first, clock.last

    def _merge(self, rank: int, clock: _Clock, found: Sequence[tuple[Any, ...]]) -> None:
        """Take what the other processes have returned from `_own`, by rank."""
        for worker, (states, losses, staleness, busy, first, last) in enumerate(found):
            if worker != rank:
                self._losses |= losses
                self._staleness += staleness
                clock.busy[worker], clock.first = busy, min(clock.first, first)
                clock.last = max(clock.last, last)
                for op, state in states.items():
                    self.ops[op].restore(state)


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
