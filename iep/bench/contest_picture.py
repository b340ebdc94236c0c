"""Comparisons of ways to run a workload -> a picture: samples a second, and the time of graph construction apart from
computation, over minibatch sizes or tree sizes, like table 1 of Xu et al. (Cavs)."""

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from iep.bench.contest import LIMITS, Comparison, Row
from iep.bench.measure import Spread
from iep.bench.picture import Lines, draw_lines, line_looks, scaled
from iep.pictures import save


def draw_comparisons(path: Path, comparisons: Sequence[Comparison], subtitle: str, over: str) -> None:
    """Write the picture to `path`, whole or not at all; its ending says which kind (.png, .svg, .pdf).

    A row of three panels for each phase and number of threads; bars are quartiles, dashed lines limits. `over` is the
    part of the comparisons' setting that they differ in.
    """
    kinds = list(dict.fromkeys((comparison.phase, comparison.threads) for comparison in comparisons))
    names = [row.name for comparison in comparisons for row in comparison.rows if row.name not in LIMITS]
    looks = line_looks(names, LIMITS)
    figure = Figure(figsize=(14, 0.5 + 3.5 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), 3, squeeze=False)
    for (phase, threads), panels in zip(kinds, axes, strict=True):
        of_kind = [each for each in comparisons if (each.phase, each.threads) == (phase, threads)]
        for axis, (name, value) in zip(panels, PANELS.items(), strict=True):
            draw_lines(axis, _lines(of_kind, over, value), looks)
            axis.set_title(f"{phase}, {threads} thread{'s' * (threads > 1)}: {name}")
            axis.set_xlabel(over)
        panels[0].set_ylabel("samples a second")
        panels[1].set_ylabel("milliseconds a sample")
        panels[0].legend(loc="best", frameon=False, fontsize="x-small")
    figure.suptitle(subtitle, fontsize="small")
    save(figure, path)


Value = Callable[[Comparison, Row], Spread | None]
PANELS: dict[str, Value] = {
    "end to end": lambda comparison, row: row.samples_per_second,
    "computation": lambda comparison, row: scaled(row.computation, 1000 / comparison.batch_size),
    "graph construction": lambda comparison, row: (
        None if row.construction is None else scaled(row.construction, 1000 / comparison.batch_size)
    ),
}


def _lines(comparisons: Sequence[Comparison], over: str, value: Value) -> Lines:
    lines: Lines = {}
    for comparison in comparisons:
        for row in comparison.rows:
            found = value(comparison, row)
            if found is not None and found.median > 0:
                lines.setdefault(row.name, []).append((comparison.setting[over], found))
    return lines
