"""Numbers that are not finite, in weights, features or on the way: a line of `iep-eval` and `iep-ask`, never NaN."""

from pathlib import Path

import pytest
import torch
from ask_cases import IMAGE, iep_ask, sample_data, trained
from evaluate_cases import iep_eval
from original_cases import engine_file, write
from tiny_data import CHANNELS, GRID, VOCAB, arrays, assert_one_error, features, write_data, write_h5

from iep.errors import InputError
from iep.evaluation.predict import ranked
from iep.models.build import load_network
from iep.models.checkpoint import load_checkpoint, save_checkpoint


def spoilt(checkpoint: Path, out: Path, network: str, weight: str, value: float) -> Path:
    """The checkpoint with one number of a weight replaced by `value`."""
    content = load_checkpoint(checkpoint)
    content["networks"][network]["weights"][weight].view(-1)[-1] = value
    save_checkpoint(out, content)
    return out


@pytest.mark.parametrize(
    ("flag", "network", "weight"),
    [
        ("ee", "engine", "classifier.4.weight"),
        ("pg", "generator", "decoder_embed.weight"),
        ("lstm", "lstm", "rnn.embed.weight"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite_is_named(data, run, tmp_path: Path, flag, network, weight, value):
    path = spoilt(run[flag], tmp_path / "bad.pt", network, weight, value)
    result = iep_eval({"lstm": "--baseline"}.get(flag, f"--{flag}"), path, "--data", data, "--out", tmp_path / "out")
    assert_one_error(result, f"{path}: {weight} of a", f"holds {value}, expected finite numbers")
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_a_variance_below_0_is_named(data: Path, tmp_path: Path):
    """Its root is no number: every answer would be none, whatever the questions."""
    file = engine_file(feature_dim=(CHANNELS, GRID, GRID), stem_batchnorm=True)
    file["execution_engine_state"]["stem.4.running_var"][1] = -0.5
    path = write(tmp_path / "old.pt", file)
    problem = "stem.4.running_var of an execution engine holds -0.5, expected no variance below 0"
    assert_one_error(iep_eval("--ee", path, "--data", data, "--workers", 0), f"{path}: {problem}")
    file["execution_engine_state"]["stem.4.running_var"][1] = 0
    assert load_network(write(path, file), "engine", VOCAB, torch.device("cpu"))


def test_features_that_are_not_finite_are_told_of_by_the_question(run, tmp_path: Path):
    data = write_data(tmp_path / "data")
    values = features(1)
    values[2] = float("nan")
    write_h5(data / "val_features.h5", {"features": values})
    first = arrays(26)["orig_idxs"][arrays(26)["image_idxs"] == 2][0]
    result = iep_eval("--ee", run["ee"], "--data", data, "--workers", 0, "--out", tmp_path / "out")
    assert_one_error(result, f"{data / 'val_questions.h5'}: question_index {first}: the answers' scores are not finite")
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_numbers_that_grow_too_large_on_the_way_are_told_of_when_asked(tmp_path: Path):
    data = sample_data(tmp_path / "data", "--backbone", "patches", "--patch-size", 2)
    run = trained(data, "ee", tmp_path / "ee", 1)
    content = load_checkpoint(run)
    for name, weight in content["networks"]["engine"]["weights"].items():
        if name.startswith("classifier."):
            weight.fill_(1e30)
    save_checkpoint(tmp_path / "large.pt", content)
    asked = ("--ee", tmp_path / "large.pt", "--image", IMAGE, "--program", "exist scene", "--json")
    assert_one_error(iep_ask(*asked, "--question", "Any?"), "question 'Any?': the answers' scores are not finite")
    assert_one_error(iep_ask(*asked), "program 1: the answers' scores are not finite")


def test_ranks_are_of_finite_scores_alone():
    probabilities, answers = ranked(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), str)
    assert answers.tolist() == [[1, 0], [0, 1]]
    assert probabilities.sum(1).tolist() == pytest.approx([1, 1])
    with pytest.raises(InputError, match=r"^1: the answers' scores"):
        ranked(torch.tensor([[0.0, 1.0], [2.0, float("inf")]]), str)
