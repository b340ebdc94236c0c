"""A directory for one process at a time: the second is refused, and told who is the first.

The lock is the kernel's, on a small file in the directory: it ends with its process, however that ends. It holds
against other processes of this machine, and of others where the file system passes locks on.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path

from iep.errors import InputError
from iep.runtime.files import os_errors_name, remove_temporaries

LOCK = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def alone_in(directory: Path, *targets: str) -> Iterator[None]:
    """Hold `directory` against other processes that ask for it; it is made, and removed again if nothing came into it.

    Temporary files that killed processes left beside the `targets`, patterns of names, are removed.

    Raises:
        InputError: another process holds it (names the process, its machine and since when), or the file system has no
            locks.
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


def take(file: FileIO, path: Path) -> bool:
    """Lock the open `file` for this process alone; False where `path` is another file, or none, by now.

    It is a record lock: worker processes that outlive this one by moments do not hold it. It is lost when this process
    closes any other handle of the file.

    Raises:
        BlockingIOError: another process has locked it.
        InputError: the file system has no locks; without them two processes could write over each other's files.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise BlockingIOError(error.errno, error.strerror, str(path)) from None
        if error.errno in _NO_LOCKS:
            raise InputError(
                f"{path}: cannot be locked, locks are not supported on its file system ({error.strerror}); choose a "
                "directory elsewhere, or have it mounted with locks"
            ) from None
        raise
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _locked(path: Path) -> FileIO:
    """The file `path`, made and locked; it says who holds it."""
    while True:
        with os_errors_name(path):
            file = FileIO(path, "a+")
        with ExitStack() as closing:
            closing.callback(file.close)
            try:
                if not take(file, path):  # the process before has just removed it
                    continue
            except BlockingIOError:
                file.seek(0)
                holder = file.read().decode(errors="replace") or "another process"
                in_use = f"{path.parent}: in use by {holder}; wait for it, or choose another directory"
                raise InputError(in_use) from None
            _sign(file)
            closing.pop_all()
            return file


def _sign(file: FileIO) -> None:
    since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    with suppress(OSError):  # on a full disk the lock holds without a name
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {since}".encode())
