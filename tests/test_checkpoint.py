"""Checkpoints: what one holds, that loading executes nothing, what is said of one that is damaged or does not fit."""

import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_data import VOCAB, newest, tiny_config
from torch import Tensor

from iep.config import PLACES, settings_of
from iep.errors import InputError
from iep.models.build import load_network
from iep.models.checkpoint import BEST, FORMAT, load_checkpoint, save_checkpoint, step_name
from iep.training.run_training import train
from iep.vocab import Vocab

CPU = torch.device("cpu")


OTHERS = (None, True, -1, 0.5, "x", [], {}, {"a": 1}, [[1]], torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64))
Place = tuple[Any, ...]


def refusal(path: Path, use: Callable[[], object] | None = None) -> str:
    """Return how `use`, or loading, refuses the checkpoint at `path`: one line that begins with its name; nothing where
    it does not."""
    try:
        load_checkpoint(path) if use is None else use()
    except InputError as error:
        message = str(error)
    else:
        return ""
    assert message.startswith(str(path)), message
    assert "\n" not in message
    return message


def places(value: Any, place: Place = ()) -> Iterator[Place]:
    """Yield the keys that lead to every part of nested containers; of many equal parts, a few."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items)[: 3 if place and place[-1] in ("weights", "state") else None]:
        if place[:1] != ("vocab",):
            yield (*place, key)
            yield from places(item, (*place, key))


def mutated(content: dict[str, Any], place: Place, random: random.Random) -> dict[str, Any]:
    """Return a copy in which the part at a place is missing, or of another type or shape."""
    content = deepcopy(content)
    *path, last = place
    holder: Any = content
    for key in path:
        holder = holder[key]
    value = holder[last]
    changes = [lambda: holder.pop(last), *(lambda other=other: holder.__setitem__(last, other) for other in OTHERS)]
    if isinstance(value, Tensor):
        for other in (value[None], value.flatten()[:1], value.double(), value.to_sparse(), value.int()):
            changes.append(lambda other=other: holder.__setitem__(last, other))
    random.choice(changes)()
    return content


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


NOT_WHOLE, KEPT = "not a whole checkpoint file", (0, 0.7, 0.9999)
NOT_OURS = f"not a checkpoint of this toolkit, expected format {FORMAT}"
NOT_CHECKPOINTS: list[tuple[Callable[[Path], object], str]] = [
    *((lambda path, keep=keep: os.truncate(path, int(keep * path.stat().st_size)), NOT_WHOLE) for keep in KEPT),
    (lambda path: torch.save({"model_state": {"w": torch.zeros(2)}, "args": {"batch_size": 64}}, path), NOT_OURS),
    (lambda path: torch.save(None, path), NOT_OURS),
    (_archive, NOT_WHOLE),
    (lambda path: path.write_bytes(pickle.dumps({"format": FORMAT, "a": print})), "a pickle protocol above 3"),
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


# Checkpoints whose parts are not what they should be


def test_a_checkpoint_with_a_part_changed_is_resumed_or_refused_by_its_name(data, parts: list[str], tmp_path: Path):
    config = tiny_config(data, "joint", *parts, "iterations=1", "num_val_samples=1")
    train(config, tmp_path / "whole", resume=False)
    path, draw = newest(tmp_path / "whole"), random.Random(0)
    content, refused = load_checkpoint(path), 0
    longer = replace(config, iterations=2)
    for place in draw.sample(found := list(places(content)), min(len(found), 20)):
        out = tmp_path / "run"
        save_checkpoint(out / path.name, mutated(content, place, draw))
        refused += bool(refusal(out / path.name, partial(train, longer, out, resume=True)))
        shutil.rmtree(out)
    assert refused > 5


def test_a_network_with_a_part_changed_is_loaded_or_refused_by_its_name(runs: dict[str, Path], tmp_path: Path):
    content, draw, refused = load_checkpoint(newest(runs["ee"])), random.Random(1), 0
    content = {part: content[part] for part in ("networks", "vocab")} | {"features": {"patch_size": 8}}
    for place in places(content):
        save_checkpoint(tmp_path / "c.pt", mutated(content, place, draw))
        refused += bool(refusal(path := tmp_path / "c.pt", partial(load_network, path, "engine", VOCAB, CPU)))
    assert refused > 20
