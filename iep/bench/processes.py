"""A training recipe by one process and by several on the same machine -> questions a second, and whether it is the same
training: the losses of all, step by step.

Every run is a fresh `torchrun` of `iep-train` from the same seed, with the machine's cores dealt out to its processes;
numbers of processes take turns. The first rows of a run's metrics, while it warms up, do not count.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from iep.bench.machine import describe_machine, machine_line
from iep.bench.measure import Spread, spread
from iep.bench.table import format_table
from iep.errors import InputError
from iep.files import check_writable, write_bytes, write_json

REPORT, TABLE = "processes.json", "processes.txt"
FORMAT = "iep processes benchmark 1"
ROWS = 10
"""Rows of metrics that a run writes, of which the first does not count."""


@dataclass(frozen=True)
class ProcessesBenchmark:
    """What to train, for how long, and by how many processes."""

    data: Path
    config: Path
    settings: tuple[str, ...] = ()
    """`key=value` over the config's."""
    processes: tuple[int, ...] = (1, 2)
    iterations: int = 100
    repeat: int = 3


@dataclass(frozen=True)
class Row:
    """What was measured with one number of processes."""

    processes: int
    threads: int
    """Of each."""
    questions_per_second: Spread
    """Of the whole job, over all counted rows of all runs."""
    speedup: float
    """Of the medians, over the first row of the table."""
    first_difference: float
    """The greatest relative difference of the first loss logged from that of the first row's first run."""
    loss_difference: float
    """The same of all losses logged."""


def run_processes_benchmark(
    benchmark: ProcessesBenchmark,
    command: str,
    out: Path | None = None,
    say: Callable[[str], None] = print,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Row]:
    """Train with every number of processes in turn, and compare.

    Raises:
        InputError: a run fails (with the last line that it wrote).
    """
    if out is not None:
        check_writable([out / REPORT, out / TABLE])
    machine = describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    heading = "\n".join([f"$ {command}", machine_line(machine), _describe(benchmark)])
    say(heading)
    runs: dict[int, list[list[dict[str, float]]]] = {count: [] for count in benchmark.processes}
    for _ in range(benchmark.repeat):
        for count, rows in runs.items():
            progress(f"{count} process{'es' * (count > 1)}")
            rows.append(_train(benchmark, count))
    rows = _compare(runs)
    table = format_rows(rows)
    say(f"\n{table}")
    if out is not None:
        asked = asdict(benchmark) | {"data": str(benchmark.data), "config": str(benchmark.config)}
        content = {"format": FORMAT, "command": command, "machine": machine, "asked": asked}
        write_json(out / REPORT, {**content, "rows": [asdict(row) for row in rows]}, indent=2)
        write_bytes(out / TABLE, f"{heading}\n\n{table}\n".encode())
    return rows


def _threads(processes: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // processes)


def _train(benchmark: ProcessesBenchmark, processes: int) -> list[dict[str, float]]:
    """The metrics of one run, less validation's."""
    every = max(1, benchmark.iterations // ROWS)
    schedule = (f"iterations={benchmark.iterations}", f"log_every={every}", f"validate_every={benchmark.iterations}")
    with tempfile.TemporaryDirectory(prefix="iep-processes-") as directory:
        run = Path(directory) / "run"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        train = ["-m", "iep.cli.train", "--config", str(benchmark.config), "--data", str(benchmark.data)]
        given = [f"--out={run}", "num_val_samples=1", *schedule, *benchmark.settings]
        done = subprocess.run(
            [*torchrun, *train, *given],
            env=os.environ | {"OMP_NUM_THREADS": str(_threads(processes))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
            raise InputError(
                f"training with {processes} processes failed: {(said or done.stderr.splitlines()[-1:])[0]}"
            )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def _compare(runs: dict[int, list[list[dict[str, float]]]]) -> list[Row]:
    speeds = {
        count: spread([row["questions_per_second"] for run in rows for row in run[1:] or run])
        for count, rows in runs.items()
    }
    first, baseline = next(iter(runs.values()))[0], next(iter(speeds.values())).median
    return [
        Row(
            count,
            _threads(count),
            speeds[count],
            speeds[count].median / baseline,
            _difference(first[:1], [run[:1] for run in rows]),
            _difference(first, rows),
        )
        for count, rows in runs.items()
    ]


def _difference(first: Sequence[dict[str, float]], runs: Sequence[Sequence[dict[str, float]]]) -> float:
    pairs = [pair for run in runs for pair in zip(first, run, strict=True)]
    return max(abs(other["loss"] - row["loss"]) / abs(row["loss"]) for row, other in pairs)


def _describe(benchmark: ProcessesBenchmark) -> str:
    settings = f" {' '.join(benchmark.settings)}" if benchmark.settings else ""
    return (
        f"{benchmark.config}{settings}, data {benchmark.data}: {benchmark.iterations} iterations a run, "
        f"{benchmark.repeat} run{'s' * (benchmark.repeat > 1)} each in turn, medians of the metrics' rows but the first"
    )


def format_rows(rows: Sequence[Row]) -> str:
    """A text table, one line a number of processes."""
    headings = (
        "processes",
        "threads each",
        "questions/s",
        "quartiles",
        "speed-up",
        "first loss differs",
        "losses differ",
    )
    return format_table([headings, *map(_cells, rows)])


def _cells(row: Row) -> tuple[object, ...]:
    speed = row.questions_per_second
    return (
        row.processes,
        row.threads,
        f"{speed.median:.4g}",
        f"{speed.lower:.4g}-{speed.upper:.4g}",
        f"{row.speedup:.2f}x",
        f"{row.first_difference:.1e}",
        f"{row.loss_difference:.1e}",
    )
