"""The picture that `iep-ask --draw` and `Answer.draw` make: what it holds, and where things lie in it."""

import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from ask_cases import IMAGE, answered, sample_data, trained
from batching_cases import quick
from clevr_files import write_images
from hypothesis import given, settings
from PIL import Image

from iep.asking.picture import lit, tree_columns
from iep.programs import program_tree

WIDE = (
    "greater_than count union filter_size[small] scene filter_color[red] scene count intersect scene relate[left] scene"
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """An engine and an image."""
    root = tmp_path_factory.mktemp("draw")
    data = sample_data(root / "data")
    return "--ee", trained(data, "ee", root / "ee", 3), "--image", IMAGE


def texts(path: Path) -> str:
    return " ".join(element.text or "" for element in ET.parse(path).iter(f"{SVG}text"))


def test_a_picture_holds_the_image_and_one_panel_a_function_with_its_name(asked, tmp_path):
    path = tmp_path / "a.svg"
    output = answered(*asked, "--program", WIDE, "--question", "Why $x$ < y, then?", "--draw", path, "--top", 4)
    assert f"Wrote {path}" in output
    assert len(list(ET.parse(path).iter(f"{SVG}image"))) == 2 + len(WIDE.split())  # and the scale of colours
    found = texts(path)
    names = (
        "Why $x$ < y, then?",
        "greater_than",
        "intersect",
        "[small]",
        "'$x$' is not in the vocabulary",
        "Colours: each",
    )
    assert [name for name in names if name not in found] == []
    assert found.count("scene") == 4
    assert found.count("%") == 4


def test_the_gradient_shows_other_places_than_the_norm(asked, tmp_path):
    for saliency in ("norm", "gradient"):
        answered(*asked, "--program", WIDE, "--draw", tmp_path / f"{saliency}.svg", "--saliency", saliency)
    panels = [
        [element.attrib["{http://www.w3.org/1999/xlink}href"] for element in ET.parse(path).iter(f"{SVG}image")]
        for path in (tmp_path / "norm.svg", tmp_path / "gradient.svg")
    ]
    assert panels[0][0] == panels[1][0]
    assert panels[0][2] != panels[1][2]  # after the image and the scale of colours
    assert "gradient of the answer's score" in texts(tmp_path / "gradient.svg")


@pytest.mark.parametrize("size", [(1, 1), (60, 700)])
def test_long_and_wide_programs_about_images_of_any_shape_are_drawn(asked, tmp_path, size):
    (image,) = write_images(tmp_path, "val", 1, size)
    long = " ".join(["equal_size", *["filter_size[small]"] * 25, "scene", *["union"] * 6, *["scene"] * 7])
    answered(*asked[:3], image, "--program", long, "--draw", tmp_path / "long.png")
    with Image.open(tmp_path / "long.png") as picture:
        picture.load()
        assert picture.height > 2000


def test_a_map_is_drawn_in_its_own_cells():
    map_HW = torch.tensor([[0.0, 1.0, 0.5], [0.25, 0.0, 0.75]])
    pixels_HW3 = lit(Image.new("RGB", (60, 30), "gray"), map_HW)
    for (row, column), value in np.ndenumerate(map_HW.numpy()):
        cell = pixels_HW3[15 * row : 15 * row + 15, 20 * column : 20 * column + 20].reshape(-1, 3)
        assert (cell == cell[0]).all()
        assert (value == 0) == np.allclose(cell[0], 128 / 255)


TOKENS = ["scene", "count", "filter_color[red]", "union", "equal_size", "relate[left]"]


@given(st.lists(st.sampled_from(TOKENS), max_size=60))
@settings(quick)
def test_arguments_stand_side_by_side_in_order_below_the_middle_of_what_takes_them(tokens):
    nodes = program_tree(tokens).nodes
    columns = tree_columns([node.arguments for node in nodes])
    assert min(columns) == 0
    for node, column in zip(nodes, columns, strict=True):
        if places := [columns[argument] for argument in node.arguments]:
            assert abs((places[0] + places[-1]) / 2 - column) < 1e-9
    for depth in range(max(node.depth for node in nodes) + 1):
        row = [column for node, column in zip(nodes, columns, strict=True) if node.depth == depth]
        assert all(right - left >= 1 for left, right in pairwise(row))
