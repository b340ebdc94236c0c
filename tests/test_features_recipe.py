"""How features were made: recorded in their file, kept in checkpoints, and enough to make the same features again."""

import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from ask_cases import IMAGE, answered, iep_ask
from clevr_files import write_images
from evaluate_cases import iep_eval
from features_cases import PATCHES, RESNET, features, run
from tiny_data import arrays, newest, tiny_config, write_data, write_h5

from iep.data.features import Features
from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint
from iep.preprocess.backbones import Patches, ResNet, backbone_of
from iep.preprocess.compute_features import image_features
from iep.training.run_training import train

PATCHES_OF_2 = {
    "backbone": "patches",
    "patch_size": 2,
    "image_size": 28,
    "normalisation": "x / 127.5 - 1",
    "dtype": "float16",
}


@pytest.fixture(scope="module")
def patches_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data set with features of random images, made by `iep-preprocess`."""
    root = tmp_path_factory.mktemp("patches")
    data = write_data(root / "data")
    for split in ("train", "val", "test"):
        write_images(root / "CLEVR", split, 5)
        (data / f"{split}_features.h5").unlink()
    run(root / "CLEVR", "--out", data, *PATCHES, "--dtype", "float16")
    return data


def test_a_features_file_tells_its_recipe_and_that_of_the_original_toolkit_none(patches_data, data):
    assert Features(patches_data / "train_features.h5").recipe == PATCHES_OF_2
    assert Features(data / "train_features.h5").recipe == {}


def test_checkpoints_of_models_that_look_keep_the_recipe(patches_data, tmp_path):
    train(tiny_config(patches_data, "ee", "iterations=1"), tmp_path / "ee", resume=False)
    train(tiny_config(patches_data, "pg", "iterations=1"), tmp_path / "pg", resume=False)
    starts = (f"pg={tmp_path / 'pg'}", f"ee={tmp_path / 'ee'}")
    train(tiny_config(patches_data, "joint", "iterations=1", *starts), tmp_path / "joint", resume=False)
    assert load_checkpoint(newest(tmp_path / "ee"))["features"] == PATCHES_OF_2
    assert load_checkpoint(newest(tmp_path / "joint"))["features"] == PATCHES_OF_2
    assert load_checkpoint(newest(tmp_path / "pg"))["features"] == {}


def test_a_run_from_before_the_recipe_was_kept_takes_it_from_its_data(patches_data, tmp_path):
    train(tiny_config(patches_data, "ee", "iterations=1"), tmp_path / "ee", resume=False)
    checkpoint = torch.load(newest(tmp_path / "ee"))
    del checkpoint["features"]
    torch.save(checkpoint, newest(tmp_path / "ee"))
    train(tiny_config(patches_data, "ee", "iterations=2"), tmp_path / "ee", resume=True)
    assert load_checkpoint(newest(tmp_path / "ee"))["features"] == PATCHES_OF_2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("flags", [PATCHES, (*RESNET, "--weights", "random", "--seed", 3)], ids=["patches", "resnet"])
def test_one_images_features_equal_its_row_of_the_file(clevr, out, flags, dtype):
    run(clevr, "--out", out, *flags, "--dtype", dtype)
    backbone = backbone_of(Features(out / "val_features.h5").recipe)
    made = image_features(clevr / "images" / "val" / "CLEVR_val_000004.png", backbone, dtype)
    assert np.allclose(
        made[0], features(out / "val_features.h5")[4], rtol=1e-4 if dtype == "float32" else 2e-3, atol=1e-4
    )
    assert made.dtype == torch.float32


@pytest.mark.parametrize(
    "backbone",
    [Patches(4), ResNet("resnet18", 2, "random", 7, 64), ResNet("resnet50", 4), ResNet()],
    ids=lambda backbone: str(backbone.recipe()["backbone"]),
)
def test_a_recipe_gives_its_backbone_back(backbone):
    assert backbone_of({**backbone.recipe(), "dtype": "float16"}) == backbone


def test_weights_of_a_file_are_asked_for_and_compared_with_the_recorded_digest(tmp_path):
    (tmp_path / "a.pth").write_bytes(b"a")
    (tmp_path / "b.pth").write_bytes(b"b")
    recipe = ResNet("resnet18", weights=str(tmp_path / "a.pth")).recipe()
    assert backbone_of(recipe, str(tmp_path / "a.pth")).weights == str(tmp_path / "a.pth")
    for weights, problem in (
        (None, r"resnet18 were those of a file .*: give --weights FILE"),
        (str(tmp_path / "b.pth"), r"made with weights file \w{16}, not with file \w{16}"),
        ("random", "not with random, outputs of order 1, seed 0"),
    ):
        with pytest.raises(InputError, match=problem):
            backbone_of(recipe, weights)


@pytest.mark.parametrize(
    ("recipe", "weights", "expected"),
    [
        (ResNet().recipe() | {"backbone": "vgg16"}, None, "backbone 'vgg16', which this version does not know"),
        (ResNet().recipe() | {"stage": 5}, None, "stage 5, expected a whole number from 1 to 4"),
        (ResNet().recipe() | {"image_size": "large"}, None, "image_size large, expected a whole number"),
        (ResNet().recipe() | {"image_size": 60_000}, None, "image_size 60000, expected a whole number from 1"),
        (
            ResNet().recipe() | {"normalisation": "none"},
            None,
            "normalisation none, not with ImageNet mean and standard",
        ),
        (ResNet("resnet18", weights="random").recipe() | {"weights": "random, seed 0"}, None, "weights random, seed 0"),
        (Patches().recipe() | {"patch_size": 60_000}, None, "patch_size 60000, expected a whole number from 1 to 292"),
        (Patches().recipe(), "random", "no weights"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(recipe, weights, expected):
    with pytest.raises(InputError, match=re.escape(expected)):
        backbone_of(recipe, weights)


def test_attributes_that_are_no_recipe_are_left_out(tmp_path):
    path = write_h5(tmp_path / "features.h5", {"features": np.zeros((2, 3, 4, 4), "f4"), **arrays(2)})
    with h5py.File(path, "r+") as file:
        file["features"].attrs["list"] = np.arange(3)
        file["features"].attrs["backbone"] = "patches"
    assert Features(path).recipe == {"backbone": "patches"}


def test_attributes_that_name_no_backbone_are_no_recipe_and_iep_ask_goes_on(patches_data, tmp_path):
    data = Path(shutil.copytree(patches_data, tmp_path / "data"))
    with h5py.File(data / "train_features.h5", "r+") as file:
        for name in list(file["features"].attrs):
            del file["features"].attrs[name]
        file["features"].attrs["author"], file["features"].attrs["version"] = "someone", 2
    assert Features(data / "train_features.h5").recipe == {}
    train(tiny_config(data, "ee", "iterations=1"), tmp_path / "ee", resume=False)
    image, program = IMAGE, "count scene"
    result = iep_ask("--ee", tmp_path / "ee", "--image", image, "--program", program)
    assert result.exit_code == 0, result.output
    assert "assumed to be 14x14 patches of 2x2 pixels" in result.stderr
    flags = ("--backbone", "patches", "--patch-size", 2)
    assert answered("--ee", tmp_path / "ee", "--image", image, "--program", program, *flags) == result.stdout


def test_features_made_otherwise_than_those_learnt_on_are_told_of_in_evaluation_and_training(
    patches_data, tmp_path, capsys
):
    train(tiny_config(patches_data, "ee", "iterations=1"), tmp_path / "ee", resume=False)
    other = tmp_path / "other"
    shutil.copytree(patches_data, other)
    for split in ("train", "val"):
        with h5py.File(other / f"{split}_features.h5", "a") as file:
            file["features"].attrs["normalisation"] = np.bytes_("another")
    capsys.readouterr()
    told = "from the features that an execution engine was trained on: normalisation another instead of x / 127.5 - 1"
    for data, count in ((patches_data, 0), (other, 1)):
        result = iep_eval("--ee", tmp_path / "ee", "--data", data, "--programs", "ground-truth")
        assert result.output.count(told) == count
        config = tiny_config(data, "ee", "iterations=1", f"ee={tmp_path / 'ee'}")
        train(config, tmp_path / f"from-{count}", resume=False)
        assert capsys.readouterr().out.count(told) == count
