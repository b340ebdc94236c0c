"""Ctrl-C and SIGTERM -> one line and exit code 130 or 143, without interrupting work that must be completed.

Within `handled()` the first signal raises `Stopped` in the main thread, at whatever point that is, as Python raises
`KeyboardInterrupt`. Inside `stop_delayed()` the exception waits for the end of the block, and in an import for the end
of the import. Python drops exceptions in destructors and in callbacks of weak references, so that a dropped `Stopped`
is raised again a moment later. `cli/command.py` prints the line and exits; `training/loop.py` saves a stopped run.

All worker processes are forked within `starting_workers()` and begin with `become_worker()`: they leave signals to
their parent, and end with it.
"""

import ctypes
import errno
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from iep.errors import InputError

SIGNALS = (signal.SIGINT, signal.SIGTERM)

PARENT = os.getppid()
"""The process that started this one, unless it ended before this module was imported."""

_PR_SET_PDEATHSIG = 1
_MOMENT = 0.01
"""Seconds after which a `Stopped` that was dropped, or that an import delays, is raised again."""

_stop_signal: signal.Signals | None = None
_depth = 0


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
def handled() -> Iterator[None]:
    """Make a signal raise `Stopped` in the block, and restore the previous handlers at its end.

    This has no effect outside of the main thread and inside another `handled()`.
    """
    global _stop_signal
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or signal.getsignal(signal.SIGTERM) is _request_stop:
        yield
        return
    handlers = {**dict.fromkeys(SIGNALS, _request_stop), signal.SIGALRM: _raise_again}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    hook = sys.unraisablehook
    sys.unraisablehook = lambda dropped: _note_dropped(dropped) or hook(dropped)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
        _stop_signal = None


@contextmanager
def stop_delayed() -> Iterator[None]:
    """Delay the `Stopped` of a signal in the block until its end; of nested blocks, until the end of the outermost.

    Raises:
        Stopped: at the end of the block, unless it raises something else.
    """
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
    if _stop_signal is not None and not _depth:
        raise Stopped(_stop_signal)


def stop_signal() -> signal.Signals | None:
    """Return the signal that asked this process to stop, or None."""
    return _stop_signal


def _request_stop(number: int, frame: FrameType | None) -> None:
    """Raise or delay `Stopped`. A second Ctrl-C ends the process at once, by the system's default action.

    A further SIGTERM is ignored: torchrun sends one to its processes even after they got a signal, and a process or
    batch system that does not want to wait sends SIGKILL.
    """
    global _stop_signal
    if _stop_signal is not None:
        return
    _stop_signal = signal.Signals(number)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _raise_again(number, frame)


def _note_dropped(dropped: "sys.UnraisableHookArgs") -> bool:
    """Return whether the exception that Python dropped is `Stopped`, which is then raised again after a moment."""
    is_stop = isinstance(dropped.exc_value, Stopped)
    if is_stop:
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)
    return is_stop


def _raise_again(number: int, frame: FrameType | None) -> None:
    """Raise `Stopped` if a stop is requested, unless the block delays it; in an import, try again after a moment."""
    if _stop_signal is None or _depth:
        return
    if _is_import(frame):
        signal.setitimer(signal.ITIMER_REAL, _MOMENT)
    else:
        raise Stopped(_stop_signal)


def _is_import(frame: FrameType | None) -> bool:
    """Return whether a module is being imported: PyTorch's C++ code aborts the process if that raises."""
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


@contextmanager
def starting_workers() -> Iterator[None]:
    """Delay signals until the end of the block, which forks worker processes; they inherit that signals are blocked.

    Otherwise, a signal that arrives before `become_worker` would run the handlers of this process in a worker.

    Raises:
        InputError: the system has no space for what the processes share.
        Stopped: at the end of the block, unless it raises something else.
    """
    with stop_delayed():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise InputError("/dev/shm: no space left, which worker processes need; free some") from None
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def become_worker() -> None:
    """Make this process, which was forked within `starting_workers()`, leave signals to its parent and end with it.

    A Ctrl-C or a batch system's SIGTERM reaches all processes of a job, and the parent decides what follows. A worker
    ends when its parent sends it SIGTERM or has ended. `multiprocessing` does the former at exit, for a loader that has
    not ended its workers because the traceback of an uncaught exception keeps it alive.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    assert parent.pid is not None
    threading.Thread(target=_end_when_told, args=(parent.pid,), daemon=True).start()
    end_with_parent(signal.SIGKILL, parent.pid)


def _end_when_told(parent: int) -> None:
    """Wait for a SIGTERM of the process `parent`, and end this process; only `sigwaitinfo` tells who sent a signal."""
    while signal.sigwaitinfo([signal.SIGTERM]).si_pid != parent:
        pass
    os._exit(0)  # another exit code would raise an error in PyTorch's handler of SIGCHLD


def end_with_parent(number: int, parent: int) -> None:
    """Make the system send this process the signal `number` when its parent ends for any reason. Linux only.

    Args:
        parent: the process that started this one; if it has already ended, the signal is sent at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)
