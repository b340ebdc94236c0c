"""A benchmark's cases -> comparisons, written as they come: one text table, one JSON file, one picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator, ScalarFormatter

from iep.bench.compare import CPU, LIMIT, TOTAL, Case, Comparison, Effort, Fact, Progress, Row, compare
from iep.bench.machine import describe_machine, machine_line
from iep.files import check_writable, write_bytes, write_json
from iep.pictures import save

FORMAT = "iep benchmark 2"
MARKERS, ENDS = "osv^D<>pX*hP", ("median", "lower", "upper")


@dataclass(frozen=True)
class Benchmark:
    """What to compare.

    Attributes:
        description: a line or several for the head of the table.
        cases: the small ones first; they may be made while the benchmark runs.
        over: the part of the cases' setting that the picture is drawn over.
        unit: what a sample is.
        about: what else the JSON file says.
    """

    description: str
    cases: Iterable[Case]
    over: str
    unit: str
    device: torch.device = CPU
    about: Mapping[str, Any] = field(default_factory=dict)


def result_files(out: Path | None, name: str, endings: Sequence[str] = (".json", ".txt", ".png")) -> list[Path]:
    """Return the files that results are written to, none without `out`, once it is known that they can be.

    Raises:
        OSError: one cannot be written.
    """
    files = [] if out is None else [out / f"{name}{ending}" for ending in endings]
    check_writable(files)
    return files


def run_benchmark(
    benchmark: Benchmark,
    effort: Effort,
    command: str,
    files: Sequence[Path] = (),
    say: Callable[[str], None] = print,
    progress: Progress = lambda what: None,
) -> list[Comparison]:
    """Measure every case.

    `say` is told the heading, and each table as soon as it is measured. JSON and table are written as often, each whole
    or not at all, and the picture in the end, so that an interruption loses only the comparison that it interrupts.
    """
    machine = describe_machine(benchmark.device)
    texts = ["\n".join([f"$ {command}", machine_line(machine), benchmark.description])]
    say(texts[0])
    about = {"format": FORMAT, "command": command, "machine": machine, "description": benchmark.description}
    about |= {"effort": asdict(effort), **benchmark.about}
    comparisons: list[Comparison] = []
    try:
        for case in benchmark.cases:
            where = _described(case.setting)
            comparisons.append(compare(case, effort, lambda name, where=where: progress(f"{where}: {name}")))
            texts.append(format_comparison(comparisons[-1], benchmark.unit))
            say(f"\n{texts[-1]}")
            if files:
                write_json(files[0], {**about, "comparisons": [_plain(each) for each in comparisons]}, indent=2)
                write_bytes(files[1], ("\n\n".join(texts) + "\n").encode())
    finally:
        if files and comparisons:
            draw_comparisons(files[2], comparisons, benchmark.over, benchmark.unit, machine_line(machine))
    return comparisons


def _plain(comparison: Comparison) -> dict[str, Any]:
    """Facts and setting beside what was measured."""
    case = comparison.case
    rows = [{**asdict(row), **row.facts} for row in comparison.rows]
    rows = [{name: value for name, value in row.items() if name != "facts"} for row in rows]
    return {**case.setting, **case.facts, "size": case.size, "baseline": case.baseline, "rows": rows}


def format_comparison(comparison: Comparison, unit: str) -> str:
    """Return a title, a table with a line for each row, and a line for each competitor that was left out."""
    case, rows = comparison.case, comparison.rows
    rounds = [row.samples_per_second.repeats for row in rows if row.samples_per_second] or [0]
    many = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else f"{max(rounds)}"
    title = f"{_described({**case.setting, **case.facts})}; milliseconds for {case.size} {unit}{'s' * (case.size > 1)}"
    title += f", median of {many} round{'s' * (max(rounds) != 1)}"
    facts = list(dict.fromkeys(name for row in rows for name in row.facts))
    parts = list(dict.fromkeys(part for row in rows for part in row.seconds if part != TOTAL))
    headings = ["strategy", *(name.replace("_", " ") for name in facts), *parts]
    headings += [f"{unit}s/s", "quartiles", "speed-up", "of limit"]
    lines = [headings, *(_cells(row, facts, parts) for row in rows)]
    kept = [number for number, column in enumerate(zip(*lines, strict=True)) if set(column[1:]) != {"-"}]
    notes = [f"{row.name} left out: {row.left_out}" for row in rows if row.left_out]
    return "\n".join([title, format_table([[line[number] for number in kept] for line in lines]), *notes])


def _cells(row: Row, facts: Sequence[str], parts: Sequence[str]) -> list[str]:
    speed = row.samples_per_second
    return [
        row.name,
        *(short(row.facts.get(name)) for name in facts),
        *(short(1000 * row.seconds[part].median if part in row.seconds else None) for part in parts),
        short(speed and speed.median),
        short(speed and f"{short(speed.lower)}-{short(speed.upper)}"),
        short(row.speedup and f"{row.speedup:.2f}x"),
        short(row.share_of_limit and f"{100 * row.share_of_limit:.0f}%"),
    ]


def short(value: Fact) -> str:
    """Return four digits of a number, in thousands, millions or billions where it is large; `-` for None."""
    if value is None or isinstance(value, str):
        return value or "-"
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(factor, 1e5):
            return f"{value / factor:.4g}{letter}"
    return f"{value:.5g}" if abs(value) >= 1e4 else f"{value:.4g}"


def _described(setting: Mapping[str, Fact]) -> str:
    return ", ".join(value if name == "phase" else f"{name} {short(value)}" for name, value in setting.items())


def format_table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return aligned columns, those of `left` flush left and the others flush right."""
    columns = [
        [cell.ljust(width) if number in left else cell.rjust(width) for cell in column]
        for number, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def draw_comparisons(path: Path, comparisons: Sequence[Comparison], over: str, unit: str, subtitle: str) -> None:
    """Draw milliseconds a sample against the setting `over`, on logarithmic scales: a line for each row, dashed for
    limits, with quartiles as bars (Suarez & Zhu, figure 2). Each value of the rest of the setting has its own panel."""
    panels: dict[tuple, list[Comparison]] = {}
    for each in comparisons:
        rest = tuple((name, value) for name, value in each.case.setting.items() if name != over)
        panels.setdefault(rest, []).append(each)
    names = list(dict.fromkeys(row.name for each in comparisons for row in each.rows if row.seconds))
    looks = {name: _look(number, name) for number, name in enumerate(names)}
    columns = next((n for n in (len(set(values)) for values in list(zip(*panels, strict=True))[::-1]) if n > 1), 1)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3 + 4 * columns, 1 + 3.5 * rows), layout="constrained")
    lines: dict[str, Any] = {}
    for number, (rest, shown) in enumerate(panels.items(), start=1):
        axis = figure.add_subplot(rows, columns, number)
        for name in names:
            found = [(each.case, row) for each in shown for row in each.rows if row.name == name and row.seconds]
            points = [
                (case.setting[over], *(1000 / case.size * getattr(row.seconds[TOTAL], end) for end in ENDS))
                for case, row in found
            ]
            if points:
                x, median, lower, upper = np.array(sorted(points)).T
                lines[name] = axis.errorbar(x, median, yerr=[median - lower, upper - median], **looks[name])
        axis.set_xscale("symlog", linthresh=1)  # a size may be 0
        axis.set(yscale="log", title=_described(dict(rest)), xlabel=over, ylabel=f"milliseconds a {unit}")
        axis.set_xticks(sorted({each.case.setting[over] for each in shown}))
        axis.xaxis.set(minor_locator=NullLocator(), major_formatter=ScalarFormatter())
        axis.yaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter=FormatStrFormatter("%g"))
        axis.yaxis.set(minor_formatter=NullFormatter())
        axis.grid(True, which="both", alpha=0.2)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle(subtitle, fontsize="small")
    save(figure, path)


def _look(number: int, name: str) -> dict[str, Any]:
    line = {"color": "0.4", "linestyle": "--"} if name.startswith(LIMIT) else {"color": f"C{number % 10}"}
    return {"marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1, "capsize": 2, **line}
