"""Attention modules and programs whose values are of the wrong kind: `iep-ask` refuses them where they are given, and
shows those that were predicted as they ran, as the report of `iep-eval` does."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from ask_cases import IMAGE, answered, iep_ask, sample_data, trained
from tiny_data import assert_one_error

from iep.asking import picture
from iep.evaluation.predict import Predictor
from iep.models.checkpoint import read_checkpoint

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def tbd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A generator, and an engine of attention modules."""
    root = tmp_path_factory.mktemp("tbd")
    data = sample_data(root / "data")
    return trained(data, "pg", root / "pg", 1), trained(data, "ee", root / "ee", 3, "--modules", "tbd")


@pytest.fixture
def predicted(tbd, monkeypatch):
    """A function: the program, what is predicted to every question -> what `iep-ask` prints."""
    pg, ee = tbd
    tokens = read_checkpoint(ee).vocab.program_index

    def ask(program: str, *arguments: object) -> str:
        programs_BL = torch.tensor([[tokens[token] for token in program.split()]])
        monkeypatch.setattr(Predictor, "programs", lambda self, batch: programs_BL)
        return answered("--pg", pg, "--ee", ee, "--image", IMAGE, "--question", "What is it?", *arguments)

    return ask


def texts(path: Path) -> str:
    return " ".join(element.text or "" for element in ET.parse(path).iter(f"{SVG}text"))


def test_a_predicted_program_is_shown_as_it_ran_and_answered_so(predicted):
    wrong = "count filter_color[red] exist unique filter_size[small] scene"
    lines = predicted(wrong).splitlines()
    assert lines[2:8] == [
        "  count",
        "  └─ filter_color[red]",
        "     └─ exist (not used: an encoding, not an attention)",
        "        └─ unique (not used)",
        "           └─ filter_size[small] (not used)",
        "              └─ scene (not used)",
    ]
    told = json.loads(predicted(wrong, "--json"))
    assert told["program"] == wrong.split()
    assert told["run"] == ["count", "filter_color[red]", "scene"]
    assert told["answers"] == json.loads(predicted(" ".join(told["run"]), "--json"))["answers"]


def test_a_picture_says_what_is_not_used_and_lights_up_nothing_of_it(predicted, tmp_path, monkeypatch):
    lit = []
    monkeypatch.setattr(picture, "lit", lambda image, map_HW: lit.append(bool(map_HW.any())) or np.asarray(image))
    predicted("count filter_color[red] exist filter_size[small] scene", "--draw", tmp_path / "a.svg")
    assert texts(tmp_path / "a.svg").count("(not used)") == 3
    assert "exist: not used: an encoding, not an" in texts(tmp_path / "a.svg")
    assert lit == [True, True, False, False, False]
    predicted("count filter_color[red] scene", "--draw", tmp_path / "b.svg")
    assert "not used" not in texts(tmp_path / "b.svg")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("count exist scene", "program token 1 (exist) is not used: an encoding, not an attention"),
        (
            "equal_size query_size scene filter_color[red] scene",
            "program token 3 (filter_color[red]) is not used: an attention, not an encoding",
        ),
    ],
)
def test_a_given_program_of_the_wrong_kinds_is_refused_with_its_function(tbd, program, expected):
    assert_one_error(iep_ask("--ee", tbd[1], "--image", IMAGE, "--program", program), expected)
