"""Images -> features.h5: what the rows hold, and what is said about bad input."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from ask_cases import SAMPLE
from clevr_files import write_clevr, write_images
from click.testing import CliRunner
from features_cases import PATCHES, RESNET, features, run
from PIL import Image
from torch.nn import functional

import iep.preprocess.compute_features as features_module
from iep.cli.preprocess import main
from iep.data.hdf5 import read_attributes
from iep.errors import InputError
from iep.preprocess import backbones
from iep.preprocess.backbones import Patches
from iep.preprocess.clevr_files import image_paths
from iep.preprocess.compute_features import preprocess_features
from iep.preprocess.images import read_image


def resized(path: Path, size: int) -> torch.Tensor:
    """(3, size, size) values 0 to 255 of an image, read without the code under test."""
    pixels = Image.open(path).convert("RGB").resize((size, size), Image.BICUBIC)
    return torch.tensor(np.array(pixels)).permute(2, 0, 1).float()


def test_pixel_shuffle_of_patches_gives_the_picture_back_and_float16_rounds_it(clevr, out, tmp_path):
    run(clevr, "--out", out, "--backbone", "patches")
    rows = features(out / "val_features.h5")
    assert rows.shape == (7, 3 * 8 * 8, 14, 14)
    assert rows.dtype == np.float32
    for index in (0, 3, 6):
        picture = functional.pixel_shuffle(torch.tensor(rows[index]), 8)
        expected = resized(clevr / "images" / "val" / f"CLEVR_val_{index:06d}.png", 112) / 127.5 - 1
        assert torch.allclose(picture, expected, atol=1e-6)
    run(clevr, "--out", tmp_path, "--backbone", "patches", "--dtype", "float16")
    assert np.array_equal(features(tmp_path / "val_features.h5"), rows.astype("f2"))


def test_the_file_says_how_it_was_made(clevr, out):
    run(clevr, "--out", out, *PATCHES)
    with h5py.File(out / "val_features.h5") as file:
        attributes = read_attributes(file["features"])
    attributes.pop("images_digest")
    assert attributes == {
        "backbone": "patches",
        "patch_size": 2,
        "image_size": 28,
        "normalisation": "x / 127.5 - 1",
        "dtype": "float32",
        "images": 7,
    }


def test_worker_processes_change_nothing(clevr, out, tmp_path):
    run(clevr, "--out", out, *PATCHES)
    images, workers = image_paths(clevr / "images" / "val"), tmp_path / "workers"
    preprocess_features({"val": images}, workers, Patches(2), batch_size=2, workers=2)
    assert (workers / "val_features.h5").read_bytes() == (out / "val_features.h5").read_bytes()
    os.truncate(images[4], 300)
    with pytest.raises(InputError, match=f"^{images[4]}: not an image"):
        preprocess_features({"val": images}, tmp_path / "broken", Patches(2), batch_size=2, workers=2)


def test_memory_does_not_grow_with_the_number_of_images(tmp_path, out, monkeypatch):
    images = write_images(tmp_path / "CLEVR", "val", 330)
    anonymous_kb = []

    def measured(extract, pixels_BCHW, run=features_module._run):
        status = Path("/proc/self/status").read_text()
        anonymous_kb.append(int(status.partition("RssAnon:")[2].split()[0]))
        return run(extract, pixels_BCHW)

    monkeypatch.setattr(features_module, "_run", measured)
    features_module.preprocess_features({"val": images}, out, Patches(16), batch_size=1, workers=1)
    row_kb = 3 * 224 * 224 * 4 / 1000
    assert anonymous_kb[-1] - anonymous_kb[-150] < 0.5 * 150 * row_kb


def test_resnet_rows_equal_torchvisions_network_cut_by_hand(clevr, out, tmp_path):
    import torchvision

    torch.manual_seed(3)
    model = torchvision.models.resnet18(weights=None).eval()
    torch.save(model.state_dict(), tmp_path / "resnet18.pth")
    run(clevr, "--out", out, *RESNET, "--weights", tmp_path / "resnet18.pth")
    rows = features(out / "val_features.h5")
    assert rows.shape == (7, 256, 4, 4)
    image = resized(clevr / "images" / "val" / "CLEVR_val_000006.png", 64) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    x = ((image - mean[:, None, None]) / std[:, None, None])[None]
    with torch.no_grad():
        for layer in list(model.children())[:7]:  # conv1, bn1, relu, maxpool, layer1, layer2, layer3
            x = layer(x)
    assert torch.allclose(torch.tensor(rows[6]), x[0], rtol=1e-4, atol=1e-4)


def test_a_resnet_runs_with_cudnn(monkeypatch):
    switched_on = []

    class Trunk(torch.nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            switched_on.append(torch.backends.cudnn.enabled)
            return pixels

    monkeypatch.setattr(backbones, "_trunk", lambda model, stage: Trunk())
    extract = backbones.ResNet("resnet18", weights="random").extractor(torch.device("cpu"))
    extract(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert switched_on == [True]


def test_random_weights_saved_and_reloaded_give_the_same_features(clevr, out, tmp_path):
    import torchvision

    run(clevr, "--out", out, *RESNET, "--weights", "random", "--seed", 5)
    torch.manual_seed(5)
    model = torchvision.models.resnet18(weights=None)
    backbones.randomize(model)
    torch.save(model.state_dict(), tmp_path / "resnet18.pth")
    run(clevr, "--out", tmp_path / "again", *RESNET, "--weights", tmp_path / "resnet18.pth")
    run(clevr, "--out", tmp_path / "other", *RESNET, "--weights", "random", "--seed", 6)
    expected = features(out / "val_features.h5")
    assert np.array_equal(features(tmp_path / "again" / "val_features.h5"), expected)
    assert not np.allclose(features(tmp_path / "other" / "val_features.h5"), expected)
    run(clevr, "--out", tmp_path / "later", *RESNET, "--weights", "random", "--stage", 4)
    assert features(tmp_path / "later" / "val_features.h5").shape == (7, 512, 2, 2)


@pytest.mark.parametrize(("name", "stage"), [("resnet18", 1), ("resnet18", 4), ("resnet50", 3), ("resnet101", 4)])
def test_random_weights_give_features_of_the_size_of_pretrained_ones(name, stage):
    extract = backbones.ResNet(name, stage, "random", seed=1).extractor(torch.device("cpu"))
    pixels = torch.tensor(read_image(SAMPLE / "images/val/CLEVR_val_000002.png", 96).copy())[None]
    with torch.no_grad():
        x = extract(pixels)
    assert 0.3 < x.std() < 4
    assert x.max() < 60
    assert (x > 0).float().mean() > 0.3


def renamed(name: str) -> Callable[[Path], object]:
    return lambda image: image.rename(image.with_name(name))


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda image: (image.unlink(), make(image))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("CLEVR_val_000009.png"), "image index 3 is missing, while 9 is there"),
        (renamed("CLEVR_new_000002.png"), "image index 2 is also that of CLEVR_new_000002.png"),
        (renamed("picture.png"), "picture.png: no image index in the name"),
        (lambda image: image.write_bytes(b""), "CLEVR_val_000003.png: not an image"),
        (lambda image: image.write_bytes(b"not a picture"), "CLEVR_val_000003.png: not an image"),
        (lambda image: image.write_bytes(b"\x89PNG\r\n\x1a\n"), "CLEVR_val_000003.png: not an image"),
        (lambda image: os.truncate(image, 300), "CLEVR_val_000003.png: not an image"),
        (replaced(Path.mkdir), "CLEVR_val_000003.png: is a directory, expected an image"),
        (replaced(os.mkfifo), "CLEVR_val_000003.png: is not a regular file, expected an image"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_in_one_line(clevr, out, change, message):
    change(clevr / "images" / "val" / "CLEVR_val_000003.png")
    assert message in run(clevr, "--out", out, *PATCHES, code=1)
    assert not (out / "val_features.h5").exists()


def test_wrong_weight_files_are_one_clear_line(clevr, out, tmp_path):
    import torchvision

    state = torchvision.models.resnet18(weights=None).state_dict()
    weights = tmp_path / "weights.pth"
    for content, problem in (
        ({k: v for k, v in state.items() if k != "conv1.weight"}, "'conv1.weight' is missing"),
        (state | {"layer3.2.conv1.weight": torch.zeros(1)}, "'layer3.2.conv1.weight' is not part of it"),
        (state | {"conv1.weight": torch.zeros(3)}, "size mismatch for conv1.weight"),
        ([1, 2], "TypeError"),
        (torch.nn.Linear(1, 1), "not a state dict of resnet18"),
        (b"\0" * 100, "not a state dict of resnet18"),
        (None, "no such file"),
    ):
        weights.unlink(missing_ok=True)
        if isinstance(content, bytes):
            weights.write_bytes(content)
        elif content is not None:
            torch.save(content, weights)
        line = run(clevr, "--out", out, *RESNET, "--weights", weights, code=1)
        assert f"{weights}: " in line
        assert problem in line


def test_a_failed_download_is_one_clear_line(clevr, out, monkeypatch, tmp_path):
    import urllib.request

    def offline(*_args, **_kwargs):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    result = CliRunner().invoke(main, [str(clevr), "--out", str(out), "--only", "features", *map(str, RESNET)])
    assert result.exit_code == 1
    assert "the weights of resnet18 cannot be downloaded" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("error", [RuntimeError("operator torchvision::nms does not exist"), ImportError("no symbol")])
def test_a_torchvision_that_does_not_fit_its_torch_is_one_clear_line(clevr, out, monkeypatch, error):
    class Broken:
        def find_spec(self, name, *_args):
            if name == "torchvision":
                raise error

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    line = run(clevr, "--out", out, *RESNET, "--weights", "random", code=1)
    assert f"torchvision cannot be imported ({error}); install the version that belongs to torch" in line
    run(clevr, "--out", out, *PATCHES)  # patches do without it


def test_features_too_large_for_float16_are_refused(clevr, out, tmp_path):
    import torchvision

    model = torchvision.models.resnet18(weights=None)
    with torch.no_grad():
        model.layer3[1].bn2.weight.fill_(1e6)
    torch.save(model.state_dict(), tmp_path / "large.pth")
    line = run(clevr, "--out", out, *RESNET, "--weights", tmp_path / "large.pth", "--dtype", "float16", code=1)
    assert "not finite in torch.float16" in line


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ((*PATCHES, "--stage", 3), "--stage does not go with --backbone patches"),
        ((*PATCHES, "--weights", "random"), "--weights does not go with --backbone patches"),
        ((*RESNET, "--patch-size", 8), "--patch-size goes with --backbone patches"),
        (("--stage", 5), "5 is not in the range 1<=x<=4"),
        (("--backbone", "patches", "--patch-size", 60_000), "60000 is not in the range 1<=x<=256"),
    ],
)
def test_flags_of_the_other_backbone_are_usage_errors(clevr, out, flags, complaint):
    assert complaint in run(clevr, "--out", out, *flags, code=2)
    assert not out.exists()


def test_one_command_does_all_splits_and_both_parts(tmp_path, out):
    clevr = write_clevr(tmp_path / "CLEVR")
    shutil.rmtree(clevr / "images" / "test")
    flags = ("--workers", "0", "--device", "cpu")
    result = CliRunner().invoke(main, [str(clevr), "--out", str(out), *map(str, PATCHES), *flags])
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {
        "vocab.json",
        "train_questions.h5",
        "val_questions.h5",
        "test_questions.h5",
        "train_features.h5",
        "val_features.h5",
    }
    assert "no images of split 'test'" in result.stdout
