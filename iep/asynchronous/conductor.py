"""The steps of each instance's plan -> tasks, each of which a worker runs when the tasks that it waits for are done.

Asynchronous training (Gaunt et al. 2017, AMPNet) keeps several *instances*, small minibatches with a plan each, in
flight at once. A task is one call of one instance, forward or backward; it belongs to the worker of its call. The last
step of an instance is its loss, which has a backward task only. A forward task is ready when the calls that it reads
are done, and a backward task when the backward tasks of all its readers are done. A task never waits while it runs.
The workers cannot deadlock: the next task of the oldest instance in flight never waits for another instance.

`Conductor` knows which tasks are ready, and `run_threads` runs them on a thread for each worker. Neither knows of
tensors: `trainer.py` says what a task computes.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from queue import PriorityQueue
from typing import Any, NamedTuple, TypeVar

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
        """Record that a task is done, and return those that wait for no other one now.

        An instance leaves with its last task.
        """
        instance, last = self.in_flight[task.instance], len(self.in_flight[task.instance].steps) - 1
        waiting = instance.steps[task.call].reads if task.is_backward else instance.readers[task.call]
        ready = []
        for call in waiting:
            is_backward = task.is_backward or call == last
            missing = instance.missing[is_backward]
            missing[call] -= 1
            if not missing[call]:
                ready.append(WorkerTask(task.instance, call, is_backward))
        if task.is_backward:
            instance.remaining -= 1
            if not instance.remaining:
                del self.in_flight[task.instance]
        return ready

    def step(self, task: WorkerTask) -> PlanStep:
        """Return the step of a task of an instance in flight."""
        return self.in_flight[task.instance].steps[task.call]


def priority(task: WorkerTask) -> tuple[bool, int, int]:
    """Return the key by which a worker chooses: backward first, then the oldest instance, then the plan's order.

    The order of a backward pass is the reverse of that of the plan.
    """
    return not task.is_backward, task.instance, -task.call if task.is_backward else task.call


class Record(NamedTuple):
    """When a task ran, in seconds since the run started."""

    worker: int
    start: float
    end: float
    task: WorkerTask
    op: int


T = TypeVar("T")
Begin = Callable[[int, T], Sequence[PlanStep]]
"""The number of an instance, and the instance -> its steps."""
Note = Callable[[Record], object]


def run_threads(
    conductor: Conductor,
    num_workers: int,
    instances: Iterable[T],
    begin: Begin,
    run: Callable[[WorkerTask], object],
    note: Note,
) -> None:
    """Run the instances on a thread for each worker, and return when nothing is in flight.

    The calling thread prepares and admits the instances in order. Each worker runs the one of its ready tasks with the
    lowest `priority`. If a task or the preparation of an instance raises an exception, or a signal raises one in the
    calling thread, the workers end after their current tasks, and the exception is raised.

    Args:
        begin: prepares an instance, and returns its steps.
        run: computes a task.
        note: gets the record of every task when the conductor knows that it is done, one at a time.
    """
    began = time.perf_counter()
    changed = threading.Condition()
    """Its lock is held to use the conductor. It tells the calling thread of instances that left, and of errors."""
    queues = [PriorityQueue[tuple[Any, WorkerTask | None]]() for _ in range(num_workers)]
    failures: list[BaseException] = []

    def push(tasks: Sequence[WorkerTask]) -> None:
        for entry in sorted((priority(task), task) for task in tasks):  # a worker may take the first at once
            queues[conductor.step(entry[1]).worker].put(entry)

    def work(worker: int) -> None:
        """Run the tasks of a worker, the most urgent first, until its queue holds None."""
        try:
            while (task := queues[worker].get()[1]) is not None:
                start = time.perf_counter()
                run(task)
                end = time.perf_counter()
                with changed:
                    op, ready = conductor.step(task).op, conductor.done(task)
                    note(Record(worker, start - began, end - began, task, op))
                    push(ready)
                    if task.instance not in conductor.in_flight:
                        changed.notify()
        except BaseException as error:
            with changed:
                failures.append(error)
                changed.notify()

    def wait(condition: Callable[[], bool]) -> None:
        with changed:
            changed.wait_for(lambda: failures or condition())
            if failures:
                raise failures.pop(0)  # an error that is kept would keep the frames that it passes

    threads = []
    try:
        for worker in range(num_workers):
            threads.append(threading.Thread(target=work, args=[worker], name=f"worker {worker}", daemon=True))
            threads[-1].start()
        for instance in instances:
            wait(lambda: conductor.can_admit)
            steps = begin(conductor.num_admitted, instance)
            with changed:
                push(conductor.admit(steps))
        wait(lambda: not conductor.in_flight)
    finally:
        for queue in queues:
            queue.put(((-1,), None))  # before all tasks
        for thread in threads:
            thread.join()
