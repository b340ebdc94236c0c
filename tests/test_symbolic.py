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
from iep.evaluation.symbolic import NO_ANSWER, execute_programs, reason_to_doubt, scene_of
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
    for tokens in ("query_color scene scene", "query_color filter_color[red] scene", "filter_color[red] scene"):
        malformed = np.array([[vocab.program_index[token] for token in tokens.split()]])
        assert execute_programs(malformed, vocab.program, np.array([0]), facts) == [NO_ANSWER]


FACTS = facts_of(
    {
        "objects": [
            {"size": "large", "color": "red", "material": "metal", "shape": "cube"},
            {"size": "large", "color": "blue", "material": "rubber", "shape": "cube"},
            {"size": "small", "color": "blue", "material": "rubber", "shape": "sphere"},
        ],
        "relationships": {"left": [[], [0], [0, 1]], "right": [[1, 2], [2], []], "front": [[]] * 3, "behind": [[]] * 3},
    }
)
RED, SPHERE = "unique filter_color[red] scene", "unique filter_shape[sphere] scene"
LONG = f"{200 * 'relate[left] unique filter_shape[cube] relate[right] unique '}filter_color[red] scene"
EXPECTED_ONE = "were found where one is expected"


@pytest.mark.parametrize(
    ("program", "answer", "reason"),
    [
        ("count filter_color[blue] scene", "2", ""),
        ("count filter_color[blue] scene", "3", "the objects found in the image give the answer '2'"),
        (f"exist relate[left] {RED}", "yes", "the objects found in the image give the answer 'no'"),
        ("exist relate[left] unique filter_color[green] scene", "yes", "no green thing was found"),
        ("query_color unique filter_shape[cube] filter_size[large] scene", "red", f"2 large cubes {EXPECTED_ONE}"),
        # The first `unique` without one object is named, and each link of its phrase.
        (
            f"count same_size unique relate[left] unique relate[left] {RED}",
            "0",
            "no thing left of the red thing was found",
        ),
        (f"query_size unique relate[left] {SPHERE}", "large", f"2 things left of the sphere {EXPECTED_ONE}"),
        (
            f"query_size unique filter_shape[cube] same_color unique filter_material[metal] relate[left] {SPHERE}",
            "large",
            "no cube that is the same color as the metal thing left of the sphere was found",
        ),
        (
            f"query_size unique same_color {RED}",
            "large",
            "no other thing that is the same color as the red thing was found",
        ),
        (
            f"query_size unique intersect same_shape {RED} relate[front] {SPHERE}",
            "large",
            "no thing that is in front of the sphere and is the same shape as the red thing was found",
        ),
        # Sets that no question of CLEVR's names.
        ("query_size unique union filter_color[red] scene scene", "large", f"3 such things {EXPECTED_ONE}"),
        ("query_size unique filter_color[red] filter_color[blue] scene", "large", "no such thing was found"),
        (f"query_size unique intersect same_shape {RED} same_size {SPHERE}", "large", "no such thing was found"),
        (f"query_size unique filter_color[green] {LONG}", "large", "no such thing was found"),
        # Programs that cannot be executed.
        ("", "yes", ""),
        ("count", "0", ""),
        ("count filter_color[red]", "0", ""),
        ("count scene scene", "0", ""),
        ("query_color filter_color[red] scene", "brown", ""),
        ("filter_color[red] scene", "yes", ""),
        ("count <END> scene", "0", ""),
        ("count filter_color[pink] scene", "0", ""),
        ("count paint scene", "0", ""),
        ("less_than query_size unique filter_color[red] scene count scene", "no", ""),
    ],
)
def test_found_objects_contradict_an_answer_in_words(program: str, answer: str, reason: str):
    assert reason_to_doubt(program.split(), FACTS, answer) == reason


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
        (("--images", SAMPLE, "--batching", "vanilla"), "--batching does not go with --ee symbolic"),
        (("--images", SAMPLE, "--features-in-memory"), "--features-in-memory does not go with --ee symbolic"),
        (("--images", SAMPLE, "--programs", "predicted"), "needs a program generator"),
    ],
)
def test_what_does_not_apply_is_one_line(data: Path, options: tuple, words: str):
    result = iep_eval("--ee", "symbolic", "--data", data, *options)
    assert_one_error(result, words, code=result.exit_code)
    assert result.exit_code != 0
