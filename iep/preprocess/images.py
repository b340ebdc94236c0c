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
from iep.runtime.reading import reading


def open_image(path: Path | str | Image.Image) -> Image.Image:
    """Decode an image, a file or one of Pillow, to RGB, rotated by its EXIF data.

    Raises:
        InputError: the file is missing, truncated or not an image.
    """
    if isinstance(path, Image.Image):
        return ImageOps.exif_transpose(path).convert("RGB")
    with reading(path, "an image"), Image.open(path) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def read_image(path: Path | Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Return the (3, H, W) uint8 RGB pixels of an image, resized by bicubic interpolation to a width and height.

    Raises:
        InputError: the file is missing, truncated or not an image.
    """
    pixels = open_image(path).resize(size, Image.Resampling.BICUBIC)
    # Convolutions round differently in another memory format, which workers would not keep.
    return np.ascontiguousarray(np.asarray(pixels).transpose(2, 0, 1))


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
