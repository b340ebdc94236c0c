"""Files that are written whole or not at all, JSON that is named when it cannot be read, and checksums of arrays.

A checksum is a short number that changes when its array is damaged, kept in an HDF5 file beside what it is of.

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

from iep.errors import InputError


@contextmanager
def os_errors_name(path: Path) -> Iterator[None]:
    """Give an operating system error that names no file (a write that fails on an open one does not) the name `path`.

    Raises:
        OSError: as the block does.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it onto `target` when the block ends well.

    The temporary file is flushed to disk before the rename, and the directory after it; it is removed when the block
    raises. So `target` holds either its old content or, for good when this returns, all of the new one.

    Raises:
        OSError: as the block does, its `filename` set to `target` where it had none or the temporary one.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with os_errors_name(target):
            yield temporary
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, target)
            sync_directory(target.parent)
    except OSError as error:
        if error.filename == str(temporary):
            error.filename, error.filename2 = str(target), None
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(directory: Path) -> None:
    """See to it that the names of the files in `directory`, new or removed, survive a power cut, where the file system
    can do that for a directory."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)


def remove_temporaries(directory: Path, name: str) -> None:
    """Remove what killed processes left of `atomic_path` beside targets called `name`, a pattern.

    Only for who knows that no other process is writing them.
    """
    for left in directory.glob(".*.tmp"):
        if fnmatch(left.name.lstrip("."), f"{name}.*.tmp"):  # a temporary file may have one of its own
            left.unlink(missing_ok=True)


def check_writable(targets: Iterable[Path]) -> None:
    """Before long work: make the targets' directories, and see that files can be written there under these names.

    Raises:
        OSError: one cannot; names it.
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
    """Write `content` to `target`, whole or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)


def write_json(target: Path, value: Any, indent: int | None = None) -> None:
    """Write `value` as JSON to `target`, whole or not at all."""
    write_bytes(target, (json.dumps(value, indent=indent) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON value in the file `path`.

    Raises:
        InputError: the file is missing, a directory, not UTF-8, or not JSON (names the line and column).
    """
    text = read_json_text(path)
    try:
        return json.loads(text)
    except RecursionError:
        raise InputError(f"{path}: not usable JSON, it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise not_json(path, error) from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{path}: not usable JSON ({str(error).partition(';')[0]})") from None


def read_json_text(path: Path) -> str:
    """The text of a JSON file, not yet parsed.

    Raises:
        InputError: the file is missing, a directory, in a file instead of a directory, or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, expected a JSON file") from None
    except NotADirectoryError:
        file = next(parent for parent in Path(path).parents if parent.exists())
        raise InputError(f"{file}: a file, expected a directory with {Path(path).name}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}, expected JSON") from None


def not_json(path: Path, error: json.JSONDecodeError) -> InputError:
    """What is wrong with the JSON in the file `path`, as one line."""
    return InputError(f"{path}: not JSON (line {error.lineno}, column {error.colno}: {error.msg})")


def row_checksums(rows: np.ndarray) -> np.ndarray:
    """(N,) uint32: CRC-32 of the bytes of each row of a C-contiguous array (N, ...)."""
    bytes_NB = rows.reshape(len(rows), -1).view(np.uint8)
    return np.fromiter((zlib.crc32(row_B) for row_B in bytes_NB), dtype=np.uint32, count=len(rows))


def arrays_digest(arrays: Mapping[str, np.ndarray]) -> str:
    """16 hexadecimal digits of the SHA-256 of integer arrays' names, shapes and values, in whatever order and width."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name], dtype="<i8").data)
    return digest.hexdigest()[:16]
