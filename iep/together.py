"""What the processes of one job do for each other: an error of one ends all, and is told once.

Each process must call these at the same places; with one process they do nothing but raise.
"""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

from iep.distributed import any_rank, broadcast, gather, is_main, world_size
from iep.errors import InputError

T = TypeVar("T")
Trouble = tuple[int, Exception]
"""Where in the work, and what went wrong there."""


def first_trouble(trouble: Trouble | None) -> Trouble | None:
    """The earliest trouble of any process, in every process."""
    troubles = gather(trouble)
    return broadcast(min(filter(None, troubles), key=lambda each: each[0], default=None) if is_main() else None)


def end_with(error: Exception) -> None:
    """End this process: the main one by raising `error`, which is told there, the others without a word.

    Raises:
        Exception: `error`, in the main process.
        SystemExit: in the others.
    """
    if is_main():
        raise error
    sys.exit(1)


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `make()` returns, or what it raises of errors that a user is told."""
    try:
        return make(), None
    except (InputError, OSError) as error:
        return None, error


def raise_any(error: Exception | None) -> None:
    """End every process where one has an error.

    Raises:
        Exception: that of the first such process, in the main one; the others exit.
    """
    if any_rank(error is not None):
        end_with(first_trouble(None if error is None else (0, error))[1])


def main_first(make: Callable[[], T]) -> T:
    """What `make()` returns; the main process makes its own first, so that others find what it leaves (a download).

    Raises:
        InputError: as `make` in any process.
        OSError: likewise.
    """
    made, error = attempt(make) if is_main() else (None, None)
    raise_any(error)
    if not is_main():
        made, error = attempt(make)
    raise_any(error)
    return made


def by_main(make: Callable[[], T]) -> T:
    """What `make()` returns in the main process, the only one to call it; it must be picklable.

    Raises:
        InputError: as `make`.
        OSError: likewise.
    """
    made, error = attempt(make) if is_main() else (None, None)
    raise_any(error)
    return broadcast(made)


def on_one_machine() -> bool:
    """Whether all processes of the job see the same disk cache."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) == world_size()
