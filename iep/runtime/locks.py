"""Locks for what one process at a time may write: the second process is refused, and its error names the first.

A lock is the kernel's, on a small file (`filelock`). It ends with its process, however that ends, and holds against
other machines where the file system passes locks on.
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
"""Workers of a killed process end moments after it, and hold its lock until then."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone_in(directory: Path, *targets: str) -> Iterator[None]:
    """Hold `directory` against other processes that ask for it.

    The directory is made if it is missing, and removed afterwards if nothing was written to it. Temporary files of
    killed processes beside the `targets` (patterns of file names) are removed.

    Raises:
        InputError: as `held`.
        OSError: the directory or the lock file cannot be made.
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
    """Hold the lock file `path`, which guards `guarded`, and remove it afterwards.

    Raises:
        InputError: another process holds the lock (the message names the process, its machine and since when), or the
            file system does not support locks; without them two processes could overwrite each other's files.
        OSError: the lock file cannot be made.
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
            "directory elsewhere, or have it mounted with locks"
        ) from None
    try:
        with suppress(OSError):  # on a full disk, the lock works without the holder's name
            since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}")
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()
