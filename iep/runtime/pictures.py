"""A matplotlib figure -> a file with the same bytes each time; an image or a map -> a data URI."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from PIL import Image

from iep.runtime.files import atomic_path

DPI = 150
HEAT = colormaps["inferno"]
"""The colours of attention and saliency maps."""
WIDTH = 320
"""The greatest width of a picture, in pixels."""
QUALITY = 75
"""The JPEG quality of the pictures, at most 95."""


def save(figure: Figure, path: Path, dpi: float = DPI) -> None:
    """Write `figure` to `path` completely or not at all, in the format of its suffix (.png, .svg, .pdf)."""
    kind = path.suffix.removeprefix(".").lower()
    dated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    # Fixed identifiers and no date make the bytes reproducible. Text remains text.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "iep", "image.composite_image": False}
    with rc_context(settings), atomic_path(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=dpi, bbox_inches="tight", metadata=dated.get(kind))


def heat_uri(map_HW: np.ndarray) -> str:
    """Return a map as a PNG in a data URI, transparent where it is 0, to be stretched over the image."""
    colors_HWC, content = HEAT(map_HW, bytes=True), io.BytesIO()
    colors_HWC[..., 3] = (170 * map_HW).astype(np.uint8)
    Image.fromarray(colors_HWC).save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode("ascii")


def data_uri(image: Image.Image) -> str:
    """Return the image, at most `WIDTH` pixels wide, as a JPEG in a data URI."""
    small, content = image.copy(), io.BytesIO()
    small.thumbnail((WIDTH, 4 * WIDTH), Image.Resampling.LANCZOS)
    small.save(content, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")
