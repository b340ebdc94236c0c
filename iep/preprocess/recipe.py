"""How a file was made, in its HDF5 attributes, so that a finished file is skipped and a different one is an error.

A recipe is a flat dictionary of strings and integers. Digests are the first 16 hexadecimal digits of SHA-256.
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
"""The version of HDF5 files: the first whose structure has checksums; HDF5 1.8 (2008) and later read it."""


def write_recipe(holder: h5py.File | h5py.Dataset, recipe: Recipe) -> None:
    """Record the recipe as attributes.

    Texts have a fixed length. Those of any length would be in a part of the file that has no checksums, and that HDF5
    may read forever if it is damaged.
    """
    for name, value in recipe.items():
        holder.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value


def file_digest(path: Path) -> str:
    """Return the digest of a file's content.

    Raises:
        InputError: as `reading`.
    """
    with reading(path, "a file"), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]


def value_digest(value: object) -> str:
    """Return the digest of a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGITS]


def listing(paths: Iterable[Path]) -> tuple[str, ...]:
    """Return files' names and sizes, for a digest; a file that changes but keeps its size is not noticed."""
    return tuple(f"{path.name} {path.stat().st_size}" for path in paths)


def is_current(path: Path, check: Callable[[], object], overwrite: bool) -> bool:
    """Return whether the file `path` is there and `check()` finds it as wanted, so that it need not be made again.

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
    """Check that the file `path` was made as wanted.

    Raises:
        InputError: it was not (names the first difference).
    """
    for key, value in wanted.items():
        if key not in found:
            raise InputError(f"{path}: was made otherwise ({key} is not recorded in it)")
        if found[key] != value:
            raise InputError(f"{path}: was made with {key} {found[key]}, now it is {value}")
