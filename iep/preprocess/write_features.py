"""Rows of features -> {split}_features.h5, written so that a process that is killed at any moment can be resumed.

The file is created at its full size, with two contiguous datasets: the rows, and a CRC-32 of each row. They are then
written at their offsets without HDF5, so that its metadata never changes and cannot be left half written. A small
journal beside the file holds the number of complete rows; it is replaced as a whole after rows and checksums are on
disk. The finished file is renamed. Its bytes depend neither on interruptions nor on the number of processes.

Shapes: N images, C H W features.
"""

import errno
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from iep.data.features import IMAGES, IMAGES_DIGEST, Features
from iep.data.hdf5 import open_hdf5, read_attributes
from iep.errors import InputError
from iep.preprocess.recipe import FORMAT, Recipe, check_same, is_current, value_digest, write_recipe
from iep.runtime.distributed import (
    Trouble,
    any_rank,
    barrier,
    by_main,
    end_with,
    first_trouble,
    is_main,
    local_world_size,
    world_size,
)
from iep.runtime.files import os_errors_name, remove_temporaries, row_checksums, sync_directory, write_json
from iep.runtime.locks import held
from iep.runtime.reading import reading
from iep.runtime.signals import deferred

_DATASET, _CHECKSUMS = "features", "checksums"


@dataclass(frozen=True)
class FeaturesSpec:
    """The content of a features file that is to be made.

    Args:
        shape: (N, C, H, W).
        dtype: the dtype of the features.
        images: names and sizes of the N image files, in the order of the rows.
        recipe: how the rows are made.
    """

    shape: tuple[int, int, int, int]
    dtype: np.dtype
    images: tuple[str, ...]
    recipe: Recipe


def is_done(path: Path, images: tuple[str, ...], recipe: Recipe, overwrite: bool, verify: bool = False) -> bool:
    """Return whether the features file exists and was made from these images (names and sizes) by this recipe.

    With `verify`, every row is checked as well.

    Raises:
        InputError: it was made differently or is damaged, and `overwrite` is not set.
    """

    def check() -> None:
        wanted = {IMAGES: len(images), **recipe, IMAGES_DIGEST: value_digest(images)}
        check_same(path, _recorded(path)[0], wanted)
        if verify:
            Features(path).verify()

    return is_current(path, check, overwrite)


def _recorded(path: Path) -> tuple[dict[str, Any], "_Begun"]:
    """Return the attributes of the dataset `features`, and the offsets of the datasets in the file."""
    with open_hdf5(path) as hdf5:
        dataset = hdf5[_DATASET]
        return read_attributes(dataset), _Begun(dataset.id.get_offset(), hdf5[_CHECKSUMS].id.get_offset(), 0)


