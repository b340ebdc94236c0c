"""Training that starts from checkpoints of the original toolkit, and what it makes of their settings."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from ask_cases import IMAGE, answered
from click.testing import Result
from original_cases import baseline_file, decode, engine_file, engine_logits, generator_file, write
from test_original_checkpoints import EVERYTHING, KINDS
from tiny_data import CHANNELS, GRID, VOCAB, assert_one_error, newest
from train_cases import iep_train, weights

from iep.config import read_config
from iep.models.checkpoint import load_checkpoint
from iep.preprocess.backbones import Patches
from iep.preprocess.compute_features import image_features

CPU = torch.device("cpu")
SIDES = {"feature_dim": (CHANNELS, GRID, GRID)}
PLAIN = ("workers=0", "batch_size=8", "iterations=1", "validate_every=1", "log_every=1", "device=cpu")


def started(model: str, data: Path, out: Path, *arguments: object) -> Result:
    return iep_train("--model", model, "--data", data, "--out", out, *PLAIN, *arguments)


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["as published", "every option"])
def test_an_engine_is_trained_further_and_resumed(options: dict[str, Any], data: Path, tmp_path: Path):
    file = engine_file(**SIDES, **options)
    begun, path = file["execution_engine_state"], write(tmp_path / "ee.pt", file)
    result = started("ee", data, tmp_path / "still", "--ee", path, "learning_rate=0")
    assert result.exit_code == 0, result.output
    for name, value in weights(tmp_path / "still", "engine").items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(value, begun[name]), name
    result = started("ee", data, tmp_path / "further", "--ee", path, "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    assert not torch.equal(weights(tmp_path / "further", "engine")["scene.conv1.weight"], begun["scene.conv1.weight"])
    again = started("ee", data, tmp_path / "further", "--resume", "iterations=2")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_baseline_is_trained_further(kind: str, data: Path, tmp_path: Path):
    sides = {} if kind == "LSTM" else {"cnn_feat_dim": (CHANNELS, GRID, GRID)}
    file = baseline_file(kind, **sides, fc_dims=[8, 5], fc_use_batchnorm=True, fc_dropout=0.5)
    path, model = write(tmp_path / "baseline.pt", file), kind.lower().replace("+", "-")
    result = started(model, data, tmp_path / "run", "--baseline", path, "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    loaded = weights(tmp_path / "run", model.replace("-", "_"))
    assert set(loaded) == set(file["baseline_state"])
    assert not torch.equal(loaded["rnn.embed.weight"], file["baseline_state"]["rnn.embed.weight"])


def test_a_generator_is_trained_further(data: Path, tmp_path: Path):
    file = generator_file(rnn_num_layers=1)
    result = started("pg", data, tmp_path / "run", "--pg", write(tmp_path / "pg.pt", file), "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    found, begun = weights(tmp_path / "run", "generator"), file["program_generator_state"]
    assert set(found) == set(begun)
    assert not torch.equal(found["decoder_linear.weight"], begun["decoder_linear.weight"])


def test_joint_training_starts_from_a_joint_file_and_from_two(data: Path, tmp_path: Path):
    both = write(tmp_path / "joint.pt", generator_file() | engine_file(**SIDES))
    pg, ee = write(tmp_path / "pg.pt", generator_file()), write(tmp_path / "ee.pt", engine_file(**SIDES))
    for out, parts in (("one", (both, both)), ("two", (pg, ee))):
        result = started("joint", data, tmp_path / out, "--pg", parts[0], "--ee", parts[1])
        assert result.exit_code == 0, result.output
    for name in ("generator", "engine"):
        one, two = weights(tmp_path / "one", name), weights(tmp_path / "two", name)
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(("asked", "norm"), [("example", "example"), ("batch", "batch"), (None, "example")])
def test_module_batch_norm_is_per_example_unless_asked_otherwise(
    asked: str | None, norm: str, data: Path, tmp_path: Path
):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, module_batchnorm=True))
    settings = [] if asked is None else [f"engine.module_norm={asked}"]
    result = started("ee", data, tmp_path / "run", "--ee", path, *settings)
    assert result.exit_code == 0, result.output
    assert ("normalises over all examples of a call" in result.output) == (norm == "batch")
    held = load_checkpoint(newest(tmp_path / "run"))
    assert held["networks"]["engine"]["kwargs"]["module_norm"] == held["config"]["engine"]["module_norm"] == norm


def test_a_question_is_answered_by_an_original_checkpoint(tmp_path: Path):
    file = generator_file(seed=3) | engine_file(feature_dim=(12, 14, 14))
    path = write(tmp_path / "joint.pt", file)
    said = json.loads(
        answered("--pg", path, "--ee", path, "--image", IMAGE, "--question", "Are there any red cubes?", "--json")
    )
    words = ["<START>", "Are", "there", "any", "red", "cubes", "<END>"]
    program = decode(file, [VOCAB.question_index[word] for word in words])
    assert said["program"] == [VOCAB.program[token] for token in program if token > 2]
    features_1CHW = image_features(IMAGE, Patches(2))
    probability_A = engine_logits(file, features_1CHW, [program])[0].softmax(0)
    assert said["answers"][0]["answer"] == VOCAB.answer[int(probability_A.argmax())]
    assert said["answers"][0]["probability"] == pytest.approx(float(probability_A.max()), abs=1e-5)


@pytest.mark.parametrize(
    ("asked", "key", "held"),
    [
        (["engine.module_dim=9"], "module_dim", 4),
        (["engine.module_norm=example"], "module_norm", "none"),
        (["--modules", "tbd"], "modules", "iep"),
        (["engine.stem_stride=2"], "stem_stride", 1),
        (["engine.stem_pixels=2"], "stem_pixels", 1),
        (["engine.initialization=torch"], "initialization", "kaiming"),
    ],
)
def test_another_setting_than_the_files_is_refused(asked: list[str], key: str, held: object, data, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES))
    result = started("ee", data, tmp_path / "run", "--ee", path, *asked)
    wanted = asked[-1].rpartition("=")[2]
    assert_one_error(result, f"{path}: was trained with engine.{key} {held}, cannot start with {wanted}")
    assert not (tmp_path / "run").exists()


def test_a_default_that_is_asked_for_is_refused_where_the_file_has_another_setting(data: Path, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, module_batchnorm=True, classifier_downsample="none"))
    (tmp_path / "settings.yaml").write_text("engine: {classifier_pool: 2}")
    for asked, problem in (
        (["engine.module_norm=none"], "engine.module_norm example, cannot start with none"),
        (["--config", tmp_path / "settings.yaml"], "engine.classifier_pool 1, cannot start with 2"),
    ):
        result = started("ee", data, tmp_path / "run", "--ee", path, *asked)
        assert_one_error(result, f"{path}: was trained with {problem}")


def test_the_runs_config_says_what_an_original_engine_is_and_starts_it_again(data: Path, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, stem_num_layers=3, module_residual=False))
    assert started("ee", data, tmp_path / "run", "--ee", path).exit_code == 0
    said = read_config(tmp_path / "run" / "config.yaml").engine
    kwargs = load_checkpoint(newest(tmp_path / "run"))["networks"]["engine"]["kwargs"]
    assert {f.name: getattr(said, f.name) for f in fields(said)} == {
        f.name: tuple(kwargs[f.name]) if isinstance(kwargs[f.name], list) else kwargs[f.name] for f in fields(said)
    }
    assert (said.modules, said.stem_widths, said.module_residual) == ("iep", (4, 4), False)
    result = started("ee", data, tmp_path / "again", "--ee", path, "--config", tmp_path / "run" / "config.yaml")
    assert result.exit_code == 0, result.output
