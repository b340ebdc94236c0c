"""Batches made by worker processes, ahead of their use and in order, and brought to a device while it computes.

What a batch is made of, and the making, are `datasets.py`'s. Features, nearly all of a batch's bytes, are read into
slots of memory that the processes share: the first touch of a page costs several times as much as reading its content,
so slots are used again and again, and nothing but a slot's number goes through the pipe.
"""

import io
import pickle
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from iep.errors import InputError
from iep.runtime.memory import SharedMemory
from iep.runtime.signals import end_with_parent, waited_for

Make = Callable[..., Any]
"""(choice, allocate) -> a batch: a dataclass with a field `features`, which is in an array that `allocate` gave."""
_PAGE = 4096


@dataclass(frozen=True)
class Loading:
    """How batches are made.

    Args:
        workers: processes that make them; 0: this one.
        prefetch: batches that each worker makes ahead.
        pin: into page-locked memory, from which copies to a GPU run beside its computing.
    """

    workers: int = 0
    prefetch: int = 2
    pin: bool = False


HERE = Loading()


class Batches:
    """Batches in order; may be gone through several times."""

    def __init__(self, make: Make, choose: Callable[[int], Any], numbers: range, slot_bytes: int, loading: Loading):
        """Batch n is `make(choose(n), allocate)`, for the n of `numbers`; its features have at most `slot_bytes`."""
        self._make, self._choices = make, _Choices(choose, numbers)
        self._slot_bytes, self._loading = slot_bytes, loading

    def __iter__(self) -> Iterator[Any]:
        """The batches.

        Raises:
            InputError: one cannot be read.
        """
        loading, slots = self._loading, None
        if loading.workers and self._slot_bytes:
            # Besides what a worker makes ahead, the user holds a batch, and another is being pinned.
            slots = Slots.make(loading.workers, loading.prefetch + 2, self._slot_bytes)
        loader = DataLoader(
            _Items(self._make, slots),
            sampler=self._choices,
            batch_size=None,
            **worker_options(loading.workers, loading.prefetch),
            pin_memory=loading.pin,
            # Its own generator: otherwise it would draw a seed for its workers from the one that training uses.
            generator=torch.Generator(),
        )
        for item in waited_for(loader):
            if isinstance(item, InputError):
                raise item
            yield item.opened() if isinstance(item, Parcel) else item


class _Choices(Sampler):
    """What each batch is made of, from a function of the batch's number."""

    def __init__(self, choose: Callable[[int], Any], numbers: range):
        self.choose, self.numbers = choose, numbers

    def __iter__(self) -> Iterator[Any]:
        return (self.choose(number) for number in self.numbers)


class _Items(Dataset):
    """What workers send: batches, and `InputError`s, which when raised would arrive as tracebacks of several lines."""

    def __init__(self, make: Make, slots: "Slots | None"):
        self.make, self.slots = make, slots

    def __getitem__(self, choice: Any) -> Any:
        try:
            worker = get_worker_info()
            return self.make(choice, np.empty) if worker is None else self._parcel(choice, worker.id)
        except InputError as error:
            return error

    def _parcel(self, choice: Any, worker: int) -> "Parcel":
        slot = None if self.slots is None else self.slots.take(worker)
        if slot is None:
            batch = self.make(choice, np.empty)
            return Parcel(pickled(replace(batch, features=None)), batch.features)
        batch = self.make(choice, lambda shape, dtype: self.slots.array(slot, shape, dtype))
        values = batch.features.numpy()
        return Parcel(pickled(replace(batch, features=None)), InSlot(self.slots, slot, values.shape, values.dtype))


