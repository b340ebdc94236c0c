"""A worker in each process of a job, on one or several machines; messages go from process to process by gloo.

Every process goes over the same instances in the same order and knows all steps of each, but runs the tasks of its own
worker only, whose number is its rank. Where a step reads one of another worker, as copies and losses do, a message says
that the task is done and carries tensors: values forward, gradients back. Another message says that a process has done
its part of an instance, so that all processes admit instances under the same condition.

In each process, two threads for each other process send and receive, one runs tasks, and the calling thread prepares
instances. A process that fails tells the others why. A process without other messages sends empty ones as
heartbeats, so that one that is silent for long has stopped.
"""

import pickle
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from heapq import heappop, heappush
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from iep.asynchronous.conductor import Conductor, PlanStep, WorkerTask, priority
from iep.asynchronous.drivers import Note, Record

SILENCE_SECONDS = 300.0
"""The time without a message after which another process is taken for lost."""
GOODBYE_SECONDS = 5.0
"""The time for which a process that fails waits until the others know why."""
ALIGNMENT = 16
"""The number of bytes whose multiples are the offsets of the tensors in a message."""

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another process of the job has failed, has ended, or is silent."""


class Message(NamedTuple):
    """A message of one process to another. An empty one is a heartbeat."""

    task: WorkerTask | None = None
    """A task that is done, for which tasks of the receiver wait."""
    copy: int | None = None
    """The copy that reads the values, or has computed the gradients, which the message carries."""
    finished: int | None = None
    """The number of an instance of which the sender has done its part."""
    value: tuple[Any] | None = None
    """What the sender contributes to an exchange."""
    failure: str | None = None
    """Why the sender ends the run."""
    is_last: bool = False


class LocalTrainer(Protocol):
    """The part of `AsynchronousTrainer` that computes."""

    def begin(self, number: int, instance: Any) -> Sequence[PlanStep]:
        """Prepare an instance, and return its steps."""

    def compute(self, task: WorkerTask) -> list[Tensor | None]:
        """Compute a task, and return the gradients that go to another process, if the task has any."""

    def outgoing(self, number: int, copy: int) -> list[Tensor]:
        """Return the values that a copy on another worker reads."""

    def incoming(self, number: int, copy: int, is_backward: bool, tensors: list[Tensor | None]) -> None:
        """Take the values that a copy of this worker reads, or the gradients that one of another has computed."""


class LocalConductor(Conductor):
    """Knows which tasks of one worker are ready; those of the others are done when their messages say so."""

    def __init__(self, conductor: Conductor, worker: int, num_workers: int):
        super().__init__(conductor.max_active_keys, conductor.flush_every)
        self.worker, self.num_workers = worker, num_workers
        self.unfinished: dict[int, int] = {}
        """The number of workers that have not done their part of each instance in flight."""

    def admit(self, steps: Sequence[PlanStep]) -> list[WorkerTask]:
        """Admit an instance, and return the tasks of this worker that are ready at once."""
        number = self.num_admitted
        ready = super().admit(steps)
        self.in_flight[number].remaining = sum(step.worker == self.worker for step in steps)
        self.unfinished[number] = self.num_workers
        return self._own(ready)

    def done(self, task: WorkerTask) -> list[WorkerTask]:
        """Record that a task of any worker is done, and return those of this worker that it makes ready."""
        ready = self._own(self.unblocked(task))
        if task.is_backward and self.step(task).worker == self.worker:
            self.in_flight[task.instance].remaining -= 1
        return ready

    def finished(self, number: int) -> None:
        """Record that a worker has done its part of an instance, which leaves with the last worker."""
        self.unfinished[number] -= 1
        if not self.unfinished[number]:
            del self.unfinished[number], self.in_flight[number]

    def listeners(self, task: WorkerTask) -> Iterator[tuple[int, int | None]]:
        """Yield each other worker that waits for a task of this one, with the copy whose tensors it gets, or None.

        A plan has at most one copy of a call's results on each worker, and a copy reads one call.
        """
        instance = self.in_flight[task.instance]
        step, last = instance.steps[task.call], len(instance.steps) - 1
        if task.is_backward:
            is_copy = step.op < 0 and task.call < last
            found = {instance.steps[read].worker: task.call if is_copy else None for read in step.reads}
        else:
            found = {}
            for call in instance.readers[task.call]:
                found.setdefault(instance.steps[call].worker, call if call < last else None)
        yield from ((worker, copy) for worker, copy in found.items() if worker != self.worker)

    def _own(self, tasks: Sequence[WorkerTask]) -> list[WorkerTask]:
        return [task for task in tasks if self.step(task).worker == self.worker]


class Peers:
    """The processes of a job of `torch.distributed`, each of which is a worker. All of them must create it together.

    Args:
        silence: the seconds without a message after which another process is taken for lost.
    """

    def __init__(self, silence: float = SILENCE_SECONDS):
        self.rank, self.size, self.silence = dist.get_rank(), dist.get_world_size(), silence
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        # If an operation of gloo times out, the connections to all processes break. Silence is noticed before that.
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3 * silence))
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._failures: list[BaseException] = []
        self._heard: dict[int, float] = {}
        """When the last message of each other process came; without those that have sent their last one."""
        self._values: dict[int, deque[tuple[Any]]] = {}
        self._outbox: dict[int, queue.SimpleQueue[tuple[Message, Sequence[Tensor | None]]]] = {}

    def drive(
        self,
        trainer: LocalTrainer,
        conductor: Conductor,
        instances: Iterable[Any],
        note: Note,
        finish: Callable[[], T],
    ) -> list[T]:
        """Run the tasks of this process's worker until all instances are done in all processes.

        Args:
            finish: called when nothing is in flight. Its results of all processes are returned, by rank.

        Raises:
            PeerError: another process has failed, has ended, or is silent; the message names it.
        """
        local = LocalConductor(conductor, self.rank, self.size)
        work, ready = threading.Condition(self._lock), list[tuple[Any, WorkerTask]]()
        early: dict[int, list[tuple[Message, list]]] = defaultdict(list)
        """Messages about instances that this process has not admitted yet."""
        is_over, began = False, time.perf_counter()

        def push(tasks: Sequence[WorkerTask]) -> None:
            for task in tasks:
                heappush(ready, (priority(task), task))
            work.notify()

        def take(message: Message, tensors: list[Tensor | None]) -> None:
            if message.task is None and message.finished is None:
                return
            number = message.finished if message.task is None else message.task.instance
            if number >= local.num_admitted:
                early[number].append((message, tensors))
            elif message.task is None:
                local.finished(number)
            else:
                if message.copy is not None:
                    trainer.incoming(number, message.copy, message.task.is_backward, tensors)
                push(local.done(message.task))

        def finish_part(number: int) -> None:
            if not local.in_flight[number].remaining:
                self._tell_all(Message(finished=number))
                local.finished(number)
                self._news.notify()

        def loop() -> None:
            while True:
                with self._lock:
                    work.wait_for(lambda: ready or is_over)
                    if is_over:
                        return
                    task = heappop(ready)[1]
                    op = local.step(task).op
                start = time.perf_counter()
                gradients = trainer.compute(task)
                record = Record(self.rank, start - began, time.perf_counter() - began, task, op)
                with self._lock:
                    note(record)
                    for rank, copy in local.listeners(task):
                        values = [] if copy is None or task.is_backward else trainer.outgoing(task.instance, copy)
                        self._outbox[rank].put((Message(task, copy), gradients or values))
                    push(local.done(task))
                    if task.is_backward:
                        finish_part(task.instance)

        self._failures.clear()
        self._heard = dict.fromkeys(self.others, time.monotonic())
        self._values = {rank: deque() for rank in self.others}
        self._outbox = {rank: queue.SimpleQueue() for rank in self.others}
        worker = self._start(loop)
        threads = [self._start(self._send, rank) for rank in self.others]
        threads += [self._start(self._receive, rank, take) for rank in self.others]
        try:
            for instance in instances:
                with self._lock:
                    self._wait(lambda: local.can_admit)
                number = local.num_admitted
                steps = trainer.begin(number, instance)
                with self._lock:
                    push(local.admit(steps))
                    for message, tensors in early.pop(number, ()):
                        take(message, tensors)
                    if number in local.in_flight:
                        finish_part(number)
            with self._lock:
                self._wait(lambda: not local.in_flight)
            found = self.exchange(finish())
            self._tell_all(Message(is_last=True))
            with self._lock:
                self._wait(lambda: not self._heard)
            return found
        except BaseException as error:
            what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            own = f"worker {self.rank} of {self.size} has failed: {what}"
            self._tell_all(Message(failure=str(error) if isinstance(error, PeerError) else own, is_last=True))
            raise
        finally:
            with self._lock:
                is_over = True
                work.notify()
            worker.join()
            deadline = time.monotonic() + GOODBYE_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def exchange(self, value: T) -> list[T]:
        """Return the picklable values of all processes by rank. The iterator over the instances may call this, too.

        Raises:
            PeerError: see `drive`.
        """
        self._tell_all(Message(value=(value,)))
        with self._lock:
            self._wait(lambda: all(self._values.values()))
            found = {rank: values.popleft()[0] for rank, values in self._values.items()}
        return [found.get(rank, value) for rank in range(self.size)]

    def _wait(self, condition: Callable[[], object]) -> None:
        """Wait for a condition, and raise the first error of a thread."""
        while not self._news.wait_for(lambda: self._failures or condition(), self.silence / 10):
            for rank, heard in self._heard.items():
                if time.monotonic() - heard > self.silence:
                    raise PeerError(f"worker {rank} of {self.size} has been silent for {self.silence:g} seconds")
        if self._failures:
            raise self._failures.pop(0)  # an error that is kept would keep the frames that it passes

    def _start(self, target: Callable[..., None], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                target(*arguments)
            except BaseException as error:  # raised again in the calling thread
                with self._lock:
                    self._failures.append(error)
                    self._news.notify()

        thread = threading.Thread(target=run, name=f"worker {self.rank}", daemon=True)
        thread.start()
        return thread

    def _tell_all(self, message: Message) -> None:
        for outbox in self._outbox.values():
            outbox.put((message, ()))

    def _send(self, rank: int) -> None:
        """Send the messages to a process, until the last one. In the meantime, send empty ones."""
        message = Message()
        while not message.is_last:
            try:
                message, tensors = self._outbox[rank].get(timeout=self.silence / 10)
            except queue.Empty:
                message, tensors = Message(), ()
            kinds = [None if each is None else (each.dtype, each.shape) for each in tensors]
            parts = [torch.frombuffer(bytearray(pickle.dumps((message, kinds))), dtype=torch.uint8)]
            parts += [each.reshape(-1).view(torch.uint8) for each in tensors if each is not None]
            packet = torch.cat([padded for each in parts for padded in (each, each.new_zeros(-len(each) % ALIGNMENT))])
            with self._naming(rank):
                dist.send(torch.tensor([len(parts[0]), len(packet)]), rank, group=self.group)
                dist.send(packet, rank, group=self.group)

    def _receive(self, rank: int, take: Callable[[Message, list[Tensor | None]], None]) -> None:
        """Take the messages of a process, until the last one."""
        message = Message()
        while not message.is_last:
            sizes = torch.empty(2, dtype=torch.int64)
            with self._naming(rank):
                dist.recv(sizes, rank, group=self.group)
                packet = torch.empty(int(sizes[1]), dtype=torch.uint8)
                dist.recv(packet, rank, group=self.group)
            message, kinds = pickle.loads(packet[: sizes[0]].numpy().tobytes())
            if message.failure is not None:
                raise PeerError(message.failure)
            with self._lock:
                self._heard[rank] = time.monotonic()
                if message.is_last:
                    del self._heard[rank]
                elif message.value is not None:
                    self._values[rank].append(message.value)
                else:
                    take(message, list(_unpack(packet, int(sizes[0]), kinds)))
                if message.task is None:
                    self._news.notify()

    @contextmanager
    def _naming(self, rank: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise PeerError(f"worker {rank} of {self.size} has ended") from None


def _unpack(packet: Tensor, start: int, kinds: Sequence[tuple[torch.dtype, torch.Size] | None]) -> Iterator:
    """Yield the tensors of a message, which share its memory."""
    for kind in kinds:
        if kind is None:
            yield None
            continue
        dtype, shape = kind
        start += -start % ALIGNMENT
        stop = start + shape.numel() * dtype.itemsize
        yield packet[start:stop].view(dtype).view(shape)
        start = stop
