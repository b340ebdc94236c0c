"""Ctrl-C and SIGTERM -> one line and exit code 130 or 143, without interrupting work that must be completed.

Within `handled()` the first signal raises `Stopped` in the main thread, at whatever point that is. Inside `deferred()`
the exception is delayed until the end of the block. A second signal ends the process at once, as is the system's
default. `cli/command.py` prints the line and exits; `training/loop.py` saves a stopped training run.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)

_PR_SET_PDEATHSIG = 1

_stop_signal: signal.Signals | None = None
_depth = 0
_process: int | None = None


class Stopped(BaseException):
    """The request of a signal to end this process. It is not an `Exception`, so that `except Exception` ignores it."""

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


@contextmanager
def _installed(handlers: Mapping[int, Callable | signal.Handlers]) -> Iterator[None]:
    """Install handlers by signal, and restore the previous ones at the end of the block."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def handled() -> Iterator[None]:
    """Make a signal raise `Stopped` in the block, and restore the previous handlers at its end.

    This has no effect outside of the main thread and inside another `handled()`.
    """
    global _stop_signal, _process
    if threading.current_thread() is not threading.main_thread() or _process == os.getpid():
        yield
        return
    _process = os.getpid()
    hook, sys.unraisablehook = sys.unraisablehook, _note_lost
    with _installed(dict.fromkeys((*SIGNALS, signal.SIGALRM), _answer)):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.unraisablehook = hook
            _process, _stop_signal = None, None


@contextmanager
def answering() -> Iterator[None]:
    """Run the block, which handles a `Stopped`, without raising another one in it or at its end."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


@contextmanager
def deferred() -> Iterator[None]:
    """Delay the `Stopped` of a signal in the block until its end; of nested blocks, until the end of the outermost.

    Raises:
        Stopped: at the end of the block, unless it raises something else.
    """
    with answering():
        yield
    if _stop_signal is not None and not _depth:
        raise Stopped(_stop_signal)


def default_signals() -> AbstractContextManager[None]:
    """Return a context in which a signal ends the process at once, as is the system's default. Main thread only."""
    return _installed(dict.fromkeys(SIGNALS, signal.SIG_DFL))


def stop_signal() -> signal.Signals | None:
    """Return the signal that asked this process to stop, or None."""
    return _stop_signal


def _answer(number: int, frame: FrameType | None) -> None:
    global _stop_signal
    if os.getpid() != _process:
        return  # a child that has no handlers of its own yet; its parent decides when it ends
    if number != signal.SIGALRM:
        if _stop_signal is not None:
            return  # only under torchrun, see below
        _stop_signal = signal.Signals(number)
        # torchrun sends SIGTERM to its processes even after they got a SIGINT or SIGTERM; there, only Ctrl-C is a
        # second signal. It kills processes that do not end in half a minute.
        for again in (signal.SIGINT,) if "TORCHELASTIC_RUN_ID" in os.environ else SIGNALS:
            signal.signal(again, signal.SIG_DFL)
    if _stop_signal is None or _depth:
        return
    if _is_importing(frame):
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # later
        return
    raise Stopped(_stop_signal)


def _note_lost(lost: "sys.UnraisableHookArgs") -> None:
    """Raise `Stopped` again if a destructor or a callback raised it, since Python drops such exceptions."""
    if isinstance(lost.exc_value, Stopped):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(lost)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported; libraries with optional imports would catch the exception."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def end_with_parent(number: int) -> None:
    """Make the system send this process the signal `number` when its parent ends for any reason. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
