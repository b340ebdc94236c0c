"""Locks that let only one process at a time write a directory or a file, and directories that are written as a whole.

The error of a second process names the first.

The kernel keeps the lock, on a small file (`filelock`). It is released when its process ends for any reason. Processes
on other machines respect it if the file system supports that.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from iep.errors import InputError
from iep.runtime.files import os_errors_name, remove_temporaries

LOCK = ".lock"
WAIT_SECONDS = 0.25
"""The time to wait for a lock: workers of a killed process end a moment after it and hold its lock until then."""


@contextmanager
def alone_in(directory: Path, *targets: str) -> Iterator[None]:
    """Lock `directory` for this process until the block ends.

    A missing directory is created, and removed at the end if nothing was written to it. The temporary files that killed
    processes left for `targets` (patterns of file names) are removed.

    Raises:
        InputError: another process has locked `directory`.
        OSError: the directory or the lock file cannot be created.
    """
    with _existing(directory), held(directory / LOCK, directory):
        for target in targets:
            remove_temporaries(directory, target)
        yield


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `target`, and rename it to `target` when the block ends without an error.

    `target` is locked for this process until the block ends. The temporary directory is removed when the block raises,
    so that `target` appears with all its files or not at all; that of a killed process is removed at the beginning.

    Raises:
        InputError: `target` exists and is not empty, or another process is writing it.
        OSError: the block or the rename failed. Its `filename` is `target`, never a temporary path.
    """
    final = target.resolve()
    lock, temporary = (final.parent / f".{final.name}{ending}" for ending in (LOCK, ".tmp"))
    try:
        with os_errors_name(target), _existing(final.parent), held(lock, target):
            if target.exists() and any(target.iterdir()):
                raise InputError(f"{target}: not empty; choose a new directory")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir()
                yield temporary
                os.replace(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        if str(error.filename).startswith((str(lock), str(temporary))):
            error.filename, error.filename2 = str(target), None
        raise


@contextmanager
def _existing(directory: Path) -> Iterator[None]:
    """Create `directory` for the block if it is missing, and remove it at the end if nothing was written to it."""
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()


@contextmanager
def held(path: Path, guarded: Path) -> Iterator[None]:
    """Lock the file or directory `guarded` by the lock file `path`, which is removed at the end of the block.

    Raises:
        InputError: another process holds the lock; the message names the process, its machine and since when.
        OSError: the lock file cannot be created, or its file system does not support locks.
    """
    lock = FileLock(path, timeout=WAIT_SECONDS, fallback_to_soft=False)
    try:
        with os_errors_name(path):
            lock.acquire()
    except Timeout:
        holder = (path.exists() and path.read_text(errors="replace")) or "another process"
        raise InputError(f"{guarded}: in use by {holder}; wait for it, or choose another directory") from None
    try:
        with suppress(OSError):  # on a full disk, the lock works without the name of its holder
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
