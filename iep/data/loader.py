"""Batches made by worker processes ahead of their use, in order, and copied to a device while it computes.

`datasets.py` defines how a batch of questions and features is made, `iep/preprocess/images.py` one of images.

Features are nearly all of a batch's bytes. Workers read them into buffers that the processes share, and send only a
buffer's number through the pipe. The buffers are reused, because the first write to a page of memory takes several
times as long as reading its content.
"""

import mmap
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from iep.errors import InputError
from iep.runtime.signals import deferred, end_with_parent

Make = Callable[..., Any]
"""(choice, allocate=np.empty) -> a batch, a dataclass with a field `features` in an array that `allocate` returned."""


@dataclass(frozen=True)
class Loading:
    """The processes and memory that make batches.

    Args:
        workers: number of processes that make batches; with 0, this process makes them.
        prefetch: number of batches that each worker makes ahead.
        pin: copy batches to page-locked memory, from which they are copied to a GPU while it computes.
    """

    workers: int = 0
    prefetch: int = 2
    pin: bool = False


NO_WORKERS = Loading()


class Batches:
    """Batches in order, which can be iterated over several times."""

    def __init__(self, make: Make, choose: Callable[[int], Any], numbers: range, buffer_bytes: int, loading: Loading):
        """Define batch n as `make(choose(n), allocate)`, for n in `numbers`, with features of up to `buffer_bytes`."""
        self._make, self._choose, self._numbers = make, choose, numbers
        self._buffer_bytes, self._loading = buffer_bytes, loading

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            InputError: a batch cannot be read.
        """
        loading, make = self._loading, self._make
        if loading.workers and self._buffer_bytes:
            # Besides the batches that a worker makes ahead, one is in use and another is being pinned.
            buffers = BatchBuffers(loading.workers, loading.prefetch + 2, self._buffer_bytes)
            make = partial(_make_in_worker, make, buffers)
        yield from made_ahead(make, map(self._choose, self._numbers), loading)


def made_ahead(make: Callable[[Any], Any], choices: Iterable[Any], loading: Loading) -> Iterator[Any]:
    """Yield `make(choice)` of each of `choices` in order, made ahead by worker processes.

    Raises:
        InputError: `make` raised it, in this process or in a worker.
    """
    options: dict[str, Any] = {}
    if loading.workers:
        # Forked processes start at once, and share the parent's buffers and data.
        options = {"prefetch_factor": loading.prefetch, "multiprocessing_context": "fork"}
    loader = DataLoader(
        _Made(make),
        sampler=choices,
        batch_size=None,
        num_workers=loading.workers,
        worker_init_fn=_start_worker,
        pin_memory=loading.pin,
        # Without a generator, it would draw a seed for its workers from the generator that training uses.
        generator=torch.Generator(),
        **options,
    )
    with deferred():  # a loader whose workers are just starting could not be ended cleanly
        iterator, end = iter(loader), object()
    while True:
        with deferred():  # a signal interrupts no transfer
            item = next(iterator, end)
        if item is end:
            return
        if isinstance(item, InputError):
            raise item
        yield item


class _Made(Dataset):
    """A data set of what `make` returns, or of the `InputError` that it raises.

    If a worker process raised the error, it would arrive as a traceback of several lines.
    """

    def __init__(self, make: Callable[[Any], Any]):
        self.make = make

    def __getitem__(self, choice: Any) -> Any:
        try:
            return self.make(choice)
        except InputError as error:
            return error


class BatchBuffers:
    """Memory for the features of batches, shared with forked worker processes.

    Each worker has buffers of its own. A worker takes a buffer, and the process that made the buffers releases it.
    Pages that are never written take no memory.
    """

    def __init__(self, workers: int, per_worker: int, size: int) -> None:
        """Allocate `per_worker` buffers of `size` bytes for each worker."""
        self.per_worker = per_worker
        self._buffers = [mmap.mmap(-1, size) for _ in range(workers * per_worker)]
        self._taken = np.frombuffer(mmap.mmap(-1, workers * per_worker), dtype=np.uint8)
        _MADE[id(self)] = self

    def take(self, worker: int) -> int | None:
        """Take a free buffer of `worker`, and return its number, or None if all are in use."""
        first = worker * self.per_worker
        free = np.flatnonzero(self._taken[first : first + self.per_worker] == 0)
        if not len(free):
            return None
        number = first + int(free[0])
        self._taken[number] = 1
        return number

    def array(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of the first bytes of a buffer."""
        return np.ndarray(shape, dtype, self._buffers[number])

    def tensor(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
        """Return the array as a tensor, and free the buffer once no tensor shares its memory any more."""
        array = self.array(number, shape, dtype)
        finalize(array, self._taken.__setitem__, number, 0)
        return torch.from_numpy(array)


_MADE: WeakValueDictionary[int, BatchBuffers] = WeakValueDictionary()
"""The buffers that this process made, by their identity, which is the same in forked processes."""


@dataclass(frozen=True)
class _InBuffer:
    """Features in a buffer of this worker; the process that receives them unpickles a tensor."""

    buffers: BatchBuffers
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _tensor_in, (id(self.buffers), self.number, self.shape, self.dtype)


def _tensor_in(buffers: int, number: int, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    return _MADE[buffers].tensor(number, shape, dtype)


def _make_in_worker(make: Make, buffers: BatchBuffers, choice: Any) -> Any:
    """Make a batch in a worker, with its features in a buffer if one is free."""
    worker = get_worker_info()
    assert worker is not None  # this is a worker
    number = buffers.take(worker.id)
    if number is None:
        return make(choice)
    batch = make(choice, partial(buffers.array, number))
    features_NCHW = batch.features.numpy()
    return replace(batch, features=_InBuffer(buffers, number, features_NCHW.shape, features_NCHW.dtype))


def _start_worker(worker: int) -> None:
    """Prepare a worker process: how it sends tensors, and what it does with signals."""
    # As arrays; torch would send each tensor through a file of its own, which takes far longer.
    ForkingPickler.register(torch.Tensor, lambda tensor: (torch.from_numpy, (tensor.numpy(),)))
    _leave_signals_to_parent()


def _leave_signals_to_parent() -> None:
    """Ignore signals in a worker process, except a SIGTERM of its parent, and end it as soon as its parent has ended.

    A Ctrl-C or a batch system's SIGTERM reaches all processes of a job, and the parent decides what follows. A loader
    that has not ended its workers, because the traceback of an uncaught exception keeps it alive, leaves them to
    `multiprocessing`, which at exit sends them SIGTERM and waits for them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # only `sigwaitinfo` tells who has sent a signal
    threading.Thread(target=_end_when_told, args=(os.getppid(),), daemon=True).start()
    end_with_parent(signal.SIGKILL)


def _end_when_told(parent: int) -> None:
    """Wait for a SIGTERM of the process `parent`, and end this process."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)  # another exit code would raise an error in PyTorch's handler of SIGCHLD


def on_device(batches: Iterable[Any], device: torch.device) -> Generator[Any]:
    """Yield the batches, moved to `device`; a GPU computes with one batch while the next is copied to it."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream = torch.cuda.Stream(device)

    def send(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return batch.to(device), stream.record_event()

    # `pairwise` sends a batch before it yields the one before it.
    for (batch, event), _ in pairwise(chain[Any](map(send, batches), [None])):
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        batch.record_stream(current)  # otherwise its memory could be reused while it is in use
        yield batch
