"""The checkpoints of an evaluation -> the numbers that their runs recorded while training, short enough to be drawn."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from iep.runtime.records import METRICS, read_rows

MOST_POINTS = 500
"""Of one curve; of a longer one, neighbouring points are averaged."""
CHARTS = {
    "Loss": ("loss",),
    "Accuracy": ("accuracy", "validation_accuracy", "reward", "reward_baseline"),
    "Loss of the generator (REINFORCE)": ("generator_loss",),
}
"""What is drawn together: a chart's title, and the names in metrics.jsonl."""

Curve = list[tuple[float, float]]
"""Points (step, value)."""


@dataclass(frozen=True)
class TrainingRun:
    """What one run recorded.

    Attributes:
        parts: what the evaluation took from it, such as `("pg", "ee")`.
        path: the run directory.
        charts: title -> name -> curve; charts and curves without points are left out.
        averaged: how many recorded points one point stands for at most.
    """

    parts: tuple[str, ...]
    path: Path
    charts: Mapping[str, Mapping[str, Curve]]
    averaged: int


def training_runs(checkpoints: Mapping[str, str]) -> list[TrainingRun]:
    """The runs that checkpoints (files in a run directory, or run directories) belong to, each once.

    A run without metrics.jsonl has no charts.

    Args:
        checkpoints: paths by part, as in a report.

    Raises:
        OSError: a metrics.jsonl cannot be read.
    """
    runs: dict[Path, tuple[Path, list[str]]] = {}
    for part, path in checkpoints.items():
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        runs.setdefault(directory.resolve(), (directory, []))[1].append(part)
    return [_read_run(tuple(parts), directory) for directory, parts in runs.values()]


def _read_run(parts: tuple[str, ...], directory: Path) -> TrainingRun:
    path = directory / METRICS
    rows = read_rows(path) if path.is_file() else []
    charts, averaged = {}, 1
    for title, names in CHARTS.items():
        curves = {name: _points(rows, name) for name in names}
        longest = max(map(len, curves.values()))
        averaged = max(averaged, -(-longest // MOST_POINTS))
        if longest:
            charts[title] = {name: thinned(curve) for name, curve in curves.items() if curve}
    return TrainingRun(parts, directory, charts, averaged)


def _points(rows: list[dict[str, float]], name: str) -> Curve:
    """The finite values of one name; a row may hold anything, for the file may have been edited."""
    return [(row["step"], float(row[name])) for row in rows if _is_finite(row["step"]) and _is_finite(row.get(name))]


def _is_finite(value: object) -> bool:
    """A number that a float holds; Python reads whole ones from JSON that none does."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most `most` points: as many neighbours as that takes become one, their mean in step and value."""
    size = -(-len(curve) // most)
    if size <= 1:
        return curve
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]
