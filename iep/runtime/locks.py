"""Locks that let only one process at a time write a directory or a file, and directories that are written as a whole.

The kernel keeps the lock, on a small file (`filelock`). It is released when its process ends for any reason. Processes
on other machines respect it if the file system supports that.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from iep.errors import InputError
from iep.runtime.files import os_errors_name, remove_temporaries

LOCK = ".lock"
WAIT_SECONDS = 0.25
"""The time to wait for a lock: workers of a killed process end a moment after it and hold its lock until then."""


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process until the block ends.

    A missing directory is created, and removed at the end if nothing was written to it. The temporary files that killed
    processes left are removed.

    Raises:
        InputError: another process has locked `directory`.
        OSError: the directory or the lock file cannot be created.
    """
    is_new = not directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with _held(directory / LOCK, directory):
            remove_temporaries(directory)
            yield
    finally:
        if is_new:
            with suppress(OSError):  # it has files
                directory.rmdir()


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `target`, and rename it to `target` when the block ends without an error.

    `target` is locked for this process until the block ends. The temporary directory is removed when the block raises,
    so that `target` appears with all its files or not at all; that of a killed process is removed at the beginning.

    Raises:
        InputError: `target` exists and is not empty, or another process is writing it.
        OSError: the block or the rename failed; the error names a file.
    """
    final = target.resolve()
    lock, temporary = (final.with_name(f".{final.name}{ending}") for ending in (LOCK, ".tmp"))
    final.parent.mkdir(parents=True, exist_ok=True)
    with os_errors_name(target), _held(lock, target):
        if target.exists() and any(target.iterdir()):
            raise InputError(f"{target}: not empty; choose a new directory")
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            yield temporary
            os.replace(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _held(path: Path, guarded: Path) -> Iterator[None]:
    """Lock the file or directory `guarded` by the lock file `path`, which is removed at the end of the block.

    Raises:
        InputError: another process holds the lock; the message names the process and its machine.
        OSError: the lock file cannot be created, or its file system does not support locks.
    """
    lock = FileLock(path, timeout=WAIT_SECONDS, fallback_to_soft=False)
    try:
        with os_errors_name(path):
            lock.acquire()
    except Timeout:
        holder = (path.exists() and path.read_text()) or "another process"
        raise InputError(f"{guarded}: in use by {holder}; wait for it, or choose another directory") from None
    try:
        with suppress(OSError):  # on a full disk, the lock works without the name of its holder
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
