"""Training steps of the mini engine -> memory over time, and whether it grows."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs" / "mini" / "ee.yaml"
# All programs from the start: a curriculum's later stages need more memory by themselves.
SETTINGS = ("curriculum=[]", "log_every=10", "validate_every=500", "num_val_samples=500")
WARM_UP = 0.25
FLAT = 10.0
"""MB per 1,000 steps. What is resident wavers by about that much, a hundredth of the whole, with the batches' sizes."""


@dataclass(frozen=True)
class Memory:
    """Samples of a run's resident memory in MB.

    Args:
        command: what ran.
        steps: (N,) steps done at each sample.
        main: (N,) of the training process.
        everything: (N,) of it and its worker processes.
    """

    command: str
    steps: np.ndarray
    main: np.ndarray
    everything: np.ndarray

    def slope(self, megabytes: np.ndarray) -> float:
        """MB per 1,000 steps: the least-squares line through the samples after the first quarter of the steps."""
        warm = self.steps >= WARM_UP * self.steps[-1]
        return float(np.polyfit(self.steps[warm] / 1000, megabytes[warm], 1)[0])

    def is_flat(self) -> bool:
        """Is neither slope above `FLAT`? A batch of features lost in each step would be hundreds of MB."""
        return max(self.slope(self.main), self.slope(self.everything)) <= FLAT


def measure(work: Path, steps: int, say: Callable[[str], None]) -> Memory:
    """Make a small data set in `work` and train on it; raises CalledProcessError when a command fails."""
    clevr, data, out = work / "clevr", work / "data", work / "run"
    _run("synth", clevr, "--preset", "mini", "--train", 200, "--val", 25, "--test", 0)
    _run("preprocess", clevr, "--out", data, "--backbone", "patches", "--dtype", "float16")
    arguments = ["--config", CONFIG, "--data", data, "--out", out, f"iterations={steps}", *SETTINGS]
    command = [sys.executable, "-m", "iep.cli.train", *map(str, arguments)]
    samples = []
    with open(work / "train.log", "w") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT) as process:
        while process.poll() is None:
            step = _last_step(out / "metrics.jsonl")
            family = [_resident(pid) for pid in _family(process.pid)]
            if step and len(family) == 2:  # with its worker, and without those of validation
                samples.append((step, family[0], sum(family)))
                if len(samples) % 60 == 1:
                    say(f"  step {step}: {family[0]:.0f} MB, with workers {sum(family):.0f} MB")
            time.sleep(1)
    if process.returncode:
        raise subprocess.CalledProcessError(
            process.returncode, command, stderr=(work / "train.log").read_text()[-2000:]
        )
    shown = ["iep-train", "--config", "configs/mini/ee.yaml", *arguments[2:]]
    shown = [str(part).replace(str(work), "WORK") for part in shown]
    return Memory(shlex.join(shown), *np.array(samples, dtype=float).T)


def table(memory: Memory, rows: int = 9) -> str:
    """Some of the samples, and the slopes."""
    lines = [f"$ {memory.command}", f"{'step':>6}  {'main MB':>8}  {'all MB':>8}"]
    for goal in np.linspace(memory.steps[0], memory.steps[-1], rows):
        place = int(np.abs(memory.steps - goal).argmin())
        step, main, everything = (values[place] for values in (memory.steps, memory.main, memory.everything))
        lines.append(f"{step:>6.0f}  {main:>8.1f}  {everything:>8.1f}")
    for name, values in (("main", memory.main), ("all", memory.everything)):
        lines.append(f"slope of {name}: {memory.slope(values):+.2f} MB per 1,000 steps, after the first quarter")
    lines.append(f"flat (no slope above {FLAT:g}): {'yes' if memory.is_flat() else 'NO'}")
    return "\n".join(lines)


def _run(command: str, *arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", f"iep.cli.{command}", *map(str, arguments)], cwd=ROOT, check=True, capture_output=True
    )


def _last_step(metrics: Path) -> int:
    try:
        return json.loads(metrics.read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def _family(pid: int) -> list[int]:
    """A process and its children."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *map(int, children)]


def _resident(pid: int) -> float:
    """MB of memory that a process holds."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0
