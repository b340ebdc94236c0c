"""Kill and resume every job a hundred times, and watch the memory of 2,000 training steps: `make soak`.

The jobs are those of the tests (`tests/killing.py`). Prints a table, and fails if a result differs or memory grows.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from killing import (  # noqa: E402
    Counts,
    Job,
    checkpointing,
    evaluation,
    kill_and_resume,
    preprocessing,
    synthesis,
    training,
)
from processes import run  # noqa: E402
from tiny_data import tiny, write_data  # noqa: E402

from iep.bench.compare import machine_line  # noqa: E402

KINDS = {"kill -9": (signal.SIGKILL,), "TERM, INT": (signal.SIGTERM, signal.SIGINT)}
COLUMNS = ("kills", "writing", "ends")
LEGEND = """\
kills      processes ended by the signal, each at a moment drawn uniformly from the job's whole duration
writing    those of them that were writing a file, which is then renamed into place
ends       jobs that finished and were compared with one that was never killed: weights and optimiser bit for bit, rows
           of metrics.jsonl except for speed and memory, best.pt; the bytes of all files of the other jobs
mismatch   differences, incomplete files, files left over, errors, output other than one line: must be 0"""
CONFIG = ROOT / "configs" / "mini" / "ee.yaml"
# All programs are used from the start, because the later stages of a curriculum need more memory.
SETTINGS = ("curriculum=[]", "log_every=10", "validate_every=500", "num_val_samples=500")
WARM_UP, FLAT = 0.25, 10.0
"""The share of the steps that do not count, and the largest slope that is no growth, in MB per 1,000 steps.

