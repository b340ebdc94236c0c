"""How a file was made, kept in its HDF5 attributes, so that a finished file is skipped and a different one refused.

A recipe is a flat dictionary of strings and integers. Digests are the first 16 hexadecimal digits of SHA-256.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np

from iep.data.hdf5 import HDF5_ERRORS
from iep.errors import InputError

Recipe = Mapping[str, str | int]
_DIGITS = 16
FORMAT = ("v108", "v108")
"""Of the HDF5 files: the first whose structure has checksums of its own; HDF5 1.8 (2008) and later read it."""


def write_recipe(holder: h5py.File | h5py.Dataset, recipe: Recipe) -> None:
    """Record the recipe as attributes. Texts are of a fixed length: those of any length would lie in a part of the file
    that has no checksums, and that HDF5 may read for ever where it is damaged."""
    for name, value in recipe.items():
        holder.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value


def file_digest(path: Path) -> str:
    """The digest of a file's content.

    Raises:
        InputError: the file is missing or a directory.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, expected a file") from None


def value_digest(value: object) -> str:
    """The digest of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGITS]


def listing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Files' names and sizes, to be digested: a file that changes and keeps its size goes unnoticed."""
    return tuple(f"{path.name} {path.stat().st_size}" for path in paths)


@contextmanager
def opened(path: Path, file: Path | BinaryIO | None = None) -> Iterator[h5py.File]:
    """The HDF5 file `path` of an earlier run, open for reading; through the open `file` where given.

    Raises:
        InputError: it is truncated, damaged or no HDF5 file.
    """
    try:
        with h5py.File(file or path, "r") as hdf5:
            yield hdf5
    except InputError:
        raise
    except HDF5_ERRORS as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as HDF5 ({reason}); --overwrite replaces it") from None


def is_current(path: Path, recorded: Callable[[], Recipe], wanted: Recipe, overwrite: bool) -> bool:
    """Whether the file `path` is there and was made as wanted: then it need not be made again.

    Args:
        recorded: reads how the file was made.
        overwrite: a file that was made otherwise, or is damaged, is to be replaced.

    Raises:
        InputError: the file was made otherwise (names the first difference) or is damaged, and `overwrite` is not set.
    """
    if not path.exists():
        return False
    try:
        _check_same(path, recorded(), wanted)
    except InputError:
        if overwrite:
            return False
        raise
    return True


def is_sound(check: Callable[[], object], overwrite: bool) -> bool:
    """Whether `check()` finds the content of a file undamaged.

    Raises:
        InputError: as `check`, where `overwrite` is not set.
    """
    try:
        check()
    except InputError:
        if overwrite:
            return False
        raise
    return True


def _check_same(path: Path, found: Recipe, wanted: Recipe) -> None:
    for key, value in wanted.items():
        if key not in found:
            raise InputError(f"{path}: was made otherwise ({key} is not recorded in it); --overwrite replaces it")
        if found[key] != value:
            raise InputError(f"{path}: was made with {key} {found[key]}, now it is {value}; --overwrite replaces it")
