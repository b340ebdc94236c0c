"""Comparisons -> a picture like figure 2 of Suarez & Zhu (Effective Approaches to Batch Parallelization): time against
minibatch size on logarithmic scales, one line a strategy, modules alone and end to end side by side."""

from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter, NullLocator, ScalarFormatter

from iep.bench.engine import LIMIT, Comparison
from iep.bench.measure import Spread
from iep.pictures import save

PANELS = {"modules": "module calls alone", "end_to_end": "end to end"}
MARKERS = "osv^D<>pX*hP"


def draw_comparisons(path: Path, comparisons: Sequence[Comparison], subtitle: str) -> None:
    """Write the picture to `path`, whole or not at all; its ending says which kind (.png, .svg, .pdf).

    A row of two panels for each phase; bars are quartiles, dashed lines limits.
    """
    phases = list(dict.fromkeys(comparison.phase for comparison in comparisons))
    rows = [row for comparison in comparisons for row in comparison.rows]
    limits = dict.fromkeys(row.strategy for row in rows if row.batching == LIMIT)
    looks = line_looks([row.strategy for row in rows if row.batching != LIMIT], limits)
    figure = Figure(figsize=(12, 1 + 4.5 * len(phases)))
    axes = figure.subplots(len(phases), 2, squeeze=False, sharey="row")
    for phase, panels in zip(phases, axes, strict=True):
        of_phase = [comparison for comparison in comparisons if comparison.phase == phase]
        for axis, (part, name) in zip(panels, PANELS.items(), strict=True):
            draw_lines(axis, _lines(of_phase, part), looks)
            axis.set_title(f"{phase}: {name}")
            axis.set_xlabel("questions a minibatch")
            axis.set_ylabel("milliseconds a question")
        panels[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize="small")
    figure.suptitle(subtitle, fontsize="small")
    figure.tight_layout()
    save(figure, path)


Lines = dict[str, list[tuple[int, Spread]]]
"""By name, what was measured at each size."""


def line_looks(names: Iterable[str], dashed: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How each line looks, in all panels alike; those that are `dashed` in shades of grey."""
    dashed = dict.fromkeys(dashed)
    looks: dict[str, dict[str, Any]] = {}
    for number, (name, marker) in enumerate(zip(dict.fromkeys(names), cycle(MARKERS), strict=False)):
        looks[name] = {"color": f"C{number % 10}", "linestyle": "-", "marker": marker}
    for number, (name, marker) in enumerate(zip(dashed, cycle(MARKERS), strict=False)):
        looks[name] = {"color": str(0.7 * number / len(dashed)), "linestyle": "--", "marker": marker}
    return looks


def draw_lines(axis: Axes, lines: Lines, looks: dict[str, dict[str, Any]]) -> None:
    """Medians and quartiles over sizes that are powers of two, or nearly; values on a logarithmic scale."""
    for name, points in lines.items():
        sizes = [size for size, _ in points]
        medians, below, above = np.transpose(
            [(value.median, value.median - value.lower, value.upper - value.median) for _, value in points]
        )
        axis.errorbar(
            sizes, medians, yerr=[below, above], label=name, markersize=4, linewidth=1, capsize=2, **looks[name]
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sorted({size for points in lines.values() for size, _ in points}))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(True, which="both", alpha=0.2)


def scaled(value: Spread, factor: float) -> Spread:
    """Every figure `factor` times as large."""
    figures = (value.median, value.lower, value.upper, value.least, value.most)
    return Spread(*(factor * figure for figure in figures), value.repeats)


def _lines(comparisons: Sequence[Comparison], part: str) -> Lines:
    """Milliseconds a question."""
    lines: Lines = {}
    for comparison in comparisons:
        size = comparison.batch_size
        for row in comparison.rows:
            lines.setdefault(row.strategy, []).append((size, scaled(row.seconds[part], 1000 / size)))
    return lines
