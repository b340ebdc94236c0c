"""Comparisons of ways to run a workload -> text tables and the JSON of a whole benchmark."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iep.bench.contest import Comparison, Row
from iep.bench.measure import Spread
from iep.bench.table import format_table
from iep.files import write_json

FORMAT = "iep workload benchmark 1"
MISSING = "-"
HEADINGS = (
    *("strategy", "calls", "ratio", "construction", "computation"),
    *("samples/s", "quartiles", "speed-up", "of limit", "of operations"),
)


def write_report(path: Path, about: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Write all that was measured as JSON, whole or not at all; `about` says with what and where."""
    write_json(path, {"format": FORMAT, **about, "comparisons": [asdict(each) for each in comparisons]}, indent=2)


def format_comparison(comparison: Comparison) -> str:
    """A text table, a line a row; milliseconds are medians of a minibatch."""
    return f"{_title(comparison)}\n{format_table([HEADINGS, *map(_cells, comparison.rows)], left=1)}"


def _title(comparison: Comparison) -> str:
    setting = ", ".join(f"{name} {value}" for name, value in comparison.setting.items())
    threads = f"{comparison.threads} thread{'s' * (comparison.threads > 1)}"
    rounds = comparison.rows[0].computation.repeats
    over = f", mean of {comparison.minibatches} minibatches" if comparison.minibatches > 1 else ""
    size = f"{comparison.cells:.4g} cells and {comparison.flop / 1e9:.4g} GFLOP a minibatch"
    speed = f"fastest product {comparison.flop_per_second / 1e9:.4g} GFLOP/s"
    what = f"{comparison.phase}, {setting}, {threads}: {size}, {speed}"
    return f"{what}; milliseconds a minibatch, median of {rounds} round{'s' * (rounds > 1)}{over}"


def _cells(row: Row) -> list[str]:
    speed = row.samples_per_second
    return [
        row.name,
        MISSING if row.calls is None else f"{row.calls:.4g}",
        MISSING if row.batching_ratio is None else f"{row.batching_ratio:.4g}",
        _milliseconds(row.construction),
        _milliseconds(row.computation),
        f"{speed.median:.4g}",
        f"{speed.lower:.4g}-{speed.upper:.4g}" if speed.repeats > 1 else MISSING,
        MISSING if row.speedup is None else f"{row.speedup:.2f}x",
        f"{100 * row.share_of_limit:.0f}%",
        f"{100 * row.share_of_flop_limit:.0f}%",
    ]


def _milliseconds(value: Spread | None) -> str:
    return MISSING if value is None else f"{1000 * value.median:.4g}"
