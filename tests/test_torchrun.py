"""Two processes under the real torchrun, started by the script for several machines, resume after kills."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from processes import free_port, is_running, together
from tiny_data import newest, tiny, tiny_config
from train_cases import weights

from iep.models.checkpoint import read_checkpoint, step_checkpoints
from iep.training.run_training import train

SCRIPT = Path(__file__).parents[1] / "scripts/train_nodes.sh"
ITERATIONS = 150
SETTINGS = (*tiny("pg"), f"iterations={ITERATIONS}", "validate_every=20", "num_val_samples=1", "workers=1")


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


def wait_for_a_checkpoint(torchrun: subprocess.Popen, out: Path, killed: int | None = None) -> None:
    """Return when there is a checkpoint newer than now, or than the end of the process `killed`."""
    deadline = time.monotonic() + 120
    before = step_checkpoints(out)[:1]
    while step_checkpoints(out)[:1] == before or (killed is not None and is_running(killed)):
        if killed is not None and is_running(killed):
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


def test_a_run_killed_in_part_and_as_a_whole_under_torchrun_ends_with_the_weights_of_an_unbroken_one(
    data: Path, tmp_path: Path
):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    config = tiny_config(data, "pg", *SETTINGS)
    together(train, config, whole, True)
    with start(data, broken) as torchrun:
        wait_for_a_checkpoint(torchrun, broken)
        first, second = workers(torchrun)
        os.kill(second, signal.SIGKILL)
        wait_for_a_checkpoint(torchrun, broken, killed=first)  # of the processes that torchrun has started again
        orphans = workers(torchrun)
        torchrun.kill()  # nobody is left to stop its processes
        _, said = torchrun.communicate(timeout=120)  # until the last of them is gone
    deadline = time.monotonic() + 60
    while any(map(is_running, orphans)):  # they are ending
        assert time.monotonic() < deadline
        time.sleep(0.05)
    step = read_checkpoint(step_checkpoints(broken)[0]).state.step
    assert f"Stopped by SIGTERM after iteration {step}, which is saved" in said
    assert step < ITERATIONS
    together(train, config, broken, True)
    ours, theirs = (weights(newest(out), "generator") for out in (broken, whole))
    assert read_checkpoint(newest(broken)).state.step == ITERATIONS
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
