"""The scene network: its labels, its loss, its changed images, its training, and the features that it makes."""

import json
import math
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner, Result
from evaluate_cases import iep_eval
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_data import assert_one_error, tiny
from train_cases import iep_train, rows, weights

from iep.backbone.augment import augmented
from iep.backbone.network import (
    ABSENT,
    NEAR,
    NUM_SCORES,
    SIZES,
    FoundObjects,
    find_objects,
    label_cells,
    match,
    scene_loss,
)
from iep.cli.preprocess import main as preprocess_main
from iep.cli.synth import main as synth_main
from iep.config import Config, to_dict
from iep.preprocess.clevr_files import scenes_path
from iep.preprocess.labelled_scenes import open_scenes
from iep.synth.world import VALUES
from iep.vocab import Vocab

SMALL = (*tiny("backbone"), "batch_size=4")


@pytest.fixture(scope="module")
def clevr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of `iep-synth` with a dozen small images."""
    out = tmp_path_factory.mktemp("clevr") / "out"
    options = ["--preset", "mini", "--train", "8", "--val", "4", "--questions-per-image", "1", "--workers", "1"]
    result = CliRunner().invoke(synth_main, [str(out), *options])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def run(clevr: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    result = iep_train("--model", "backbone", "--data", clevr, "--out", out, *SMALL)
    assert result.exit_code == 0, result.output
    assert "8 images of train and 4 images of val" in result.output
    assert all(row["images_per_second"] > 0 for row in rows(out) if "loss" in row)
    return out


def iep_preprocess(*arguments: object) -> Result:
    return CliRunner().invoke(preprocess_main, [*map(str, arguments)])


def random_objects(seed: int, images: int = 3, most: int = 5) -> torch.Tensor:
    """(B, M, F) objects, some of them absent."""
    chance = torch.Generator().manual_seed(seed)
    points = torch.rand(images, most, 2, generator=chance)
    values = [torch.randint(size, (images, most, 1), generator=chance) for size in SIZES]
    objects = torch.cat([points, *values], 2)
    objects[torch.rand(images, most, generator=chance) < 0.3, :2] = ABSENT
    return objects


def loss_of_each_cell(scores: torch.Tensor, objects: torch.Tensor) -> torch.Tensor:
    """Return the loss, one cell and one object after the other."""
    count, _, height, width = scores.shape
    centres, near = set(), {}
    for around in (True, False):  # the cells of centres replace those around them
        for image, things in enumerate(objects):
            for x, y, *values in things.tolist():
                if x < 0:
                    continue
                column, row = x * width, y * height
                for down, right in product((-0.5, 0.5) if around else (0.0,), repeat=2):
                    cell_row = min(max(math.floor(row + down), 0), height - 1)
                    cell_column = min(max(math.floor(column + right), 0), width - 1)
                    cell = (image, cell_row, cell_column)
                    near[cell] = [column - cell_column - 0.5, row - cell_row - 0.5, *map(int, values)]
                    if not around:
                        centres.add(cell)
    loss = scores.new_zeros(())
    for cell in product(range(count), range(height), range(width)):
        weight, sign = (8, 1) if cell in centres else (1, -1)
        loss = loss - weight * F.logsigmoid(sign * scores[cell[0], 0, cell[1], cell[2]]) / max(1, len(centres))
    for (image, row, column), (right, down, *values) in near.items():
        cell = scores[image, :, row, column]
        terms = [(cell[1] - right).abs() / 2, (cell[2] - down).abs() / 2]
        for logits, value in zip(cell[3:].split(SIZES), values, strict=True):
            terms.append(F.cross_entropy(logits, torch.tensor(value)))
        loss = loss + sum(terms) / len(near)
    return loss


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([torch.float32, torch.float64]))
def test_the_loss_is_that_of_one_cell_after_the_other(seed: int, dtype: torch.dtype):
    objects = random_objects(seed)
    scores = torch.randn(3, NUM_SCORES, 4, 3, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    scores.requires_grad_()
    expected = loss_of_each_cell(scores, objects)
    (wanted,) = torch.autograd.grad(expected, scores)
    found = scene_loss(scores, objects)
    torch.testing.assert_close(found.double(), expected.double(), rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(found, scores)
    torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_perfect_scores_name_every_object_and_their_negatives_find_none():
    objects = torch.tensor([[[0.1, 0.2, 0, 3, 1, 2], [0.55, 0.7, 1, 7, 0, 0], [ABSENT, ABSENT, 1, 1, 1, 1]]])
    is_centre, _, labels = label_cells(objects, 28, 42)
    parts = [F.one_hot(labels[:, 2 + k].long(), size).movedim(-1, 1) for k, size in enumerate(SIZES)]
    scores = torch.cat([torch.where(is_centre[:, None], 9, -9), labels[:, :2], *(99 * part for part in parts)], 1)
    (found,) = find_objects(scores.float())
    torch.testing.assert_close(found.objects_NF, objects[0, :2])
    torch.testing.assert_close(found.confidence_NA, torch.ones(2, 4))
    assert len(find_objects(-scores.float() * is_centre[:, None])[0].objects_NF) == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_objects_follow_the_pixels_of_a_changed_image(seed: int):
    torch.manual_seed(seed)
    pixels, objects = torch.full((8, 3, 64, 64), 20.0), torch.full((8, 1, 6), ABSENT)
    for image in range(8):
        x, y = torch.randint(8, 56, (2,)).tolist()
        pixels[image, :, y - 2 : y + 3, x - 2 : x + 3] = 220
        objects[image, 0] = torch.tensor([(x + 0.5) / 64, (y + 0.5) / 64, 1, 1, 1, 1])
    changed, moved = augmented(pixels, objects)
    assert torch.equal(moved[..., 2:], objects[..., 2:])
    for image in range(8):
        bright = changed[image].mean(0) > 110
        if moved[image, 0, 0] >= 0 and bright.any():
            middle = (bright.nonzero().double().mean(0) + 0.5) / 64
            assert (middle.flip(0) - moved[image, 0, :2]).abs().max() < 0.06


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_matches_are_those_of_the_nearest_pairs_first(seed: int):
    objects = random_objects(seed, images=1)[0]
    found = torch.rand(7, 6, generator=torch.Generator().manual_seed(seed))
    there = [(j, thing) for j, thing in enumerate(objects.tolist()) if thing[0] >= 0]
    pairs = sorted(
        (math.hypot(90 * (a[0] - b[0]), 60 * (a[1] - b[1])), i, j)
        for i, a in enumerate(found.tolist())
        for j, b in there
    )
    expected: dict[int, int] = {}
    for distance, i, j in pairs:
        if distance <= NEAR and i not in expected and j not in expected.values():
            expected[i] = j
    ours, theirs = match(found, objects, (90, 60))
    assert dict(zip(ours.tolist(), theirs.tolist(), strict=True)) == expected


def test_training_resumes_with_the_same_bits(clevr: Path, run: Path, tmp_path: Path):
    for iterations in (2, 4):
        options = [*SMALL, f"iterations={iterations}", "features_in_memory=true"]
        result = iep_train("--model", "backbone", "--data", clevr, "--out", tmp_path / "run", "--resume", *options)
        assert result.exit_code == 0, result.output
    for name, value in weights(run / "step-4.pt", "backbone").items():
        assert torch.equal(weights(tmp_path / "run" / "step-4.pt", "backbone")[name], value), name


def test_features_of_two_backbones_in_one_directory_are_refused(clevr: Path, run: Path, tmp_path: Path):
    of_features = ("--only", "features", "--backbone", "synth", "--split")
    ours = (*of_features, "val", "--weights", run / "step-4.pt")
    for options in ((*of_features, "train"), ours, ("--only", "questions")):
        result = iep_preprocess(clevr, "--out", tmp_path, *options)
        assert result.exit_code == 0, result.output
    trained = iep_train("--model", "ee", "--data", tmp_path, "--out", tmp_path / "run", "iterations=1")
    assert_one_error(trained, "val_features.h5: computed differently from", "weights file ", "instead of file")


@pytest.mark.parametrize(
    ("confidences", "warning"),
    [
        ([], "0 objects found, and CLEVR's images have 3 to 10; "),
        ([1.0] * 11, "11 objects found, and CLEVR's images have 3 to 10; "),
        ([0.6, 0.7, 1.0], "3 objects found, 2 of them with doubtful attributes; "),
        ([1.0] * 10, ""),
    ],
)
def test_an_image_unlike_those_of_training_has_a_warning(confidences: list[float], warning: str):
    confidence_NA = torch.ones(len(confidences), 4)
    confidence_NA[:, 2] = torch.tensor(confidences)
    found = FoundObjects(torch.zeros(len(confidences), 6), confidence_NA)
    assert found.warning == (warning and f"{warning}the answer is unreliable")


def scenes_of(clevr: Path, split: str) -> list[dict]:
    return json.loads(scenes_path(clevr, split).read_text())["scenes"]


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (("objects", 0, "pixel_coords"), None, "not a CLEVR scenes file (TypeError"),
        (("objects", 0, "pixel_coords"), [500, 3, 9.0], "pixel_coords is [500, 3, 9.0], outside its image of 240x160"),
        (("objects", 0, "color"), "blu", "scene 1, object 0: color is 'blu', expected one of gray, red, blue"),
        (("image_filename",), "7.png", "images/train/7.png: no such file, expected an image"),
    ],
)
def test_scenes_that_cannot_be_learnt_from(clevr: Path, tmp_path: Path, keys: tuple, value: object, words: str):
    scenes = scenes_of(clevr, "train")
    reduce(getitem, keys[:-1], scenes[1])[keys[-1]] = value
    (tmp_path / "images").symlink_to(clevr / "images")
    (tmp_path / "scenes").mkdir()
    scenes_path(tmp_path, "train").write_text(json.dumps({"scenes": scenes}))
    result = iep_train("--model", "backbone", "--data", tmp_path, "--out", tmp_path / "run", *SMALL)
    assert_one_error(result, words, str(tmp_path))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (None, "holds the weights of something else, expected metadata of the format"),
        (to_dict(Config.backbone), "the weights do not fit"),
    ],
)
def test_weights_that_are_not_those_of_a_backbone(clevr: Path, tmp_path: Path, kwargs: object, words: str):
    config = {"format": "iep-model-1", "networks": {"backbone": kwargs}}
    config |= {"features": {}, "vocab": Vocab.clevr().to_json()}
    metadata = None if kwargs is None else {"iep": json.dumps(config)}
    save_file({"backbone.weight": torch.zeros(3)}, path := tmp_path / "other.safetensors", metadata)
    assert_one_error(iep_eval("--backbone", path, "--scenes", clevr), f"{path}: ", words)
    options = ("--out", tmp_path / "out", "--backbone", "synth", "--weights", path)
    assert_one_error(iep_preprocess(clevr, *options), f"{path}: ", words)
    assert not (tmp_path / "out").exists(), "refused before the questions are encoded"


def test_objects_are_read_with_the_farthest_first(clevr: Path):
    for scene, objects in zip(
        scenes_of(clevr, "val"), open_scenes(clevr, "val", (32, 32)).questions.answers, strict=True
    ):
        there = objects[objects[:, 0] >= 0]
        order = sorted(scene["objects"], key=lambda thing: -thing["pixel_coords"][2])
        for (x, y, *values), thing in zip(there, order, strict=True):
            assert [x, y] == pytest.approx([thing["pixel_coords"][0] / 240, thing["pixel_coords"][1] / 160])
            for value, (attribute, names) in zip(values, VALUES.items(), strict=True):
                assert names[int(value)] == thing[attribute]
