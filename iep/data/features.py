"""A features file -> rows of features, on demand or all in memory, checked against the file's checksums.

Rows that are stored as numpy stores them, as `iep-preprocess` does, are read without HDF5, in half the time. Files
without checksums and compressed files are read as well.

Shapes: N images, C H W feature maps.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
import torch

from iep.data.hdf5 import REMEDY, open_hdf5, read_attributes
from iep.errors import InputError
from iep.runtime.distributed import attempt, barrier, broadcast, gather, local_rank
from iep.runtime.files import arrays_digest, row_checksums
from iep.runtime.memory import available_memory
from iep.runtime.reading import reading

LOAD_BYTES = 2**25
"""The number of bytes that `Features.in_memory` reads at a time."""
DIGEST_ROWS = 16
"""The number of rows whose digest is that of a file without checksums."""
IMAGES, IMAGES_DIGEST = "images", "images_digest"
"""The attributes with the number and the digest of the images; all other attributes are the recipe of the rows."""
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


class Features:
    """Rows of a features file, read on demand.

    Worker processes that are forked from this one may read as well; together they check each row once.

    Attributes:
        path: the file.
        shape: (N, C, H, W).
        dtype: the dtype of the values, float16, float32 or float64.
        recipe: how the rows were made of images, as `iep-preprocess` recorded it; empty if it is not recorded.
        images: how many images they were made of, and the digest of the files' names and sizes; None if they are not
            recorded.
    """

    def __init__(self, path: Path):
        """Check the file.

        Raises:
            InputError: the file is missing, damaged or not HDF5, or has no (N, C, H, W) floating-point `features`.
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
            images = attributes.pop(IMAGES, None), attributes.pop(IMAGES_DIGEST, None)
            self.images = images if isinstance(images[0], int) and isinstance(images[1], str) else None
            plain = {name: value for name, value in attributes.items() if isinstance(value, (str, int))}
            self.recipe = plain if "backbone" in attributes else {}
            self._offset = _offset_of_plain_rows(dataset)
            self._checksums_N = _read_checksums(file, len(dataset))
        # In memory that forked processes share; a length of 0 is an error of mmap.
        self._is_sound_N = np.frombuffer(mmap.mmap(-1, max(1, len(self))), dtype=bool)
        self._memory: BinaryIO | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The number of bytes of one image's features."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def digest(self) -> str:
        """Return a digest of the shape and the checksums, or for a file without checksums, of some of the rows.

        Raises:
            InputError: a row cannot be read.
        """
        rows = self._checksums_N
        if rows is None:
            rows = self.read(np.linspace(0, len(self) - 1, min(len(self), DIGEST_ROWS)).astype(np.int64)).numpy()
        return arrays_digest({"shape": np.array(self.shape), "rows": rows})

    def read(self, rows: np.ndarray, allocate: Callable[..., np.ndarray] = np.empty) -> torch.Tensor:
        """Return the (N, C, H, W) features of the images `rows` (N,), in the file's dtype.

        If the file has checksums, a row is checked when it is first read; checking it again would take longer than
        reading it.

        Args:
            allocate: (shape, dtype) -> the C-contiguous array to read into.

        Raises:
            InputError: the file is missing, or a row cannot be read or is damaged (names the row).
        """
        values_NCHW = allocate((len(rows), *self.shape[1:]), self.dtype)
        with self._reader(rows) as read_row:
            for row, values_CHW in zip(rows.tolist(), values_NCHW, strict=True):
                try:
                    read_row(row, values_CHW)
                except Exception as error:  # HDF5 raises all kinds of errors for damaged files
                    what = " ".join(str(error).split())
                    raise InputError(f"{self.path}: features, row {row} cannot be read ({what})") from None
                if self._checksums_N is None or self._is_sound_N[row]:
                    continue
                if row_checksums(values_CHW[None])[0] != self._checksums_N[row]:
                    raise InputError(f"{self.path}: features, row {row} is damaged, its checksum differs; {REMEDY}")
                self._is_sound_N[row] = True
        return torch.from_numpy(values_NCHW)

    def verify(self) -> None:
        """Read every row, and thereby check it.

        Raises:
            InputError: the file is missing, or a row cannot be read or is damaged (names the row).
        """
        for row in range(len(self)):
            self.read(np.array([row]))

    def in_memory(self) -> "Features":
        """Read and check all features, and return them in memory that other processes share.

        The processes that torchrun started share one copy on each machine; all of them must call this.

        Raises:
            InputError: the features do not fit into memory, or a row cannot be read or is damaged (names the row).
        """
        memory = attempt(self._load, local_rank() == 0)
        node = os.environ.get("GROUP_RANK", "0")
        mine: Any = memory and (node, f"/proc/{os.getpid()}/fd/{memory.fileno()}")
        paths = broadcast(dict(filter(None, gather(mine) or [])))
        memory = memory or open(paths[node], "rb")  # noqa: SIM115 - for as long as the features live
        barrier()  # until all processes have opened the memory, the first must keep it
        other = copy(self)
        other._memory, other._checksums_N = memory, None
        return other

    def _load(self) -> BinaryIO:
        """Read all rows into an anonymous file in memory, which exists as long as a process has it open.

        Raises:
            InputError: the features do not fit into memory, or a row cannot be read or is damaged.
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
        """Open the file or the memory, and yield a function that reads one of the `rows` into an array."""
        if self._memory is None and self._offset is None:
            with open_hdf5(self.path) as file:
                dataset = file["features"]
                yield lambda row, values_CHW: dataset.read_direct(values_CHW, np.s_[row])
            return
        start, size = self._offset, self.row_bytes
        if self._memory is not None:
            yield lambda row, values_CHW: _read_into(values_CHW, self._memory.fileno(), row * size)
            return
        with reading(self.path, "a features file"), open(self.path, "rb", buffering=0) as file:
            for row in rows.tolist() if len(rows) > 1 else ():  # lets the disk fetch all rows at once
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
    """Return the offset in its file of a dataset that is stored as a numpy array is, or None if it is not."""
    native = h5py.h5t.py_create(dataset.dtype.newbyteorder("="), logical=True)
    return dataset.id.get_offset() if dataset.id.get_type().equal(native) else None


def _read_checksums(file: h5py.File, count: int) -> np.ndarray | None:
    """Return the (count,) checksums of the rows, or None if the file has none, as the original toolkit's files."""
    if "checksums" not in file:
        return None
    checksums_N = file["checksums"][()]
    if checksums_N.shape != (count,) or checksums_N.dtype != np.uint32:
        raise InputError(f"checksums is {checksums_N.shape} {checksums_N.dtype}, expected one a row")
    return checksums_N
