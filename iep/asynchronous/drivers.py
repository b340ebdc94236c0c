"""Run the tasks of instances on workers, each of which is a thread.

A driver admits the instances in order, runs every task once, and returns when nothing is in flight. On its worker, the
task with the lowest `priority` is next. A driver knows nothing of tensors: `begin` prepares an instance and returns its
steps, `run` computes a task, and `note` gets the record of every task when it is done, one at a time.
"""

import threading
import time
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
