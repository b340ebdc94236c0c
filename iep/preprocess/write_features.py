"""Rows of features -> {split}_features.h5, written so that a process that is killed at any moment can be resumed.

The unfinished file has its full size from the start, with three contiguous datasets: the rows, a CRC-32 of each row,
and a CRC-32 of the name and size of each row's image. They are written at their offsets without HDF5, so that its
metadata never changes and cannot be left half written. A resumed run computes the rows whose checksum is not that of
their content, or whose image has changed. The finished file is renamed. Its bytes depend neither on interruptions nor
on the number of processes.

Shapes: N images, C H W features.
"""

import errno
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import h5py
import numpy as np
from tqdm import tqdm

from iep.data.features import IMAGES, IMAGES_DIGEST, Features, open_hdf5, own_dataset, read_attributes
from iep.errors import InputError
from iep.preprocess.recipe import FORMAT, Recipe, check_same, is_current, value_digest, write_recipe
from iep.runtime.distributed import barrier, by_main, is_main
from iep.runtime.files import atomic_path, os_errors_name, row_checksums
from iep.runtime.signals import stop_delayed

_DATASET, _CHECKSUMS, _IMAGES = "features", "checksums", "image_checksums"


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
        check_same(path, _recorded(path), {IMAGES: len(images), **recipe, IMAGES_DIGEST: value_digest(images)})
        if verify:
            Features(path).verify()

    return is_current(path, check, overwrite)


def _recorded(path: Path) -> dict[str, Any]:
    """Return the attributes of the dataset `features`."""
    with open_hdf5(path) as hdf5:
        return read_attributes(own_dataset(hdf5, _DATASET))


class FeatureRows:
    """The rows of an unfinished features file, written by one or several processes.

    Attributes:
        done_N: whether each row was complete when the file was opened.
    """

    def __init__(self, partial: Path, file: BinaryIO, dtype: np.dtype, done_N: np.ndarray):
        self.done_N = done_N
        self._file, self._dtype = file, dtype
        with open_hdf5(partial) as hdf5:
            self._offsets = [own_dataset(hdf5, name).id.get_offset() for name in (_DATASET, _CHECKSUMS)]

    def write(self, first: int, rows_BCHW: np.ndarray) -> None:
        """Write rows `first` to `first` + B - 1, and then their checksums."""
        content = np.ascontiguousarray(rows_BCHW, dtype=self._dtype)
        for values, offset in zip((content, row_checksums(content)), self._offsets, strict=True):
            self._file.seek(offset + first * values[0].nbytes)
            self._file.write(values.data)
            self._file.flush()


@contextmanager
def feature_rows(path: Path, spec: FeaturesSpec, overwrite: bool) -> Iterator[FeatureRows]:
    """Write the features file `path`, from its beginning or with the rows that an interrupted run has left.

    All rows must have been written when the block ends; the file is then renamed to `path`. With several processes, the
    main process creates and renames the file, and all of them must call this.

    Raises:
        InputError: an unfinished file was made differently or is damaged, and `overwrite` is not set; or there is no
            space for the whole file on the disk.
        OSError: the file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    done_N = by_main(lambda: _resume(partial, spec, overwrite))
    with os_errors_name(partial), open(partial, "r+b") as file:
        yield FeatureRows(partial, file, spec.dtype, done_N)
        os.fsync(file.fileno())
        barrier()
        if is_main():
            os.replace(partial, path)


def _resume(partial: Path, spec: FeaturesSpec, overwrite: bool) -> np.ndarray:
    """Create the unfinished file unless there is one, and return which of its (N,) rows are complete."""
    recipe = {IMAGES: len(spec.images), **spec.recipe}
    if not is_current(partial, lambda: check_same(partial, _recorded(partial), recipe), overwrite):
        _create(partial, spec)
        return np.zeros(len(spec.images), dtype=bool)
    images_N = _image_checksums(spec)
    with open_hdf5(partial) as hdf5:
        checksums_N, known_N = (own_dataset(hdf5, name)[()] for name in (_CHECKSUMS, _IMAGES))
        done_N = (checksums_N != 0) & (known_N == images_N)
        for row in tqdm(np.flatnonzero(done_N), desc=f"checking {partial.name}", unit="image", delay=1):
            done_N[row] = row_checksums(hdf5[_DATASET][row][None])[0] == checksums_N[row]
        digest = read_attributes(hdf5[_DATASET])[IMAGES_DIGEST]
    if digest != value_digest(spec.images):  # their rows must not count as complete with the new images
        with stop_delayed(), h5py.File(partial, "r+", libver=FORMAT) as hdf5:
            hdf5[_CHECKSUMS][...] = np.where(done_N, checksums_N, 0)
            hdf5[_IMAGES][...] = images_N
            hdf5.flush()
            hdf5[_DATASET].attrs.modify(IMAGES_DIGEST, np.bytes_(value_digest(spec.images)))
    return done_N


def _image_checksums(spec: FeaturesSpec) -> np.ndarray:
    """Return the (N,) uint32 CRC-32 of the name and size of each row's image."""
    return np.array([zlib.crc32(image.encode(errors="surrogateescape")) for image in spec.images], dtype=np.uint32)


def _create(partial: Path, spec: FeaturesSpec) -> None:
    """Create the unfinished file at its full size, without rows."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.unlink(missing_ok=True)
    try:
        with atomic_path(partial) as temporary, open(temporary, "w+b") as file:
            # Stops are delayed, because HDF5 would write to a file that is already closed.
            with stop_delayed(), h5py.File(file, "w", libver=FORMAT) as hdf5:
                create_in_place(hdf5, _CHECKSUMS, spec.shape[:1], np.dtype(np.uint32))
                create_in_place(hdf5, _IMAGES, spec.shape[:1], np.dtype(np.uint32))[...] = _image_checksums(spec)
                dataset = create_in_place(hdf5, _DATASET, spec.shape, spec.dtype)
                recipe = {**spec.recipe, IMAGES: spec.shape[0], IMAGES_DIGEST: value_digest(spec.images)}
                write_recipe(dataset, recipe)
            os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        free = shutil.disk_usage(partial.parent).free
        size = math.prod(spec.shape) * spec.dtype.itemsize
        need = f"needs {size / 1e9:.3f} GB, {free / 1e9:.3f} GB are free"
        raise InputError(f"{partial}: no space for the features: {need} ({error.strerror})") from None


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
