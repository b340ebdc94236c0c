"""Rows of features -> {split}_features.h5, written so that a process killed at any moment can be started again.

The file is made at its full size at the start: two contiguous data sets, the rows and a CRC-32 of each, whose storage
HDF5 allocates early. Both are then written straight to their place, without HDF5, so that its metadata never changes
and cannot be left half written. A small journal beside it, replaced as a whole after rows and checksums are on disk,
says how many rows are complete. The finished file is renamed to its name; it is the same bytes whatever happened on the
way, and by however many processes it was written.

Shapes: N images, C H W features.
"""

import errno
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np

from iep.data.features import IMAGES, IMAGES_DIGEST, Features
from iep.data.hdf5 import read_attributes
from iep.errors import InputError
from iep.preprocess.recipe import FORMAT, Recipe, is_current, is_sound, opened, value_digest, write_recipe
from iep.runtime.distributed import (
    Trouble,
    any_rank,
    barrier,
    by_main,
    end_with,
    first_trouble,
    is_main,
    on_one_machine,
)
from iep.runtime.files import os_errors_name, read_json, remove_temporaries, row_checksums, sync_directory, write_json
from iep.runtime.locks import take
from iep.runtime.signals import deferred

_DATASET, _CHECKSUMS = "features", "checksums"


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


def is_done(path: Path, images: tuple[str, ...], recipe: Recipe, overwrite: bool, verify: bool = False) -> bool:
    """Whether the features file is there, made of these images (names and sizes) by this recipe; with `verify`, also
    whether every row is as it was written.

    Raises:
        InputError: it was made otherwise, cannot be read or is damaged, and `overwrite` is not set.
    """
    wanted = {IMAGES: len(images), **recipe, IMAGES_DIGEST: value_digest(images)}
    if not is_current(path, lambda: _recorded(path, path)[0], wanted, overwrite):
        return False
    return not verify or is_sound(lambda: Features(path).verify(), overwrite)


def _recorded(path: Path, file: Path | BinaryIO) -> tuple[dict[str, Any], "_Begun"]:
    """The attributes of the data set `features`, and where in the file everything lies."""
    with opened(path, file) as hdf5:
        for name in (_DATASET, _CHECKSUMS):
            if name not in hdf5:
                raise InputError(f"{path}: has no data set {name!r}; --overwrite replaces it")
        dataset = hdf5[_DATASET]
        return read_attributes(dataset), _Begun(dataset.id.get_offset(), hdf5[_CHECKSUMS].id.get_offset(), 0)


class FeatureRows:
    """The rows of a features file that is being written, perhaps by several processes, each in places of its own.

    Attributes:
        count: this many rows, the first ones, are written, by whichever process.
    """

    def __init__(self, file: FileIO, begun: "_Begun", spec: FeaturesSpec, journal: Path, flush_seconds: float) -> None:
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
        """All processes have written what they had to do, or this one has had trouble; `count` rows are complete.

        Every few seconds, and before an error ends all, see to it that they survive.

        Args:
            trouble: the row that could not be made, and why.

        Raises:
            Exception: the first trouble of any process, in the main process; the others exit.
        """
        due = time.monotonic() - self._flushed >= self._flush_seconds
        if not any_rank(due or trouble is not None):
            self.count = count
            return
        os.fsync(self._file.fileno())
        first = first_trouble(trouble)  # by which all have put theirs on disk
        self.count = count if first is None else first[0]
        self._record()
        if first is not None:
            barrier()  # torchrun stops the main process soon after another has ended
            end_with(first[1])

    def flush(self) -> None:
        """Put the rows on disk, then record them in the journal."""
        os.fsync(self._file.fileno())
        self._record()

    def _record(self) -> None:
        if is_main():
            images = value_digest(self._spec.images[: self.count])
            write_json(self._journal, {"rows": self.count, IMAGES_DIGEST: images})
        self._flushed = time.monotonic()


@dataclass(frozen=True)
class _Begun:
    """Where the file that is being written holds what, and how many rows are complete."""

    rows_at: int
    checksums_at: int
    count: int


@contextmanager
def feature_rows(path: Path, spec: FeaturesSpec, overwrite: bool, flush_seconds: float = 5.0) -> Iterator[FeatureRows]:
    """Write the features file `path`: begin it, or go on where an interrupted run stopped.

    All rows must have been written when the block ends; the file then takes its name. The main process of several
    begins and ends the file; all must come here.

    Raises:
        InputError: what an interrupted run left was made otherwise or is damaged, and `overwrite` is not set; another
            job is at work on it; or the disk is too small for the whole file.
        OSError: the file cannot be written.
    """
    partial, journal = _partial(path), _journal(path)
    with ExitStack() as stack:
        stack.enter_context(os_errors_name(partial))

        def start() -> _Begun:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(stack.enter_context(_opened_alone(partial)))
            return _resume(files[0], partial, journal, spec, overwrite) or _begin(files[0], partial, journal, spec)

        files: list[FileIO] = []
        begun = by_main(start)
        if not is_main():
            files.append(stack.enter_context(_opened_to_write(partial)))
        rows = FeatureRows(files[0], begun, spec, journal, flush_seconds)
        try:
            yield rows
        except BaseException:
            if on_one_machine():  # else what the others have put on disk is known only where all meet
                with suppress(OSError):
                    rows.flush()
            raise
        assert rows.count == spec.shape[0], f"{rows.count} rows of {spec.shape[0]}"
        os.fsync(files[0].fileno())
        barrier()
        if is_main():
            os.replace(partial, path)
            sync_directory(path.parent)
            clear_up(path)


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}.progress")


