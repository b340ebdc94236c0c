"""Ctrl-C and SIGTERM -> one line and exit code 130 or 143, never in the middle of what must be done whole.

Within `handled()` the first signal raises `Stopped` in the main thread, at whatever point that is. Inside `deferred()`
it waits for the end of the block, and in `waited_for` for the next item. A second signal ends the process at once, as
is the system's default. `cli/command.py` prints the line and exits; `training/loop.py` saves a stopped training run.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 2.0
"""Seconds for which an item is still waited for after a signal."""

_PR_SET_PDEATHSIG = 1

T = TypeVar("T")
_asked: signal.Signals | None = None
_depth = _waiting = 0
_process: int | None = None


class Stopped(BaseException):
    """A signal asks this process to end. It is not an `Exception`, so that no handler of errors continues after it."""

    def __init__(self, number: signal.Signals, outcome: str = ""):
        super().__init__(number, outcome)
        self.number = number
        self.outcome = outcome

    def __str__(self) -> str:
        return f"Stopped by {self.number.name}{self.outcome and f' {self.outcome}'}"

    @property
    def exit_code(self) -> int:
        """The exit code that a shell reports for a process that this signal ended."""
        return 128 + self.number


def quit_on_signals() -> None:
    """Have the first signal write its line and end the process, for the time before a command begins."""

    def end(number: int, frame: FrameType | None) -> None:
        stop = Stopped(signal.Signals(number))
        os.write(2, f"{stop}\n".encode())
        os._exit(stop.exit_code)

    for number in SIGNALS:
        signal.signal(number, end)


@contextmanager
def handled() -> Iterator[None]:
    """Have a signal raise `Stopped` in the block, and restore the previous handlers afterwards.

    It changes nothing in other threads than the main one, and inside another `handled()`.
    """
    global _asked, _process
    if threading.current_thread() is not threading.main_thread() or _process == os.getpid():
        yield
        return
    _process = os.getpid()
    before = {number: signal.signal(number, _answer) for number in SIGNALS}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _ask_again)
    hook, sys.unraisablehook = sys.unraisablehook, _note_lost
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
        _process, _asked = None, None


@contextmanager
def answering() -> Iterator[None]:
    """Complete the block, which handles a `Stopped`: no other is raised in it or at its end."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def deferred() -> Iterator[None]:
    """Complete the block: a signal that arrives in it raises `Stopped` at its end, in nested blocks at the outermost's.

    Raises:
        Stopped: at the end of the block, unless it raises something else.
    """
    with answering():
        yield
    if _asked is not None and not _depth:
        raise Stopped(_asked)


@contextmanager
def unanswered() -> Iterator[None]:
    """Have a signal end the process at once in the block, as is the system's default; only for the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def waited_for(items: Iterable[T]) -> Iterator[T]:
    """Yield the items, such as those of worker processes.

    After a signal, the next item is still waited for, up to `PATIENCE`, so that no transfer is cut short.

    Raises:
        Stopped: instead of yielding the next item after a signal.
    """
    global _waiting
    with deferred():  # a loader whose workers are just starting could not be ended cleanly
        iterator, end = iter(items), object()
    while True:
        _waiting += 1
        try:
            item = next(iterator, end)
        finally:
            _waiting -= 1
        if _asked is not None and not _depth and not _waiting:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Stopped(_asked)
        if item is end:
            return
        yield item


def asked() -> signal.Signals | None:
    """Return the signal that has asked this process to stop, if there is one."""
    return _asked


def _answer(number: int, frame: FrameType | None) -> None:
    global _asked
    if os.getpid() != _process:
        return  # in a child that does not yet have handlers of its own; its parent decides when it ends
    if _asked is not None:
        return  # only under torchrun, see below
    _asked = signal.Signals(number)
    # torchrun sends SIGTERM to its processes even after they got a SIGINT or SIGTERM; there, only Ctrl-C is a second
    # signal. It kills processes that do not end in half a minute.
    for again in (signal.SIGINT,) if "TORCHELASTIC_RUN_ID" in os.environ else SIGNALS:
        signal.signal(again, signal.SIG_DFL)
    if _waiting and not _depth:
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    else:
        _ask_again(number, frame)


def _note_lost(lost: "sys.UnraisableHookArgs") -> None:
    """Ask again if a destructor or a callback raised `Stopped`, since Python drops such exceptions."""
    if isinstance(lost.exc_value, Stopped):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(lost)


def _ask_again(number: int, frame: FrameType | None) -> None:
    if _asked is None or _depth or os.getpid() != _process:
        return
    if _is_importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        return
    raise Stopped(_asked)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported; libraries that try an import would swallow the exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end_with_parent(number: int) -> None:
    """Have the system send this process the signal `number` when its parent ends for any reason. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
