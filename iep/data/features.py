"""A features file -> rows of features, on demand, checked against the file's checksums; or all of them in memory.

Rows that are stored as numpy stores them (those of `iep-preprocess` are) are read without HDF5, in half the time.
Files without checksums and compressed files are read as well.

Shapes: N images, C H W feature maps.
"""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import torch

from iep.data.hdf5 import REMEDY, open_hdf5, read_attributes
from iep.errors import InputError
from iep.runtime.distributed import attempt, barrier, broadcast, gather, local_rank
from iep.runtime.files import row_checksums
from iep.runtime.memory import available_memory
from iep.runtime.reading import reading

LOAD_BYTES = 2**25
"""How much is read at once into memory."""
IMAGES, IMAGES_DIGEST = "images", "images_digest"
"""The attributes that tell which images the rows were made of; all others are their recipe."""
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


class Features:
    """Rows of a features file, read on demand.

    Worker processes that are forked from this one may read, too; all of them check each row once.

    Attributes:
        path: the file.
        shape: (N, C, H, W).
        dtype: of the values, float16, float32 or float64.
        recipe: how the rows were made of images, as `iep-preprocess` recorded it; empty where nothing is recorded.
        images: how many images they were made of, and the digest of the files' names and sizes; None likewise.
    """

    def __init__(self, path: Path):
        """Check the file.

        Raises:
            InputError: not HDF5, damaged, no dataset `features`, or not (N, C, H, W) floating point.
        """
        self.path = Path(path)
        with open_hdf5(path) as file:
            dataset = file.get("features")
            if not isinstance(dataset, h5py.Dataset):
                raise InputError("has no dataset 'features', expected a features file of iep-preprocess")
            if dataset.ndim != 4 or dataset.dtype.newbyteorder("=") not in FLOATS or 0 in dataset.shape[1:]:
                raise InputError(f"features is {dataset.shape} {dataset.dtype}, expected (N, C, H, W) floats")
            self.shape: tuple[int, int, int, int] = dataset.shape
            self.dtype = dataset.dtype.newbyteorder("=")
            attributes = read_attributes(dataset)
            self.recipe = _recipe(attributes)
            self.images = _images(attributes)
            self._offset = _offset_of_plain_rows(dataset)
            self._checksums_N = _read_checksums(file, len(dataset))
        # In memory that forked processes share; mmap refuses a length of 0.
        self._is_sound_N = np.frombuffer(mmap.mmap(-1, max(1, len(self))), dtype=bool)
        self._memory: BinaryIO | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one image's features."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def read(self, rows: np.ndarray, allocate: Callable[..., np.ndarray] = np.empty) -> torch.Tensor:
        """Return the (N, C, H, W) features of the images `rows` (N,), in the file's dtype.

        If the file has checksums, a row is checked when it is first read; checking it again would take longer than
        reading it.

        Args:
            allocate: (shape, dtype) -> the C-contiguous array to read into.

        Raises:
            InputError: the file is missing, or a row cannot be read or is damaged (names it).
        """
        values_NCHW = allocate((len(rows), *self.shape[1:]), self.dtype)
        with self._reader(rows) as read_row:
            for row, values_CHW in zip(rows.tolist(), values_NCHW, strict=True):
                try:
                    read_row(row, values_CHW)
                except Exception as error:  # HDF5 raises all kinds of errors for damaged files
                    what = " ".join(str(error).split())
                    raise InputError(f"{self.path}: features, row {row} cannot be read ({what})") from None
                self._check(row, values_CHW)
        return torch.from_numpy(values_NCHW)

    def _check(self, row: int, values_CHW: np.ndarray) -> None:
        if self._checksums_N is None:
            return
        if not self._is_sound_N[row] and row_checksums(values_CHW[None])[0] != self._checksums_N[row]:
            raise InputError(f"{self.path}: features, row {row} is damaged, its checksum differs; {REMEDY}")
        self._is_sound_N[row] = True

    def verify(self) -> None:
        """Read every row.

        Raises:
            InputError: as `read`.
        """
        for row in range(len(self)):
            self.read(np.array([row]))

    def in_memory(self) -> "Features":
        """Return the same features, all read and checked, in memory that other processes share.

        The processes that torchrun started share one copy on each machine; all of them must call this.

        Raises:
            InputError: the features do not fit into memory, or as `read`.
        """
        memory = attempt(self._load, local_rank() == 0)
        node = os.environ.get("GROUP_RANK", "0")
        mine = memory and (node, f"/proc/{os.getpid()}/fd/{memory.fileno()}")
        paths = broadcast(dict(filter(None, gather(mine) or [])))
        memory = memory or open(paths[node], "rb")  # noqa: SIM115 - for as long as the features live
        barrier()  # until all processes have opened the memory, the first must keep it
        other = copy(self)
        other._memory, other._offset, other._checksums_N = memory, 0, None
        return other

    def _load(self) -> BinaryIO:
        """Read all rows into a file of the kernel's without a name, which goes with the last process that has it open.

        Raises:
            InputError: as `in_memory`.
        """
        need, available = len(self) * self.row_bytes, available_memory()
        if need > available:
            raise InputError(
                f"{self.path}: its features take {need:,} bytes of memory, and {available:,} are available; without "
                "features_in_memory they are read from the file as they are needed"
            )
        memory = open(os.memfd_create("iep"), "w+b")  # noqa: SIM115 - for as long as the features live
        step = max(1, LOAD_BYTES // self.row_bytes)
        for start in range(0, len(self), step):
            memory.write(self.read(np.arange(start, min(start + step, len(self)))).numpy())
        memory.flush()
        return memory

    @contextmanager
    def _reader(self, rows: np.ndarray) -> Iterator[Callable[[int, np.ndarray], None]]:
        """Open what holds the features, and yield a function that reads one of the `rows` into an array."""
        if self._offset is None:
            with open_hdf5(self.path) as file:
                dataset = file["features"]
                yield lambda row, values_CHW: dataset.read_direct(values_CHW, np.s_[row])
            return
        with ExitStack() as stack:
            if self._memory is None:
                stack.enter_context(reading(self.path, "a features file"))
            file = self._memory or stack.enter_context(open(self.path, "rb", buffering=0))
            start, size = self._offset, self.row_bytes
            if self._memory is None and len(rows) > 1:
                for row in rows.tolist():  # have the disk fetch all rows at once
                    os.posix_fadvise(file.fileno(), start + row * size, size, os.POSIX_FADV_WILLNEED)
            yield lambda row, values_CHW: _read_into(values_CHW, file.fileno(), start + row * size)


def _read_into(values: np.ndarray, descriptor: int, start: int) -> None:
    """Fill a C-contiguous array with the bytes of an open file from `start` on."""
    left = memoryview(values).cast("B")
    while left:
        count = os.preadv(descriptor, [left], start)
        if not count:
            raise OSError("the file ends before it")
        left, start = left[count:], start + count


def _offset_of_plain_rows(dataset: h5py.Dataset) -> int | None:
    """Return the offset in its file of a dataset that is stored as a numpy array is; None if it is not."""
    native = h5py.h5t.py_create(dataset.dtype.newbyteorder("="), logical=True)
    return dataset.id.get_offset() if dataset.id.get_type().equal(native) else None


def _recipe(attributes: Mapping[str, Any]) -> dict[str, str | int]:
    """Return the recipe among a file's attributes as plain values, which checkpoints keep; empty without a backbone."""
    if "backbone" not in attributes:
        return {}
    recipe: dict[str, str | int] = {}
    for name, value in attributes.items():
        if name not in (IMAGES, IMAGES_DIGEST) and isinstance(value, (str, int, np.integer)):
            recipe[name] = value if isinstance(value, str) else int(value)
    return recipe


def _images(attributes: Mapping[str, Any]) -> tuple[int, str] | None:
    count, digest = attributes.get(IMAGES), attributes.get(IMAGES_DIGEST)
    return (int(count), digest) if isinstance(count, (int, np.integer)) and isinstance(digest, str) else None


def _read_checksums(file: h5py.File, count: int) -> np.ndarray | None:
    """Return the (count,) checksums of the rows; None if the file has none, as the original toolkit's."""
    if "checksums" not in file:
        return None
    checksums_N = file["checksums"][()]
    if checksums_N.shape != (count,) or checksums_N.dtype != np.uint32:
        raise InputError(f"checksums is {checksums_N.shape} {checksums_N.dtype}, expected one a row")
    return checksums_N
