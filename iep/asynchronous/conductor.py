"""The steps of each instance's plan -> the tasks that are ready. Pure Python, without tensors, threads or clocks.

Asynchronous training (Gaunt et al. 2017, AMPNet) keeps several *instances*, small minibatches with a plan each, in
flight at once. A task is one call of one instance, forward or backward; it belongs to the worker of its call. The last
step of an instance is its loss, which has a backward task only. A forward task is ready when the calls that it reads
are done, and a backward task when the backward tasks of all its readers are done. A task never waits while it runs.
The task of the oldest instance in flight that comes next in the order of its plan is always ready or running, so that
no order of the workers can deadlock.

`drivers.py` runs the tasks; `trainer.py` says what a task computes.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

COPY, LOSS = -1, -2
"""The ops of a copy to another worker and of the loss; those of modules are 0 or greater."""


class PlanStep(NamedTuple):
    """One call of an instance's plan, or its loss, which is the last step and reads every call that no other reads."""

    op: int
    worker: int
    reads: tuple[int, ...]
    """The positions of the earlier calls whose results it reads, each once."""


class WorkerTask(NamedTuple):
    """The forward or backward pass of one step of one instance."""

    instance: int
    call: int
    is_backward: bool


class _InFlight:
    """An instance whose tasks are not all done."""

    def __init__(self, steps: Sequence[PlanStep], num_own: int, num_processes: int):
        self.steps = steps
        self.readers: list[list[int]] = [[] for _ in steps]
        for call, step in enumerate(steps):
            for read in step.reads:
                self.readers[read].append(call)
        self.missing = [[len(step.reads) for step in steps], [len(readers) for readers in self.readers]]
        """The number of tasks that each task waits for, forward and backward."""
        self.missing[True][-1] = len(steps[-1].reads)
        self.remaining, self.unfinished = num_own, num_processes
        """The number of backward tasks here that are not done, and of processes that have not done their part."""


class Conductor:
    """Knows which tasks are ready, and admits new instances.

    Instances are numbered from 0 in the order of admission. Instance n is admitted only if n < oldest + K, where oldest
    is the number of the oldest instance in flight and K is `max_active_keys`. At most K instances are therefore in
    flight, and a slow instance delays those that follow, so that the number of updates during its flight is limited.
    docs/asynchronous.md states the bound. With `flush_every`, an instance whose number is a multiple of it is admitted
    only when nothing is in flight.

    Where every worker is a process, each has a conductor that admits the same instances and knows the tasks of all
    workers, but returns those of its own worker only. An instance then leaves when all processes have done their part.

    Args:
        worker: the worker of this process; None if all workers are here.
        num_processes: the number of processes.

    Raises:
        ValueError: `max_active_keys` or `flush_every` is less than 1.
    """

    def __init__(
        self, max_active_keys: int, flush_every: int | None = None, worker: int | None = None, num_processes: int = 1
    ):
        for name, number in (("max_active_keys", max_active_keys), ("flush_every", flush_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, expected 1 or greater")
        self.max_active_keys, self.flush_every = max_active_keys, flush_every
        self.worker, self.num_processes = worker, num_processes
        self.num_admitted = 0
        self.in_flight: dict[int, _InFlight] = {}

    @property
    def last_needed(self) -> int:
        """The number of the last instance that must be done, as all before it, when the next one is admitted."""
        number = self.num_admitted
        return number - (1 if self.flush_every and number % self.flush_every == 0 else self.max_active_keys)

    @property
    def can_admit(self) -> bool:
        """Whether the next instance may be admitted now."""
        oldest = next(iter(self.in_flight), self.num_admitted)  # dicts keep the order of insertion
        return oldest > self.last_needed

    def admit(self, steps: Sequence[PlanStep]) -> list[WorkerTask]:
        """Admit an instance, whose number is `num_admitted`, and return its tasks here that are ready at once."""
        assert self.can_admit
        number = self.num_admitted
        num_own = sum(self.worker in (None, step.worker) for step in steps)
        self.in_flight[number] = _InFlight(steps, num_own, self.num_processes)
        self.num_admitted += 1
        first = [WorkerTask(number, call, False) for call, step in enumerate(steps[:-1]) if not step.reads]
        ready = self._here(first or [WorkerTask(number, len(steps) - 1, True)])
        if not num_own:
            self.finished(number)
        return ready

    def done(self, task: WorkerTask) -> list[WorkerTask]:
        """Record that a task of any worker is done, and return the tasks here that wait for no other one now."""
        instance, last = self.in_flight[task.instance], len(self.in_flight[task.instance].steps) - 1
        waiting = instance.steps[task.call].reads if task.is_backward else instance.readers[task.call]
        ready = []
        for call in waiting:
            is_backward = task.is_backward or call == last
            missing = instance.missing[is_backward]
            missing[call] -= 1
            if not missing[call]:
                ready.append(WorkerTask(task.instance, call, is_backward))
        ready = self._here(ready)
        if task.is_backward and self._here([task]):
            instance.remaining -= 1
            if not instance.remaining:
                self.finished(task.instance)
        return ready

    def finished(self, number: int) -> None:
        """Record that a process has done its part of an instance, which leaves with the last one."""
        self.in_flight[number].unfinished -= 1
        if not self.in_flight[number].unfinished:
            del self.in_flight[number]

    def is_finished(self, number: int) -> bool:
        """Return whether all tasks here of an admitted instance are done."""
        return number not in self.in_flight or not self.in_flight[number].remaining

    def listeners(self, task: WorkerTask) -> Iterator[tuple[int, int | None]]:
        """Yield each other worker that waits for a task here, with the copy whose tensors it gets, or None.

        A plan has at most one copy of a call's results on each worker, and a copy reads one call.
        """
        instance = self.in_flight[task.instance]
        step, last = instance.steps[task.call], len(instance.steps) - 1
        found: dict[int, int | None] = {}
        if task.is_backward:
            found = {instance.steps[read].worker: task.call if step.op == COPY else None for read in step.reads}
        else:
            for call in instance.readers[task.call]:
                found.setdefault(instance.steps[call].worker, call if call < last else None)
        yield from ((worker, copy) for worker, copy in found.items() if worker != step.worker)

    def _here(self, tasks: list[WorkerTask]) -> list[WorkerTask]:
        return tasks if self.worker is None else [task for task in tasks if self.step(task).worker == self.worker]

    def step(self, task: WorkerTask) -> PlanStep:
        """Return the step of a task of an instance in flight."""
        return self.in_flight[task.instance].steps[task.call]


def priority(task: WorkerTask) -> tuple[bool, int, int]:
    """Return the key by which a worker chooses: backward first, then the oldest instance, then the plan's order.

    The order of a backward pass is the reverse of that of the plan.
    """
    return not task.is_backward, task.instance, -task.call if task.is_backward else task.call
