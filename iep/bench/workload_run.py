"""Comparisons to make of a workload -> tables, JSON and a picture, written as they come."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from iep.bench.contest import Comparison, Samples, Way, compare
from iep.bench.contest_picture import draw_comparisons
from iep.bench.contest_report import format_comparison, write_report
from iep.bench.machine import describe_machine, machine_line
from iep.bench.measure import Effort
from iep.errors import InputError
from iep.files import check_writable, write_bytes

Case = tuple[Samples, Sequence[Way]]
"""What is run, and the ways to run it."""


@dataclass(frozen=True)
class Files:
    """Where a benchmark's results are written; None for what is not wanted.

    Raises:
        InputError: two are the same file.
    """

    json: Path | None = None
    table: Path | None = None
    picture: Path | None = None

    def __post_init__(self) -> None:
        if len({path.resolve() for path in self.wanted}) < len(self.wanted):
            raise InputError(f"results of several kinds in one file: {', '.join(map(str, self.wanted))}")

    @property
    def wanted(self) -> list[Path]:
        return [path for path in (self.json, self.table, self.picture) if path is not None]


@dataclass(frozen=True)
class WorkloadBenchmark:
    """How to measure the cases of a workload."""

    description: str
    """Of the network and its samples, a line."""
    phases: tuple[str, ...]
    threads: tuple[int, ...]
    effort: Effort
    over: str
    """The part of the cases' setting that they differ in."""
    seed: int


def run_workload_benchmark(
    benchmark: WorkloadBenchmark,
    cases: Iterable[Case],
    command: str,
    files: Files,
    say: Callable[[str], None] = print,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Comparison]:
    """Measure every case in every phase on every number of threads.

    `say` hears the heading, then each table as soon as it is measured; table and JSON are written as often, each whole
    or not at all. `progress` hears what is measured next.
    """
    check_writable(files.wanted)
    machine = describe_machine(torch.device("cpu"))
    lines = [f"$ {command}", machine_line(machine), benchmark.description]
    say("\n".join(lines))
    about = {"command": command, "machine": machine, "workload": benchmark.description, "seed": benchmark.seed}
    before, comparisons = torch.get_num_threads(), []
    try:
        for samples, ways in cases:
            for phase, threads in product(benchmark.phases, benchmark.threads):
                where = f"{phase} {samples.setting[benchmark.over]}"
                comparison = compare(
                    ways, samples, phase, threads, benchmark.effort, lambda way, where=where: progress(f"{where} {way}")
                )
                comparisons.append(comparison)
                lines.append(f"\n{format_comparison(comparison)}")
                say(lines[-1])
                _write(files, about, lines, comparisons)
    finally:
        torch.set_num_threads(before)
    if files.picture is not None:
        draw_comparisons(
            files.picture, comparisons, f"{benchmark.description}; {machine_line(machine)}", benchmark.over
        )
    return comparisons


def _write(files: Files, about: dict[str, Any], lines: Sequence[str], comparisons: Sequence[Comparison]) -> None:
    if files.json is not None:
        write_report(files.json, about, comparisons)
    if files.table is not None:
        write_bytes(files.table, ("\n".join(lines) + "\n").encode())