def clear_up(path: Path) -> None:
    """Remove what lies beside the finished file `path`, perhaps left by a process that was killed just then.

    Unless there is an unfinished file, which is to take its place: the journal is that one's.
    """
    if _partial(path).exists():
        return
    _journal(path).unlink(missing_ok=True)
    remove_temporaries(path.parent, _journal(path).name)


def _opened_to_write(partial: Path) -> FileIO:
    return open(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)


def _opened_alone(partial: Path) -> FileIO:
    """The file, locked. HDF5 too must use this handle: closing another one would unlock it."""
    while True:
        with ExitStack() as closing:
            file = closing.enter_context(_opened_to_write(partial))
            try:
                if take(file, partial):
                    closing.pop_all()
                    return file
            except BlockingIOError:
                raise InputError(f"{partial}: another process is writing it") from None
        # The process before has just finished it, and it has its name: not this one's to write.


def _buffered(file: FileIO) -> BinaryIO:
    """The same open file for HDF5, which wants whole reads and writes; closing it leaves `file` open."""
    return open(file.fileno(), "r+b", closefd=False)


def _begin(file: FileIO, partial: Path, journal: Path, spec: FeaturesSpec) -> _Begun:
    """Make the file at its full size, without rows.

    The journal comes last: a file without one is begun again.
    """
    journal.unlink(missing_ok=True)
    try:
        file.truncate(0)
        # A signal waits: HDF5 would write to a file that is closed before it.
        with deferred(), _buffered(file) as buffered, h5py.File(buffered, "w", libver=FORMAT) as hdf5:
            begun = _create_datasets(hdf5, spec)
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:
        partial.unlink()
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(partial.parent).free
        need = f"needs {_num_bytes(spec) / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        raise InputError(f"{partial}: no room for the features: {need} ({error.strerror})") from None
    FeatureRows(file, begun, spec, journal, 0).flush()
    return begun


def _num_bytes(spec: FeaturesSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _create_datasets(hdf5: h5py.File, spec: FeaturesSpec) -> _Begun:
    """Add the data sets, whole and without content, and the attributes of the rows."""
    checksums = create_in_place(hdf5, _CHECKSUMS, spec.shape[:1], np.dtype(np.uint32))
    dataset = create_in_place(hdf5, _DATASET, spec.shape, spec.dtype)
    write_recipe(dataset, {**spec.recipe, IMAGES: spec.shape[0], IMAGES_DIGEST: value_digest(spec.images)})
    return _Begun(dataset.id.get_offset(), checksums.id.get_offset(), 0)


def create_in_place(hdf5: h5py.File, name: str, shape: tuple[int, ...], dtype: np.dtype) -> h5py.Dataset:
    """A contiguous data set without content that has its place in the file from the start, to be written there."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)  # the same bytes whenever it is made
    layout.set_attr_phase_change(255, 0)  # attributes all in the header, where they are replaced in their place
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    element, extent = h5py.h5t.py_create(dtype, logical=True), h5py.h5s.create_simple(shape)
    return h5py.Dataset(h5py.h5d.create(hdf5.id, name.encode(), element, extent, layout))


def _resume(file: FileIO, partial: Path, journal: Path, spec: FeaturesSpec, overwrite: bool) -> _Begun | None:
    """Where things are and how many rows are complete, or None when the file is to be begun."""
    if not journal.exists() or not os.fstat(file.fileno()).st_size:
        return None

    def recorded() -> Recipe:
        _completed_rows(journal, spec)
        with _buffered(file) as buffered:
            return _recorded(partial, buffered)[0]

    if not is_current(partial, recorded, {IMAGES: len(spec.images), **spec.recipe}, overwrite):
        return None
    with _buffered(file) as buffered:
        attributes, begun = _recorded(partial, buffered)
    images = value_digest(spec.images)
    if attributes[IMAGES_DIGEST] != images:  # images of rows to come were replaced since
        with deferred(), _buffered(file) as buffered, h5py.File(buffered, "r+", libver=FORMAT) as hdf5:
            hdf5[_DATASET].attrs.modify(IMAGES_DIGEST, np.bytes_(images))
    return replace(begun, count=_completed_rows(journal, spec))


def _completed_rows(journal: Path, spec: FeaturesSpec) -> int:
    """How many rows the journal says are complete.

    Raises:
        InputError: it is no journal, or the images of those rows are no longer the same.
    """
    progress = read_json(journal)
    rows = progress.get("rows") if isinstance(progress, dict) else None
    if not isinstance(rows, int) or not 0 <= rows <= spec.shape[0]:
        raise InputError(f"{journal}: not the journal of {spec.shape[0]} rows; --overwrite begins again")
    if progress.get(IMAGES_DIGEST) != value_digest(spec.images[:rows]):
        raise InputError(f"{journal}: the images of its {rows} rows have changed since; --overwrite begins again")
    return rows
