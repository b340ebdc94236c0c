"""The recipe of a file in its HDF5 attributes, by which a finished file is skipped and a different one is an error.

A recipe is a flat dictionary of strings and integers that says how the file was made. Digests are the first 16
hexadecimal digits of SHA-256.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import h5py
import numpy as np

from iep.errors import InputError
from iep.runtime.reading import reading

Recipe = Mapping[str, str | int]
_DIGITS = 16
FORMAT = ("v108", "v108")
"""The version of HDF5 files: the first with checksums of its structure, which HDF5 1.8 (2008) and later read."""


def write_recipe(holder: h5py.File | h5py.Dataset, recipe: Recipe) -> None:
    """Record the recipe as attributes.

    Texts have a fixed length. HDF5 stores texts of variable length in a part of the file that has no checksums, and
    that it may read forever if it is damaged.
    """
    for name, value in recipe.items():
        holder.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value


def file_digest(path: Path) -> str:
    """Return the digest of a file's content.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    with reading(path, "a file"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]


def value_digest(value: object) -> str:
    """Return the digest of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGITS]


def listing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return the names and sizes of files. A digest of these misses changes that keep the size."""
    return tuple(f"{path.name} {path.stat().st_size}" for path in paths)


def is_current(path: Path, check: Callable[[], object], overwrite: bool) -> bool:
    """Return whether the file `path` exists and passes `check()`, so that it need not be made again.

    Raises:
        InputError: `check()` raises it, and `overwrite` is not set.
    """
    if not path.exists():
        return False
    try:
        check()
    except InputError as error:
        if overwrite:
            return False
        hint = "" if "--overwrite" in str(error) else "; --overwrite replaces it"
        raise InputError(f"{error}{hint}") from None
    return True


def check_same(path: Path, found: Recipe, wanted: Recipe) -> None:
    """Check that the recipe `found` in the file `path` has all `wanted` values.

    Raises:
        InputError: a value is missing or differs (names the first one).
    """
    for key, value in wanted.items():
        if key not in found:
            raise InputError(f"{path}: was made differently ({key} is not recorded in it)")
        if found[key] != value:
            raise InputError(f"{path}: was made with {key} {found[key]}, now it is {value}")
