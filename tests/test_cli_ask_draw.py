"""The picture that `iep-ask --draw` writes."""

import os
import signal
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from ask_cases import IMAGE, answered, iep_ask, sample_data, trained
from clevr_files import write_images
from matplotlib.figure import Figure
from PIL import Image
from tiny_data import assert_one_error, files_no_larger_than

from iep.asking.picture import lit

WIDE = (
    "greater_than count union filter_size[small] scene filter_color[red] scene count intersect scene relate[left] scene"
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """An engine and an image."""
    root = tmp_path_factory.mktemp("draw")
    data = sample_data(root / "data", "--backbone", "patches", "--patch-size", 2)
    return "--ee", trained(data, "ee", root / "ee", 3), "--image", IMAGE


def texts(path: Path) -> str:
    return " ".join(element.text or "" for element in ET.parse(path).iter(f"{SVG}text"))


def test_a_picture_holds_the_image_and_one_panel_a_function_with_its_name(asked, tmp_path):
    path = tmp_path / "a.svg"
    output = answered(*asked, "--program", WIDE, "--question", "Why $x$ < y, then?", "--draw", path, "--top", 4)
    assert f"Wrote {path}" in output
    assert len(list(ET.parse(path).iter(f"{SVG}image"))) == 1 + len(WIDE.split())
    found = texts(path)
    for name in (
        "Why $x$ < y, then?",
        "greater_than",
        "intersect",
        "[small]",
        "'Why', '$x$', '<'",
        "Colours: norm over",
    ):
        assert name in found
    assert found.count("scene") == 4
    assert found.count("%") == 4


@pytest.mark.parametrize("kind", ["png", "pdf", "svg"])
def test_a_picture_is_the_same_bytes_every_time(asked, tmp_path, kind):
    one, other = tmp_path / f"one.{kind}", tmp_path / f"other.{kind}"
    for path in (one, other):
        answered(*asked, "--program", "count scene", "--draw", path)
    assert one.read_bytes() == other.read_bytes()
    assert len(one.read_bytes()) > 5000
    if kind == "png":
        with Image.open(one) as picture:
            assert min(picture.size) > 300


def test_the_gradient_shows_other_places_than_the_norm(asked, tmp_path):
    for saliency in ("norm", "gradient"):
        answered(*asked, "--program", WIDE, "--draw", tmp_path / f"{saliency}.svg", "--saliency", saliency)
    panels = [
        [element.attrib["{http://www.w3.org/1999/xlink}href"] for element in ET.parse(path).iter(f"{SVG}image")]
        for path in (tmp_path / "norm.svg", tmp_path / "gradient.svg")
    ]
    assert panels[0][0] == panels[1][0]
    assert panels[0][1] != panels[1][1]
    assert "gradient of the answer's score" in texts(tmp_path / "gradient.svg")


def test_of_several_questions_each_has_its_picture(asked, tmp_path):
    answered(*asked, "--program", "count scene", "--program", "exist scene", "--draw", tmp_path / "all.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all-1.png", "all-2.png"]


@pytest.mark.parametrize("size", [(1, 1), (128, 128), (700, 60), (60, 700)])
def test_long_and_wide_programs_about_images_of_any_shape_are_drawn(asked, tmp_path, size):
    (image,) = write_images(tmp_path, "val", 1, size)
    long = " ".join(["equal_size", *["filter_size[small]"] * 25, "scene", *["union"] * 6, *["scene"] * 7])
    answered(*asked[:3], image, "--program", long, "--draw", tmp_path / "long.png")
    with Image.open(tmp_path / "long.png") as picture:
        picture.load()
        assert picture.height > 2000


def test_a_question_in_letters_that_the_font_lacks_is_drawn_without_a_word(asked, tmp_path, recwarn):
    question = "有多少东西？" * 20
    answered(*asked, "--program", "count scene", "--question", question, "--draw", tmp_path / "a.png")
    assert (tmp_path / "a.png").exists()
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_of_many_unknown_words_some_are_named_and_the_rest_counted(asked, tmp_path):
    question = " ".join(f"zz{number}" for number in range(150))
    output = answered(*asked, "--program", "count scene", "--question", question, "--draw", tmp_path / "a.svg")
    answered(*asked, "--program", "count scene", "--question", question, "--draw", tmp_path / "a.png")
    assert output.count("is not in the vocabulary") == 10
    assert "\n  and 140 more words are read as <UNK>\n" in output
    assert "and 140 more" in texts(tmp_path / "a.svg")
    with Image.open(tmp_path / "a.png") as picture:
        assert picture.height < 2000


def test_a_program_of_hundreds_of_functions_is_answered_and_not_drawn(asked, tmp_path):
    tokens = ["scene"]
    for _ in range(7):
        tokens = ["union", *tokens, *tokens]  # not deep: numbers would grow too large
    program = " ".join(["count", *tokens])
    result = iep_ask(*asked, "--program", program, "--draw", tmp_path / "a.png")
    assert result.stdout == answered(*asked, "--program", program)
    assert_one_error(result, "a program of 256 functions is not drawn, expected 200 at most")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_whole_leaves_what_stood_there(asked, tmp_path):
    path = tmp_path / "a.png"
    path.write_text("before")
    with files_no_larger_than(3000):
        result = iep_ask(*asked, "--program", "count scene", "--draw", path)
    assert_one_error(result, str(path))
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_signal_amid_the_writing_leaves_what_stood_there(asked, tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    path.write_text("before")

    def half(figure: Figure, target: Path, **options: object) -> None:
        target.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(Figure, "savefig", half)
    result = iep_ask(*asked, "--program", "count scene", "--draw", path)
    assert result.exit_code == 143
    assert "Stopped by SIGTERM" in result.stderr
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_lit_is_bright_and_the_rest_is_the_image_in_grey():
    image = Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8))
    map_HW = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    pixels = lit(image, map_HW)
    assert pixels.shape == (8, 8, 3)
    assert np.ptp(pixels[0, 0]) < 0.01
    assert np.ptp(pixels[7, 7]) > 0.2
    assert pixels.min() >= 0
    assert pixels.max() <= 1


def test_attentions_are_drawn_as_they_are_and_the_picture_says_so(asked, tmp_path):
    data = sample_data(tmp_path / "data", "--backbone", "patches", "--patch-size", 2)
    ee = trained(data, "ee", tmp_path / "ee", 3, "--modules", "tbd")
    path = tmp_path / "a.svg"
    answered("--ee", ee, *asked[2:], "--program", "count filter_color[red] scene", "--draw", path)
    assert len(list(ET.parse(path).iter(f"{SVG}image"))) == 4
    assert "attentions as they are" in texts(path)
    answered(*asked, "--program", "count scene", "--draw", tmp_path / "b.svg")
    assert "attentions as" not in texts(tmp_path / "b.svg")
