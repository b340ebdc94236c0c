"""What `iep-bench processes` compares: a training job by one process and by several on this machine.

Every round is a fresh `torchrun` of `iep-train` from the same seed, with the machine's cores divided among its
processes. The first metrics of a run, while it warms up, do not count. Losses of all runs are compared too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from iep.bench.compare import Case, Competitor, Fact
from iep.bench.report import Benchmark
from iep.errors import InputError

LOGGED = 10
"""Metrics that a run writes."""
Metrics = list[dict[str, float]]


def processes_benchmark(
    data: Path, config: Path, processes: Sequence[int] = (1, 2), iterations: int = 100, settings: Sequence[str] = ()
) -> Benchmark:
    """Return the comparison of numbers of processes, the first of which is the baseline.

    Raises:
        InputError: a run fails (with the last line that it wrote), when the case is measured.
    """
    first_run: list[Metrics] = []
    every = max(1, iterations // LOGGED)
    schedule = [f"iterations={iterations}", f"log_every={every}", f"validate_every={iterations}", "num_val_samples=1"]

    def competitor(count: int) -> Competitor:
        threads, runs = max(1, len(os.sched_getaffinity(0)) // count), []

        def measure() -> dict[str, float]:
            runs.append(train(data, config, count, threads, [*schedule, *settings]))
            first_run[:] = first_run or runs[:1]
            return {"question": 1 / median(row["questions_per_second"] for row in runs[-1][1:] or runs[-1])}

        def facts() -> dict[str, Fact]:
            first = max(differences([run[:1] for run in runs], first_run[0][:1]))
            losses = max(differences(runs, first_run[0]))
            return {"threads each": threads, "first loss differs": f"{first:.1e}", "losses differ": f"{losses:.1e}"}

        return Competitor(_name(count), measure, facts=facts)

    ready = [competitor(count) for count in processes]
    case = Case({"iterations": iterations}, 1, ready, _name(processes[0]), warm_up=False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Benchmark(f"{' '.join(['iep-train', str(config), *settings])}", [case], "iterations", "question", device)


def _name(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"


def train(data: Path, config: Path, processes: int, threads: int, settings: Sequence[str]) -> Metrics:
    """Return the metrics of one run, without those of validation.

    Raises:
        InputError: it fails.
    """
    with tempfile.TemporaryDirectory(prefix="iep-processes-") as directory:
        run = Path(directory) / "run"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        job = ["-m", "iep.cli.train", f"--config={config}", f"--data={data}", f"--out={run}", *settings]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run([*torchrun, *job], env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.splitlines() or ["no message"]
            said = next((line for line in lines if line.startswith("Error: ")), lines[-1])
            raise InputError(f"training with {_name(processes)} failed: {said}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def differences(runs: Sequence[Metrics], reference: Metrics) -> list[float]:
    """Return the relative differences of all runs' losses from those of a reference run."""
    pairs = [pair for run in runs for pair in zip(run, reference, strict=True)]
    return [abs(row["loss"] - other["loss"]) / max(abs(other["loss"]), 1e-12) for row, other in pairs]
