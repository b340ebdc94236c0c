"""Cells of a grid of experts and minibatches -> text tables, the map of speed-ups, and the JSON of all of them."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from iep.bench.moe import Cell, Timing
from iep.bench.moe_ways import BATCHED, GROUPED, LOOP, NAMES, VANILLA
from iep.bench.table import format_table
from iep.files import write_json

FORMAT = "iep experts benchmark 1"
MISSING, SCALED = "-", "*"
HEADINGS = (
    *("experts", "tokens", "active", BATCHED, "quartiles", GROUPED, LOOP, VANILLA),
    *("bound", "of", "GB/s", "GFLOP/s", "x bound", "x others", "speed-up"),
)


def write_report(path: Path, about: dict[str, Any], cells: Sequence[Cell]) -> None:
    """Write all that was measured as JSON, whole or not at all; `about` says with what and where."""
    write_json(path, {"format": FORMAT, **about, "cells": [_plain(cell) for cell in cells]}, indent=2)


def speedup(cell: Cell) -> float | None:
    """Of batched over vanilla: a figure of the map."""
    return cell.timing(BATCHED).speedup


def is_scaled(cell: Cell) -> bool:
    """Whether vanilla, which the speed-up is over, was run on a part of the minibatch."""
    vanilla = cell.timing(VANILLA)
    return vanilla.seconds is not None and vanilla.tokens_run < cell.setting.tokens


def format_cells(cells: Sequence[Cell]) -> str:
    """Cells of one phase and number of threads: a line each, then the map of speed-ups, then what was left out."""
    setting = cells[0].setting
    threads = f"{setting.threads} thread{'s' * (setting.threads > 1)}"
    rounds = max((timing.seconds.repeats for cell in cells for timing in cell.timings if timing.seconds), default=0)
    title = f"{setting.phase}, k {setting.k}, {threads}: milliseconds a minibatch, medians of up to {rounds} rounds"
    parts = [
        f"{title}\n{format_table([HEADINGS, *map(_line, cells)])}",
        f"\n{setting.phase}, k {setting.k}, {threads}: speed-up of {BATCHED} over {VANILLA}\n{_map(cells)}",
        *_notes(cells),
    ]
    return "\n".join(parts)


def _line(cell: Cell) -> list[str]:
    batched, least = cell.timing(BATCHED), cell.bound
    quartiles = batched.seconds
    of_bound = [MISSING] * 4
    if least is not None:
        part = "memory" if least.memory > least.products else "products"
        of_bound = [
            f"{1000 * least.seconds:.4g}",
            part,
            f"{least.bytes_per_second / 1e9:.3g}",
            f"{least.flop_per_second / 1e9:.3g}",
        ]
    return [
        *map(str, (cell.setting.experts, cell.setting.tokens, cell.active)),
        _milliseconds(batched),
        MISSING if quartiles is None else f"{1000 * quartiles.lower:.4g}-{1000 * quartiles.upper:.4g}",
        *(_milliseconds(cell.timing(name), is_scaled(cell) and name == VANILLA) for name in NAMES[1:]),
        *of_bound,
        _times(batched.over_bound),
        _times(cell.over_others),
        _times(batched.speedup, is_scaled(cell)),
    ]


def _map(cells: Sequence[Cell]) -> str:
    found = {(cell.setting.experts, cell.setting.tokens): cell for cell in cells}
    tokens = sorted({tokens for _, tokens in found})
    rows = [["experts \\ tokens", *map(str, tokens)]]
    for experts in sorted({experts for experts, _ in found}):
        row = [found.get((experts, size)) for size in tokens]
        rows.append(
            [str(experts), *(MISSING if cell is None else _times(speedup(cell), is_scaled(cell)) for cell in row)]
        )
    return format_table(rows)


def _notes(cells: Sequence[Cell]) -> list[str]:
    """What the marks in the tables stand for, and what was left out."""
    scaled = {cell.timing(VANILLA).tokens_run for cell in cells if is_scaled(cell)}
    notes = [f"{SCALED} {VANILLA} ran the first {part} tokens; scaled to all of them" for part in sorted(scaled)]
    for cell in cells:
        reasons: dict[str, list[str]] = {}
        for timing in cell.timings:
            if timing.left_out is not None:
                reasons.setdefault(timing.left_out, []).append(timing.name)
        where = f"{cell.setting.experts} experts, {cell.setting.tokens} tokens"
        notes += [f"{MISSING} {where}: {', '.join(names)} left out: {reason}" for reason, names in reasons.items()]
    return notes


def _plain(cell: Cell) -> dict[str, Any]:
    plain = asdict(cell)
    least = plain["bound"] and {**plain["bound"], "seconds": cell.bound.seconds}
    return {**plain.pop("setting"), **plain, "bound": least}


def _milliseconds(timing: Timing, scaled: bool = False) -> str:
    return MISSING if timing.seconds is None else f"{1000 * timing.seconds.median:.4g}{SCALED * scaled}"


def _times(value: float | None, scaled: bool = False) -> str:
    return (
        MISSING
        if value is None
        else f"{value:.2f}{SCALED * scaled}"
        if value < 100
        else f"{value:.0f}{SCALED * scaled}"
    )
