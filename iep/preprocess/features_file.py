"""Rows of features -> {split}_features.h5, written so that a process killed at any moment can be started again.

The file is made at its full size at the start: one contiguous data set whose storage HDF5 allocates early. Its rows
are then written straight to their place, without HDF5, so that its metadata never changes and cannot be left half
written. A small journal beside it, replaced as a whole after the rows are on disk, says how many rows are complete. The
finished file is renamed to its name; it is the same bytes whatever happened on the way.

Shapes: N images, C H W features.
"""

import errno
import fcntl
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from iep.errors import InputError
from iep.files import os_errors_name, read_json, write_json
from iep.preprocess.recipe import Recipe, is_current, opened, value_digest

_DATASET = "features"
_IMAGES = "images_digest"


@dataclass(frozen=True)
class FeaturesSpec:
    """What a features file is to hold.

    Args:
        shape: (N, C, H, W).
        dtype: of the features.
        images: names and sizes of the N image files, in the order of the rows.
        recipe: how the rows are made.
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype
    images: tuple[str, ...]
    recipe: Recipe


def is_done(path: Path, images: tuple[str, ...], recipe: Recipe, overwrite: bool) -> bool:
    """Whether the features file is there, made of these images (names and sizes) by this recipe.

    Raises:
        InputError: it was made otherwise or cannot be read, and `overwrite` is not set.
    """
    wanted = {"images": len(images), **recipe, _IMAGES: value_digest(images)}
    return is_current(path, lambda: _recorded(path, path)[0], wanted, overwrite)


def _recorded(path: Path, file: Path | BinaryIO) -> tuple[dict[str, Any], int]:
    """The attributes of the data set `features`, and where in the file its first row lies."""
    with opened(path, file) as hdf5:
        if _DATASET not in hdf5:
            raise InputError(f"{path}: has no data set 'features'; --overwrite replaces it")
        dataset = hdf5[_DATASET]
        attributes = dict(dataset.attrs)
        if _IMAGES in attributes:
            attributes[_IMAGES] = attributes[_IMAGES].decode()
        return attributes, dataset.id.get_offset()


class FeatureRows:
    """The rows of a features file that is being written.

    Attributes:
        count: how many rows are written; the next one is that of image `count`.
    """

    def __init__(
        self, file: FileIO, offset: int, count: int, spec: FeaturesSpec, journal: Path, flush_seconds: float
    ) -> None:
        self.count = count
        self._file, self._offset, self._spec = file, offset, spec
        self._journal, self._flush_seconds, self._flushed = journal, flush_seconds, time.monotonic()

    def append(self, rows_BCHW: np.ndarray) -> None:
        """Write the next B rows; every few seconds, see to it that they survive."""
        content = np.ascontiguousarray(rows_BCHW, dtype=self._spec.dtype)
        assert content.shape[1:] == self._spec.shape[1:], content.shape
        assert self.count + len(content) <= self._spec.shape[0], (self.count, len(content))
        left = memoryview(content).cast("B")
        position = self._offset + self.count * (left.nbytes // len(content))
        while left:
            written = os.pwrite(self._file.fileno(), left, position)
            left, position = left[written:], position + written
        self.count += len(content)
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Put the rows on disk, then record them in the journal."""
        os.fsync(self._file.fileno())
        images = value_digest(self._spec.images[: self.count])
        write_json(self._journal, {"rows": self.count, _IMAGES: images})
        self._flushed = time.monotonic()


@contextmanager
def feature_rows(path: Path, spec: FeaturesSpec, overwrite: bool, flush_seconds: float = 5.0) -> Iterator[FeatureRows]:
    """Write the features file `path`: begin it, or go on where an interrupted run stopped.

    All rows must have been appended when the block ends; the file then takes its name.

    Raises:
        InputError: what an interrupted run left was made otherwise or is damaged, and `overwrite` is not set; another
            process is at work on it; or the disk is too small for the whole file.
        OSError: the file cannot be written.
    """
    partial, journal = path.with_name(f"{path.name}.partial"), path.with_name(f"{path.name}.progress")
    path.parent.mkdir(parents=True, exist_ok=True)
    with os_errors_name(partial), open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
        _lock(file, partial)
        start = _resume(file, partial, journal, spec, overwrite) or _begin(file, partial, journal, spec)
        rows = FeatureRows(file, *start, spec, journal, flush_seconds)
        try:
            yield rows
        except BaseException:
            with suppress(OSError):
                rows.flush()
            raise
        assert rows.count == spec.shape[0], f"{rows.count} rows of {spec.shape[0]}"
        os.fsync(file.fileno())
        os.replace(partial, path)
        for left in (journal, *path.parent.glob(f".{journal.name}.*.tmp")):  # killed runs leave the latter
            left.unlink()