Resident memory varies by about that much, a hundredth of the whole, with the sizes of batches. A batch of features that
is never freed would be hundreds of MB.
"""


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Number of times to kill each job with kill -9; a quarter of it with other signals.",
)
@click.option(
    "--steps", type=click.IntRange(min=100), default=2000, show_default=True, help="Number of training steps."
)
@click.option("--only", type=click.Choice(["kills", "memory"]), help="Run only this part.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the moments of the signals.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the table.")
def main(kills: int, steps: int, only: str | None, seed: int, out: Path | None) -> None:
    """Kill and resume every job, and watch the memory of a long run."""
    lines = [f"$ python scripts/soak.py --kills {kills} --steps {steps} --seed {seed}"]
    lines.append(machine_line(torch.device("cpu")))
    sound = True

    def say(text: str) -> None:
        click.echo(text)
        lines.append(text)

    with tempfile.TemporaryDirectory(prefix="iep-soak-") as directory:
        work = Path(directory)
        if only != "memory":
            for counts in _kill_all(work, kills, seed, say):
                sound &= not counts.mismatches
            say(f"\n{LEGEND}")
        if only != "kills":
            click.echo(f"\n{steps} steps of the mini engine ...")
            sound &= show_memory(measure_memory(work, steps), say)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("\n".join(lines) + "\n")
    sys.exit(not sound)


def _kill_all(work: Path, kills: int, seed: int, say: Callable[[str], None]) -> Iterator[Counts]:
    """Kill and resume every job with all kinds of signals, print a row for each, and yield its counts."""
    say(f"\n{'job':<22} {'signals':<10}" + "".join(f"{name:>11}" for name in (*COLUMNS, "mismatch", "seconds")))
    for number, job in enumerate(_jobs(work)):
        for kind, signals in KINDS.items():
            start = time.monotonic()
            root = work / f"job-{number}-{kind[:4]}"
            some = kills if kind == "kill -9" else max(1, kills // 4)
            counts = kill_and_resume(job, root, some, seed + number, signals)
            values = [*(getattr(counts, name) for name in COLUMNS), len(counts.mismatches)]
            figures = "".join(f"{value:>11}" for value in (*values, round(time.monotonic() - start)))
            say(f"{job.name:<22} {kind:<10}{figures}")
            for problem in counts.mismatches:
                say(f"  {problem}")
            yield counts


def _jobs(work: Path) -> Iterator[Job]:
    """Yield jobs that take about a second each, on data sets of a few images."""
    data = write_data(work / "tiny")
    bent = ("engine.stem_norm=true", "warmup=3", "decay=cosine", "curriculum=[[0, 5], [9, 99]]")
    for model in ("pg", "ee"):
        _run("train", "--data", data, "--out", work / model, *tiny(model), f"model={model}")
    starts = (f"pg={work / 'pg'}", f"ee={work / 'ee'}")
    long = ("iterations=30", "validate_every=7")
    yield training(
        data, *tiny("pg"), *long, "model=pg", "generator.dropout=0.5", "generator.num_layers=2", name="training pg"
    )
    yield training(data, *tiny("ee"), *long, "model=ee", *bent, name="training ee")
    yield training(data, *tiny("ee"), *long, "iterations=15", "model=ee", "workers=2", name="training ee, 2 workers")
    yield training(
        data,
        *tiny("joint"),
        *long,
        "iterations=8",
        "validate_every=3",
        "model=joint",
        "precision=bfloat16",
        *starts,
        name="training joint",
    )
    yield checkpointing(data, *tiny("lstm"))
    clevr = work / "small"
    sizes = ("--preset", "mini", "--train", 60, "--val", 2, "--test", 1, "--width", 64, "--height", 48)
    _run("synth", clevr, *sizes)
    yield preprocessing(clevr)
    yield synthesis(images=20)
    yield evaluation(data, work / "ee")


def _run(command: str, *arguments: object) -> None:
    """Run a command to its end."""
    done = run(command, list(arguments))
    assert done.returncode == 0, done.output


def measure_memory(work: Path, steps: int) -> np.ndarray:
    """Train the mini engine on a small data set, and return samples of its resident memory.

    Returns:
        (N, 3): the step, and the MB of the training process and of all its processes.
    """
    clevr, data, out = work / "clevr", work / "data", work / "run"
    _run("synth", clevr, "--preset", "mini", "--train", 200, "--val", 25, "--test", 0)
    _run("preprocess", clevr, "--out", data, "--dtype", "float16")
    command = [sys.executable, "-m", "iep.cli.train", "--config", CONFIG, "--data", data, "--out", out]
    samples = []
    with subprocess.Popen([*map(str, command), f"iterations={steps}", *SETTINGS], cwd=ROOT) as process:
        while process.poll() is None:
            memory = _resident(process.pid)
            if len(memory) == 2 and (step := _last_step(out / "metrics.jsonl")):  # not those of validation
                samples.append((step, memory[0], sum(memory)))
            time.sleep(1)
    assert process.returncode == 0
    return np.array(samples, dtype=float)


def show_memory(samples: np.ndarray, say: Callable[[str], None], rows: int = 9) -> bool:
    """Print some of the samples, and return whether memory stays flat after the warm-up."""
    say(f"{'step':>6}  {'main MB':>8}  {'all MB':>8}")
    for goal in np.linspace(samples[0, 0], samples[-1, 0], rows):
        step, main, everything = samples[np.abs(samples[:, 0] - goal).argmin()]
        say(f"{step:>6.0f}  {main:>8.1f}  {everything:>8.1f}")
    warm = samples[samples[:, 0] >= WARM_UP * samples[-1, 0]]
    slopes = np.polyfit(warm[:, 0] / 1000, warm[:, 1:], 1)[0]  # of the least-squares line, per 1,000 steps
    say(f"slopes after the first quarter: main {slopes[0]:+.2f}, all {slopes[1]:+.2f} MB per 1,000 steps")
    is_flat = bool(slopes.max() <= FLAT)
    say(f"flat (no slope above {FLAT:g}): {'yes' if is_flat else 'NO'}")
    return is_flat


def _last_step(metrics: Path) -> int:
    """Return the step of the last row of the metrics, or 0 if there is none yet."""
    try:
        return json.loads(metrics.read_text().splitlines()[-1])["step"]
    except (OSError, IndexError, ValueError):
        return 0


def _resident(pid: int) -> list[float]:
    """Return the MB of memory that a process and each of its children hold; nothing if one of them has ended."""
    try:
        family = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in family]
    except (OSError, IndexError):
        return []
    return [count * os.sysconf("SC_PAGE_SIZE") / 1e6 for count in pages]


if __name__ == "__main__":
    main()
