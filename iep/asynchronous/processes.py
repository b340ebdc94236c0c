"""A worker in each process of a job, on one or several machines; messages go from process to process by gloo.

Every process goes over the same instances in the same order and knows all steps of each, but runs the tasks of its own
worker only, whose number is its rank. Where a step reads one of another worker, as copies and losses do, a message says
that the task is done and carries tensors: values forward, gradients back. Another message says that a process has done
its part of an instance, so that all processes admit instances under the same condition.

One thread for each other process receives its messages, one runs tasks, and the calling thread prepares instances. A
process that fails tells the others why. One that ends, or is silent for too long, ends the run in all others.
"""

import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from iep.asynchronous.conductor import Conductor, PlanStep, WorkerTask, priority
from iep.asynchronous.drivers import Note, Record

SILENCE = timedelta(seconds=300)
"""The time without a message after which another process is taken for lost."""
ALIGNMENT = 16
"""The number of bytes whose multiples are the offsets of the tensors in a message."""

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another process of the job has failed, has ended, or is silent."""


class Message(NamedTuple):
    """What one process tells another; with no value at all, that it has done all instances."""

    task: WorkerTask | None = None
    """A task that is done, for which tasks of the receiver wait."""
    copy: int | None = None
    """The copy that reads the values or has computed the gradients which the message carries."""
    finished: int | None = None
    """The number of an instance of which the sender has done its part."""
    failure: str | None = None
    """Why the sender ends the run."""


class LocalTrainer(Protocol):
    """The part of `AsynchronousTrainer` that computes."""

    def begin(self, number: int, instance: Any) -> Sequence[PlanStep]:
        """Prepare an instance, and return its steps."""

    def compute(self, task: WorkerTask) -> None:
        """Compute a task."""

    def outgoing(self, number: int, copy: int, is_backward: bool) -> list[Tensor | None]:
        """Return the values that a copy on another worker reads, or the gradients that a copy has computed."""

    def incoming(self, number: int, copy: int, is_backward: bool, tensors: list[Tensor | None]) -> None:
        """Take what `outgoing` has returned in another process."""


class LocalConductor(Conductor):
    """Knows which tasks of one worker are ready; those of the others are done when their messages say so."""

    def __init__(self, conductor: Conductor, worker: int, num_workers: int):
        super().__init__(conductor.max_active_keys, conductor.flush_every)
        self.worker, self.num_workers = worker, num_workers
        self.awaited_words: dict[int, int] = {}
        """The number of workers that have not done their part of each instance in flight."""

    def admit(self, steps: Sequence[PlanStep]) -> list[WorkerTask]:
        """Admit an instance, and return the tasks of this worker that are ready at once."""
        number = self.num_admitted
        ready = super().admit(steps)
        self.in_flight[number].remaining = sum(step.worker == self.worker for step in steps)
        self.awaited_words[number] = self.num_workers
        return self._own(ready)

    def done(self, task: WorkerTask) -> list[WorkerTask]:
        """Record that a task of any worker is done, and return those of this worker that it makes ready."""
        ready = self._own(self.unblocked(task))
        if task.is_backward and self.step(task).worker == self.worker:
            self.in_flight[task.instance].remaining -= 1
        return ready

    def finished(self, number: int) -> None:
        """Record that a worker has done its part of an instance, which leaves with the last worker."""
        self.awaited_words[number] -= 1
        if not self.awaited_words[number]:
            del self.awaited_words[number], self.in_flight[number]

    def _own(self, tasks: Sequence[WorkerTask]) -> list[WorkerTask]:
        return [task for task in tasks if self.step(task).worker == self.worker]


class Peers:
    """The processes of a job of `torch.distributed`, each of which is a worker. All of them must create it together.

    Args:
        silence: the time without a message after which another process is taken for lost.
    """

    def __init__(self, silence: timedelta = SILENCE):
        self.rank, self.size, self.silence = dist.get_rank(), dist.get_world_size(), silence
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.group = dist.new_group(backend="gloo", timeout=silence)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def drive(self, trainer: LocalTrainer, conductor: Conductor, instances: Iterable[Any], note: Note) -> None:
        """Run the tasks of this process's worker until all instances are done in all processes.

        Raises:
            PeerError: another process has failed, has ended, or is silent; the message names it.
        """
        local, lock = LocalConductor(conductor, self.rank, self.size), threading.Lock()
        work, news = threading.Condition(lock), threading.Condition(lock)
        queue: list[tuple[Any, WorkerTask]] = []
        early: dict[int, list[tuple[Message, list]]] = defaultdict(list)
        """Messages about instances that this process has not admitted yet."""
        failures: list[BaseException] = []
        is_over, began = False, time.perf_counter()

        def push(tasks: Sequence[WorkerTask]) -> None:
            for task in tasks:
                heappush(queue, (priority(task), task))
            work.notify()

        def take(message: Message, tensors: list[Tensor | None]) -> None:
            number = message.finished if message.task is None else message.task.instance
            if number >= local.num_admitted:
                early[number].append((message, tensors))
            elif message.task is None:
                local.finished(number)
                news.notify()
            else:
                if message.copy is not None:
                    trainer.incoming(number, message.copy, message.task.is_backward, tensors)
                push(local.done(message.task))

        def finish_part(number: int) -> None:
            if not local.in_flight[number].remaining:
                for rank in self.others:
                    self._send(rank, Message(finished=number))
                local.finished(number)
                news.notify()

        def receive(rank: int) -> None:
            try:
                while (received := self._receive(rank))[0] != Message():
                    if received[0].failure is not None:
                        raise PeerError(f"worker {rank} has failed: {received[0].failure}")
                    with lock:
                        take(*received)
            except BaseException as error:  # raised again in the calling thread
                fail(error)

        def loop() -> None:
            try:
                while True:
                    with lock:
                        work.wait_for(lambda: queue or is_over)
                        if is_over:
                            return
                        task = heappop(queue)[1]
                        step = local.step(task)
                    start = time.perf_counter()
                    trainer.compute(task)
                    record = Record(self.rank, start - began, time.perf_counter() - began, task, step.op)
                    with lock:
                        note(record)
                        for rank, copy in self._readers(local, task):
                            sent = [] if copy is None else trainer.outgoing(task.instance, copy, task.is_backward)
                            self._send(rank, Message(task, copy), sent)
                        push(local.done(task))
                        if task.is_backward:
                            finish_part(task.instance)
            except BaseException as error:  # raised again in the calling thread
                fail(error)

        def fail(error: BaseException) -> None:
            with lock:
                failures.append(error)
                news.notify()

        threads = [threading.Thread(target=loop, name="worker", daemon=True)]
        threads += [
            threading.Thread(target=receive, args=(rank,), name="receiver", daemon=True) for rank in self.others
        ]
        try:
            for thread in threads:
                thread.start()
            for instance in instances:
                with lock:
                    news.wait_for(lambda: failures or local.can_admit)
                if failures:
                    break
                number = local.num_admitted
                steps = trainer.begin(number, instance)
                with lock:
                    push(local.admit(steps))
                    for message, tensors in early.pop(number, ()):
                        take(message, tensors)
                    if number in local.in_flight and not local.in_flight[number].remaining:
                        finish_part(number)
            with lock:
                news.wait_for(lambda: failures or not local.in_flight)
            if failures:
                raise failures[0]
        except BaseException as error:
            if not isinstance(error, PeerError):
                with lock, suppress(RuntimeError):
                    for rank in self.others:
                        self._send(rank, Message(failure=f"{type(error).__name__}: {error}"))
            raise
        finally:
            with lock:
                is_over = True
                work.notify_all()
            threads[0].join()
        for rank in self.others:
            self._send(rank, Message())
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        while self._sent:
            self._sent.popleft()[0].wait()

    def gather(self, value: T) -> list[T]:
        """Return the picklable values of all processes by rank, in every process."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def _readers(self, local: LocalConductor, task: WorkerTask) -> Iterator[tuple[int, int | None]]:
        """Yield each other worker that waits for a task of this one, with the copy whose tensors it gets, or None."""
        instance = local.in_flight[task.instance]
        step, last = instance.steps[task.call], len(instance.steps) - 1
        if task.is_backward:
            is_copy = step.op < 0 and task.call < last
            readers = {instance.steps[read].worker: task.call if is_copy else None for read in step.reads}
        else:
            readers = {}
            for call in instance.readers[task.call]:
                readers.setdefault(instance.steps[call].worker, call if call < last else None)
        yield from ((rank, copy) for rank, copy in readers.items() if rank != self.rank)

    def _send(self, rank: int, message: Message, tensors: Sequence[Tensor | None] = ()) -> None:
        """Send a message without waiting; the caller holds a lock, so that its two parts stay together."""
        kinds = [None if each is None else (each.dtype, each.shape) for each in tensors]
        parts = [torch.frombuffer(bytearray(pickle.dumps((message, kinds))), dtype=torch.uint8)]
        parts += [each.contiguous().view(-1).view(torch.uint8) for each in tensors if each is not None]
        packet = torch.cat([padded for each in parts for padded in (each, each.new_zeros(-len(each) % ALIGNMENT))])
        for part in (torch.tensor([len(parts[0]), len(packet)]), packet):
            self._sent.append((dist.isend(part, rank, group=self.group), part))
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()

    def _receive(self, rank: int) -> tuple[Message, list[Tensor | None]]:
        """Return the next message of a process.

        Raises:
            PeerError: the process has ended, or has sent nothing for too long.
        """
        sizes = torch.empty(2, dtype=torch.int64)
        try:
            dist.recv(sizes, rank, group=self.group)
            packet = torch.empty(sizes[1], dtype=torch.uint8)
            dist.recv(packet, rank, group=self.group)
        except RuntimeError as error:
            what = "ended"
            if "imed out" in str(error):
                what = f"been silent for {self.silence.total_seconds():g} seconds"
            raise PeerError(f"worker {rank} of {self.size} has {what}") from None
        message, kinds = pickle.loads(packet[: sizes[0]].numpy().tobytes())
        tensors, start = [], int(sizes[0])
        for kind in kinds:
            if kind is None:
                tensors.append(None)
                continue
            start += -start % ALIGNMENT
            dtype, shape = kind
            stop = start + shape.numel() * dtype.itemsize
            tensors.append(packet[start:stop].view(dtype).view(shape))
            start = stop
        return message, tensors
