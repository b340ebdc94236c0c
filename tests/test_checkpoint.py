"""Checkpoints: what one holds, that loading executes nothing, what is said of one that is damaged or does not fit."""

import math
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_data import VOCAB, content, newest, save_content, tiny_config

from iep.config import PLACES, settings_of
from iep.errors import InputError
from iep.models.checkpoint import BEST, FORMAT, read_checkpoint, step_name
from iep.training.run_training import train

CPU = torch.device("cpu")


def refusal(path: Path, use: Callable[[], object] | None = None) -> str:
    """Return how `use`, or loading, refuses the checkpoint at `path`: one line that begins with its name; nothing where
    it does not."""
    try:
        read_checkpoint(path) if use is None else use()
    except InputError as error:
        message = str(error)
    else:
        return ""
    assert message.startswith(str(path)), message
    assert "\n" not in message
    return message


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A generator's checkpoint to damage."""
    return Path(shutil.copy(newest(runs["pg"]), tmp_path / "copy.pt"))


# What a checkpoint holds


@pytest.mark.parametrize("name", ["step-4.pt", BEST])
def test_a_checkpoint_holds_all_that_a_run_needs_to_go_on(runs: dict[str, Path], data: Path, name: str):
    held = read_checkpoint(runs["ee"] / name)
    state, settings = held.state, settings_of(tiny_config(data, "ee"))
    assert state.step in (2, 4)
    assert state.config == {key: settings[key] for key in settings if key not in PLACES}
    assert held.vocab == VOCAB
    assert set(held.networks) == {"engine"}
    assert state.optimizer["state"][0]["step"] == state.step
    assert not state.validation_due


def test_a_run_directory_stands_for_its_best_checkpoint_or_else_its_newest(tmp_path: Path):
    held: dict[str, Any] = {"networks": {}, "vocab": VOCAB.to_json(), "features": {}}
    for step in (900, 1000, 99):
        save_content(tmp_path / step_name(step), {**held, "features": {"which": step}})
    assert read_checkpoint(tmp_path).recipe["which"] == 1000
    save_content(tmp_path / BEST, {**held, "features": {"which": "best"}})
    assert read_checkpoint(tmp_path).recipe["which"] == "best"


# Files that are no checkpoint


def test_a_checkpoint_with_one_byte_changed_is_refused_or_unharmed(copy: Path):
    content, draw = copy.read_bytes(), random.Random(0)
    with zipfile.ZipFile(copy) as archive:
        whole = {name: archive.read(name) for name in archive.namelist()}
    refused = 0
    for _ in range(40):
        place = draw.randrange(len(content))
        copy.write_bytes(content[:place] + bytes([content[place] ^ draw.randrange(1, 256)]) + content[place + 1 :])
        try:
            read_checkpoint(copy)
        except InputError:
            refused += 1
        else:
            with zipfile.ZipFile(copy) as archive:
                assert {name: archive.read(name) for name in archive.namelist()} == whole
    assert refused > 20


def _archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


NOT_WHOLE, KEPT = "not a whole checkpoint file", (0, 0.7, 0.9999)
NOT_OURS = f"not a checkpoint of this toolkit, expected format {FORMAT}"
NOT_CHECKPOINTS: list[tuple[Callable[[Path], object], str]] = [
    *((lambda path, keep=keep: os.truncate(path, int(keep * path.stat().st_size)), NOT_WHOLE) for keep in KEPT),
    (lambda path: torch.save({"model_state": {"w": torch.zeros(2)}, "args": {"batch_size": 64}}, path), NOT_OURS),
    (lambda path: torch.save(None, path), NOT_OURS),
    (_archive, NOT_WHOLE),
    (lambda path: path.write_bytes(pickle.dumps({"format": FORMAT, "a": print})), "a pickle protocol above 3"),
    *((lambda path, text=text: path.write_bytes(text), NOT_WHOLE) for text in (b"<!DOCTYPE html>", b"none", bytes(99))),
    (Path.unlink, "no such file"),
    (
        lambda path: (path.unlink(), path.mkdir()),
        "holds no checkpoint, expected best.pt, step-N.pt or",
    ),
]


@pytest.mark.parametrize(("damage", "problem"), NOT_CHECKPOINTS)
def test_a_file_that_is_not_a_checkpoint_is_refused(copy: Path, damage: Callable[[Path], object], problem: str):
    damage(copy)
    assert problem in refusal(copy)


def test_a_checkpoint_of_pickle_protocol_3_loads_without_a_warning(copy: Path):
    held = content(copy)
    torch.save(held, copy, pickle_protocol=3)
    with warnings.catch_warnings(action="error"):
        assert read_checkpoint(copy).state.step == held["step"]


# Checkpoints whose parts are not what they should be


NOT_OF_THESE = "optimizer.state.0 is not of a parameter of these networks"
PARTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (
        lambda held: held["networks"].pop("generator"),
        "holds no network, expected a checkpoint with a program generator",
    ),
    (lambda held: held.update(networks=[1]), "networks is [1], expected networks by name"),
    (
        lambda held: held["networks"]["generator"].update(weights=None),
        "networks.generator.weights is None",
    ),
    (
        lambda held: held["networks"]["generator"].pop("kwargs"),
        "has no networks.generator.kwargs",
    ),
    (lambda held: held.pop("vocab"), "has no vocab, expected a vocabulary"),
    (lambda held: held.update(features=["a"]), "features is ['a'], expected settings by name"),
    *(
        (lambda held, step=step: held.update(step=step), f"step is {step!r}, expected a number of steps")
        for step in (math.nan, -5, "x", True)
    ),
    (lambda held: held["optimizer"].update(state=None), "optimizer is {"),
    (lambda held: held["optimizer"]["state"][0].pop("step"), "has no optimizer.state.0.step, expected a tensor"),
    (lambda held: held["optimizer"]["state"][0].update(exp_avg_sq=torch.zeros(9)), NOT_OF_THESE),
    (lambda held: held["optimizer"]["state"][0].update(exp_avg=torch.zeros(9)), NOT_OF_THESE),
    (lambda held: held["optimizer"].update(state={99: held["optimizer"]["state"][0]}), NOT_OF_THESE.replace("0", "99")),
]


@pytest.mark.parametrize(("change", "problem"), PARTS)
def test_a_run_does_not_resume_from_a_checkpoint_with_a_part_changed(
    data: Path, copy: Path, change: Callable[[dict[str, Any]], object], problem: str
):
    change(held := content(copy))
    save_content(path := copy.with_name("step-4.pt"), held)
    copy.unlink()
    config = replace(tiny_config(data, "pg"), iterations=9)
    assert problem in refusal(path, partial(train, config, path.parent, resume=True))
