"""Two processes under the real torchrun, by the script for several machines: stopped or killed, they resume to the
weights of an unbroken run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from processes import free_port, together
from tiny_data import TINY, tiny_config

from iep.config import Config
from iep.models.checkpoint import load_checkpoint, step_checkpoints, step_name
from iep.training.run_training import train

SCRIPT = Path(__file__).parents[1] / "scripts/train_nodes.sh"
ITERATIONS = 150
SETTINGS = (*TINY, f"iterations={ITERATIONS}", "validate_every=20", "num_val_samples=1", "workers=1")


def start(data: Path, out: Path) -> subprocess.Popen:
    """Start torchrun with two processes of one machine, which train from the last checkpoint."""
    train = ["--model=pg", f"--data={data}", f"--out={out}", *SETTINGS]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", SCRIPT, "1", f"127.0.0.1:{free_port()}", *train],
        env=os.environ | {"PROCESSES": "2", "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def training(data: Path, out: Path) -> Iterator[subprocess.Popen]:
    """torchrun while it trains, once another checkpoint is written."""
    with start(data, out) as torchrun:
        wait_for_a_checkpoint(torchrun, out)
        yield torchrun


def wait_for_a_checkpoint(torchrun: subprocess.Popen, out: Path, killed: int | None = None) -> None:
    """Return when there is a checkpoint newer than now, or than the end of the process `killed`."""
    deadline = time.monotonic() + 120
    before = step_checkpoints(out)[:1]
    while step_checkpoints(out)[:1] == before or (killed is not None and runs(killed)):
        if killed is not None and runs(killed):
            before = step_checkpoints(out)[:1]
        assert torchrun.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "no further checkpoint is written"
        time.sleep(0.05)


def workers(torchrun: subprocess.Popen) -> list[int]:
    """Return the processes that torchrun has started, by rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ranked = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranked |= {int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")}
    return [ranked[rank] for rank in sorted(ranked)]


def runs(process: int) -> bool:
    """Return whether the process runs. One that has ended may stay listed until its parent asks how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _train(config: Config, out: Path) -> None:
    train(config, out, resume=True)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(out / step_name(ITERATIONS))["networks"]["generator"]["weights"]


def saved_step(out: Path) -> int:
    return load_checkpoint(step_checkpoints(out)[0])["step"]


def test_runs_killed_or_stopped_under_torchrun_end_with_the_weights_of_an_unbroken_run(data: Path, tmp_path: Path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = tiny_config(data, "pg", *SETTINGS)
    together(_train, config, whole)

    with training(data, broken) as torchrun:
        first, second = workers(torchrun)
        os.kill(second, signal.SIGKILL)
        wait_for_a_checkpoint(torchrun, broken, killed=first)  # of the processes that torchrun has started again
        torchrun.send_signal(signal.SIGTERM)
        _, said = torchrun.communicate(timeout=120)
    assert f"Stopped by SIGTERM after iteration {saved_step(broken)}, which is saved" in said

    with training(data, broken) as torchrun:  # torchrun itself is killed: nobody is left to stop its processes
        orphans = workers(torchrun)
        torchrun.kill()
        _, said = torchrun.communicate(timeout=120)  # until the last of them is gone
    assert not any(map(runs, orphans))
    assert f"Stopped by SIGTERM after iteration {saved_step(broken)}, which is saved" in said
    assert saved_step(broken) < ITERATIONS

    together(_train, config, broken)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(broken)[name], weight)
