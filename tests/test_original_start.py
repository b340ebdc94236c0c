"""Training that starts from checkpoints of the original toolkit, and what it makes of their settings."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ask_cases import IMAGE, answered
from click.testing import CliRunner, Result
from original_cases import baseline_file, decode, engine_file, engine_logits, generator_file, write
from test_original_checkpoints import BASELINES, ENGINES
from tiny_data import CHANNELS, GRID, VOCAB, assert_one_error, newest, tiny

from iep.cli.train import main
from iep.config import read_config
from iep.models.build import load_network
from iep.models.checkpoint import load_checkpoint
from iep.preprocess.backbones import Patches
from iep.preprocess.compute_features import image_features

CPU = torch.device("cpu")
SIDES = {"feature_dim": (CHANNELS, GRID, GRID)}
PLAIN = [
    "workers=0",
    "batch_size=8",
    "iterations=1",
    "validate_every=1",
    "log_every=1",
    "device=cpu",
    "num_val_samples=4",
]


def iep_train(model: str, data: Path, out: Path, *arguments: object) -> Result:
    return CliRunner().invoke(
        main, [str(part) for part in ("--model", model, "--data", data, "--out", out, *PLAIN, *arguments)]
    )


def weights(out: Path, name: str) -> dict[str, torch.Tensor]:
    return load_checkpoint(newest(out))["networks"][name]["weights"]


def engine_options() -> dict[str, dict[str, Any]]:
    """Those whose engine takes the tiny data's features, which are of 4x4."""
    return {name: options for name, options in ENGINES.items() if "feature_dim" not in options}


@pytest.mark.parametrize("options", engine_options().values(), ids=engine_options())
def test_an_engine_with_each_option_is_trained_further(options: dict[str, Any], data: Path, tmp_path: Path):
    file = engine_file(**SIDES, **options)
    path = write(tmp_path / "ee.pt", file)
    result = iep_train("ee", data, tmp_path / "run", "--ee", path, "learning_rate=0")
    assert result.exit_code == 0, result.output
    assert "normalises over all examples" not in result.output
    for name, value in weights(tmp_path / "run", "engine").items():
        if "running" not in name and "num_batches" not in name:
            assert torch.equal(value, file["execution_engine_state"][name]), name
    result = iep_train("ee", data, tmp_path / "further", "--ee", path, "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    loaded = load_network(tmp_path / "further", "engine", VOCAB, CPU)
    assert not torch.equal(
        loaded.state_dict()["scene.conv1.weight"], file["execution_engine_state"]["scene.conv1.weight"]
    )
    again = iep_train("ee", data, tmp_path / "further", "--resume", "iterations=2")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize(("kind", "options"), BASELINES.values(), ids=BASELINES)
def test_a_baseline_with_each_option_is_trained_further(kind: str, options: dict[str, Any], data: Path, tmp_path: Path):
    sides = {} if kind == "LSTM" else {"cnn_feat_dim": (CHANNELS, GRID, GRID)}
    file = baseline_file(kind, **(sides | options))
    path, model = write(tmp_path / "baseline.pt", file), kind.lower().replace("+", "-")
    result = iep_train(model, data, tmp_path / "run", "--baseline", path, "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    loaded = load_network(tmp_path / "run", "baseline", VOCAB, CPU).state_dict()
    assert set(loaded) == set(file["baseline_state"])
    assert not torch.equal(loaded["rnn.embed.weight"], file["baseline_state"]["rnn.embed.weight"])


def test_a_generator_is_trained_further(data: Path, tmp_path: Path):
    file = generator_file(rnn_num_layers=1)
    result = iep_train("pg", data, tmp_path / "run", "--pg", write(tmp_path / "pg.pt", file), "learning_rate=0.01")
    assert result.exit_code == 0, result.output
    found, begun = weights(tmp_path / "run", "generator"), file["program_generator_state"]
    assert set(found) == set(begun)
    assert not torch.equal(found["decoder_linear.weight"], begun["decoder_linear.weight"])


def test_joint_training_starts_from_a_joint_file_and_from_two(data: Path, tmp_path: Path):
    both = write(tmp_path / "joint.pt", generator_file() | engine_file(**SIDES))
    pg, ee = write(tmp_path / "pg.pt", generator_file()), write(tmp_path / "ee.pt", engine_file(**SIDES))
    for out, parts in (("one", (both, both)), ("two", (pg, ee))):
        result = iep_train("joint", data, tmp_path / out, "--pg", parts[0], "--ee", parts[1])
        assert result.exit_code == 0, result.output
    for name in ("generator", "engine"):
        one, two = weights(tmp_path / "one", name), weights(tmp_path / "two", name)
        assert all(torch.equal(one[key], two[key]) for key in one)


def test_an_engine_is_trained_on_the_programs_of_an_original_generator(data: Path, tmp_path: Path):
    path = write(tmp_path / "pg.pt", generator_file())
    result = iep_train(
        "ee", data, tmp_path / "run", "--pg", path, "--programs", "predicted", *tiny("ee"), "iterations=1"
    )
    assert result.exit_code == 0, result.output
    assert load_checkpoint(newest(tmp_path / "run"))["step"] == 1


@pytest.mark.parametrize(("asked", "norm"), [("example", "example"), ("batch", "batch"), (None, "example")])
def test_module_batch_norm_is_per_example_unless_asked_otherwise(
    asked: str | None, norm: str, data: Path, tmp_path: Path
):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, module_batchnorm=True))
    settings = [] if asked is None else [f"engine.module_norm={asked}"]
    result = iep_train("ee", data, tmp_path / "run", "--ee", path, *settings)
    assert result.exit_code == 0, result.output
    assert ("normalises over all examples of a call" in result.output) == (norm == "batch")
    held = load_checkpoint(newest(tmp_path / "run"))
    assert held["networks"]["engine"]["kwargs"]["module_norm"] == held["config"]["engine"]["module_norm"] == norm


