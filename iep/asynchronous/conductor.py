"""The steps of each instance's plan -> the tasks that are ready. Pure Python, without tensors, threads or clocks.

Asynchronous training (Gaunt et al. 2017, AMPNet) keeps several *instances*, small minibatches with a plan each, in
flight at once. A task is one call of one instance, forward or backward; it belongs to the worker of its call. The last
step of an instance is its loss, which has a backward task only. A forward task is ready when the calls that it reads
are done, and a backward task when the backward tasks of all its readers are done. A task never waits while it runs.
The task of the oldest instance in flight that comes next in the order of its plan is always ready or running, so that
no order of the workers can deadlock.

`drivers.py` runs the tasks; `trainer.py` says what a task computes.
"""

from collections.abc import Sequence
from typing import NamedTuple

COPY, LOSS = -1, -2
"""The ops of a copy to another worker and of the loss; those of modules are 0 or greater."""
BACKWARD_WEIGHTS = ("current", "forward")
"""The weights that a backward task may use (`trainer.py`)."""


class PlanStep(NamedTuple):
    """One call of an instance's plan, or its loss, which is the last step and reads every call that no other reads."""

    op: int
    worker: int
    reads: tuple[int, ...]
    """The positions of the earlier calls whose results it reads, each once."""
    size: int = 1
    """The number of rows that it computes."""


class WorkerTask(NamedTuple):
    """The forward or backward pass of one step of one instance."""

    instance: int
    call: int
    is_backward: bool


class _InFlight:
    """An instance whose tasks are not all done."""

    def __init__(self, steps: Sequence[PlanStep]):
        self.steps = steps
        self.readers: list[list[int]] = [[] for _ in steps]
        for call, step in enumerate(steps):
            for read in step.reads:
                self.readers[read].append(call)
        self.missing = [[len(step.reads) for step in steps], [len(readers) for readers in self.readers]]
        """The number of tasks that each task waits for, forward and backward."""
        self.missing[True][-1] = len(steps[-1].reads)
        self.remaining = len(steps)
        """The number of backward tasks that are not done."""


class Conductor:
    """Knows which tasks are ready, and admits new instances.

    Instances are numbered from 0 in the order of admission. Instance n is admitted only if n < oldest + K, where oldest
    is the number of the oldest instance in flight and K is `max_active_keys`. At most K instances are therefore in
    flight, and a slow instance delays those that follow, so that the number of updates during its flight is limited.
    docs/asynchronous.md states the bound. With `flush_every`, an instance whose number is a multiple of it is admitted
    only when nothing is in flight.

    Raises:
        ValueError: `max_active_keys` or `flush_every` is less than 1.
    """

    def __init__(self, max_active_keys: int, flush_every: int | None = None):
        for name, number in (("max_active_keys", max_active_keys), ("flush_every", flush_every)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, expected 1 or greater")
        self.max_active_keys, self.flush_every = max_active_keys, flush_every
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
        """Admit an instance, whose number is `num_admitted`, and return its tasks that are ready at once."""
        assert self.can_admit
        number = self.num_admitted
        self.in_flight[number] = _InFlight(steps)
        self.num_admitted += 1
        first = [WorkerTask(number, call, False) for call, step in enumerate(steps[:-1]) if not step.reads]
        return first or [WorkerTask(number, len(steps) - 1, True)]

    def done(self, task: WorkerTask) -> list[WorkerTask]:
        """Record that a task is done, and return the tasks that it makes ready. An instance leaves with its last."""
        ready = self.unblocked(task)
        if task.is_backward:
            instance = self.in_flight[task.instance]
            instance.remaining -= 1
            if not instance.remaining:
                del self.in_flight[task.instance]
        return ready

    def unblocked(self, task: WorkerTask) -> list[WorkerTask]:
        """Return the tasks that wait for no other task now that this one is done."""
        instance, last = self.in_flight[task.instance], len(self.in_flight[task.instance].steps) - 1
        waiting = instance.steps[task.call].reads if task.is_backward else instance.readers[task.call]
        ready = []
        for call in waiting:
            is_backward = task.is_backward or call == last
            missing = instance.missing[is_backward]
            missing[call] -= 1
            if not missing[call]:
                ready.append(WorkerTask(task.instance, call, is_backward))
        return ready

    def step(self, task: WorkerTask) -> PlanStep:
        """Return the step of a task of an instance in flight."""
        return self.in_flight[task.instance].steps[task.call]


def priority(task: WorkerTask) -> tuple[bool, int, int]:
    """Return the key by which a worker chooses: backward first, then the oldest instance, then the plan's order.

    The order of a backward pass is the reverse of that of the plan.
    """
    return not task.is_backward, task.instance, -task.call if task.is_backward else task.call
