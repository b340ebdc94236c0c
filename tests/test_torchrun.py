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
from tiny_data import TINY, tiny_config

from iep.config import Config
from iep.training.checkpoint import load_checkpoint, step_checkpoints, step_name
from iep.training.run import train

SCRIPT = Path(__file__).parents[1] / "scripts/train_nodes.sh"
ITERATIONS = 150
SETTINGS = (*TINY, f"iterations={ITERATIONS}", "validate_every=20", "num_val_samples=1", "workers=1")


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
    """torchrun while it trains, some checkpoints being written."""
    with start(data, out) as torchrun:
        deadline = time.monotonic() + 120
        while not step_checkpoints(out):
            assert torchrun.poll() is None, "it has ended"
            assert time.monotonic() < deadline, "no checkpoint is written"
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


def _train(config: Config, out: Path) -> None:
    train(config, out, resume=False)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(out / step_name(ITERATIONS))["networks"]["generator"]["weights"]


def test_a_run_stopped_by_a_signal_and_one_whose_process_is_killed_end_as_an_unbroken_one(data: Path, tmp_path: Path):
    whole, stopped, killed = (tmp_path / name for name in ("whole", "stopped", "killed"))
    together(_train, tiny_config(data, "pg", *SETTINGS), whole)

    with training(data, stopped) as torchrun:
        torchrun.send_signal(signal.SIGTERM)
        _, said = torchrun.communicate(timeout=120)
    newest = step_checkpoints(stopped)[0]
    assert f"Stopped by SIGTERM after iteration {load_checkpoint(newest)['step']}, which is saved" in said
    assert newest.name != step_name(ITERATIONS)
    with start(data, stopped) as torchrun:
        _, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said

    with training(data, killed) as torchrun:
        first, second = workers(torchrun)
        os.kill(second, signal.SIGKILL)
        _, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 0, said
    assert not Path(f"/proc/{first}").exists()

    for out in (stopped, killed):
        for name, weight in weights(whole).items():
            assert torch.equal(weights(out)[name], weight)
