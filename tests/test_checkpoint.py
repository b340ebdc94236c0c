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
from checkpoint_cases import is_refused, mutated, places, refusal
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


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda content, keep=keep: content[: int(keep * len(content))] for keep in (0, 0.01, 0.7, 0.9999)),
        lambda content: random.Random(0).randbytes(1000),
        lambda content: b"",
    ],
)
def test_what_is_left_of_a_checkpoint_is_refused(copy: Path, damage: Callable[[bytes], bytes]):
    copy.write_bytes(damage(copy.read_bytes()))
    assert "not a whole checkpoint file" in refusal(copy)


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


@pytest.mark.parametrize(
    "content",
    [{"model_state": {"w": torch.zeros(2)}, "args": {"batch_size": 64}}, {"format": "iep-checkpoint-0"}, [1], None],
)
def test_what_another_toolkit_saved_is_refused(tmp_path: Path, content: object):
    torch.save(content, tmp_path / "c.pt")
    assert f"not a checkpoint of this toolkit, expected format {FORMAT}" in refusal(tmp_path / "c.pt")


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "of PyTorch before 1.6"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_another_pickle_protocol_is_loaded_where_that_is_safe_and_else_named_with_what_to_do(
    copy: Path, recwarn: pytest.WarningsRecorder, archive: bool, protocol: int
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
    assert not recwarn.list


def test_what_holds_no_checkpoint_is_named(tmp_path: Path):
    assert "no such file" in refusal(tmp_path / "none.pt")
    assert "holds no checkpoint, expected best.pt or step-N.pt" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")
    assert "is not a regular file" in refusal(tmp_path / "pipe.pt")
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "it is an archive without data.pkl" in refusal(tmp_path / "c.pt")
    (tmp_path / "p.pt").write_bytes(pickle.dumps({"format": FORMAT, "a": print}))
    assert refusal(tmp_path / "p.pt").startswith(f"{tmp_path / 'p.pt'}: not ")


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
        refused += is_refused(out / path.name, partial(train, longer, out, resume=True))
        shutil.rmtree(out)
    assert refused > 20


def test_a_network_with_a_part_changed_is_loaded_or_refused_by_its_name(runs: dict[str, Path], tmp_path: Path):
    content, draw, refused = load_checkpoint(newest(runs["ee"])), random.Random(1), 0
    content = {part: content[part] for part in ("networks", "vocab")} | {"features": {"patch_size": 8}}
    for place in [place for place in places(content) for _ in range(2)]:
        save_checkpoint(tmp_path / "c.pt", mutated(content, place, draw))
        refused += is_refused(path := tmp_path / "c.pt", partial(load_network, path, "engine", VOCAB, CPU))
    assert refused > 40
