"""Checkpoints: what one holds, that loading executes nothing, what is said of one that is damaged or does not fit."""

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from checkpoint_cases import mutated, places, refusal
from tiny_data import VOCAB, newest, tiny_config

from iep.config import PLACES, settings_of
from iep.errors import InputError
from iep.models.build import load_network
from iep.models.checkpoint import BEST, FORMAT, load_checkpoint, save_checkpoint, step_name
from iep.training.run_training import train
from iep.vocab import Vocab

CPU = torch.device("cpu")


@pytest.fixture
def copy(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A generator's checkpoint to damage."""
    return Path(shutil.copy(newest(runs["pg"]), tmp_path / "copy.pt"))


# What a checkpoint holds


@pytest.mark.parametrize("name", ["step-4.pt", BEST])
def test_a_checkpoint_holds_all_that_a_run_needs_to_go_on(runs: dict[str, Path], data: Path, name: str):
    held = load_checkpoint(runs["ee"] / name)
    assert held["model"] == "ee"
    assert held["step"] in (2, 4)
    settings = settings_of(tiny_config(data, "ee"))
    assert held["config"] == {key: settings[key] for key in settings if key not in PLACES}
    assert Vocab.from_json(held["vocab"], "held") == VOCAB
    assert set(held["networks"]) == {"engine"}
    assert held["optimizer"]["state"][0]["step"] == held["step"]
    assert not held["validation_due"]


def test_a_run_directory_stands_for_its_best_checkpoint_or_else_its_newest(tmp_path: Path):
    for step in (900, 1000, 99):
        save_checkpoint(tmp_path / step_name(step), {"which": step})
    assert load_checkpoint(tmp_path)["which"] == 1000
    save_checkpoint(tmp_path / BEST, {"which": "best"})
    assert load_checkpoint(tmp_path)["which"] == "best"


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
            load_checkpoint(copy)
        except InputError:
            refused += 1
        else:
            with zipfile.ZipFile(copy) as archive:
                assert {name: archive.read(name) for name in archive.namelist()} == whole
    assert refused > 20


def _archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


NOT_WHOLE, KEPT = "not a whole checkpoint file", (0, 0.01, 0.7, 0.9999)
NOT_OURS = f"not a checkpoint of this toolkit, expected format {FORMAT}"
NOT_CHECKPOINTS: list[tuple[Callable[[Path], object], str]] = [
    *((lambda path, keep=keep: os.truncate(path, int(keep * path.stat().st_size)), NOT_WHOLE) for keep in KEPT),
    (lambda path: path.write_bytes(random.Random(0).randbytes(1000)), NOT_WHOLE),
    (lambda path: torch.save({"model_state": {"w": torch.zeros(2)}, "args": {"batch_size": 64}}, path), NOT_OURS),
    (lambda path: torch.save({"format": "iep-checkpoint-0"}, path), NOT_OURS),
    (lambda path: torch.save(None, path), NOT_OURS),
    (_archive, "it is an archive without data.pkl"),
    (lambda path: path.write_bytes(pickle.dumps({"format": FORMAT, "a": print})), "not "),
    (Path.unlink, "no such file"),
    (
        lambda path: (path.unlink(), path.mkdir()),
        "holds no checkpoint, expected best.pt, step-N.pt or",
    ),
    (lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file"),
]


@pytest.mark.parametrize(("damage", "problem"), NOT_CHECKPOINTS)
def test_a_file_that_is_not_a_checkpoint_is_refused(copy: Path, damage: Callable[[Path], object], problem: str):
    damage(copy)
    assert problem in refusal(copy)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("archive", [True, False], ids=["archive", "of PyTorch before 1.6"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_another_pickle_protocol_is_loaded_where_that_is_safe_and_else_named_with_what_to_do(
    copy: Path, archive: bool, protocol: int
):
    held = load_checkpoint(copy)
    torch.save(held, copy, pickle_protocol=protocol, _use_new_zipfile_serialization=archive)
    if protocol in (2, 3):
        assert load_checkpoint(copy)["step"] == held["step"]
    else:
        message = refusal(copy)
        assert f"written with pickle protocol {protocol if protocol > 1 else '0 or 1'}, which torch does" in message
        assert (
            "if you trust the file, torch.save anew what torch.load(FILE, 'cpu', weights_only=False) gives" in message
        )
        if protocol > 0:  # of which torch itself makes nothing
            torch.save(torch.load(copy, "cpu", weights_only=False), copy)
            assert load_checkpoint(copy)["step"] == held["step"]


# Checkpoints whose parts are not what they should be


@pytest.mark.parametrize("model", ["ee", "joint"])
def test_a_checkpoint_with_a_part_changed_is_resumed_or_refused_by_its_name(
    data: Path, parts: list[str], tmp_path: Path, model: str
):
    config = tiny_config(data, model, *(parts if model == "joint" else []), "iterations=1", "num_val_samples=1")
    train(config, tmp_path / "whole", resume=False)
    path, draw = newest(tmp_path / "whole"), random.Random(0)
    content, refused = load_checkpoint(path), 0
    longer = replace(config, iterations=2)
    for place in draw.sample(found := list(places(content)), min(len(found), 40)):
        out = tmp_path / "run"
        save_checkpoint(out / path.name, mutated(content, place, draw))
        refused += bool(refusal(out / path.name, partial(train, longer, out, resume=True)))
        shutil.rmtree(out)
    assert refused > 20


def test_a_network_with_a_part_changed_is_loaded_or_refused_by_its_name(runs: dict[str, Path], tmp_path: Path):
    content, draw, refused = load_checkpoint(newest(runs["ee"])), random.Random(1), 0
    content = {part: content[part] for part in ("networks", "vocab")} | {"features": {"patch_size": 8}}
    for place in [place for place in places(content) for _ in range(2)]:
        save_checkpoint(tmp_path / "c.pt", mutated(content, place, draw))
        refused += bool(refusal(path := tmp_path / "c.pt", partial(load_network, path, "engine", VOCAB, CPU)))
    assert refused > 40
