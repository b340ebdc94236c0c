"""A directory for one process at a time: the second is refused, and told who is the first.

The lock is the kernel's, on a small file in the directory: it ends with its process, however that ends. It holds
against other processes of this machine, and of others where the file system passes locks on.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from iep.errors import InputError
from iep.files import os_errors_name, remove_temporaries

LOCK = ".lock"


@contextmanager
def alone_in(directory: Path, *targets: str) -> Iterator[None]:
    """Hold `directory` against other processes that ask for it; it is made, and removed again if nothing came into it.

    Temporary files that killed processes left beside the `targets`, patterns of names, are removed.

    Raises:
        InputError: another process holds it (names the process, its machine and since when).
        OSError: the directory or the lock's file cannot be made.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    try:
        file = _locked(path)
        try:
            for target in targets:
                remove_temporaries(directory, target)
            yield
        finally:
            path.unlink(missing_ok=True)
            file.close()
    finally:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()


def _locked(path: Path) -> FileIO:
    """The file `path`, made and locked; it says who holds it."""
    while True:
        with os_errors_name(path):
            file = FileIO(path, "a+")
        try:
            # A record lock belongs to this process alone: worker processes that outlive it by moments do not hold it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise InputError(f"{path.parent}: in use by {holder}; wait for it, or choose another directory") from None
        if _is_same_file(file, path):
            _sign(file)
            return file
        file.close()  # the process before has just removed it


def _is_same_file(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _sign(file: FileIO) -> None:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    with suppress(OSError):  # on a full disk the lock holds without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
