"""Run the tasks of instances on W workers: on threads, or one at a time under a virtual clock.

Both drivers admit the instances in order, run every task once, and return when nothing is in flight. On its worker,
the task with the lowest `priority` is next. A driver knows nothing of tensors: `begin` prepares an instance and returns
its steps, `run` computes a task, and `note` gets the record of every task when it is done, one at a time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from iep.asynchronous.conductor import Conductor, PlanStep, WorkerTask, priority

T = TypeVar("T")
Begin = Callable[[int, T], Sequence[PlanStep]]
"""The number of an instance, and the instance -> its steps."""
Note = Callable[["Record"], object]


class Record(NamedTuple):
    """When a task ran, in seconds since the driver started."""

    worker: int
    start: float
    end: float
    task: WorkerTask
    op: int


class Threads:
    """A thread for each of some workers, which runs the tasks that are ready; the calling thread prepares instances.

    Methods that say so are called with the lock held.
    """

    def __init__(
        self, conductor: Conductor, workers: Iterable[int], run: Callable[[WorkerTask], object], note: Note
    ) -> None:
        self.conductor, self.run, self.note, self.began = conductor, run, note, time.perf_counter()
        self.lock = threading.Lock()
        self.news = threading.Condition(self.lock)
        self.work = {worker: threading.Condition(self.lock) for worker in workers}
        self.queues: dict[int, list] = {worker: [] for worker in self.work}
        self.failures: list[BaseException] = []
        self.is_over = False

    def drive(self, instances: Iterable[T], begin: Begin) -> None:
        """Run the instances, and raise the first error of a thread when all workers have ended their tasks."""
        threads = []
        try:
            for worker in self.queues:
                threads.append(self.start(self.loop, worker))
            for instance in instances:
                self.wait(lambda: self.conductor.can_admit)
                steps = begin(self.conductor.num_admitted, instance)
                with self.lock:
                    self.admit(steps)
            self.wait(lambda: not self.conductor.in_flight)
        finally:
            with self.lock:
                self.is_over = True
                for condition in self.work.values():
                    condition.notify()
            for thread in threads:
                thread.join()

    def start(self, target: Callable[..., None], number: int) -> threading.Thread:
        """Start a thread that calls `target(number)`, and keeps its error for the calling thread."""

        def run() -> None:
            try:
                target(number)
            except BaseException as error:
                with self.lock:
                    self.failures.append(error)
                    self.news.notify()

        thread = threading.Thread(target=run, name=f"worker {number}", daemon=True)
        thread.start()
        return thread

    def wait(self, condition: Callable[[], object]) -> None:
        """Wait until a condition holds with the lock, or raise the first error of a thread."""
        with self.lock:
            self.news.wait_for(lambda: self.failures or condition())
            if self.failures:
                raise self.failures.pop(0)  # an error that is kept would keep the frames that it passes

    def loop(self, worker: int) -> None:
        """Run the tasks of a worker."""
        while True:
            with self.lock:
                self.work[worker].wait_for(lambda: self.queues[worker] or self.is_over)
                if self.is_over:
                    return
                task = heappop(self.queues[worker])[1]
                op = self.conductor.step(task).op
            start = time.perf_counter()
            result = self.run(task)
            end = time.perf_counter()
            with self.lock:
                self.note(Record(worker, start - self.began, end - self.began, task, op))
                self.done(task, result)
                self.news.notify()

    def admit(self, steps: Sequence[PlanStep]) -> None:
        """Admit an instance. The lock is held."""
        self.push(self.conductor.admit(steps))

    def done(self, task: WorkerTask, result: Any) -> None:
        """Record that a task of a worker here is done, with the result of `run`. The lock is held."""
        self.push(self.conductor.done(task))

    def push(self, tasks: Sequence[WorkerTask]) -> None:
        """Hand tasks to their workers. The lock is held."""
        for task in tasks:
            worker = self.conductor.step(task).worker
            heappush(self.queues[worker], (priority(task), task))
            self.work[worker].notify()


def run_threads(
    conductor: Conductor,
    num_workers: int,
    instances: Iterable[T],
    begin: Begin,
    run: Callable[[WorkerTask], object],
    note: Note,
) -> None:
    """Run the instances on a thread for each worker.

    If a task or the preparation of an instance raises an exception, or a signal raises one in the calling thread, the
    workers end after their current tasks, and the exception is raised.
    """
    Threads(conductor, range(num_workers), run, note).drive(instances, begin)


def run_virtual(
    conductor: Conductor,
    num_workers: int,
    instances: Iterable[T],
    begin: Begin,
    run: Callable[[WorkerTask], object] | None,
    note: Note,
    cost: Callable[[PlanStep, WorkerTask], float] | None = None,
    delay: Callable[[WorkerTask], float] = lambda _: 0.0,
) -> None:
    """Run the instances in one thread under a virtual clock, whose records are in simulated seconds.

    The next task is always one that can start first: at the time of its worker, or when its messages have arrived. With
    given costs and delays, every run is the same to the last bit.

    Args:
        run: computes a task; None to simulate the costs only.
        cost: the seconds of a task; None to measure those of `run`.
        delay: the seconds for which a message is on its way from one worker to another. The task is the one, forward or
            backward, of the step on the worker that reads the value: the copy. Inputs have no delay.
    """
    clock = [0.0] * num_workers
    arriving: list[list] = [[] for _ in clock]  # by time of arrival
    arrived: list[list] = [[] for _ in clock]  # by priority
    ends: dict[int, dict[WorkerTask, float]] = defaultdict(dict)
    """When each task of an instance in flight ended."""
    left: dict[int, float] = {}
    """When each instance ended whose end no later admission has waited for."""
    freed, waiting, began = 0.0, iter(instances), time.perf_counter

    def push(tasks: Sequence[WorkerTask], at: float) -> None:
        for task in tasks:
            worker = conductor.step(task).worker
            times = [at]
            for other in conductor.awaited(task):
                crosses = conductor.step(other).worker != worker
                times.append(ends[task.instance][other] + (delay(max(task, other)) if crosses else 0.0))
            heappush(arriving[worker], (max(times), priority(task), task))

    def admit() -> None:
        nonlocal freed
        while conductor.can_admit and (instance := next(waiting, None)) is not None:
            needed = [number for number in left if number <= conductor.last_needed]
            freed = max([freed, *map(left.pop, needed)])
            push(conductor.admit(begin(conductor.num_admitted, instance)), freed)

    def start_of(worker: int) -> float:
        if arrived[worker]:
            return clock[worker]
        return max(clock[worker], arriving[worker][0][0]) if arriving[worker] else float("inf")

    admit()
    while conductor.in_flight:
        worker = min(range(num_workers), key=start_of)
        start = start_of(worker)
        while arriving[worker] and arriving[worker][0][0] <= start:
            _, key, task = heappop(arriving[worker])
            heappush(arrived[worker], (key, task))
        task = heappop(arrived[worker])[1]
        step, measured = conductor.step(task), began()
        if run is not None:
            run(task)
        seconds = began() - measured if cost is None else cost(step, task)
        clock[worker] = ends[task.instance][task] = start + seconds
        note(Record(worker, start, clock[worker], task, step.op))
        push(conductor.done(task), 0.0)
        if task.instance not in conductor.in_flight:
            left[task.instance] = max(ends.pop(task.instance).values())
            admit()
