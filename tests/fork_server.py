"""Real processes of the commands, begun in milliseconds: a server that has imported everything forks one for each.

`Server` is the tests' end; run as a program, this file is the server. A request is a command's name and arguments, and
after how many seconds which signal is sent; the answer says how the process ended and what it wrote. `setup` names a
function of `SETUPS` that the process calls first: flushing made frequent, a kill in the midst, a mistake on purpose.
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

COMMANDS = ("train", "evaluate", "preprocess", "synth")
MODULES = (
    "iep.training.run_training",
    "iep.evaluation.run_evaluation",
    "iep.evaluation.json_report",
    "iep.preprocess.compute_features",
    "iep.preprocess.backbones",
)
PATIENCE = 60.0


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal that ended it, and all that it wrote."""

    returncode: int
    pid: int
    signalled: bool
    """Whether the signal was sent before the process ended by itself."""
    seconds: float
    output: str


class Server:
    """The server's process, to be used in a `with` block."""

    def __init__(self, log: Path):
        """`log` is the file that the processes write to, one after the other."""
        self._log = log

    def __enter__(self) -> "Server":
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()

    def run(
        self,
        command: str,
        arguments: Sequence[object],
        after: Sequence[float] = (),
        number: int = signal.SIGKILL,
        setup: str | None = None,
        cwd: Path | None = None,
    ) -> Ended:
        """Run `iep-COMMAND` in the directory `cwd`; send it the signal at each of the moments `after`, in seconds from
        its start."""
        request = {
            "command": command,
            "arguments": list(map(str, arguments)),
            "after": list(after),
            "number": number,
            "setup": setup,
            "cwd": str(cwd or Path.cwd()),
            "log": str(self._log),
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return Ended(**answer, output=self._log.read_text(errors="replace"))


def _serve() -> None:
    for name in (*(f"iep.cli.{name}" for name in COMMANDS), *MODULES, "torch._dynamo"):
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        start = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _become(request)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        print(json.dumps(_watch(pid, start, request)), flush=True)
    os._exit(0)


def _watch(pid: int, start: float, request: dict) -> dict:
    handle, signalled = os.pidfd_open(pid), False
    for moment in request["after"]:
        if not select.select([handle], [], [], max(0.0, start + moment - time.monotonic()))[0]:
            signal.pidfd_send_signal(handle, request["number"])
            signalled = True
    if not select.select([handle], [], [], PATIENCE)[0]:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    os.close(handle)
    return {
        "returncode": os.waitstatus_to_exitcode(status),
        "pid": pid,
        "signalled": signalled,
        "seconds": time.monotonic() - start,
    }


def _become(request: dict) -> NoReturn:
    """Run the command in this process, which ends with it; without the seconds in which Python clears everything up."""
    from iep.runtime.signals import quit_on_signals

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["cwd"])
    quit_on_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if request["setup"] is not None:
        SETUPS[request["setup"]]()
    main = importlib.import_module(f"iep.cli.{request['command']}").main
    code: object = 1
    try:
        main(request["arguments"], prog_name=f"iep-{request['command']}")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code or 0)


def _flush_often() -> None:
    """Features are recorded after every batch, so that kills meet the recording."""
    from iep.preprocess import compute_features as features

    preprocess = features.preprocess_features
    features.preprocess_features = lambda *args, **kwargs: preprocess(*args, **kwargs, flush_seconds=0)


def _be_killed() -> None:
    """The process is killed when its third file has taken its place: in the midst of its work on any machine."""
    replace, left = os.replace, [3]

    def replace_and_die(*arguments: object) -> None:
        replace(*arguments)
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_and_die


def _write_in_place() -> None:
    """A mistake: checkpoints are written where they stand, a little at a time."""
    from iep.models import checkpoint

    def write_bytes(target: Path, content: bytes) -> None:
        with open(target, "wb", buffering=0) as file:
            for start in range(0, len(content), len(content) // 8):
                file.write(content[start : start + len(content) // 8])
                time.sleep(0.002)

    checkpoint.write_bytes = write_bytes


def _forget_the_optimizer() -> None:
    """A mistake: a resumed run begins its optimiser's averages anew."""
    from iep.training.loop import Trainer

    restore = Trainer.restore

    def forgetful(self: Trainer, content: dict) -> None:
        fresh = self.optimizer.state_dict()
        restore(self, content)
        self.optimizer.load_state_dict(fresh)

    Trainer.restore = forgetful


def _leave_a_temporary_file() -> None:
    """A mistake: what a killed process would leave is there at the end."""
    from iep.training.loop import Trainer

    fit = Trainer.fit

    def untidy(self: Trainer, *batches: object) -> None:
        fit(self, *batches)
        (self.out / ".left.1.tmp").touch()

    Trainer.fit = untidy


def _answer_with_a_traceback() -> None:
    """A mistake: a stop that is an error among others."""
    import iep.runtime.signals

    def answer(number: int, frame: object) -> None:
        raise RuntimeError("asked to stop")

    iep.runtime.signals._answer = answer


SETUPS = {
    "flush often": _flush_often,
    "be killed": _be_killed,
    "write in place": _write_in_place,
    "forget the optimizer": _forget_the_optimizer,
    "leave a temporary file": _leave_a_temporary_file,
    "answer with a traceback": _answer_with_a_traceback,
}

if __name__ == "__main__":
    _serve()
