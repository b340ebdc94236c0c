"""Programs executed on found objects: exact on the true objects, and one line for options that do not apply."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from evaluate_cases import evaluate, iep_eval
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import assert_one_error

from iep.backbone.network import FoundObjects
from iep.cli.preprocess import main as preprocess_main
from iep.data.question_file import load_vocab, open_split
from iep.evaluation.symbolic import NO_ANSWER, execute_programs, scene_of
from iep.preprocess.labelled_scenes import open_scenes
from iep.synth.executor import facts_of
from iep.synth.scenes import CAMERA, camera_at

SAMPLE = Path(__file__).parents[1] / "data" / "sample"
SIZE = (240, 160)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data")
    options = [str(SAMPLE), "--out", str(out), "--only", "questions", "--vocab", "clevr"]
    assert CliRunner().invoke(preprocess_main, options).exit_code == 0
    return out


def test_programs_on_true_objects_have_the_true_answers(data: Path):
    vocab = load_vocab(data)
    questions = open_split(data, "val", vocab, False, None).questions
    facts = {}
    for image, objects_MF in enumerate(torch.from_numpy(open_scenes(SAMPLE, "val", SIZE).questions.answers)):
        found = FoundObjects(objects_MF[objects_MF[:, 0] >= 0], torch.empty(0))
        facts[image] = facts_of(scene_of(found, SIZE))
    answers = execute_programs(questions.programs, vocab.program, questions.image_idxs, facts)
    assert answers == [vocab.answer[index] for index in questions.answers]
    malformed = np.array([[vocab.program_index[token] for token in ("query_color", "scene", "scene")]])
    assert execute_programs(malformed, vocab.program, np.array([0]), facts) == [NO_ANSWER]


@given(st.floats(-3, 3), st.floats(-3, 3), st.floats(0, 0.7))
def test_pixels_are_located_where_they_were_projected_from(x: float, y: float, z: float):
    camera = camera_at(CAMERA)
    column, row, _ = camera.project((x, y, z), 480, 320)
    assert camera.locate(column, row, 480, 320, z) == pytest.approx((x, y, z), abs=1e-9)


def test_the_command_answers_from_images_alone(data: Path, tmp_path: Path):
    options = ("--ee", "symbolic", "--data", data, "--images", SAMPLE, "--workers", 0)
    report, predictions, _ = evaluate(tmp_path / "out", *options)
    assert report["checkpoints"] == {"ee": "symbolic"}
    right = [row["predicted_answer"] == row["answer"] for row in predictions]
    assert report["accuracy"]["overall"] == pytest.approx(np.mean(right))
    assert np.mean(right) > 0.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--ee symbolic needs images: give --images CLEVR_DIR"),
        (("--images", SAMPLE / "images"), "no such directory, expected the split's images"),
        (("--images", SAMPLE, "--batching", "vanilla"), "batching is vanilla, a setting of execution engines"),
        (("--images", SAMPLE, "--features-in-memory"), "features_in_memory is True, a setting of networks"),
        (("--images", SAMPLE, "--programs", "predicted"), "needs a program generator"),
    ],
)
def test_what_does_not_apply_is_one_line(data: Path, options: tuple, words: str):
    assert_one_error(iep_eval("--ee", "symbolic", "--data", data, *options), words)
