"""Image files of a CLEVR directory -> small pictures as data URIs, each once, for a page that needs no other file."""

import base64
import io
from pathlib import Path

from PIL import Image

from iep.errors import InputError
from iep.preprocess.clevr_files import image_directories, image_number, png_files
from iep.preprocess.images import open_image
from iep.preprocess.recipe import listing, value_digest

WIDTH = 320
"""Pixels; smaller images stay as they are."""
QUALITY = 75
"""Of JPEG, up to 95."""


class Pictures:
    """The pictures that a page needs, read when first asked for."""

    def __init__(self, clevr_dir: Path, split: str):
        """Find the split's images, by the index in their names.

        Raises:
            InputError: `clevr_dir` has no images of the split.
        """
        directories = image_directories(clevr_dir)
        if split not in directories:
            found = f", found images of {', '.join(directories)}" if directories else ""
            raise InputError(f"{clevr_dir / 'images' / split}: no such directory, expected the split's images{found}")
        self.directory = directories[split]
        self._paths = {image_number(path.name): path for path in sorted(png_files(self.directory))}
        self.by_key: dict[int, str] = {}
        """Data URIs by image index."""
        self.problems: dict[int, str] = {}
        """Why there is no picture, by image index."""

    def is_of(self, count: int, digest: str) -> bool:
        """Are the first `count` images those of a features file with this digest of names and sizes?"""
        if not all(index in self._paths for index in range(count)):
            return False
        return value_digest(listing(self._paths[index] for index in range(count))) == digest

    def key(self, image: int) -> int | None:
        """The key in `by_key` of the picture of image `image`; None where there is none, for a reason in `problems`."""
        if image not in self.by_key and image not in self.problems:
            path = self._paths.get(image)
            try:
                if path is None:
                    raise InputError(f"{self.directory}: no image with index {image}")
                self.by_key[image] = data_uri(open_image(path))
            except InputError as error:
                self.problems[image] = str(error)
        return image if image in self.by_key else None


def data_uri(image: Image.Image) -> str:
    """The image, at most `WIDTH` pixels wide, as a JPEG in a data URI."""
    small = image.copy()
    small.thumbnail((WIDTH, 4 * WIDTH), Image.Resampling.LANCZOS)
    content = io.BytesIO()
    small.save(content, "JPEG", quality=QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode("ascii")
