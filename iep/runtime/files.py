"""Files that are written completely or not at all, and checksums of arrays, which reveal damage.

`reading.py` reads the files that a user gives.

Shapes: N rows.
"""

import errno
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np


@contextmanager
def os_errors_name(path: Path) -> Iterator[None]:
    """Add the name of the file `path` to an `OSError` of the block without one, such as that of a failed write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_path(target: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path beside `target`, and rename it to `target` when the block ends without an error.

    The temporary file is removed when the block raises. `target` therefore has either its old content or the complete
    new content.

    Args:
        durable: flush the file to disk before the rename, and the directory after it, so that the new content survives
            a power failure.

    Raises:
        OSError: the block or the rename failed. Its `filename` is `target`, never the temporary path.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with os_errors_name(target):
            yield temporary
            if durable:
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
            os.replace(temporary, target)
            if durable:
                sync_directory(target.parent)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename, error.filename2 = str(target), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """Flush the directory entries of `directory` to disk, if its file system supports this."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def remove_temporaries(directory: Path, name: str) -> None:
    """Remove the temporary files that killed processes left for targets whose names match the pattern `name`.

    No other process may be writing these targets at the time.
    """
    for left in directory.glob(".*.tmp"):
        if fnmatch(left.name.lstrip("."), f"{name}.*.tmp"):  # a temporary file may have a temporary file itself
            left.unlink(missing_ok=True)


def check_writable(targets: Iterable[Path]) -> None:
    """Create the directories of `targets`, and check that the files can be written, before they are computed.

    Raises:
        OSError: a target cannot be written; the error names it.
    """
    for target in targets:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "its directory is a file", str(target)) from None
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a directory, expected a file", str(target))
        try:
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None


def write_bytes(target: Path, content: bytes) -> None:
    """Write `content` to `target` completely or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)


def write_json(target: Path, value: Any, indent: int | None = None) -> None:
    """Write `value` as JSON to `target` completely or not at all."""
    write_bytes(target, (json.dumps(value, indent=indent) + "\n").encode())


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """Return the (N,) uint32 CRC-32 of the bytes of each row of a C-contiguous array (N, ...)."""
    bytes_NB = rows.reshape(len(rows), -1).view(np.uint8)
    return np.fromiter((zlib.crc32(row_B) for row_B in bytes_NB), dtype=np.uint32, count=len(rows))


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of arrays' names, shapes and values.

    The digest depends neither on the order of the arrays nor on the width of their numbers.
    """
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        kind = "<f8" if arrays[name].dtype.kind == "f" else "<i8"
        digest.update(np.ascontiguousarray(arrays[name], dtype=kind).data)
    return digest.hexdigest()[:16]
