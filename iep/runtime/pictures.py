"""A matplotlib figure -> a file with the same bytes each time; and the colours of maps."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from iep.runtime.files import atomic_path

DPI = 150
HEAT = colormaps["inferno"]
"""The colours of attention and saliency maps."""


def save(figure: Figure, path: Path, dpi: float = DPI) -> None:
    """Write `figure` to `path` completely or not at all, in the format of its suffix (.png, .svg, .pdf)."""
    kind = path.suffix.removeprefix(".").lower()
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # Fixed identifiers and no date make the bytes reproducible. Text remains text.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "iep", "image.composite_image": False}
    with rc_context(settings), atomic_path(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, bbox_inches="tight", metadata=dated.get(kind))
