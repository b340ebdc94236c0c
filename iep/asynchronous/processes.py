"""A worker in each process of a job, on one or several machines; messages go from process to process by gloo.

Every process goes over the same instances in the same order and knows all steps of each, but runs the tasks of its own
worker only, whose number is its rank. Where a step reads one of another worker, as copies and losses do, a message says
that the task is done and carries tensors: values forward, gradients back. Another message says that a process has done
its part of an instance, so that all processes admit instances under the same condition.

In each process, two threads for each other process send and receive, one runs tasks, and the calling thread prepares
instances. A process that fails tells the others why. An operation of gloo that times out names a process that is lost.
"""

import queue
import re
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from iep.asynchronous.conductor import Conductor, PlanStep, WorkerTask
from iep.asynchronous.drivers import Note, Threads

TIMEOUT_SECONDS = 600.0
"""The time without a message after which another process is taken for lost; the longest task takes less."""
LAST_SECONDS = 5.0
"""The time for which a process that fails waits until the others know why."""

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another process of the job has failed, has ended, or is silent."""


class Message(NamedTuple):
    """A message of one process to another."""

    task: WorkerTask | None = None
    """A task that is done, for which tasks of the receiver wait."""
    copy: int | None = None
    """The copy that reads the values, or has computed the gradients, which the message carries."""
    finished: int | None = None
    """The number of an instance of which the sender has done its part."""
    value: tuple[Any] | None = None
    """The object that the sender contributes to an exchange."""
    failure: str | None = None
    """Why the sender ends the run."""
    is_last: bool = False
    """Whether the sender has nothing more to say in this run."""


class Peers:
    """The processes of a job of `torch.distributed`, each of which is a worker. All of them must create it together.

    Args:
        timeout: the seconds without a message after which another process is taken for lost.
    """

    def __init__(self, timeout: float = TIMEOUT_SECONDS):
        self.rank, self.size, self.timeout = dist.get_rank(), dist.get_world_size(), timeout
        self.others = [rank for rank in range(self.size) if rank != self.rank]
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def drive(
        self,
        trainer: Any,
        conductor: Conductor,
        instances: Iterable[Any],
        note: Note,
        finish: Callable[[], T],
    ) -> list[T]:
        """Run the tasks of this process's worker until all instances are done in all processes.

        Args:
            trainer: the `AsynchronousTrainer` of this process, which computes.
            finish: called when nothing is in flight. Its results of all processes are returned, by rank.

        Raises:
            PeerError: another process has failed, has ended, or is silent; the message names it.
        """
        self._process = _Process(self, trainer, conductor, note)
        return self._process.drive_with_others(instances, finish)

    def exchange(self, value: T) -> list[T]:
        """Return the picklable values of all processes by rank. Only the iterator over the instances may call this.

        Raises:
            PeerError: see `drive`.
        """
        return self._process.exchange(value)


class _Process(Threads):
    """The worker of this process during one run, with two more threads for each other process."""

    def __init__(self, peers: Peers, trainer: Any, conductor: Conductor, note: Note):
        super().__init__(conductor, [peers.rank], trainer.compute, note)
        self.peers, self.trainer = peers, trainer
        self.early: dict[int, list[tuple[Message, list]]] = defaultdict(list)
        """Messages about instances that this process has not admitted yet."""
        self.values: dict[int, deque[tuple[Any]]] = {rank: deque() for rank in peers.others}
        self.outbox = {rank: queue.SimpleQueue[tuple[Message, Sequence[Tensor | None]]]() for rank in peers.others}

    def drive_with_others(self, instances: Iterable[Any], finish: Callable[[], T]) -> list[T]:
        """Run the instances as `Peers.drive` says."""
        threads = [self.start(loop, rank) for rank in self.peers.others for loop in (self.send, self.receive)]
        try:
            self.drive(instances, self.trainer.begin)
            values = self.exchange(finish(), is_last=True)
            for thread in threads:
                thread.join()
            self.wait(lambda: True)  # raises the error of a thread
            return values
        except BaseException as error:
            what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
            own = f"worker {self.peers.rank} of {self.peers.size} has failed: {what}"
            self.tell_all(Message(failure=str(error) if isinstance(error, PeerError) else own, is_last=True))
            deadline = time.monotonic() + LAST_SECONDS
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            raise

    def exchange(self, value: T, is_last: bool = False) -> list[T]:
        """Return the values of all processes by rank.

        Raises:
            PeerError: see `Peers.drive`.
        """
        self.tell_all(Message(value=(value,), is_last=is_last))
        self.wait(lambda: all(self.values.values()))
        with self.lock:
            found = {rank: values.popleft()[0] for rank, values in self.values.items()}
        return [found.get(rank, value) for rank in range(self.peers.size)]

    def admit(self, steps: Sequence[PlanStep]) -> None:
        """Admit an instance, and take the messages about it that came before. The lock is held."""
        number = self.conductor.num_admitted
        super().admit(steps)
        for message, tensors in self.early.pop(number, ()):
            self.take(message, tensors)
        self.tell_if_finished(number)

    def done(self, task: WorkerTask, result: Sequence[Tensor | None]) -> None:
        """Send what a task has computed to the workers that wait for it; `result` are its gradients for them, if any.

        The lock is held.
        """
        for rank, copy in self.conductor.listeners(task):
            values = [] if copy is None or task.is_backward else self.trainer.outgoing(task.instance, copy)
            self.outbox[rank].put((Message(task, copy), result or values))
        super().done(task, result)
        if task.is_backward:
            self.tell_if_finished(task.instance)

    def tell_if_finished(self, number: int) -> None:
        """Tell the others if this process has done its part of an instance. The lock is held."""
        if self.conductor.is_finished(number):
            self.tell_all(Message(finished=number))

    def tell_all(self, message: Message) -> None:
        """Send a message without tensors to all other processes."""
        for outbox in self.outbox.values():
            outbox.put((message, ()))

    def take(self, message: Message, tensors: list[Tensor | None]) -> None:
        """Take a message about a task or an instance. The lock is held."""
        number = message.finished if message.task is None else message.task.instance
        assert number is not None
        if number >= self.conductor.num_admitted:
            self.early[number].append((message, tensors))
        elif message.task is None:
            self.conductor.finished(number)
        else:
            if message.copy is not None:
                self.trainer.incoming(number, message.copy, message.task.is_backward, tensors)
            self.push(self.conductor.done(message.task))

    def send(self, rank: int) -> None:
        """Send the messages to a process, until the last one."""
        message = Message()
        while not message.is_last:
            message, tensors = self.outbox[rank].get()
            packed = [_packed(each) for each in tensors]
            with self.naming(rank):
                dist.send_object_list([(message, packed)], rank, group=self.peers.group)

    def receive(self, rank: int) -> None:
        """Take the messages of a process, until the last one."""
        message = Message()
        while not message.is_last:
            received: list[Any] = [None]
            with self.naming(rank):
                dist.recv_object_list(received, rank, group=self.peers.group)
            message, packed = received[0]
            if message.failure is not None:
                raise PeerError(message.failure)
            with self.lock:
                if message.value is not None:
                    self.values[rank].append(message.value)
                else:
                    self.take(message, [_unpacked(each) for each in packed])
                if message.task is None:
                    self.news.notify()

    @contextmanager
    def naming(self, rank: int) -> Iterator[None]:
        """Name the process that an operation of gloo waited for in vain."""
        try:
            yield
        except RuntimeError as error:
            name = f"worker {rank} of {self.peers.size}"
            if not re.search("Timed out|timeout", str(error)):
                raise PeerError(f"{name} has ended") from None
            if "pair closure" in str(error):
                time.sleep(1)  # let the operation that has timed out name its process first; it breaks all others
            silence = f"{name} has been silent for {self.peers.timeout:g} seconds"
            raise PeerError(f"{silence}; it has stopped, or waits for a worker that has") from None


Packed = tuple[torch.dtype, torch.Size, np.ndarray]
"""The dtype, the shape and the bytes of a tensor: NumPy has no bfloat16."""


def _packed(tensor: Tensor | None) -> Packed | None:
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy()


def _unpacked(packed: Packed | None) -> Tensor | None:
    if packed is None:
        return None
    dtype, shape, data = packed
    return torch.from_numpy(data).view(dtype).view(shape)
