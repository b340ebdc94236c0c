"""Locks that let only one process at a time write a directory or a file. The error of a second one names the first.

The kernel keeps the lock, on a small file (`filelock`). It is released when its process ends for any reason. Processes
on other machines respect it if the file system supports that.
"""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from iep.errors import InputError
from iep.runtime.files import remove_temporaries

LOCK = ".lock"
WAIT_SECONDS = 0.25
"""The time to wait for a lock: workers of a killed process end a moment after it and hold its lock until then."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone_in(directory: Path, *targets: str) -> Iterator[None]:
    """Lock `directory` for this process until the block ends.

    A missing directory is created, and removed at the end if nothing was written to it. The temporary files that killed
    processes left for `targets` (patterns of file names) are removed.

    Raises:
        InputError: as `held`.
        OSError: the directory or the lock file cannot be created.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with held(directory / LOCK, directory):
            for target in targets:
                remove_temporaries(directory, target)
            yield
    finally:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()


@contextmanager
def held(path: Path, guarded: Path) -> Iterator[None]:
    """Lock the file or directory `guarded` by the lock file `path`, which is removed at the end of the block.

    Raises:
        InputError: another process holds the lock (the message names the process, its machine and since when), or the
            file system does not support locks, so that two processes could overwrite each other's files.
        OSError: the lock file cannot be created.
    """
    lock = FileLock(path, timeout=WAIT_SECONDS, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        holder = (path.exists() and path.read_text(errors="replace")) or "another process"
        raise InputError(f"{guarded}: in use by {holder}; wait for it, or choose another directory") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise InputError(
            f"{path}: cannot be locked, locks are not supported on its file system ({error.strerror}); choose a "
            "directory on another file system, or mount this one with locks"
        ) from None
    try:
        with suppress(OSError):  # on a full disk, the lock works without the name of its holder
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
