"""Measure training by one process and by several processes on this machine.

Every round starts `iep-train` under `torchrun` with the same seed, and divides the machine's cores among the processes.
The first metrics of a run do not count, because it is still warming up.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from iep.bench.compare import Benchmark, Case, Competitor
from iep.config import find_config
from iep.errors import InputError
from iep.runtime.devices import resolve_device


def processes(
    data: Path, config: Path, processes: Sequence[int], iterations: int, settings: Sequence[str]
) -> Benchmark:
    """Return the comparison of several numbers of processes, the first of which is the baseline.

    Raises:
        InputError: there is no such config; or, while the case is measured, a run failed; contains its error.
    """
    config = find_config(config)
    schedule = (f"iterations={iterations}", f"log_every={max(1, iterations // 10)}", f"validate_every={iterations}")

    def competitor(count: int) -> Competitor:
        threads = max(1, len(os.sched_getaffinity(0)) // count)

        def measure() -> dict[str, float]:
            speeds = train(data, config, count, threads, [*schedule, "num_val_samples=1", *settings])
            return {"question": 1 / median(speeds[1:] or speeds)}

        return Competitor(f"{count} process{'es' * (count > 1)}", measure, facts=lambda: {"threads each": threads})

    ready = [competitor(count) for count in processes]
    case = Case({"iterations": iterations}, 1, ready, ready[0].name, warm_up=False)
    description = " ".join(["iep-train", str(config), *settings])
    return Benchmark(description, [case], "question", resolve_device("auto"))


def train(data: Path, config: Path, processes: int, threads: int, settings: Sequence[str]) -> list[float]:
    """Train once, and return the questions per second of each row of its metrics.

    Raises:
        InputError: the training failed.
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
            raise InputError(f"training with {processes} processes failed: {said}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["questions_per_second"] for row in rows if "loss" in row]
