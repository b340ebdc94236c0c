"""Run a benchmark, and write its comparisons as they are measured: a text table, a JSON file and a picture."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import iep
from iep.bench.compare import CPU, LIMIT, TOTAL, Case, Effort, Fact, Row, compare
from iep.evaluation.json_report import align_rows
from iep.runtime.files import check_writable, write_bytes, write_json
from iep.runtime.pictures import save

Comparison = tuple[Case, Sequence[Row]]
MARKERS, ENDS = "osv^D<>pX*hP", ("median", "lower", "upper")


@dataclass(frozen=True)
class Benchmark:
    """Cases to compare, and how to present them.

    Attributes:
        description: one or more lines for the head of the table.
        cases: the cases, small ones first; they may be created while the benchmark runs.
        over: the key of the cases' settings that is the horizontal axis of the picture.
        unit: the name of a sample, such as `question`.
        pictures: functions that draw further pictures, by name; `cases` may add to them.
    """

    description: str
    cases: Iterable[Case]
    over: str
    unit: str
    device: torch.device = CPU
    pictures: dict[str, Callable[[], Figure]] = field(default_factory=dict)


def machine_line(device: torch.device) -> str:
    """Return a line that describes the machine: processor or GPU, threads, load, versions, and the time."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    where = names[0] if names else platform.processor() or platform.machine()
    where += f", {torch.get_num_threads()} of {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else where
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"{where}; torch {torch.__version__}, iep {iep.__version__}; {now}"


def result_files(out: Path | None, name: str) -> list[Path]:
    """Return the paths of the JSON file, the table and the picture in `out`; none without `out`.

    Raises:
        OSError: a file cannot be written.
    """
    files = [] if out is None else [out / f"{name}{ending}" for ending in (".json", ".txt", ".png")]
    check_writable(files)
    return files


def run_benchmark(benchmark: Benchmark, effort: Effort, command: str, files: Sequence[Path] = ()) -> list[Comparison]:
    """Measure every case, and print each table as soon as it is measured.

    The JSON file and the table are rewritten after every comparison, and the picture is drawn at the end, so that an
    interruption loses only the comparison that it interrupts.
    """
    machine = machine_line(benchmark.device)
    texts = ["\n".join([f"$ {command}", machine, benchmark.description])]
    print(texts[0], flush=True)
    about = {"command": command, "machine": machine, "description": benchmark.description, "effort": asdict(effort)}
    comparisons: list[Comparison] = []
    try:
        for case in benchmark.cases:
            comparisons.append((case, compare(case, effort)))
            texts.append(format_comparison(*comparisons[-1], benchmark.unit))
            print(f"\n{texts[-1]}", flush=True)
            if files:
                write_json(files[0], {**about, "comparisons": [_plain(*each) for each in comparisons]}, indent=2)
                write_bytes(files[1], ("\n\n".join(texts) + "\n").encode())
    finally:
        if files and comparisons:
            draw_comparisons(files[2], comparisons, benchmark.over, benchmark.unit, machine)
            more = {files[2].with_stem(f"{files[2].stem}-{name}"): draw for name, draw in benchmark.pictures.items()}
            for path, draw in more.items():
                save(draw(), path)
            print(f"\nWrote {', '.join(map(str, [*files, *more]))}")
    return comparisons


def _plain(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    return {**case.setting, **case.facts, "size": case.size, "baseline": case.baseline, "rows": [*map(asdict, rows)]}


def format_comparison(case: Case, rows: Sequence[Row], unit: str) -> str:
    """Return a title, a table with a line for each row, and a line for each competitor that was left out."""
    rounds = max((row.samples_per_second.repeats for row in rows if row.samples_per_second), default=0)
    title = f"{_described({**case.setting, **case.facts})}; milliseconds for {case.size} {unit}{'s' * (case.size > 1)}"
    lines = [_cells(row, unit) for row in rows]
    headings = list(dict.fromkeys(heading for line in lines for heading in line))
    columns = ([heading, *(line.get(heading, "-") for line in lines)] for heading in headings)
    table = align_rows([*zip(*(column for column in columns if set(column[1:]) != {"-"}), strict=True)])
    notes = [f"{row.name} left out: {row.left_out}" for row in rows if row.left_out]
    return "\n".join([f"{title}, median of up to {rounds} rounds", table, *notes])


def _cells(row: Row, unit: str) -> dict[str, str]:
    parts = {part: short(1000 * taken.median) for part, taken in row.seconds.items() if part != TOTAL}
    cells = {"strategy": row.name, **{name.replace("_", " "): short(fact) for name, fact in row.facts.items()}, **parts}
    if speed := row.samples_per_second:
        cells[f"{unit}s/s"] = short(speed.median)
        cells["quartiles"] = f"{short(speed.lower)}-{short(speed.upper)}"
        cells["speed-up"] = short(row.speedup and f"{row.speedup:.2f}x")
        cells["of limit"] = short(row.share_of_limit and f"{100 * row.share_of_limit:.0f}%")
    return cells


def short(value: Fact) -> str:
    """Return a number with four digits, in thousands, millions or billions if it is large; `-` for None."""
    if value is None or isinstance(value, str):
        return value or "-"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e5):
            return f"{value / factor:.4g}{letter}"
    return f"{value:.5g}" if abs(value) >= 1e4 else f"{value:.4g}"


def _described(setting: Mapping[str, Fact]) -> str:
    return ", ".join(value if name == "phase" else f"{name} {short(value)}" for name, value in setting.items())


def draw_comparisons(path: Path, comparisons: Sequence[Comparison], over: str, unit: str, subtitle: str) -> None:
    """Draw milliseconds per sample against the setting `over` on logarithmic scales (Suarez & Zhu 2017, figure 2).

    Each competitor is a line, dashed for limits, with quartiles as bars. Each value of the other settings has its own
    panel.
    """
    panels: dict[str, list[Comparison]] = {}
    for case, found in comparisons:
        rest = {name: value for name, value in case.setting.items() if name != over}
        panels.setdefault(_described(rest), []).append((case, found))
    names = list(dict.fromkeys(row.name for _, found in comparisons for row in found if row.seconds))
    figure = Figure(figsize=(3 + 4 * len(panels), 4.5), layout="constrained")
    lines: dict[str, Any] = {}
    for axis, (title, shown) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for number, name in enumerate(names):
            points = [
                (case.setting[over], *(1000 / case.size * getattr(row.seconds[TOTAL], end) for end in ENDS))
                for case, found in shown
                for row in found
                if row.name == name and row.seconds
            ]
            if points:
                x, median, lower, upper = np.array(sorted(points)).T
                look = {"marker": MARKERS[number % len(MARKERS)], "linestyle": "--" if name.startswith(LIMIT) else "-"}
                lines[name] = axis.errorbar(x, median, yerr=[median - lower, upper - median], linewidth=1, **look)
        axis.set_xscale("symlog", linthresh=1)  # a size may be 0
        axis.set(yscale="log", title=title, xlabel=over, ylabel=f"milliseconds per {unit}")
        axis.grid(True, which="both", alpha=0.2)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize="small")
    figure.suptitle(subtitle, fontsize="small")
    save(figure, path)
