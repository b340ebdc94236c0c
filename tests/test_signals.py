"""Ctrl-C and SIGTERM end a command with one line and 130 or 143, at once or between two steps, and lose no work."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from iep.cli.command import Command
from iep.data.loader import NO_WORKERS, made_ahead
from iep.errors import InputError
from iep.runtime.signals import Stopped, become_worker, end_with_parent, handled, starting_workers, stop_delayed

BOTH = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])


def ask(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Assert that the test leaves the signals' handlers as they were."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_process_whose_parent_has_already_ended_ends_at_once():
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        parent = os.getpid()
        if os.fork() == 0:
            while os.getppid() == parent:
                time.sleep(0.001)
            end_with_parent(signal.SIGKILL, parent)
            os.write(sender, b"still alive")
        os._exit(0)
    os.waitpid(child, 0)
    os.close(sender)
    assert os.read(receiver, 20) == b""
    os.close(receiver)


def wait_as_worker() -> None:
    become_worker()
    time.sleep(60)


def test_a_worker_leaves_signals_to_its_parent_from_the_start():
    worker = multiprocessing.get_context("fork").Process(target=wait_as_worker)
    with starting_workers():
        worker.start()
    os.kill(worker.pid, signal.SIGINT)
    worker.join(0.1)
    assert worker.is_alive()
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


def test_a_full_shared_memory_is_named():
    with pytest.raises(InputError, match="/dev/shm: no space left, which worker processes need"), starting_workers():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@BOTH
def test_a_signal_ends_a_command_with_one_line_and_its_exit_code(handlers, number: int, code: int):
    cleaned = []

    @click.command(cls=Command)
    def main() -> None:
        try:
            ask(number)
            time.sleep(5)
        finally:
            cleaned.append(True)

    result = CliRunner().invoke(main)
    assert result.output == f"Stopped by {signal.Signals(number).name}\n"
    assert result.exit_code == code
    assert cleaned


def test_a_signal_waits_for_the_end_of_the_outermost_deferred_block(handlers):
    done = []

    def work() -> None:
        with stop_delayed():
            with stop_delayed():
                ask()
                done.append("inner")
            done.append("outer")
        done.append("after")

    with handled(), pytest.raises(Stopped):
        work()
    assert done == ["inner", "outer"]


def test_an_error_in_a_deferred_block_is_not_hidden_by_a_signal(handlers):
    def fail() -> None:
        with stop_delayed():
            ask()
            raise ValueError("first")

    with handled(), pytest.raises(ValueError, match="first"):
        fail()


def test_a_signal_waits_for_the_current_item_of_a_loader_but_not_for_the_next(handlers):
    def make(number: int) -> int:
        if number == 1:
            ask()
        made.append(number)
        return number

    made, got = [], []
    with handled(), pytest.raises(Stopped):
        got.extend(made_ahead(make, range(3), NO_WORKERS))
    assert (made, got) == ([0, 1], [0])


def test_a_stop_that_is_lost_in_a_destructor_is_raised_again(handlers, capfd):
    class Finished:
        def __del__(self) -> None:
            ask()
            time.sleep(0.01)

    def work() -> None:
        Finished()
        time.sleep(5)

    with handled(), pytest.raises(Stopped):
        work()
    assert "Exception ignored" not in capfd.readouterr().err


def test_only_the_main_thread_has_handlers(handlers):
    entered = []

    def enter() -> None:
        with handled():
            entered.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [before]


@pytest.mark.parametrize(("sent", "code"), [((2, 2), -2), ((15, 2), -2), ((2, 15), 130), ((15, 15, 15), 143)])
def test_a_second_ctrl_c_ends_the_process_at_once_and_a_further_sigterm_changes_nothing(sent, code: int):
    """torchrun sends SIGTERM to processes that got a signal before."""
    body = f"""if True:
        import os
        from iep.runtime.signals import Stopped, become_worker, stop_delayed, end_with_parent, handled, starting_workers
        with handled():
            try:
                with stop_delayed():
                    [os.kill(os.getpid(), number) for number in {sent}]
            except Stopped as stop:
                os._exit(stop.exit_code)
    """
    assert subprocess.run([sys.executable, "-c", body], timeout=60, capture_output=True).returncode == code


# Real processes of the commands


@pytest.mark.parametrize(("number", "code", "after"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 0.5)])
def test_a_signal_during_startup_ends_a_command_with_one_line(tmp_path: Path, number: int, code: int, after: float):
    """At once, the command is about to import PyTorch; after that, it waits for the lock of its directory."""
    waits = "import time, iep.cli.train as train\ntrain.alone_in = lambda *_: time.sleep(30)\ntrain.main()"
    arguments = ["--model", "ee", "--data", str(tmp_path), "--out", str(tmp_path / "run")]
    process = subprocess.Popen([sys.executable, "-c", waits, *arguments], stderr=subprocess.PIPE, text=True)
    while not _handles(process.pid):
        time.sleep(0.002)
    time.sleep(after)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, f"Stopped by {signal.Signals(number).name}\n")
    assert not (tmp_path / "run").exists()


def _handles(pid: int) -> bool:
    """Return whether the process `pid` has a handler for SIGTERM; Python has none of its own."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)
