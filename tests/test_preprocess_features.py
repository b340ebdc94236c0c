"""Images -> features.h5: what the rows hold, how the file says it was made, and what is said about bad input."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import h5py
import numpy as np
import pytest
import torch
import torchvision
from clevr_files import write_images
from click.testing import CliRunner
from evaluate_cases import iep_eval
from features_cases import FILE, RESNET, SMALL, SMALL_RESNET, Watched, features, run
from PIL import Image
from tiny_data import newest, tiny_config, write_data

from iep.cli.preprocess import main
from iep.data.features import Features
from iep.errors import InputError
from iep.models.checkpoint import read_checkpoint
from iep.preprocess.backbones import ResNet, Scenes, backbone_of, randomize
from iep.preprocess.clevr_files import image_paths
from iep.preprocess.compute_features import image_features, preprocess_features
from iep.preprocess.images import open_image
from iep.training.run_training import train


def test_memory_does_not_grow_with_the_number_of_images(tmp_path, out):
    anonymous_kb = []

    def measure() -> None:
        status = Path("/proc/self/status").read_text()
        anonymous_kb.append(int(status.partition("RssAnon:")[2].split()[0]))

    images = write_images(tmp_path / "CLEVR", "val", 330)
    preprocess_features({"val": images}, out, Watched(image_size=192, before=measure), batch_size=1, workers=1)
    row_kb = 64 * 48 * 48 * 4 / 1000
    assert anonymous_kb[-1] - anonymous_kb[-150] < 0.5 * 150 * row_kb


# What the rows hold


def resized(path: Path, size: int) -> torch.Tensor:
    """(3, size, size) values 0 to 255 of an image, read without the code under test."""
    pixels = Image.open(path).convert("RGB").resize((size, size), Image.BICUBIC)
    return torch.tensor(np.array(pixels)).permute(2, 0, 1).float()


def saved_resnet(path: Path, seed: int, initialise: Callable[[torch.nn.Module], object] = lambda model: None) -> Path:
    """A file with the weights of torchvision's resnet18, changed by `initialise`."""
    torch.manual_seed(seed)
    model = torchvision.models.resnet18(weights=None)
    with torch.no_grad():
        initialise(model)
    torch.save(model.state_dict(), path)
    return path


def test_worker_processes_change_nothing(clevr, out, tmp_path):
    run(clevr, "--out", out, *SMALL)
    images = image_paths(clevr / "images" / "val")
    preprocess_features({"val": images}, tmp_path / "workers", SMALL_RESNET, batch_size=2, workers=2)
    assert (tmp_path / "workers" / FILE).read_bytes() == (out / FILE).read_bytes()
    os.truncate(images[4], 300)
    with pytest.raises(InputError, match=f"^{images[4]}: not an image"):
        preprocess_features({"val": images}, tmp_path / "broken", SMALL_RESNET, batch_size=2, workers=2)


