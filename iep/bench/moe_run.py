"""Numbers of experts and sizes of minibatches -> tables, JSON and a picture, written as they come."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from iep.bench.contest import TRAINING
from iep.bench.machine import describe_machine, machine_line
from iep.bench.measure import Effort
from iep.bench.moe import Cell, Setting, count_active, empty_cell, measure_cell
from iep.bench.moe_bound import Probe, available_memory, refused_for_memory
from iep.bench.moe_picture import draw_cells
from iep.bench.moe_report import format_cells, write_report
from iep.bench.workload_run import Files
from iep.devices import resolve_device
from iep.files import check_writable, write_bytes
from iep.workloads.experts import Experts

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExpertsBenchmark:
    """What to measure, and how: every number of experts with every size of minibatch."""

    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    k: int
    width: tuple[int, int, int]
    """Inputs, hidden and outputs of an expert."""
    phases: tuple[str, ...]
    threads: tuple[int, ...]
    """On a GPU the first alone."""
    effort: Effort
    seed: int
    device: str

    @property
    def description(self) -> str:
        """A line."""
        sizes = "-".join(map(str, self.width))
        return (
            f"experts {sizes}, k {self.k}, drawn uniformly with seed {self.seed}, float32; the whole layer, no gating"
        )


def run_experts_benchmark(
    benchmark: ExpertsBenchmark,
    command: str,
    files: Files,
    say: Callable[[str], None] = print,
    progress: Progress = lambda what: None,
) -> list[Cell]:
    """Measure every cell in every phase on every number of threads.

    `say` hears the heading, then each table when it is complete; table and JSON are written after every cell, each
    whole or not at all. `progress` hears what is measured next.

    Raises:
        InputError: there is no such device.
    """
    check_writable(files.wanted)
    device = resolve_device(benchmark.device)
    machine = describe_machine(device)
    heading = "\n".join([f"$ {command}", machine_line(machine), benchmark.description])
    say(heading)
    about = {"command": command, "machine": machine, "workload": benchmark.description, "seed": benchmark.seed}
    before, tables, probe = torch.get_num_threads(), [], Probe(device)
    threads = benchmark.threads if device.type == "cpu" else benchmark.threads[:1]
    try:
        for phase, number in product(benchmark.phases, threads):
            torch.set_num_threads(number)
            tables.append([])
            for experts in sorted(benchmark.experts):
                for cell in _cells(benchmark, phase, number, experts, probe, progress):
                    tables[-1].append(cell)
                    _write(files, about, heading, tables)
            say(f"\n{format_cells(tables[-1])}")
    finally:
        torch.set_num_threads(before)
    cells = [cell for table in tables for cell in table]
    if files.picture is not None:
        draw_cells(files.picture, cells, f"{benchmark.description}\n{machine_line(machine)}")
    return cells


def _cells(
    benchmark: ExpertsBenchmark, phase: str, threads: int, experts: int, probe: Probe, progress: Progress
) -> Iterator[Cell]:
    """Those of one layer, the smallest minibatch first; what was left out of one is left out of the larger ones."""
    available, layer, left_out = available_memory(probe.device), None, {}
    for tokens in sorted(benchmark.tokens):
        setting = Setting(phase, threads, experts, tokens, benchmark.k)
        where = f"{phase} {experts} x {tokens}"
        rows = tokens * benchmark.k
        refusal = refused_for_memory(benchmark.width, experts, rows, phase == TRAINING, available)
        if refusal is not None:
            yield empty_cell(setting, count_active(setting, benchmark.seed), refusal)
            continue
        if layer is None:
            progress(f"{where} make")
            torch.manual_seed(benchmark.seed)
            layer = Experts(*benchmark.width, experts).to(probe.device)
        hear = partial(_hear, progress, where)
        cell = measure_cell(layer, setting, benchmark.effort, probe, benchmark.seed, left_out, hear)
        left_out = {timing.name: timing.left_out for timing in cell.timings if timing.left_out is not None}
        yield cell


def _hear(progress: Progress, where: str, way: str) -> None:
    progress(f"{where} {way}")


def _write(files: Files, about: dict[str, Any], heading: str, tables: list[list[Cell]]) -> None:
    if files.json is not None:
        write_report(files.json, about, [cell for table in tables for cell in table])
    if files.table is not None:
        write_bytes(files.table, "\n\n".join([heading, *map(format_cells, tables)]).encode() + b"\n")
