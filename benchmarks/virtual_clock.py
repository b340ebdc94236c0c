"""Run the tasks of instances one at a time under a virtual clock: a driver of `AsynchronousTrainer` for experiments."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from iep.asynchronous.conductor import Begin, Conductor, Note, PlanStep, Record, T, WorkerTask, priority
from iep.asynchronous.trainer import AsynchronousTrainer


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
            for other in awaited(conductor, task):
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
        ready = conductor.done(task)
        note(Record(worker, start, clock[worker], task, step.op))
        push(ready, 0.0)
        if task.instance not in conductor.in_flight:
            left[task.instance] = max(ends.pop(task.instance).values())
            admit()


def awaited(conductor: Conductor, task: WorkerTask) -> list[WorkerTask]:
    """Return the tasks that a task of an instance in flight waited for."""
    instance = conductor.in_flight[task.instance]
    if task.is_backward and task.call < len(instance.steps) - 1:
        return [WorkerTask(task.instance, call, True) for call in instance.readers[task.call]]
    return [WorkerTask(task.instance, call, False) for call in instance.steps[task.call].reads]


def message_bytes(trainer: AsynchronousTrainer, task: WorkerTask) -> int:
    """Return the number of bytes that the copy of a task of an instance in flight sends."""
    active = trainer.in_flight[task.instance]
    plan, kinds = active.instance.plan, active.buffers.kinds
    call = plan.calls[task.call]
    of_rows = ((kinds[each.column], call.size * (each.count or 1)) for each in call.arguments)
    return sum(rows * kind.shape.numel() * kind.dtype.itemsize for kind, rows in of_rows)