def test_resnet_rows_equal_torchvisions_network_cut_by_hand_of_whichever_weights(clevr, tmp_path):
    weights, made = saved_resnet(tmp_path / "resnet18.pth", 5, randomize), {}
    for name, flags in (
        ("file", ("--weights", weights)),
        ("seed 5", ("--weights", "random", "--seed", 5)),
        ("seed 6", ("--weights", "random", "--seed", 6)),
        ("stage 4", ("--weights", "random", "--stage", 4)),
    ):
        run(clevr, "--out", tmp_path / name, *RESNET, *flags)
        made[name] = features(tmp_path / name / FILE)
    assert np.array_equal(made["file"], made["seed 5"])
    assert not np.allclose(made["seed 6"], made["seed 5"])
    assert (made["file"].shape, made["stage 4"].shape) == ((7, 256, 4, 4), (7, 512, 2, 2))
    run(clevr, "--out", tmp_path, *RESNET, "--weights", weights, "--dtype", "float16")
    assert np.array_equal(features(tmp_path / FILE), made["file"].astype("f2"))
    model = torchvision.models.resnet18(weights=None).eval()
    model.load_state_dict(torch.load(weights))
    image = resized(clevr / "images" / "val" / "CLEVR_val_000006.png", 64) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((image - mean[:, None, None]) / std[:, None, None])[None]
    with torch.no_grad():
        for layer in list(model.children())[:7]:  # conv1, bn1, relu, maxpool, layer1, layer2, layer3
            x = layer(x)
    assert torch.allclose(torch.tensor(made["file"][6]), x[0], rtol=1e-4, atol=1e-4)


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda image: image.rename(image.with_name("CLEVR_val_000009.png")), "image index 3 is missing, while 9 is"),
        (lambda image: image.rename(image.with_name("CLEVR_new_000002.png")), "2 is also that of CLEVR_new_000002.png"),
        (lambda image: image.rename(image.with_name("picture.png")), "picture.png: no image index in the name"),
        (lambda image: os.truncate(image, 300), "CLEVR_val_000003.png: not an image"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_in_one_line(clevr, out, change, message):
    change(clevr / "images" / "val" / "CLEVR_val_000003.png")
    assert message in run(clevr, "--out", out, *SMALL, code=1)
    assert not (out / FILE).exists()


def test_wrong_weight_files_are_one_clear_line(clevr, out, tmp_path):
    state = torchvision.models.resnet18(weights=None).state_dict()
    weights = tmp_path / "weights.pth"
    for content, problem in (
        ({k: v for k, v in state.items() if k != "conv1.weight"}, "'conv1.weight' is missing"),
        (state | {"conv1.weight": torch.zeros(3)}, "size mismatch for conv1.weight"),
        (torch.nn.Linear(1, 1), "not a state dict of resnet18"),
    ):
        torch.save(content, weights)
        line = run(clevr, "--out", out, *RESNET, "--weights", weights, code=1)
        assert f"{weights}: " in line
        assert problem in line
    weights.unlink()
    assert f"{weights}: no such file" in run(clevr, "--out", out, *RESNET, "--weights", weights, code=1)
    saved_resnet(weights, 0, lambda model: model.layer3[1].bn2.weight.fill_(1e6))
    line = run(clevr, "--out", out, *RESNET, "--weights", weights, "--dtype", "float16", code=1)
    assert "not finite in torch.float16" in line


def test_a_failed_download_is_one_clear_line(clevr, out, monkeypatch, tmp_path):
    def offline(*_args, **_kwargs):
        raise URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    result = CliRunner().invoke(main, [str(clevr), "--out", str(out), "--only", "features", *map(str, RESNET)])
    assert result.exit_code == 1
    assert "the weights of resnet18 cannot be downloaded" in result.stderr.splitlines()[-1]


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    exif, grey_HW = Image.Exif(), np.arange(256, dtype=np.uint8).reshape(8, 32)
    exif[0x0112] = 6  # the tag of the orientation
    Image.fromarray(grey_HW).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(np.asarray(open_image(tmp_path / "a.png"))[:, :, 0], np.rot90(grey_HW, -1))


# How features were made


RECIPE_OF_SMALL = {
    "backbone": "resnet18",
    "stage": 1,
    "weights": "random, outputs of order 1, seed 0",
    "image_size": 32,
    "normalisation": "ImageNet mean and standard deviation",
    "dtype": "float16",
}


@pytest.fixture(scope="module")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data set with features of random images, made by `iep-preprocess`."""
    root = tmp_path_factory.mktemp("small")
    data = write_data(root / "data")
    for split in ("train", "val", "test"):
        write_images(root / "CLEVR", split, 5)
        (data / f"{split}_features.h5").unlink()
    run(root / "CLEVR", "--out", data, *SMALL, "--dtype", "float16")
    return data


@pytest.mark.parametrize(
    ("flags", "dtype"), [(SMALL, "float16"), ((*RESNET, "--weights", "random", "--seed", 3), "float32")]
)
def test_one_images_features_equal_its_row_of_the_file(clevr, out, flags, dtype):
    run(clevr, "--out", out, *flags, "--dtype", dtype)
    backbone = backbone_of(Features(out / FILE).recipe)
    made, _ = image_features(clevr / "images" / "val" / "CLEVR_val_000004.png", backbone, dtype)
    assert np.allclose(made[0], features(out / FILE)[4], rtol=1e-4 if dtype == "float32" else 2e-3, atol=1e-4)
    assert made.dtype == torch.float32


@pytest.mark.parametrize(
    "backbone",
    [Scenes(), ResNet("resnet18", 2, "random", 7, 64), ResNet("resnet50", 4), ResNet()],
    ids=lambda backbone: str(backbone.recipe()["backbone"]),
)
def test_a_recipe_gives_its_backbone_back(backbone):
    assert backbone_of({**backbone.recipe(), "dtype": "float16"}) == backbone


def test_checkpoints_of_models_that_read_images_keep_the_recipe(small_data, tmp_path):
    def recipe_after(model: str, *settings: str) -> dict:
        out = tmp_path / model
        train(tiny_config(small_data, model, "iterations=1", *settings), out, resume=False)
        return read_checkpoint(newest(out)).recipe

    assert recipe_after("ee") == RECIPE_OF_SMALL
    assert recipe_after("pg") == {}
    assert recipe_after("joint", f"pg={tmp_path / 'pg'}", f"ee={tmp_path / 'ee'}") == RECIPE_OF_SMALL


@pytest.mark.parametrize(
    ("backbone", "change", "weights", "expected"),
    [
        (ResNet(), {"normalisation": "none"}, None, "normalisation none, not with ImageNet mean and standard"),
        (ResNet(), {"weights": "file 0123"}, None, "those of a file 0123 (its SHA-256): give --weights FILE"),
        (ResNet(), {"weights": "file 0123"}, "random", "file 0123, not with random, outputs of order 1, seed 0"),
        (ResNet(), {"backbone": "patches"}, None, "backbone 'patches', which this version does not know"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_refused(backbone, change, weights, expected):
    with pytest.raises(InputError, match=re.escape(expected)):
        backbone_of(backbone.recipe() | change, weights)


def test_features_made_otherwise_than_those_trained_on_are_reported(small_data, tmp_path, capsys):
    train(tiny_config(small_data, "ee", "iterations=1"), tmp_path / "ee", resume=False)
    other = Path(shutil.copytree(small_data, tmp_path / "other"))
    for split in ("train", "val"):
        with h5py.File(other / f"{split}_features.h5", "a") as file:
            file["features"].attrs["normalisation"] = np.bytes_("another")
    capsys.readouterr()
    told = "from the features that an execution engine was trained on: normalisation another instead of ImageNet"
    for data, count in ((small_data, 0), (other, 1)):
        result = iep_eval("--ee", tmp_path / "ee", "--data", data, "--programs", "ground-truth")
        assert result.output.count(told) == count
        config = tiny_config(data, "ee", "iterations=1", f"ee={tmp_path / 'ee'}")
        train(config, tmp_path / f"from-{count}", resume=False)
        assert capsys.readouterr().out.count(told) == count
