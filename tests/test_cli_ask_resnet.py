"""`iep-ask` where the features came of a ResNet: its weights are made again, asked for or taken for others."""

import json
from pathlib import Path

import pytest
import torch
from ask_cases import COUNT, IMAGE, answered, changed, iep_ask, sample_data, trained
from evaluate_cases import evaluate
from tiny_data import assert_one_error

from iep.models.checkpoint import load_checkpoint
from iep.preprocess.backbones import ResNet
from iep.preprocess.recipe import file_digest


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine trained on features of a ResNet with random weights, and its data."""
    root = tmp_path_factory.mktemp("resnet")
    flags = ("--backbone", "resnet18", "--stage", 2, "--image-size", 64, "--weights", "random", "--seed", 5)
    data = sample_data(root / "data", *flags)
    return trained(data, "ee", root / "ee", 5), data


def save_random(path: Path) -> None:
    """The weights of that ResNet, as a file."""
    torch.save(ResNet("resnet18", weights="random", seed=5)._model().state_dict(), path)


def test_a_resnet_with_random_weights_is_made_again_of_its_seed(resnet, tmp_path):
    ee, data = resnet
    _, rows, _ = evaluate(tmp_path, "--ee", ee, "--data", data, "--workers", 0)
    row = next(row for row in rows if row["image_index"] == 2)
    output = answered("--ee", ee, "--image", IMAGE, "--program", " ".join(row["program"]), "--json")
    found = json.loads(output)["answers"][0]
    assert found["answer"] == row["predicted_answer"]
    assert found["probability"] == pytest.approx(row["probability"], rel=1e-3)


def test_weights_of_a_file_are_asked_for_and_must_be_that_file(resnet, tmp_path):
    ee, _ = resnet
    save_random(tmp_path / "a.pth")
    torch.save({}, tmp_path / "b.pth")
    recipe = load_checkpoint(ee)["features"] | {"weights": f"file {file_digest(tmp_path / 'a.pth')}"}
    of_file = changed(ee, tmp_path / "ee.pt", features=recipe)
    asked = ("--image", IMAGE, "--program", COUNT)
    assert_one_error(iep_ask("--ee", of_file, *asked), "give --weights FILE")
    assert_one_error(iep_ask("--ee", of_file, *asked, "--weights", tmp_path / "b.pth"), "made with weights file")
    assert answered("--ee", of_file, *asked, "--weights", tmp_path / "a.pth") == answered("--ee", ee, *asked)


def test_a_file_taken_for_torchvisions_weights_is_said(resnet, tmp_path):
    save_random(tmp_path / "a.pth")
    ee, _ = resnet
    recipe = load_checkpoint(ee)["features"] | {"weights": "torchvision IMAGENET1K_V1"}
    other = changed(ee, tmp_path / "ee.pt", features=recipe)
    result = iep_ask("--ee", other, "--image", IMAGE, "--program", COUNT, "--weights", tmp_path / "a.pth")
    assert result.exit_code == 0, result.output
    assert f"made with torchvision IMAGENET1K_V1; {tmp_path / 'a.pth'} is used in its place" in result.stderr
    assert result.stdout == answered("--ee", ee, "--image", IMAGE, "--program", COUNT)


def test_an_engine_of_unknown_features_is_taken_for_the_original_toolkits(resnet, tmp_path, monkeypatch):
    from iep.preprocess import backbones

    ee, _ = resnet

    def lost(*arguments: object, **options: object) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(backbones, "_torchvision_models", lambda: type("Models", (), {"get_model": staticmethod(lost)}))
    old = changed(ee, tmp_path / "old.pt", features=None)
    result = iep_ask("--ee", old, "--image", IMAGE, "--program", COUNT)
    assert "assumed to be resnet101 to stage 3, 224x224 pixels, default weights" in result.stderr
    assert_one_error(result, "the weights of resnet101 cannot be downloaded (no network here)")
