"""Two processes under the real torchrun, by the script for several machines: stopped or killed, they go on to the
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
from tiny_data import tiny, tiny_config

from iep.config import Config
from iep.models.checkpoint import load_checkpoint, step_checkpoints, step_name
from iep.training.run_training import train

SCRIPT = Path(__file__).parents[1] / "scripts/train_nodes.sh"
ITERATIONS = 150
SETTINGS = (*tiny("pg"), f"iterations={ITERATIONS}", "validate_every=20", "num_val_samples=1", "workers=1")


def start(data: Path, out: Path) -> subprocess.Popen:
    """torchrun, which is to train two processes of one machine from where they are."""
    train = ["--model=pg", f"--data={data}", f"--out={out}", *SETTINGS]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", SCRIPT, "1", f"127.0.0.1:{free_port()}", *train],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PROCESSES": "2", "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def training(data: Path, out: Path) -> Iterator[subprocess.Popen]:
    """torchrun while it trains, another checkpoint being written."""
    with start(data, out) as torchrun:
        deadline = time.monotonic() + 120
        before = step_checkpoints(out)[:1]
        while step_checkpoints(out)[:1] == before:
            assert torchrun.poll() is None, "it has ended"
            assert time.monotonic() < deadline, "no further checkpoint is written"
            time.sleep(0.05)
        yield torchrun


def workers(torchrun: subprocess.Popen) -> list[int]:
    """The processes that it has started, by rank."""
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ranked = {}
    for child in map(int, children):
        environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranked |= {int(entry[5:]): child for entry in environment if entry.startswith(b"RANK=")}
    return [ranked[rank] for rank in sorted(ranked)]


def runs(process: int) -> bool:
    """Does it run? One that has ended may stay listed until somebody asks how."""
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


def test_runs_stopped_or_killed_under_torchrun_or_with_it_end_as_an_unbroken_one(data: Path, tmp_path: Path):
    whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))
    config = tiny_config(data, "pg", *SETTINGS)
    together(_train, config, whole)

    with training(data, stopped) as torchrun:
        torchrun.send_signal(signal.SIGTERM)
        _, said = torchrun.communicate(timeout=120)
    step = saved_step(stopped)
    assert f"Stopped by SIGTERM after iteration {step}, which is saved" in said
    assert step < ITERATIONS

    with training(data, stopped) as torchrun:  # torchrun itself is killed: nobody is left to stop its processes
        orphans = workers(torchrun)
        torchrun.kill()
        _, said = torchrun.communicate(timeout=120)  # until the last of them is gone
    assert not any(map(runs, orphans))
    assert f"Stopped by SIGTERM after iteration {saved_step(stopped)}, which is saved" in said
    together(_train, config, stopped)

    with training(data, killed) as torchrun:
        first, second = workers(torchrun)
        os.kill(second, signal.SIGKILL)
        _, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said
    assert not runs(first)

    for out in (stopped, killed):
        for name, weight in weights(whole).items():
            assert torch.equal(weights(out)[name], weight)
