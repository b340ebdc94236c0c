"""A run's state <-> one file, written whole or not at all and loaded without executing anything in it.

A checkpoint holds plain containers and tensors only: weights and constructor arguments of its networks, optimiser,
random states, step, resolved config, vocabulary. Building networks from one is `networks.py`.
"""

import io
import pickle
import random
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from iep.errors import InputError
from iep.files import write_bytes

FORMAT = "iep-checkpoint-1"
PARTS_OF_A_MODEL = {"networks": dict, "vocab": dict}
PARTS_OF_A_RUN = PARTS_OF_A_MODEL | {
    "model": str,
    "step": int,
    "best": float,
    "task": dict,
    "optimizer": dict,
    "random": dict,
    "config": dict,
}
LAST, BEST = "last.pt", "best.pt"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (plain containers and tensors) to `path`, whole or not at all.

    Raises:
        OSError: the disk is full; what stood at `path` still stands.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    write_bytes(path, buffer.getvalue())


def load_checkpoint(path: Path, parts: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU. A run directory stands for its best checkpoint.

    `parts` are the keys that it must have and the kinds of their values.

    Raises:
        InputError: the file is missing, truncated, not a checkpoint of this toolkit, or holds more than plain data.
    """
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in (BEST, LAST) if (path / name).is_file()]
        if not found:
            raise InputError(f"{path}: holds no checkpoint, expected {BEST} or {LAST}")
        path = found[0]
    if not path.is_file():
        raise InputError(f"{path}: no such file, expected a checkpoint or a run directory")
    _check_archive(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(f"{path}: holds more than plain tensors; not loaded ({_first_line(error)})") from None
    except Exception as error:
        # An archive that is damaged outside of what its checksums cover can make torch fail in any way.
        raise InputError(f"{path}: not a checkpoint file ({_first_line(error)})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a checkpoint of this toolkit, expected format {FORMAT}")
    for part, kind in (parts or {}).items():
        if not isinstance(content.get(part), kind):
            raise InputError(f"{path}: a checkpoint without {part!r}, or with one of another kind than {kind.__name__}")
    return content


def _check_archive(path: Path) -> None:
    """Compare the parts of a checkpoint, which is a zip archive, with their checksums before anything is unpickled.

    Raises:
        InputError: the file is no archive, or a part differs from what was written.
    """
    unreadable = (zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, struct.error, zlib.error)
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except unreadable as error:
        raise InputError(f"{path}: not a whole checkpoint file ({_first_line(error)})") from None
    if damaged is not None:
        raise InputError(f"{path}: not a whole checkpoint file ({damaged} is damaged)")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def random_states() -> dict[str, Any]:
    """The states of every random generator that training draws from, as plain data."""
    version, keys, gauss = random.getstate()
    kind, words, position, has_gauss, cached = np.random.get_state()
    states = {
        "python": [version, list(keys), gauss],
        "numpy": [kind, words.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `random_states` gave."""
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(states["torch"])
    # The machine that a run goes on with may have fewer devices than the one before, or more.
    for device, state in zip(range(torch.cuda.device_count()), states.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(state, device)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch with 0 to 2 ** 32 - 1."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
