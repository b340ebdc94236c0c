"""Image files -> batches of uint8 pixels, decoded and resized by worker processes in the order of the images' indices.

Shapes: B images of a batch, 3 colours, H = W = the size in pixels. Normalising is the backbone's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from iep.data.loader import Loading, made_ahead
from iep.errors import InputError
from iep.runtime.reading import reading

_OF_16_BITS = ("PNG", "PPM")
"""Formats whose grey has at most 16 bits, though Pillow may store it in 32 (mode I)."""


def open_image(path: Path) -> Image.Image:
    """Decode an image to RGB as it is meant to be seen: rotated by its EXIF data, and 16 bits of grey scaled to 8.

    Raises:
        InputError: the file is missing, truncated or not an image, or its pixels are numbers without a maximum, so that
            it is unknown which one is white.
    """
    with reading(path, "an image"), Image.open(path) as image:
        return _rgb(ImageOps.exif_transpose(image), image.format)


def _rgb(image: Image.Image, kind: str) -> Image.Image:
    """Convert `image`, from a file of that kind, to RGB; Pillow itself would make everything above 255 white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and kind in _OF_16_BITS):
        grey_HW = np.asarray(image).astype(np.int64)
        return Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8)).convert("RGB")  # 65535 / 255 is 257
    if image.mode in ("I", "F"):
        numbers = "whole numbers of 32 bits" if image.mode == "I" else "fractions"
        raise InputError(
            f"is an image of {numbers} (mode {image.mode}), which do not tell what is white; expected 8 or 16 bits"
        )
    return image.convert("RGB")


def read_image(path: Path, size: int) -> np.ndarray:
    """Return the (3, size, size) uint8 RGB pixels of an image, resized by bicubic interpolation to a square.

    Raises:
        InputError: as `open_image`.
    """
    pixels = open_image(path).resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(pixels).transpose(2, 0, 1)


def image_batches(
    paths: Sequence[Path], size: int, batch_size: int, workers: int, first: int = 0, step: int = 1
) -> Iterator[torch.Tensor]:
    """Yield (B, 3, size, size) uint8 tensors, all of `batch_size` images but the last: batches `first`, `first` +
    `step` and so on.

    Raises:
        InputError: an image cannot be read (names it).
    """

    def read(start: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([read_image(path, size) for path in paths[start : start + batch_size]]))

    starts = range(first * batch_size, len(paths), step * batch_size)
    return made_ahead(read, starts, Loading(workers))
