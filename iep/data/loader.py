"""Batches made by worker processes ahead of their use, in order, and copied to a device while it computes.

`datasets.py` defines how a batch of questions and features is made, `iep/preprocess/images.py` one of images.

Features are nearly all of a batch's bytes. Workers read them into slots of memory that the processes share, and send
only a slot's number through the pipe. The slots are reused, because the first write to a page of memory takes several
times as long as reading its content.
"""

import mmap
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from iep.errors import InputError
from iep.runtime.signals import become_worker, starting_workers, stop_delayed

Make = Callable[..., Any]
"""(choice, allocate=np.empty) -> a batch, whose features are in an array that `allocate(shape, dtype)` returned."""


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


@dataclass(frozen=True)
class Batches:
    """Batches in order, which can be iterated over several times: batch n is `make(choose(n), allocate)`.

    Args:
        numbers: the numbers of the batches.
        slot_bytes: the greatest number of bytes of a batch's features.
    """

    make: Make
    choose: Callable[[int], Any]
    numbers: range
    slot_bytes: int
    loading: Loading

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            InputError: a batch cannot be read.
        """
        yield from made_ahead(self.make, map(self.choose, self.numbers), self.loading, self.slot_bytes)


def made_ahead(make: Make, choices: Iterable[Any], loading: Loading, slot_bytes: int = 0) -> Iterator[Any]:
    """Yield what `make` returns for each of `choices` in order, made ahead by worker processes.

    Args:
        slot_bytes: the greatest number of bytes that a batch needs from `allocate`; with 0, `make` gets no `allocate`.

    Raises:
        InputError: `make` raised it, in this process or in a worker.
    """
    # Besides the batches that a worker makes ahead, one is in use and another is being pinned.
    slots = Slots(loading.workers * (loading.prefetch + 2) if slot_bytes else 0, slot_bytes)
    loader = DataLoader(
        _Made(partial(make, allocate=slots.allocate) if loading.workers and slot_bytes else make),
        sampler=choices,
        batch_size=None,
        num_workers=loading.workers,
        prefetch_factor=loading.prefetch if loading.workers else None,
        # Forked processes start at once, and share the parent's slots and data.
        multiprocessing_context="fork" if loading.workers else None,
        worker_init_fn=partial(_start_worker, slots),
        pin_memory=loading.pin,
        # Without a generator, it would draw a seed for its workers from the generator that training uses.
        generator=torch.Generator(),
    )
    with starting_workers():  # a loader whose workers are just starting could not be ended cleanly
        iterator, end = iter(loader), object()
    while True:
        with stop_delayed():  # a signal interrupts no transfer
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


class Slots:
    """Memory for the features of batches, shared with forked worker processes, which have equal parts of the slots.

    A worker takes a slot for each batch, and the process that made the slots frees it when the batch's tensor is gone.
    Pages that are never written take no memory.
    """

    def __init__(self, count: int, size: int) -> None:
        """Allocate `count` slots of `size` bytes."""
        self._memory = [np.frombuffer(mmap.mmap(-1, size), np.uint8) for _ in range(count)]
        self._numbers = {memory.ctypes.data: number for number, memory in enumerate(self._memory)}
        self._is_taken = np.frombuffer(mmap.mmap(-1, max(1, count)), dtype=bool)
        _SLOTS[id(self)] = self

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array in a free slot of this worker, or in memory of its own if there is no free slot."""
        worker = get_worker_info()
        assert worker is not None  # this is a worker
        mine = range(worker.id, len(self._memory), worker.num_workers)
        number = next((number for number in mine if not self._is_taken[number]), None)
        if number is None:
            return np.empty(shape, dtype)
        self._is_taken[number] = True
        return self._array(number, shape, dtype)

    def reduce(self, tensor: torch.Tensor) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return what a worker sends for a tensor: its slot, or its values if it is not the content of a slot."""
        array, number = tensor.numpy(), self._numbers.get(tensor.data_ptr())
        if number is None or not tensor.is_contiguous():
            return torch.from_numpy, (array,)
        return _tensor_in, (id(self), number, array.shape, array.dtype)

    def tensor(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
        """Return the content of a slot as a tensor, and free the slot once no tensor shares its memory any more."""
        array = self._array(number, shape, dtype)
        finalize(array, self._is_taken.__setitem__, number, False)
        return torch.from_numpy(array)

    def _array(self, number: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.ndarray(shape, dtype, self._memory[number])


_SLOTS: WeakValueDictionary[int, Slots] = WeakValueDictionary()
"""The slots that this process made, by their identity, which is the same in forked processes."""


def _tensor_in(slots: int, number: int, shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    return _SLOTS[slots].tensor(number, shape, dtype)


def _start_worker(slots: Slots, worker: int) -> None:
    """Prepare a worker process: how it sends tensors, and what it does with signals."""
    # As arrays; torch would send each tensor through a file of its own, which takes far longer.
    ForkingPickler.register(torch.Tensor, slots.reduce)
    become_worker()


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
