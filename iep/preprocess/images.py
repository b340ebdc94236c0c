"""Image files -> batches of uint8 pixels, decoded and resized by worker processes in the order of the images' indices.

The backbone normalises the pixels.

Shapes: B images of a batch, 3 colours, H W the height and width in pixels.
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
"""Formats whose grey values have at most 16 bits, though Pillow may store them in 32 bits (mode I)."""


def open_image(path: Path | str | Image.Image) -> Image.Image:
    """Decode an image, a file or one of Pillow, to RGB, rotated by its EXIF data, and with 16 bits of grey scaled to 8.

    Raises:
        InputError: the file is missing, truncated or not an image, or its pixels have no maximum that means white.
    """
    if isinstance(path, Image.Image):
        return _rgb(ImageOps.exif_transpose(path), path.format)
    with reading(path, "an image"), Image.open(path) as image:
        return _rgb(ImageOps.exif_transpose(image), image.format)


def _rgb(image: Image.Image, kind: str | None) -> Image.Image:
    """Convert `image` from a file of a `kind` to RGB; Pillow itself would turn everything above 255 white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and kind in _OF_16_BITS):
        grey_HW = np.asarray(image).astype(np.int64)
        return Image.fromarray(((grey_HW + 128) // 257).astype(np.uint8)).convert("RGB")  # 65535 / 255 is 257
    if image.mode in ("I", "F"):
        numbers = "whole numbers of 32 bits" if image.mode == "I" else "fractions"
        raise InputError(
            f"is an image of {numbers} (mode {image.mode}), in which white is undefined; expected 8 or 16 bits"
        )
    return image.convert("RGB")


def read_image(path: Path | Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Return the (3, H, W) uint8 RGB pixels of an image, resized by bicubic interpolation to a width and height.

    Raises:
        InputError: the file is missing, truncated or not an image, or its pixels have no maximum that means white.
    """
    pixels = open_image(path).resize(size, Image.Resampling.BICUBIC)
    return np.asarray(pixels).transpose(2, 0, 1)


def image_batches(
    paths: Sequence[Path], size: tuple[int, int], batch_size: int, workers: int, starts: Sequence[int] | None = None
) -> Iterator[torch.Tensor]:
    """Yield the images in order, as (B, 3, H, W) uint8 tensors; B is `batch_size`, or less in the last batch.

    Args:
        size: the width and height.
        starts: the positions at which the wanted batches begin; None for all batches.

    Raises:
        InputError: an image cannot be read (names it).
    """

    def read(start: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([read_image(path, size) for path in paths[start : start + batch_size]]))

    return made_ahead(read, range(0, len(paths), batch_size) if starts is None else starts, Loading(workers))
