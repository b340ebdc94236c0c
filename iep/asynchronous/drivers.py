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
from typing import NamedTuple, TypeVar

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


def run_threads(
    conductor: Conductor,
    num_workers: int,
    instances: Iterable[T],
    begin: Begin,
    run: Callable[[WorkerTask], object],
    note: Note,
) -> None:
    """Run the instances on a thread for each worker.

    The calling thread prepares the instances. If a task or the preparation of an instance raises an exception, or a
    signal raises one in the calling thread, the workers end after their current tasks, and the exception is raised.
    """
    lock = threading.Lock()
    work, news = [threading.Condition(lock) for _ in range(num_workers)], threading.Condition(lock)
    queues: list[list] = [[] for _ in range(num_workers)]
    failures: list[BaseException] = []
    is_over, began = False, time.perf_counter()

    def push(tasks: Sequence[WorkerTask]) -> None:
        for task in tasks:
            worker = conductor.step(task).worker
            heappush(queues[worker], (priority(task), task))
            work[worker].notify()

    def loop(worker: int) -> None:
        try:
            while True:
                with lock:
                    work[worker].wait_for(lambda: queues[worker] or is_over)
                    if is_over:
                        return
                    task = heappop(queues[worker])[1]
                    op = conductor.step(task).op
                start = time.perf_counter()
                run(task)
                end = time.perf_counter()
                with lock:
                    note(Record(worker, start - began, end - began, task, op))
                    push(conductor.done(task))
                    news.notify()
        except BaseException as error:  # raised again in the calling thread
            with lock:
                failures.append(error)
                news.notify()

    threads = [threading.Thread(target=loop, args=(each,), name=f"worker {each}") for each in range(num_workers)]
    try:
        for thread in threads:
            thread.start()
        for instance in instances:
            with lock:
                news.wait_for(lambda: failures or conductor.can_admit)
            if failures:
                break
            steps = begin(conductor.num_admitted, instance)
            with lock:
                push(conductor.admit(steps))
        with lock:
            news.wait_for(lambda: failures or not conductor.in_flight)
    finally:
        with lock:
            is_over = True
            for condition in work:
                condition.notify()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if failures:
        raise failures[0]


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