@dataclass(frozen=True)
class Slots:
    """Places for the features of batches in shared memory, each worker's own; at the start, a byte for each says
    whether it is taken. Its worker sets that, and the process that the batch was sent to clears it."""

    memory: SharedMemory
    per_worker: int
    slot_bytes: int
    start: int

    @staticmethod
    def make(workers: int, per_worker: int, slot_bytes: int) -> "Slots":
        """Free slots of `slot_bytes` bytes."""
        whole_pages = -(-slot_bytes // _PAGE) * _PAGE
        start = -(-workers * per_worker // _PAGE) * _PAGE
        return Slots(SharedMemory(start + workers * per_worker * whole_pages), per_worker, whole_pages, start)

    def take(self, worker: int) -> int | None:
        """A free slot of `worker`'s, from now on taken; None when its batches are all in use."""
        first = worker * self.per_worker
        free = np.flatnonzero(self._taken[first : first + self.per_worker] == 0)
        if not len(free):
            return None
        slot = first + int(free[0])
        self._taken[slot] = 1
        return slot

    def release(self, slot: int) -> None:
        """Leave the slot for another batch."""
        self._taken[slot] = 0

    def array(self, slot: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The slot's first bytes."""
        assert int(np.prod(shape)) * dtype.itemsize <= self.slot_bytes, (shape, dtype)
        return self.memory.array(self.start + slot * self.slot_bytes, shape, dtype)

    @property
    def _taken(self) -> np.ndarray:
        return self.memory.array(0, (self.start,), np.dtype(np.uint8))


@dataclass(frozen=True)
class InSlot:
    """An array in a slot, on its way from a worker."""

    slots: Slots
    slot: int
    shape: tuple[int, ...]
    dtype: np.dtype

    def tensor(self) -> torch.Tensor:
        """The slot is taken for as long as anything holds the memory of this tensor."""
        held = _Held(self.slots, self.slot, self.slots.array(self.slot, self.shape, self.dtype))
        return torch.from_numpy(np.asarray(held))


@dataclass(frozen=True)
class Parcel:
    """A batch on its way from a worker: pickled without its features, and these."""

    content: bytes
    features: InSlot | torch.Tensor | None

    def opened(self) -> Any:
        """The batch."""
        features = self.features.tensor() if isinstance(self.features, InSlot) else self.features
        return replace(pickle.loads(self.content), features=features)

    def pin_memory(self) -> Any:
        """The batch in page-locked memory; the data loader calls this, in a thread of its own."""
        return self.opened().pin_memory()


class _Pickler(pickle.Pickler):
    """Writes small tensors as arrays: by way of a file for each, as torch sends them, they would take far longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            return torch.from_numpy, (value.numpy(),)
        return NotImplemented


def pickled(value: Any) -> bytes:
    """`value`, which holds CPU tensors, as bytes for `pickle.loads`."""
    content = io.BytesIO()
    _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return content.getvalue()


class _Held:
    """An array that releases its slot when the last array or tensor that is made of it is gone."""

    def __init__(self, slots: Slots, slot: int, array: np.ndarray):
        self._slots, self._slot, self._array = slots, slot, array
        self.__array_interface__ = array.__array_interface__

    def __del__(self) -> None:
        self._slots.release(self._slot)


def worker_options(workers: int, prefetch: int) -> dict[str, Any]:
    """What a `DataLoader` is told of its worker processes."""
    if not workers:
        return {}
    # Forked, whatever Python's default: they are there at once, share what the parent has read, and are its children.
    return {
        "num_workers": workers,
        "prefetch_factor": prefetch,
        "multiprocessing_context": "fork",
        "worker_init_fn": _leave_signals_to_parent,
    }


def _leave_signals_to_parent(worker: int) -> None:
    """In a worker process: a Ctrl-C or a batch system's SIGTERM goes to all processes of a job, and it is the parent's
    to decide what follows. When the parent is gone, so is the worker, at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)


def on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """The batches, moved to `device`; to a GPU each is on its way while it computes with the one before."""
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream, waiting = torch.cuda.Stream(device), None
    for batch in batches:
        with torch.cuda.stream(stream):
            sent = batch.to(device), stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting, device)
        waiting = sent
    if waiting is not None:
        yield _arrived(*waiting, device)


def _arrived(batch: Any, event: torch.cuda.Event, device: torch.device) -> Any:
    """The batch, for use on the current stream."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    batch.record_stream(current)  # or its memory would be given away while it is in use
    return batch
