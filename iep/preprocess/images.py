"""Image files -> batches of uint8 pixels, decoded and resized by worker processes in the order of the images' indices.

The backbone normalises the pixels.

Shapes: B images of a batch, 3 colours, H W the height and width in pixels.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from iep.data.loader import Loading, made_ahead
from iep.errors import InputError
from iep.runtime.reading import reading

ImageLike = Path | str | Image.Image | np.ndarray | Tensor


def open_image(image: ImageLike) -> Image.Image:
    """Decode an image to RGB, rotated by its EXIF data.

    Args:
        image: a file; an image of Pillow; an array (H, W, 3) of uint8; or a tensor (3, H, W) of uint8, or of numbers
            from 0 to 1.

    Raises:
        InputError: the file is missing, truncated or not an image, or has more than 8 bits a colour; or the array or
            tensor has another shape, dtype or range.
    """
    if isinstance(image, np.ndarray | Tensor):
        image = Image.fromarray(_pixels(image))
    if isinstance(image, Image.Image):
        return _rgb(image)
    if not isinstance(image, Path | str):
        kinds = "a path, an image of Pillow, an array (H, W, 3) or a tensor (3, H, W)"
        raise InputError(f"the image is of type {type(image).__name__}, expected {kinds}")
    with reading(image, "an image"), Image.open(image) as opened:
        return _rgb(opened)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # Pillow would make nearly everything white
        raise InputError(f"is an image of mode {image.mode}, expected 8 bits a colour")
    return ImageOps.exif_transpose(image).convert("RGB")


def _pixels(image: np.ndarray | Tensor) -> np.ndarray:
    """Return the (H, W, 3) pixels of an array or a tensor."""
    found = f"{type(image).__name__} {tuple(image.shape)} of {image.dtype}"
    if isinstance(image, Tensor):
        if image.is_floating_point() and image.numel() and image.min() >= 0 and image.max() <= 1:
            image = (255 * image).round().to(torch.uint8)
        image = image.detach().cpu().numpy()
        image = np.moveaxis(image, 0, -1) if image.ndim == 3 else image
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        expected = "an array (H, W, 3) of uint8, or a tensor (3, H, W) of uint8 or of numbers from 0 to 1"
        raise InputError(f"the image is {found}, expected {expected}")
    return np.ascontiguousarray(image)


def read_image(path: Path | Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Return the (3, H, W) uint8 RGB pixels of an image, resized by bicubic interpolation to a width and height.

    Raises:
        InputError: the file is missing, truncated or not an image, or has more than 8 bits a colour.
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
