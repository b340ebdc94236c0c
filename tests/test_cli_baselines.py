"""The baselines by the commands: trained, started from one another, evaluated, and what is refused.

test_original_checkpoints.py compares their logits and gradients with a second implementation.
"""

import shutil
from pathlib import Path

import pytest
import torch
from evaluate_cases import iep_eval
from sequence_cases import QUESTIONS, pad_rows
from tiny_data import CHANNELS, GRID, assert_one_error, build, features, newest, tiny, write_h5
from torch import nn
from train_cases import iep_train

from iep.config import BASELINES
from iep.models.checkpoint import read_checkpoint
from iep.models.network import NETWORKS


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each model, trained long enough that some answers are right and some are not."""
    root = tmp_path_factory.mktemp("baselines")
    for model in BASELINES:
        settings = (*tiny(model), "iterations=30", "validate_every=30", "num_val_samples=9")
        result = iep_train("--model", model, "--data", data, "--out", root / model, *settings)
        assert result.exit_code == 0, result.output
        assert f"trained {model} to iteration 30" in result.output
    return {model: newest(root / model) for model in BASELINES}


@pytest.mark.parametrize("model", BASELINES)
def test_training_starts_from_a_trained_one_of_its_kind_and_takes_its_settings(data, trained, tmp_path: Path, model):
    name, given = NETWORKS[model][0], ("--model", model, "--data", data, "--baseline")
    small = ("device=cpu", "workers=0", "iterations=1", "learning_rate=0")
    result = iep_train(*given, trained[model], "--out", tmp_path / "run", *small)
    assert result.exit_code == 0, result.output
    start, held = read_checkpoint(trained[model]), read_checkpoint(newest(tmp_path / "run"))
    for key, value in start.networks[name].weights.items():
        assert torch.equal(held.networks[name].weights[key], value), key
    assert held.state.config[name] == start.state.config[name]
    wider = iep_train(*given, trained[model], "--out", tmp_path / "other", f"{name}.hidden_dim=11")
    assert_one_error(wider, f"{trained[model]}: was trained with {name}.hidden_dim 10, cannot start with 11")
    other = next(trained[each] for each in BASELINES if each != model)
    assert_one_error(
        iep_train(*given, other, "--out", tmp_path / "other"), f"{other}: holds a", "expected a checkpoint"
    )
    assert not (tmp_path / "other").exists()


def test_features_are_those_that_a_baseline_was_made_for(data: Path, trained, tmp_path: Path):
    other = Path(shutil.copytree(data, tmp_path / "data"))
    path = write_h5(other / "val_features.h5", {"features": features(1, grid=GRID + 1)})
    found = f"{path}: features are ({CHANNELS}, {GRID + 1}, {GRID + 1}) an image, but the"
    result = iep_eval("--baseline", trained["cnn-lstm"], "--data", other)
    assert_one_error(result, f"{found} CNN+LSTM of {trained['cnn-lstm']} is made for ({CHANNELS}, {GRID}, {GRID})")
    assert iep_eval("--baseline", trained["cnn-lstm-sa"], "--data", other).exit_code == 0  # attention has no fixed grid
    write_h5(path, {"features": features(1, channels=CHANNELS + 1)})
    result = iep_eval("--baseline", trained["cnn-lstm-sa"], "--data", other)
    assert_one_error(result, f"is made for ({CHANNELS},)")


CNN = {"num_question_tokens": 9, "num_answers": 4, "feature_dim": 3, "feature_height": 5, "feature_width": 4}


def test_the_classifiers_batch_norm_is_over_questions_and_that_of_residual_blocks_over_images():
    network, rows = build("cnn_lstm", CNN | {"cnn_res_blocks": 1, "classifier_norm": True, "classifier_dims": ()}), []
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    network(pad_rows(QUESTIONS), torch.randn(3, 3, 5, 4), [1, 0, 1, 2, 1, 0, 2])
    assert sorted(rows) == [3, 3, len(QUESTIONS)]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cnn_pooling": "maxpool4"}, "cnn_pooling is 'maxpool4', expected one of maxpool2, none"),
        ({"feature_height": 1}, "cnn_pooling maxpool2 leaves nothing of a grid of 1x4"),
    ],
)
def test_a_cnn_that_cannot_be_is_refused(options: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        build("cnn_lstm", CNN | options)
