"""Images and scenes of a CLEVR directory -> a split to train a backbone on.

Each image is one question, whose answer is the list of its objects.

`scenes/CLEVR_{split}_scenes.json` names, for each object, its attributes and the pixel of its centre (`pixel_coords`),
in CLEVR v1.0 and in what `iep-synth` writes. Shapes: N images, M objects of an image at most, F = 6 numbers of one.
"""

from collections.abc import Callable
from copy import copy
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from iep.backbone.network import ABSENT
from iep.data.question_file import Questions, Split
from iep.errors import InputError, nearest
from iep.preprocess.clevr_files import read_scenes, scenes_path
from iep.preprocess.images import image_batches, read_image
from iep.preprocess.recipe import listing, value_digest
from iep.runtime.distributed import is_main
from iep.runtime.reading import reading
from iep.synth.world import ATTRIBUTES, VALUES

BELOW_1 = 1 - 2**-20


class SceneImages:
    """The images of a split as uint8 pixels, decoded on demand; it is read like `iep.data.features.Features`.

    Attributes:
        path: the directory of the images.
        shape: (N, 3, H, W).
        recipe: how they were resized.
    """

    def __init__(self, path: Path, images: list[Path], size: tuple[int, int]):
        self.path, self.shape = path, (len(images), 3, *size[::-1])
        self.recipe: dict[str, str | int] = {"image_size": f"{size[0]}x{size[1]}"}
        self._images, self._size = images, size
        self._pixels_NCHW: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._images)

    @property
    def row_bytes(self) -> int:
        """Bytes of one image's pixels."""
        return int(np.prod(self.shape[1:]))

    @property
    def digest(self) -> str:
        """The digest of the names and sizes of the images' files."""
        return value_digest(listing(self._images))

    def read(self, rows: np.ndarray, allocate: Callable[..., np.ndarray] = np.empty) -> torch.Tensor:
        """Return the (N, 3, H, W) uint8 pixels of the images `rows` (N,).

        Raises:
            InputError: an image cannot be read (names it).
        """
        pixels_NCHW = allocate((len(rows), *self.shape[1:]), np.dtype(np.uint8))
        for row, pixels_CHW in zip(rows.tolist(), pixels_NCHW, strict=True):
            known = self._pixels_NCHW
            pixels_CHW[:] = read_image(self._images[row], self._size) if known is None else known[row]
        return torch.from_numpy(pixels_NCHW)

    def in_memory(self, workers: int = 0) -> "SceneImages":
        """Return the same images, all decoded, by `workers` processes.

        Raises:
            InputError: a file is missing or not an image.
        """
        other = copy(self)
        other._pixels_NCHW, end = np.empty(self.shape, np.uint8), 0
        with tqdm(total=len(self), desc=str(self.path), unit="image", disable=not is_main()) as bar:
            for batch in image_batches(self._images, self._size, 64, workers):
                other._pixels_NCHW[end : end + len(batch)] = batch.numpy()
                end += len(batch)
                bar.update(len(batch))
        return other


def open_scenes(
    clevr_dir: Path,
    split: str,
    size: tuple[int, int],
    num_samples: int | None = None,
    skip: int = 0,
) -> Split:
    """Open the images of a split and what their scenes hold.

    The `answers` of the split's questions, one for each image, are (N, M, F) float32 objects, the farthest first: x and
    y of its centre, from 0 to below 1, and the index of its value of each of `ATTRIBUTES`.

    Args:
        size: width and height in pixels, to which images are resized.
        num_samples: use at most this many images; None for all.
        skip: leave out the first images.

    Raises:
        InputError: a file is missing or damaged, a scene has an object without a place in the image, with an unknown
            attribute or without one, or no scene has an object.
    """
    path, directory = scenes_path(clevr_dir, split), clevr_dir / "images" / split
    found = list(islice(read_scenes(path), None if num_samples is None else skip + num_samples))
    scenes = found[skip:]
    if not scenes:
        raise InputError(f"{path}: has {len(found)} scenes, of which skipping {skip} leaves none")
    images, objects = [], []
    for number, scene in enumerate(scenes, skip):
        with reading(path, "a CLEVR scenes file"):
            images.append(directory / scene["image_filename"])
            with reading(images[-1], "an image"), Image.open(images[-1]) as opened:
                width_height = opened.size
            objects.append(_objects(scene, width_height, f"scene {number}"))
    most = max(map(len, objects))
    if most == 0:
        raise InputError(f"{path}: none of the {len(scenes):,} scenes has an object")
    answers_NMF = np.full((len(objects), most, 2 + len(ATTRIBUTES)), ABSENT, np.float32)
    for row_MF, rows in zip(answers_NMF, objects, strict=True):
        row_MF[: len(rows)] = np.array(rows, np.float32).reshape(-1, answers_NMF.shape[2])
    numbers = np.arange(len(scenes))
    questions = Questions(
        path,
        questions=np.zeros((len(scenes), 0), np.int64),
        image_idxs=numbers,
        orig_idxs=numbers + skip,
        families=None,
        programs=None,
        answers=answers_NMF,
    )
    pixels: Any = SceneImages(directory, images, size)  # read like `Features`
    return Split(questions, pixels, len(scenes))


def _objects(scene: dict[str, Any], width_height: tuple[int, int], name: str) -> list[list[float]]:
    """Return the numbers of each object of a scene, the farthest object first."""
    found = []
    for number, thing in enumerate(scene["objects"]):
        *place, depth = thing["pixel_coords"]
        if not all(0 <= x <= most for x, most in zip(place, width_height, strict=True)):
            size = "x".join(map(str, width_height))
            raise InputError(f"{name}, object {number}: pixel_coords is {[*place, depth]}, outside its image of {size}")
        for attribute, known in VALUES.items():
            if (value := thing[attribute]) not in known:
                what = f"{name}, object {number}: {attribute} is {value!r}, expected one of {', '.join(known)}"
                raise InputError(f"{what}{nearest(value, known)}")
        point = [min(x / most, BELOW_1) for x, most in zip(place, width_height, strict=True)]  # pixels are rounded
        found.append((depth, [*point, *(VALUES[attribute].index(thing[attribute]) for attribute in ATTRIBUTES)]))
    return [numbers for _, numbers in sorted(found, key=lambda each: -each[0])]
