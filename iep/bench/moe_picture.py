"""Cells of a grid of experts and minibatches -> a picture like figure 3 of Suarez & Zhu (Effective Approaches to Batch
Parallelization): the speed-up of batched over vanilla as colours on a logarithmic scale, with its number."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from iep.bench.moe import Cell
from iep.bench.moe_report import SCALED, is_scaled, speedup
from iep.pictures import save

COLOURS, LEFT_OUT = "viridis", "0.9"


def draw_cells(path: Path, cells: Sequence[Cell], subtitle: str) -> None:
    """Write the picture to `path`, whole or not at all; its ending says which kind (.png, .svg, .pdf).

    A map for each phase (below each other) and number of threads (side by side); what was left out is grey and empty.
    """
    phases, threads = (list(dict.fromkeys(getattr(cell.setting, of) for cell in cells)) for of in ("phase", "threads"))
    experts, tokens = (sorted({getattr(cell.setting, of) for cell in cells}) for of in ("experts", "tokens"))
    figures = [value for cell in cells if (value := speedup(cell)) is not None]
    norm = LogNorm(min([1.0, *figures]), max([10.0, *figures]))
    width, height = 2 + 0.9 * len(tokens), 1.2 + 0.6 * len(experts)
    figure = Figure(figsize=(1 + len(threads) * width, 1 + len(phases) * height), layout="constrained")
    axes = figure.subplots(len(phases), len(threads), squeeze=False)
    for row, phase in zip(axes, phases, strict=True):
        for axis, number in zip(row, threads, strict=True):
            shown = [cell for cell in cells if (cell.setting.phase, cell.setting.threads) == (phase, number)]
            _draw_map(axis, shown, experts, tokens, norm)
            axis.set_title(f"{phase}, {number} thread{'s' * (number > 1)}")
    bar = figure.colorbar(axes[0, 0].images[0], ax=axes)
    bar.set_label("speed-up of batched over vanilla")
    marks = f"\n{SCALED} vanilla on a part of the minibatch, scaled" if any(map(is_scaled, cells)) else ""
    figure.suptitle(subtitle + marks, fontsize="small", wrap=True)
    save(figure, path)


def _draw_map(axis: Axes, cells: Sequence[Cell], experts: list[int], tokens: list[int], norm: LogNorm) -> None:
    values = np.full((len(experts), len(tokens)), np.nan)
    for cell in cells:
        value = speedup(cell)
        if value is None:
            continue
        place = experts.index(cell.setting.experts), tokens.index(cell.setting.tokens)
        values[place] = value
        text = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
        colour = "black" if norm(value) > 0.6 else "white"
        axis.text(*place[::-1], text + SCALED * is_scaled(cell), ha="center", va="center", color=colour)
    axis.imshow(np.ma.masked_invalid(values), norm=norm, cmap=COLOURS, origin="lower", aspect="auto")
    axis.set_facecolor(LEFT_OUT)
    axis.set_xticks(range(len(tokens)), [f"{size:,}" for size in tokens])
    axis.set_yticks(range(len(experts)), [f"{number:,}" for number in experts])
    axis.set_xlabel("tokens a minibatch")
    axis.set_ylabel("experts")
