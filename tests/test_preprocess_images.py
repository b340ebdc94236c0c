"""Images of many kinds -> the RGB pixels that a person would see."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from iep.errors import InputError
from iep.preprocess.images import open_image, read_image

GREY_HW = np.arange(256, dtype=np.uint8).reshape(8, 32)
ORIENTATION = 0x0112
"""EXIF's tag."""


def saved(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)
    return path


@pytest.mark.parametrize("kind", ["png", "tif", "pgm"])
def test_16_bits_of_grey_are_the_picture_that_8_bits_are(tmp_path, kind):
    narrow = saved(tmp_path / "8.png", GREY_HW)
    wide = saved(tmp_path / f"16.{kind}", GREY_HW.astype(np.uint16) * 257)
    pixels = np.asarray(open_image(wide))
    assert pixels.shape == (8, 32, 3)
    assert np.array_equal(pixels, np.asarray(open_image(narrow)))
    assert np.array_equal(pixels[:, :, 0], GREY_HW)


def test_16_bits_are_rounded_to_the_nearest_of_8(tmp_path):
    path = saved(tmp_path / "16.png", np.array([[0, 128, 129, 65535 - 129, 65535 - 128, 65535]], dtype=np.uint16))
    assert np.asarray(open_image(path))[0, :, 0].tolist() == [0, 0, 1, 254, 255, 255]


@pytest.mark.parametrize(("dtype", "words"), [("float32", "fractions (mode F)"), ("int32", "of 32 bits (mode I)")])
def test_numbers_that_do_not_say_what_is_white_are_refused(tmp_path, dtype, words):
    path = saved(tmp_path / "a.tif", GREY_HW.astype(dtype))
    with pytest.raises(InputError) as refused:
        open_image(path)
    assert str(path) in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("orientation", "seen"),
    [(1, lambda x: x), (2, np.fliplr), (3, lambda x: np.rot90(x, 2)), (6, lambda x: np.rot90(x, -1)), (8, np.rot90)],
)
@pytest.mark.parametrize(("kind", "options"), [("png", {}), ("tif", {"compression": "tiff_lzw"})])
def test_a_picture_is_turned_as_its_exif_data_say(tmp_path, orientation, seen, kind, options):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = saved(tmp_path / f"a.{kind}", GREY_HW, exif=exif, **options)
    assert np.array_equal(np.asarray(open_image(path))[:, :, 0], seen(GREY_HW))
    assert read_image(path, 14).shape == (3, 14, 14)