def _lock(file: FileIO, partial: Path) -> None:
    # A record lock belongs to this process alone: worker processes that outlive it by moments do not hold it. It is
    # lost when the process closes any other handle of the file, so that HDF5 too must use this one.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        raise InputError(f"{partial}: another process is writing it") from None


def _buffered(file: FileIO) -> BinaryIO:
    """The same open file for HDF5, which wants whole reads and writes; closing it leaves `file` open."""
    return open(file.fileno(), "r+b", closefd=False)


def _begin(file: FileIO, partial: Path, journal: Path, spec: FeaturesSpec) -> tuple[int, int]:
    """Make the file at its full size, without rows. Returns the offset of the first row, and 0.

    The journal comes last: a file without one is begun again.
    """
    journal.unlink(missing_ok=True)
    try:
        file.truncate(0)
        with _buffered(file) as buffered, h5py.File(buffered, "w") as hdf5:
            offset = _create_dataset(hdf5, spec)
        os.posix_fallocate(file.fileno(), offset, _num_bytes(spec))
    except OSError as error:
        partial.unlink()
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(partial.parent).free
        need = f"needs {_num_bytes(spec) / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        raise InputError(f"{partial}: no room for the features: {need} ({error.strerror})") from None
    FeatureRows(file, offset, 0, spec, journal, 0).flush()
    return offset, 0


def _num_bytes(spec: FeaturesSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _create_dataset(hdf5: h5py.File, spec: FeaturesSpec) -> int:
    """Add the data set, whole and without content, and its attributes. Returns where in the file its storage lies."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)  # the same bytes whenever it is made
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    element, extent = h5py.h5t.py_create(spec.dtype, logical=True), h5py.h5s.create_simple(spec.shape)
    dataset = h5py.Dataset(h5py.h5d.create(hdf5.id, _DATASET.encode(), element, extent, layout))
    dataset.attrs.update({**spec.recipe, "images": spec.shape[0]})
    # Of a fixed length, so that it can be replaced in its place.
    dataset.attrs[_IMAGES] = np.bytes_(value_digest(spec.images))
    return dataset.id.get_offset()


def _resume(file: FileIO, partial: Path, journal: Path, spec: FeaturesSpec, overwrite: bool) -> tuple[int, int] | None:
    """The offset of the first row and how many rows are complete, or None when the file is to be begun."""
    if not journal.exists() or not os.fstat(file.fileno()).st_size:
        return None

    def recorded() -> Recipe:
        _completed_rows(journal, spec)
        with _buffered(file) as buffered:
            return _recorded(partial, buffered)[0]

    if not is_current(partial, recorded, {"images": len(spec.images), **spec.recipe}, overwrite):
        return None
    with _buffered(file) as buffered:
        attributes, offset = _recorded(partial, buffered)
    images = value_digest(spec.images)
    if attributes[_IMAGES] != images:  # images of rows to come were replaced since
        with _buffered(file) as buffered, h5py.File(buffered, "r+") as hdf5:
            hdf5[_DATASET].attrs.modify(_IMAGES, np.bytes_(images))
    return offset, _completed_rows(journal, spec)


def _completed_rows(journal: Path, spec: FeaturesSpec) -> int:
    """How many rows the journal says are complete.

    Raises:
        InputError: it is no journal, or the images of those rows are no longer the same.
    """
    progress = read_json(journal)
    rows = progress.get("rows") if isinstance(progress, dict) else None
    if not isinstance(rows, int) or not 0 <= rows <= spec.shape[0]:
        raise InputError(f"{journal}: not the journal of {spec.shape[0]} rows; --overwrite begins again")
    if progress.get(_IMAGES) != value_digest(spec.images[:rows]):
        raise InputError(f"{journal}: the images of its {rows} rows have changed since; --overwrite begins again")
    return rows
