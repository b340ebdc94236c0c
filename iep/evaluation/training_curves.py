"""The metrics.jsonl of the runs of checkpoints -> charts, laid out for the SVG drawings of the HTML report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from iep.config import CONFIG
from iep.runtime.reading import read_yaml
from iep.runtime.records import METRICS, read_rows

MOST_POINTS = 500
"""The most points of a curve; neighbouring points of a longer one are averaged."""
LARGEST_VALUE = 1e100
"""The greatest absolute value that is drawn; differences of larger values may overflow."""
ACCURACY = "Accuracy"
CHARTS = {
    "Loss": ("loss",),
    ACCURACY: ("accuracy", "validation_accuracy", "reward", "reward_baseline"),
    "Loss of the generator (REINFORCE)": ("generator_loss",),
}
"""The title of each chart, and the names in metrics.jsonl of the curves that it shows."""
WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 10, 26
"""Margins of a chart around its curves, in the same unit as its width and height."""

Curve = list[tuple[float, float]]
"""Points (step, value), by step."""


@dataclass(frozen=True)
class TrainingRun:
    """The curves that one run recorded.

    Attributes:
        parts: the options whose checkpoints belong to the run, such as `("pg", "ee")`.
        path: the run directory.
        charts: the curves by title and name; charts and curves without points are left out.
        averaged: the greatest number of recorded points that one point of a curve is the mean of.
    """

    parts: tuple[str, ...]
    path: Path
    charts: Mapping[str, Mapping[str, Curve]]
    averaged: int


def training_runs(checkpoints: Mapping[str, str]) -> list[TrainingRun]:
    """Return the runs that checkpoints (files in a run directory, or run directories) belong to, each once.

    The runs that a joint run started from follow it. A run without metrics.jsonl has no charts.

    Args:
        checkpoints: paths by part, as in a report.

    Raises:
        InputError: the config.yaml of a run cannot be read.
        OSError: a metrics.jsonl cannot be read.
    """
    runs: dict[Path, tuple[Path, list[str]]] = {}

    def add(part: str, path: str) -> Path:
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        runs.setdefault(directory.resolve(), (directory, []))[1].append(part)
        return directory

    for directory in [add(part, path) for part, path in checkpoints.items()]:
        settings = read_yaml(directory / CONFIG) if (directory / CONFIG).is_file() else {}
        if isinstance(settings, Mapping) and settings.get("model") == "joint":
            for part in ("pg", "ee"):
                name = f"{part} before joint training"
                if isinstance(settings.get(part), str) and all(name not in parts for _, parts in runs.values()):
                    add(name, settings[part])
    return [_read_run(tuple(parts), directory) for directory, parts in runs.values()]


def _read_run(parts: tuple[str, ...], directory: Path) -> TrainingRun:
    """Return the curves of one run directory."""
    path = directory / METRICS
    rows = read_rows(path) if path.is_file() else []
    charts, longest = {}, 1
    for title, names in CHARTS.items():
        if curves := {name: curve for name in names if (curve := _points(rows, name))}:
            longest = max(longest, *map(len, curves.values()))
            charts[title] = {name: thinned(curve) for name, curve in curves.items()}
    return TrainingRun(parts, directory, charts, -(-longest // MOST_POINTS))


def _points(rows: list[dict[str, float]], name: str) -> Curve:
    """Return the points of one name that can be drawn; the values of an edited file may be of any type."""
    pairs = ((row["step"], row.get(name)) for row in rows)
    return [(step, float(value)) for step, value in pairs if _can_be_drawn(step) and _can_be_drawn(value)]


def _can_be_drawn(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST_VALUE


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return at most `most` points, each the mean of equally many neighbours in a longer curve."""
    size = -(-len(curve) // most)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return curve if size <= 1 else [tuple(np.mean(part, axis=0).tolist()) for part in parts]


def draw_chart(title: str, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Lay out a chart for the report's template.

    Returns:
        `title`; `levels` and `marks`, the labels of the two axes with their y and x; `curves`, each with its `name`,
        its `points` in the chart and `end`, the text of its last value; `steps`, for each step of any curve its x, its
        label and the texts of the nearest values of all curves.
    """
    steps = sorted({step for curve in curves.values() for step, _ in curve})
    values = [value for curve in curves.values() for _, value in curve]
    is_share, is_one_step = title == ACCURACY, len(steps) == 1
    levels = [0, 0.25, 0.5, 0.75, 1] if is_share else ticks(min(values), max(values), 4)
    marks = steps if is_one_step else [step for step in ticks(steps[0], steps[-1], 5) if steps[0] <= step <= steps[-1]]

    def x(step: float) -> float:
        share = 0.5 if is_one_step else (step - steps[0]) / (steps[-1] - steps[0])
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(TOP + (levels[-1] - value) / (levels[-1] - levels[0]) * (HEIGHT - TOP - BOTTOM), 1)

    def text(value: float) -> str:
        return f"{100 * value:.1f}%" if is_share else short(value)

    nearest = []  # for every curve, the texts of its values nearest to the steps
    for curve in curves.values():
        distances = np.abs(np.subtract.outer(steps, [step for step, _ in curve]))
        nearest.append([text(curve[at][1]) for at in distances.argmin(axis=1)])
    return {
        "title": title,
        "levels": [(y(level), f"{level:.0%}" if is_share else short(level)) for level in levels],
        "marks": [(x(mark), short(mark)) for mark in marks],
        "curves": [
            {
                "name": name.replace("_", " "),
                "points": [(x(step), y(value)) for step, value in curve],
                "end": of_curve[-1],
            }
            for (name, curve), of_curve in zip(curves.items(), nearest, strict=True)
        ],
        "steps": [(x(step), f"{step:,.0f}", at) for step, *at in zip(steps, *nearest, strict=True)],
    }


def ticks(low: float, high: float, wanted: int) -> Sequence[float]:
    """Return about `wanted` round numbers at equal distances, the first not above `low`, the last not below `high`."""
    high = high if high > low else low + (abs(low) or 1.0)
    return MaxNLocator(wanted, steps=[1, 2, 5, 10]).tick_values(low, high).tolist()


def short(value: float) -> str:
    """Return a number in three or four digits: 0.125, 1230, 20k."""
    return f"{float(f'{value / 1000:.4g}'):g}k" if abs(value) >= 1e4 else f"{float(f'{value:.3g}'):g}"
