"""Files that are written completely or not at all, and checks that reveal damage.

`reading.py` reads the files that a user gives.

Shapes: N rows.
"""

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"


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
    new content. `remove_temporaries` removes the temporary file of a process that was killed.

    Args:
        durable: flush the file to disk before the rename, since a power failure could otherwise leave it empty.

    Raises:
        OSError: the block or the rename failed; the error names a file.
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
    finally:
        temporary.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> None:
    """Remove the temporary files that killed processes left in `directory`, to which no other process may write now."""
    for left in directory.glob(".*.[0-9]*.tmp"):
        left.unlink(missing_ok=True)


def check_writable(targets: Iterable[Path]) -> None:
    """Create the directories of `targets`, and check that files can be written there, before they are computed.

    Raises:
        OSError: a target is a directory, or its directory cannot be created or written.
    """
    for target in targets:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(f"{target}: a directory, expected a file")
        with tempfile.TemporaryFile(dir=target.parent):
            pass


def write_bytes(target: Path, content: bytes) -> None:
    """Write `content` to `target` completely or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(content)


def write_json(target: Path, value: Any, indent: int | None = None) -> None:
    """Write `value` as JSON to `target` completely or not at all."""
    write_bytes(target, (json.dumps(value, indent=indent) + "\n").encode())


def is_whole_png(path: Path) -> bool:
    """Return whether a picture is complete; a power cut may have left it short."""
    try:
        with open(path, "rb") as file:
            file.seek(-len(_PNG_END), os.SEEK_END)
            return file.read() == _PNG_END
    except OSError:  # missing, or shorter than a PNG's end
        return False


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
