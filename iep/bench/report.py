"""Comparisons -> a text table and the JSON of a whole benchmark. Pictures are `picture.py`'s."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iep.bench.engine import PARTS, Comparison, Row
from iep.bench.measure import Spread
from iep.bench.table import format_table
from iep.files import write_json

FORMAT = "iep engine benchmark 1"
MISSING = "-"
HEADINGS = (
    *("strategy", "nodes", "calls", "bound"),
    *("planning", "gather/scatter", "modules", "stem+classifier", "step"),
    *("questions/s", "quartiles", "speed-up", "modules'", "of limit", "memory MB"),
)


def write_report(path: Path, setting: Mapping[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Write all that was measured as JSON, whole or not at all; `setting` says with what and where."""
    results = [asdict(comparison) for comparison in comparisons]
    write_json(path, {"format": FORMAT, **setting, "comparisons": results}, indent=2)


def format_comparison(comparison: Comparison) -> str:
    """A text table, one line a strategy; milliseconds are medians of a minibatch, MB are millions of bytes."""
    return f"{_title(comparison)}\n{format_table([HEADINGS, *map(_cells, comparison.rows)], left=1)}"


def _title(comparison: Comparison) -> str:
    rounds = [row.seconds["modules"].repeats for row in comparison.rows]
    many = f"{min(rounds)} to {max(rounds)}" if min(rounds) < max(rounds) else f"{max(rounds)}"
    many += " round" if max(rounds) == 1 else " rounds"
    over = f", mean of {comparison.minibatches} minibatches" if comparison.minibatches > 1 else ""
    questions = f"{comparison.batch_size} question{'' if comparison.batch_size == 1 else 's'}"
    images = f"{comparison.images:.4g} image{'' if comparison.images == 1 else 's'}"
    placed = f", placed on {', '.join(comparison.devices)}" if comparison.devices else ""
    what = f"{comparison.phase}: {questions} of {images} a minibatch{placed}"
    return f"{what}; milliseconds a minibatch, median of {many}{over}"


def _cells(row: Row) -> list[str]:
    speed = row.questions_per_second
    return [
        row.strategy,
        f"{row.nodes:.4g}",
        f"{row.calls:.4g}",
        MISSING if row.lower_bound is None else f"{row.lower_bound:.4g}",
        *(_milliseconds(row.seconds[part]) for part in PARTS),
        f"{speed.median:.4g}",
        f"{speed.lower:.4g}-{speed.upper:.4g}",
        _times(row.speedup["end_to_end"]),
        _times(row.speedup["modules"]),
        f"{100 * row.share_of_limit:.0f}%",
        MISSING if row.peak_memory is None else f"{row.peak_memory / 1e6:.4g}",
    ]


def _milliseconds(value: Spread | None) -> str:
    return MISSING if value is None else f"{1000 * value.median:.4g}"


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}x"
