"""A features file -> rows of features, checked against the file's checksums; and the reading of any HDF5 file.

Rows that are stored as numpy stores them, as `iep-preprocess` does, are read without HDF5, in half the time. Files
without checksums and compressed files are read as well.

Shapes: N images, C H W feature maps.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from iep.errors import InputError
from iep.runtime.distributed import attempt, local_rank
from iep.runtime.files import arrays_digest, row_checksums
from iep.runtime.reading import reading

REMEDY = "iep-preprocess --verify --overwrite makes the file anew"
IMAGES, IMAGES_DIGEST = "images", "images_digest"
"""The attributes with the number and the digest of the images; all other attributes are the recipe of the rows."""
BLOCK_BYTES = 1 << 24
"""The number of bytes of the rows that `Features.verify` reads at once."""
CHANNELS = (256, 512, 1024, 2048)
"""The numbers of channels of ResNets' features, in files of other tools often on the last side."""
FLOATS = tuple(np.dtype(name) for name in ("float16", "float32", "float64"))


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open the HDF5 file `path` for reading, and close it after the block.

    Raises:
        InputError: the file is missing, truncated or not HDF5, or the block fails because the file is damaged.
    """
    with reading(path, "a whole HDF5 file of iep-preprocess"), h5py.File(path, "r") as file:
        yield file


def own_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Return the dataset `name`, whose values are stored in the file itself.

    HDF5 reads a missing source of a virtual dataset as zeros, and any local file as external storage.

    Raises:
        InputError: there is no such dataset, or its values are stored in another file.
    """
    dataset = file.get(name)
    if not isinstance(dataset, h5py.Dataset):
        raise InputError(f"has no dataset {name!r}, expected a file of iep-preprocess")
    if dataset.file != file or dataset.is_virtual or dataset.external:
        how = "a link, a virtual dataset or external storage"
        raise InputError(f"{name} is stored in another file ({how}), expected a dataset with its values in this file")
    return dataset


def read_attributes(holder: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """Return all attributes, with numpy's texts and numbers as Python's."""
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in holder.attrs.items()}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


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
            InputError: the file is missing, damaged or not HDF5, or has no (N, C, H, W) floating-point `features` with
                values of its own; or features of unknown origin look like (N, H, W, C).
        """
        self.path = Path(path)
        with open_hdf5(path) as file:
            dataset = own_dataset(file, "features")
            if dataset.ndim != 4 or dataset.dtype.newbyteorder("=") not in FLOATS or 0 in dataset.shape[1:]:
                raise InputError(f"features is {dataset.shape} {dataset.dtype}, expected (N, C, H, W) floats")
            self.shape: tuple[int, int, int, int] = dataset.shape
            self.dtype = dataset.dtype.newbyteorder("=")
            attributes = read_attributes(dataset)
            images = attributes.pop(IMAGES, None), attributes.pop(IMAGES_DIGEST, None)
            self.images = images if isinstance(images[0], int) and isinstance(images[1], str) else None
            plain = {name: value for name, value in attributes.items() if isinstance(value, (str, int))}
            self.recipe = plain if "backbone" in attributes else {}
            if not self.recipe and max(self.shape[1:3]) < self.shape[3] and self.shape[3] in CHANNELS:
                what = f"features is {self.shape}, channels last, expected (N, C, H, W)"
                raise InputError(f"{what}; store features.transpose(0, 3, 1, 2) of numpy in its place")
            self._offset = _offset_of_plain_rows(dataset)
            self._checksums_N = _read_checksums(file, len(dataset))
        # In memory that forked processes share; a length of 0 is an error of mmap.
        self._is_sound_N = np.frombuffer(mmap.mmap(-1, max(1, len(self))), dtype=bool)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The number of bytes of one image's features."""
        return int(np.prod(self.shape[1:])) * self.dtype.itemsize

    @property
    def digest(self) -> str:
        """The digest of the shape and, if the file has them, of the checksums."""
        checksums_N = np.empty(0) if self._checksums_N is None else self._checksums_N
        return arrays_digest({"shape": np.array(self.shape), "checksums": checksums_N})

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
        block = max(1, BLOCK_BYTES // self.row_bytes)
        for start in range(0, len(self), block):
            self.read(np.arange(start, min(start + block, len(self))))

    def in_memory(self, workers: int = 0) -> "Features":
        """Read and check every row, which leaves the file in the system's cache, and return these features.

        The processes of a machine share the cache; one of those that torchrun started reads for all of them. Images,
        which are read like features, are decoded by `workers` processes; here they have no use.

        Raises:
            InputError: a row cannot be read or is damaged (names the row).
        """
        attempt(self.verify, local_rank() == 0)
        return self

    @contextmanager
    def _reader(self, rows: np.ndarray) -> Iterator[Callable[[int, np.ndarray], None]]:
        """Open the file, and yield a function that reads one of the `rows` into an array."""
        if self._offset is None:
            with open_hdf5(self.path) as file:
                dataset = own_dataset(file, "features")
                yield lambda row, values_CHW: dataset.read_direct(values_CHW, np.s_[row])
            return
        start, size = self._offset, self.row_bytes
        with reading(self.path, "a features file"), open(self.path, "rb") as file:
            for row in rows.tolist() if len(rows) > 1 else ():  # lets the disk fetch all rows at once
                os.posix_fadvise(file.fileno(), start + row * size, size, os.POSIX_FADV_WILLNEED)

            def read_row(row: int, values_CHW: np.ndarray) -> None:
                file.seek(start + row * size)
                if file.readinto(values_CHW) != size:
                    raise OSError("the file ends before it")

            yield read_row


def _offset_of_plain_rows(dataset: h5py.Dataset) -> int | None:
    """Return the offset in its file of a dataset that is stored as a numpy array is, or None if it is not."""
    native = h5py.h5t.py_create(dataset.dtype.newbyteorder("="), logical=True)
    return dataset.id.get_offset() if dataset.id.get_type().equal(native) else None


def _read_checksums(file: h5py.File, count: int) -> np.ndarray | None:
    """Return the (count,) checksums of the rows, or None if the file has none, as the original toolkit's files."""
    if "checksums" not in file:
        return None
    checksums_N = own_dataset(file, "checksums")[()]
    if checksums_N.shape != (count,) or checksums_N.dtype != np.uint32:
        raise InputError(f"checksums is {checksums_N.shape} {checksums_N.dtype}, expected one a row")
    return checksums_N