class FeatureRows:
    """The rows of a features file, written by one or several processes.

    Attributes:
        count: the number of rows from the first on that are complete.
    """

    def __init__(self, file: BinaryIO, begun: "_Begun", spec: FeaturesSpec, journal: Path, flush_seconds: float):
        self.count = begun.count
        self._file, self._begun, self._spec = file, begun, spec
        self._journal, self._flush_seconds, self._flushed = journal, flush_seconds, time.monotonic()

    def write(self, first: int, rows_BCHW: np.ndarray) -> None:
        """Write rows `first` to `first` + B - 1."""
        content = np.ascontiguousarray(rows_BCHW, dtype=self._spec.dtype)
        assert content.shape[1:] == self._spec.shape[1:], content.shape
        assert 0 <= first <= first + len(content) <= self._spec.shape[0], (first, len(content))
        checksums = row_checksums(content)
        self._write(content, self._begun.rows_at + first * (content.nbytes // len(content)))
        self._write(checksums, self._begun.checksums_at + first * checksums.itemsize)

    def _write(self, values: np.ndarray, position: int) -> None:
        left = memoryview(values).cast("B")
        while left:
            written = os.pwrite(self._file.fileno(), left, position)
            left, position = left[written:], position + written

    def end_round(self, count: int, trouble: Trouble | None = None) -> None:
        """End a round, in which all processes have written their rows, so that `count` rows are complete.

        The rows are flushed to disk every few seconds, and before an error ends the job.

        Args:
            trouble: the row that this process could not make, and the error.

        Raises:
            Exception: the error at the first row, in the main process; the others exit.
        """
        due = time.monotonic() - self._flushed >= self._flush_seconds
        if not any_rank(due or trouble is not None):
            self.count = count
            return
        os.fsync(self._file.fileno())
        first = first_trouble(trouble)  # after this, the rows of all processes are on disk
        self.count = count if first is None else first[0]
        self._record()
        if first is not None:
            barrier()  # torchrun stops the main process soon after another process has ended
            end_with(first[1])

    def flush(self) -> None:
        """Flush the rows to disk, and then record them in the journal."""
        os.fsync(self._file.fileno())
        self._record()

    def _record(self) -> None:
        if is_main():
            images = value_digest(self._spec.images[: self.count])
            write_json(self._journal, {"rows": self.count, IMAGES_DIGEST: images})
        self._flushed = time.monotonic()


@dataclass(frozen=True)
class _Begun:
    """The offsets of the datasets in the file that is being written, and the number of complete rows."""

    rows_at: int
    checksums_at: int
    count: int


@contextmanager
def feature_rows(path: Path, spec: FeaturesSpec, overwrite: bool, flush_seconds: float = 5.0) -> Iterator[FeatureRows]:
    """Write the features file `path`, from its beginning or from the row at which an interrupted run stopped.

    All rows must have been written when the block ends; the file is then renamed to `path`. With several processes, the
    main process creates and renames the file, and all of them must call this.

    Raises:
        InputError: an unfinished file was made differently or is damaged, and `overwrite` is not set; another process
            writes it; or there is no space for the whole file on the disk.
        OSError: the file cannot be written.
    """
    partial, journal, lock = _beside(path)
    with ExitStack() as stack:
        stack.enter_context(os_errors_name(partial))

        def start() -> _Begun:
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(lock, partial))
            return _resume(partial, journal, spec, overwrite) or _begin(partial, journal, spec)

        begun = by_main(start)
        file = stack.enter_context(open(partial, "r+b", buffering=0))
        rows = FeatureRows(file, begun, spec, journal, flush_seconds)
        try:
            yield rows
        except BaseException:
            if local_world_size() == world_size():  # else the rows of other machines may not be on disk
                with suppress(OSError):
                    rows.flush()
            raise
        assert rows.count == spec.shape[0], f"{rows.count} rows of {spec.shape[0]}"
        os.fsync(file.fileno())
        barrier()
        if is_main():
            os.replace(partial, path)
            sync_directory(path.parent)
            clear_up(path)


def _beside(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the unfinished file that is to replace `path`, of its journal and of its lock."""
    return tuple(path.with_name(name.format(path.name)) for name in ("{}.partial", "{}.progress", ".{}.lock"))


def clear_up(path: Path) -> None:
    """Remove the files beside the finished file `path` that a killed process may have left.

    If there is an unfinished file that is to replace `path`, they belong to that file and stay.
    """
    partial, journal, lock = _beside(path)
    if not partial.exists():
        journal.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        remove_temporaries(path.parent, journal.name)


def _begin(partial: Path, journal: Path, spec: FeaturesSpec) -> _Begun:
    """Create the file at its full size, without rows.

    The journal is written last, because a file without a journal is created anew.
    """
    journal.unlink(missing_ok=True)
    try:
        with open(partial, "w+b") as file:
            # Signals are deferred, because HDF5 would write to a file that is already closed.
            with deferred(), h5py.File(file, "w", libver=FORMAT) as hdf5:
                begun = _create_datasets(hdf5, spec)
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            FeatureRows(file, begun, spec, journal, 0).flush()
    except OSError as error:
        partial.unlink()
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(partial.parent).free
        size = math.prod(spec.shape) * spec.dtype.itemsize
        need = f"needs {size / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        raise InputError(f"{partial}: no space for the features: {need} ({error.strerror})") from None
    return begun


def _create_datasets(hdf5: h5py.File, spec: FeaturesSpec) -> _Begun:
    """Add the datasets at their full size, without content, and the attributes of the rows."""
    checksums = create_in_place(hdf5, _CHECKSUMS, spec.shape[:1], np.dtype(np.uint32))
    dataset = create_in_place(hdf5, _DATASET, spec.shape, spec.dtype)
    write_recipe(dataset, {**spec.recipe, IMAGES: spec.shape[0], IMAGES_DIGEST: value_digest(spec.images)})
    return _Begun(dataset.id.get_offset(), checksums.id.get_offset(), 0)


def create_in_place(hdf5: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype) -> h5py.Dataset:
    """Create a contiguous dataset without content at a fixed offset in the file, where its content can be written."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)  # without times, the bytes do not depend on when the file is made
    layout.set_attr_phase_change(255, 0)  # attributes in the header can be replaced in place
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    element, extent = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(hdf5.id, name.encode(), element, extent, layout))


def _resume(partial: Path, journal: Path, spec: FeaturesSpec, overwrite: bool) -> _Begun | None:
    """Return the offsets and the number of complete rows, or None if the file must be created anew."""
    wanted = {IMAGES: len(spec.images), **spec.recipe}

    def check() -> None:
        _completed_rows(journal, spec)
        check_same(partial, _recorded(partial)[0], wanted)

    if not journal.exists() or not is_current(partial, check, overwrite):
        return None
    attributes, begun = _recorded(partial)
    images = value_digest(spec.images)
    if attributes.get(IMAGES_DIGEST) != images:  # images were replaced whose rows are not written yet
        with deferred(), h5py.File(partial, "r+", libver=FORMAT) as hdf5:
            hdf5[_DATASET].attrs.modify(IMAGES_DIGEST, np.bytes_(images))
    return replace(begun, count=_completed_rows(journal, spec))


def _completed_rows(journal: Path, spec: FeaturesSpec) -> int:
    """Return the number of complete rows that the journal records.

    Raises:
        InputError: it is not a journal of this file, or the images of those rows have changed.
    """
    with reading(journal, f"the journal of {spec.shape[0]} rows"):
        progress = json.loads(journal.read_bytes())
        rows = progress["rows"]
        if not 0 <= rows <= spec.shape[0] or progress[IMAGES_DIGEST] != value_digest(spec.images[:rows]):
            raise InputError(f"the images of its {rows} rows have changed")
    return rows