def test_vanilla_batching_with_batch_norm_trains_as_the_per_example_norm_does(data: Path, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, module_batchnorm=True))
    exact = ["engine.module_norm=batch", "--batching", "vanilla", "--no-sharing"]
    for out, settings in (("vanilla", exact), ("example", ["--batching", "vanilla"]), ("batched", [])):
        result = iep_train("ee", data, tmp_path / out, "--ee", path, *settings)
        assert result.exit_code == 0, result.output
    vanilla, example, batched = (weights(tmp_path / out, "engine") for out in ("vanilla", "example", "batched"))
    for name, value in vanilla.items():
        if name.endswith(("conv1.bias", "conv2.bias")):
            continue  # a norm follows: without a gradient but for rounding, of which Adam makes a whole step
        torch.testing.assert_close(example[name], value, rtol=1e-4, atol=1e-5)
        if "running" not in name:  # batched, the rows come in another order
            torch.testing.assert_close(batched[name], value, rtol=1e-4, atol=1e-5)


def test_training_from_an_original_generator_learns_new_words(data: Path, tmp_path: Path):
    old = replace(VOCAB, question=VOCAB.question[:-2])
    file = generator_file()
    state = file["program_generator_state"]
    state["encoder_embed.weight"] = state["encoder_embed.weight"][:-2]
    file["program_generator_kwargs"]["encoder_vocab_size"] -= 2
    path = write(tmp_path / "pg.pt", file | {"vocab": old.to_json()})
    result = iep_train("pg", data, tmp_path / "run", "--pg", path, "learning_rate=0")
    assert result.exit_code == 0, result.output
    words = weights(tmp_path / "run", "generator")["encoder_embed.weight"]
    assert len(words) == len(VOCAB.question)
    assert torch.equal(words[:-2], state["encoder_embed.weight"])


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
    result = iep_train("ee", data, tmp_path / "run", "--ee", path, *asked)
    wanted = asked[-1].rpartition("=")[2]
    assert_one_error(result, f"{path}: was trained with engine.{key} {held}, cannot start with {wanted}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["key=value", "file"])
def test_a_default_that_is_asked_for_is_refused_where_the_file_has_another_setting(how: str, data, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, module_batchnorm=True, classifier_downsample="none"))
    for key, has, wanted in (("module_norm", "example", "none"), ("classifier_pool", 1, 2)):
        (tmp_path / "settings.yaml").write_text(f"engine: {{{key}: {wanted}}}")
        file = ["--config", tmp_path / "settings.yaml"]
        asked = file if how == "file" else [f"engine.{key}={wanted}"]
        result = iep_train("ee", data, tmp_path / "run", "--ee", path, *asked)
        assert_one_error(result, f"{path}: was trained with engine.{key} {has}, cannot start with {wanted}")
    assert iep_train("ee", data, tmp_path / "run", "--ee", path).exit_code == 0


def test_the_runs_config_says_what_an_original_engine_is_and_starts_it_again(data: Path, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SIDES, stem_num_layers=3, module_residual=False))
    assert iep_train("ee", data, tmp_path / "run", "--ee", path).exit_code == 0
    said = read_config(tmp_path / "run" / "config.yaml").engine
    kwargs = load_checkpoint(newest(tmp_path / "run"))["networks"]["engine"]["kwargs"]
    assert {f.name: getattr(said, f.name) for f in fields(said)} == {
        f.name: tuple(kwargs[f.name]) if isinstance(kwargs[f.name], list) else kwargs[f.name] for f in fields(said)
    }
    assert (said.modules, said.stem_widths, said.module_residual) == ("iep", (4, 4), False)
    result = iep_train("ee", data, tmp_path / "again", "--ee", path, "--config", tmp_path / "run" / "config.yaml")
    assert result.exit_code == 0, result.output
