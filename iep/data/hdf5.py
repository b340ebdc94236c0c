"""HDF5 files that a user gives -> open files and their attributes; a damaged file is an error of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from iep.runtime.reading import reading

REMEDY = "iep-preprocess --verify --overwrite makes the file anew"


@contextmanager
def open_hdf5(path: Path) -> Iterator[h5py.File]:
    """Open the HDF5 file `path` for reading, and close it after the block.

    Raises:
        InputError: the file is missing, truncated or not HDF5, or the block fails because the file is damaged.
    """
    with reading(path, "a whole HDF5 file of iep-preprocess"), h5py.File(path, "r") as file:
        yield file


def read_attributes(holder: h5py.File | h5py.Dataset) -> dict[str, Any]:
    """Return all attributes, with numpy's texts and numbers as Python's."""
    values = {name: value.item() if isinstance(value, np.generic) else value for name, value in holder.attrs.items()}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
