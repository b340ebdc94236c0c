"""A features file -> rows of features, on demand, checked against the file's checksums; or all of them in memory.

Rows that lie in the file as numpy has them (those of `iep-preprocess` do) are read without HDF5. Files without
checksums, and compressed ones, are read too.

Shapes: N images, C H W feature maps.
"""

import os
from collections.abc import Callable, Mapping
from copy import copy
from io import FileIO
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from iep.data.hdf5 import HDF5_ERRORS, REMEDY, damage_named, open_hdf5, read_attributes
from iep.errors import InputError
from iep.runtime.distributed import attempt, barrier, broadcast, gather, local_rank, raise_any
from iep.runtime.files import row_checksums
from iep.runtime.memory import SharedMemory, attach, available_memory

LOAD_BYTES = 2**25
"""Read at once into memory."""
IMAGES, IMAGES_DIGEST = "images", "images_digest"
"""The attributes that say of which images the rows were made; all others are their recipe."""
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


class Features:
    """Rows of a features file, read on demand. While the process that made this lives, it may be handed to worker
    processes; each opens its own handle.

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
        with open_hdf5(path) as file, damage_named(path):
            dataset = file.get("features")
            if not isinstance(dataset, h5py.Dataset):
                raise InputError(f"{path}: has no dataset 'features', expected a features file of iep-preprocess")
            if dataset.ndim != 4 or dataset.dtype.newbyteorder("=") not in FLOATS or 0 in dataset.shape[1:]:
                raise InputError(f"{path}: features is {dataset.shape} {dataset.dtype}, expected (N, C, H, W) floats")
            self.shape: tuple[int, int, int, int] = dataset.shape
            self.dtype = dataset.dtype.newbyteorder("=")
            attributes = read_attributes(dataset)
            self.recipe = _recipe(attributes)
            self.images = _images(attributes)
            self._offset = _offset_of_plain_rows(dataset)
            self._checksums_N = _read_checksums(file, len(dataset))
        # One byte a row, shared with the processes that this object is handed to.
        self._are_sound = None if self._checksums_N is None or not len(self) else SharedMemory(len(self))
        self._memory: SharedMemory | None = None
        self._bytes: FileIO | None = None
        self._dataset: h5py.Dataset | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None, "_dataset": None}

    @property
    def row_bytes(self) -> int:
        """Bytes of one image's features."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    def read(self, rows: np.ndarray, allocate: Callable[..., np.ndarray] = np.empty) -> torch.Tensor:
        """(N, C, H, W) features of the images `rows` (N,), of the file's dtype. Where the file has checksums, a row is
        checked when it is first read: later that would take longer than the reading.

        Args:
            allocate: (shape, dtype) -> the array to read into, C-contiguous.

        Raises:
            InputError: a row cannot be read or is damaged (names it).
        """
        values_NCHW = allocate((len(rows), *self.shape[1:]), self.dtype)
        self._announce(rows)
        for row, values_CHW in zip(rows.tolist(), values_NCHW, strict=True):
            try:
                self._read_row(row, values_CHW)
            except HDF5_ERRORS as error:
                what = " ".join(str(error).split())
                raise InputError(f"{self.path}: features, row {row} cannot be read ({what})") from None
            self._check(row, values_CHW)
        return torch.from_numpy(values_NCHW)

    def _check(self, row: int, values_CHW: np.ndarray) -> None:
        if self._are_sound is None:
            return
        is_sound_N = self._are_sound.array(0, (len(self),), np.dtype(bool))
        if not is_sound_N[row] and row_checksums(values_CHW[None])[0] != self._checksums_N[row]:
            raise InputError(f"{self.path}: features, row {row} is damaged, its checksum differs; {REMEDY}")
        is_sound_N[row] = True

    def close(self) -> None:
        """Close the files that reading rows has opened; reading more opens them again."""
        if self._bytes is not None:
            self._bytes.close()
        if self._dataset is not None:
            self._dataset.file.close()
        self._bytes = self._dataset = None

    def verify(self) -> None:
        """Read every row.

        Raises:
            InputError: one cannot be read or is damaged (names it).
        """
        for row in range(len(self)):
            self.read(np.array([row]))

    def in_memory(self) -> "Features":
        """The same features, all read and checked once, in memory that other processes share.

        The processes that torchrun started have one copy on each machine; all must come here.

        Raises:
            InputError: they do not fit into memory, or a row cannot be read or is damaged.
        """
        memory, error = attempt(self._load) if local_rank() == 0 else (None, None)
        raise_any(error)
        node = os.environ.get("GROUP_RANK", "0")
        shared = broadcast(dict(filter(None, gather(memory and (node, (memory.path, memory.size))) or [])))
        memory = memory or attach(*shared[node])
        barrier()  # all have it open now, and it lasts until the last is gone
        other = copy(self)
        other._memory, other._offset, other._are_sound = memory, 0, None
        other._bytes = other._dataset = None
        return other

    def _load(self) -> SharedMemory:
        need, there = len(self) * self.row_bytes, available_memory()
        if need > there:
            raise InputError(
                f"{self.path}: its features take {need:,} bytes of memory, and {there:,} are available; without "
                "features_in_memory they are read from the file as they are needed"
            )
        memory = SharedMemory(max(1, need))  # of no bytes there is no memory
        step = max(1, LOAD_BYTES // self.row_bytes)
        for start in range(0, len(self), step):
            rows = self.read(np.arange(start, min(start + step, len(self))))
            left, place = memoryview(rows.numpy()).cast("B"), start * self.row_bytes
            while left:
                count = os.pwrite(memory.descriptor, left, place)
                left, place = left[count:], place + count
        return memory

    def _announce(self, rows: np.ndarray) -> None:
        """Have the disk fetch all rows at once, rather than one after the other."""
        if self._offset is not None and self._memory is None and len(rows) > 1:
            descriptor = self._descriptor()
            for row in rows.tolist():
                where = self._offset + row * self.row_bytes
                os.posix_fadvise(descriptor, where, self.row_bytes, os.POSIX_FADV_WILLNEED)

    def _read_row(self, row: int, values_CHW: np.ndarray) -> None:
        if self._offset is None:
            if self._dataset is None:
                self._dataset = open_hdf5(self.path)["features"]
            self._dataset.read_direct(values_CHW, np.s_[row])
            return
        descriptor, place = self._descriptor(), self._offset + row * self.row_bytes
        left = memoryview(values_CHW).cast("B")
        while left:
            count = os.preadv(descriptor, [left], place)
            if not count:
                raise OSError("the file ends before it")
            left, place = left[count:], place + count

    def _descriptor(self) -> int:
        """Of the open file that rows are read from without HDF5."""
        if self._memory is not None:
            return self._memory.descriptor
        if self._bytes is None:
            self._bytes = open(self.path, "rb", buffering=0)  # noqa: SIM115 - for as long as this object lives
        return self._bytes.fileno()


def _offset_of_plain_rows(dataset: h5py.Dataset) -> int | None:
    """Where in its file a dataset's values lie one after the other as numpy has them; None where they do not.

    Such rows are read without HDF5, in half the time.
    """
    native = h5py.h5t.py_create(dataset.dtype.newbyteorder("="), logical=True)
    return dataset.id.get_offset() if dataset.id.get_type().equal(native) else None


def _recipe(attributes: Mapping[str, Any]) -> dict[str, str | int]:
    """As plain values, so that checkpoints can keep them. Without a backbone among them the attributes are others'."""
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
    """(count,) the checksum of each row; None where the file has none, such as the original toolkit's."""
    if "checksums" not in file:
        return None
    checksums_N = file["checksums"][()]
    if checksums_N.shape != (count,) or checksums_N.dtype != np.uint32:
        raise InputError(f"{file.filename}: checksums is {checksums_N.shape} {checksums_N.dtype}, expected one a row")
    return checksums_N
