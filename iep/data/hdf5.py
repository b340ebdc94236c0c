"""HDF5 files of anyone's -> open files and attributes, or one line that names the file and what is wrong with it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py

from iep.errors import InputError

REMEDY = "iep-preprocess --verify --overwrite makes the file anew"


def open_hdf5(path: Path) -> h5py.File:
    """The HDF5 file `path`, open for reading.

    Raises:
        InputError: it is missing, truncated, or not HDF5.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such file; iep-preprocess writes it")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InputError(f"{path}: not a whole HDF5 file ({' '.join(str(error).split())})") from None


HDF5_ERRORS = (OSError, RuntimeError, LookupError, ValueError, TypeError, OverflowError)
"""What h5py raises of files whose structure is damaged."""


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Give what h5py raises of a damaged file's structure the form of our errors.

    Raises:
        InputError: names the file `path`.
    """
    try:
        yield
    except InputError:
        raise
    except HDF5_ERRORS as error:
        raise InputError(f"{path}: damaged ({' '.join(str(error).split())})") from None


def read_attributes(holder: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """All attributes, texts as `str`."""
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in holder.attrs.items()}
