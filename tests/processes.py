"""Real processes, forked in milliseconds from a server that has imported everything once and never run it.

`together` calls a function in several processes of one group, as torchrun would start them. `run` runs a command, sends
it signals, and returns how it ended.
"""

import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

PATIENCE_SECONDS = 120

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        *(f"iep.cli.{name}" for name in ("train", "evaluate", "preprocess", "synth")),
        *("iep.training.run_training", "iep.evaluation.run_evaluation", "iep.evaluation.json_report"),
        *("iep.preprocess.compute_features", "iep.preprocess.backbones"),
        *("pytest", "torch._dynamo"),  # the first step of an optimiser imports the second, in two seconds
    ]
)


def together(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
    """Return what `function(*arguments)` returns in each of `world_size` joined processes, by rank.

    The function is one of a module's top level.

    Raises:
        AssertionError: one of them fails (the message is its traceback), ends without an answer, or takes too long.
    """
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    workers = [
        _context.Process(target=_work, args=(rank, world_size, port, sender, function, arguments))
        for rank, (_, sender) in enumerate(pipes)
    ]
    for worker, (_, sender) in zip(workers, pipes, strict=True):
        worker.start()
        sender.close()  # so that a process that dies without an answer is noticed at once
    try:
        answers = [_answer(rank, receiver) for rank, (receiver, _) in enumerate(pipes)]
    finally:
        for worker in workers:
            worker.join(5)
            worker.kill()
    failures = [answer for kind, answer in answers if kind == "failed"]
    assert not failures, "\n".join(failures)
    return [answer for _, answer in answers]


def _answer(rank: int, receiver: Connection) -> tuple[str, Any]:
    assert receiver.poll(PATIENCE_SECONDS), f"process {rank} takes too long"
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return "failed", f"process {rank} ended without an answer"


def _work(
    rank: int, world_size: int, port: int, sender: Connection, function: Callable[..., Any], arguments: tuple
) -> None:
    from iep.runtime.distributed import joined

    os.environ.update(environment(rank, world_size, port))
    try:
        with joined():
            answer = ("done", function(*arguments))
    except BaseException:
        answer = ("failed", f"process {rank}:\n{traceback.format_exc()}")
    sender.send_bytes(pickle.dumps(answer))  # send() would share tensors' memory, which ends with this process


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in (numbers | {"MASTER_PORT": port}).items()} | {
        "MASTER_ADDR": "127.0.0.1"
    }


def is_running(process: int) -> bool:
    """Return whether the process runs. One that has ended may stay listed until its parent waits for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class Ended:
    """The end of a process, and its output."""

    returncode: int
    """The exit code, or minus the number of the signal that ended the process."""
    pid: int
    signalled: bool
    """True if a signal was sent before the process ended by itself."""
    seconds: float
    output: str


def run(
    command: str,
    arguments: Sequence[object],
    after: Sequence[float] = (),
    number: int = signal.SIGKILL,
    cwd: Path | None = None,
) -> Ended:
    """Run `iep-COMMAND` in the directory `cwd`, and send it the signal at each of the moments `after`.

    Moments are in seconds from the command's start.
    """
    ready, sender = _context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        given = (command, [*map(str, arguments)], cwd or Path.cwd(), log.name, sender)
        process = _context.Process(target=_become, args=given)
        process.start()
        sender.close()  # so that a process that dies at once is noticed
        ready.recv()
        start, signalled = time.monotonic(), False
        for moment in after:
            process.join(max(0.0, start + moment - time.monotonic()))
            if process.is_alive():
                os.kill(process.pid, number)
                signalled = True
        process.join(PATIENCE_SECONDS)
        seconds = time.monotonic() - start
        process.kill()
        process.join()
        return Ended(process.exitcode, process.pid, signalled, seconds, log.read())


def _become(command: str, arguments: list[str], cwd: Path, log: str, ready: Connection) -> NoReturn:
    """Run the command in this process, which ends with it, without the seconds in which Python clears everything up."""
    from iep.runtime.signals import Stopped, handled

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(cwd)
    main = importlib.import_module(f"iep.cli.{command}").main
    code: object = 1
    try:
        with handled():  # before the moments of signals are counted
            ready.send(None)
            main(arguments, prog_name=f"iep-{command}")
    except SystemExit as end:
        code = end.code
    except Stopped as stop:
        print(stop, file=sys.stderr)
        code = stop.exit_code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code or 0)
