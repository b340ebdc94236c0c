"""A run's state <-> one file, written whole or not at all and loaded without executing anything in it.

A checkpoint holds plain containers and tensors only: weights and constructor arguments of its networks, optimiser,
step, resolved config, vocabulary, and how the features that it was trained on were made of images. It holds no random
states, because the random numbers of a step are a function of the seed and the step. A run keeps its newest checkpoints
by number, and the best. `build.py` builds networks from one. Checkpoints of the original toolkit load as well, to start
from or to evaluate.
"""

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iep.errors import InputError
from iep.models.original import from_original, is_original, safe_globals
from iep.models.weights import SAFETENSORS, WEIGHTS, find_networks, read_weights
from iep.runtime.files import write_bytes
from iep.runtime.reading import reading

FORMAT = "iep-checkpoint-1"
NETWORK = {"kwargs": {str: object}, "weights": {str: Tensor}}
PARTS_OF_A_MODEL = {"networks": {str: NETWORK}, "vocab": {str: object}, "features": {str: str | int}}
PARTS_OF_A_RUN = PARTS_OF_A_MODEL | {
    "step": int,
    "best": float,
    "best_step": int | None,
    "validation_due": bool,
    "task": {str: float},
    "optimizer": {"state": {int: {str: Tensor}}, "param_groups": list},
    "config": {str: object},
}
"""The parts of a checkpoint and their types, for `check_parts`."""
BEST = "best.pt"
_NUMBERED = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run and where it was found."""

    path: Path
    content: dict[str, Any]


def step_name(step: int) -> str:
    """Return the file name of the checkpoint after `step` steps."""
    return f"step-{step}.pt"


def step_checkpoints(out: Path) -> list[Path]:
    """Return the numbered checkpoints in the run directory `out`, newest first."""
    found = [(int(match[1]), path) for path in out.glob("step-*.pt") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints(out: Path) -> list[Path]:
    """Return what a run in `out` can resume from, newest first: its numbered checkpoints, then the best one."""
    return step_checkpoints(out) + [path for path in [out / BEST] if path.exists()]


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (plain containers and tensors) to `path`, whole or not at all.

    Raises:
        OSError: the file cannot be written, as on a full disk; the previous file at `path` is unchanged.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    write_bytes(path, buffer.getvalue())


def load_checkpoint(path: Path, parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint, with tensors on the CPU.

    For a run directory, this is its best checkpoint, or otherwise its newest; `default` names the networks that come
    with the package. A checkpoint of the original toolkit is converted by `iep.models.original.from_original`. A
    `.safetensors` file holds the networks alone.

    Args:
        parts: the parts that the checkpoint must have, as `check_parts` takes them.

    Raises:
        InputError: the file is missing, truncated or not a checkpoint, holds more than plain data, or a part is
            missing.
    """
    path = Path(path)
    if path.is_dir():
        found = [each for each in (path / BEST, *step_checkpoints(path), path / WEIGHTS) if each.exists()]
        if not found:
            names = f"{BEST}, {step_name(0).replace('0', 'N')} or {WEIGHTS}"
            raise InputError(f"{path}: holds no checkpoint, expected {names}")
        return load_checkpoint(found[0], parts)
    with reading(path, "a whole checkpoint file"):
        file = find_networks(path)
        if file.suffix == SAFETENSORS:
            content = read_weights(file)
            check_parts(content, parts or {})
            return content
        content = _read(path)
        if is_original(content):
            if "step" in (parts or {}):
                raise InputError("of the original toolkit; a run can start from it, but not resume from it")
            return from_original(content)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InputError(f"not a checkpoint of this toolkit, expected format {FORMAT}")
        content["features"] = content.get("features") or {}  # of earlier versions, which did not record them
        check_parts(content, parts or {})
    return content


def check_parts(value: Any, parts: Any, name: str = "") -> None:
    """Check that plain data has the expected parts and types.

    Args:
        parts: a type; or a mapping of keys to the `parts` of their values, where a type in place of a key stands for
            any number of keys of that type.
        name: the dotted name of the value.

    Raises:
        InputError: a part is missing or of another type.
    """
    kind = dict if isinstance(parts, Mapping) else parts
    if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise InputError(f"{name or 'the checkpoint'} is {found}, expected {getattr(kind, '__name__', kind)}")
    for key, part in parts.items() if kind is dict else ():
        names = list(value) if isinstance(key, type) else [key]
        for each in names:
            if isinstance(key, type):
                check_parts(each, key, f"the key {each!r} of {name}")
            check_parts(value.get(each), part, f"{name}.{each}".lstrip("."))


def check_optimizer(held: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
    """Check that a saved state of Adam belongs to the parameters, before torch loads it.

    The fused optimiser does not check shapes itself, and would read and write beyond its memory.

    Raises:
        InputError: it is of a parameter that there is not, or a tensor is missing, unknown, or of another shape or
            type.
    """
    for number, tensors in held["state"].items():
        if not 0 <= number < len(parameters):
            raise InputError(f"optimizer.state.{number} is of a parameter that these networks do not have")
        like = parameters[number]
        expected = {"step": torch.zeros(()), "exp_avg": like, "exp_avg_sq": like}
        found, wanted = (
            {name: (tuple(each.shape), each.dtype, each.layout) for name, each in state.items()}
            for state in (tensors, expected)
        )
        if found != wanted:
            raise InputError(f"optimizer.state.{number} holds {found}, expected {wanted}")


def _read(path: Path) -> Any:
    """Return the content of a torch file without executing anything in it."""
    if zipfile.is_zipfile(path):  # files of torch before 1.6 are not
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:  # torch does not compare checksums
                raise zipfile.BadZipFile(f"{damaged} is damaged")
    try:
        with torch.serialization.safe_globals(safe_globals()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that loads all the same
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if (found := re.search(r"GLOBAL \S+", str(error))) is None:
            what = "not a whole checkpoint file, or written with a pickle protocol above 3"
        else:
            what = f"holds more than plain tensors; loading it could execute code ({found[0]})"
        raise InputError(what) from None


def load_newest(out: Path) -> Saved | None:
    """Return the newest checkpoint of the run in `out`, to resume from, or None if there is no checkpoint.

    Raises:
        InputError: it is damaged or not the checkpoint of a run (names the one before it, if any).
    """
    if not (found := checkpoints(out)):
        return None
    try:
        return Saved(found[0], load_checkpoint(found[0], PARTS_OF_A_RUN))
    except InputError as error:
        advice = f"; remove it to resume from {found[1].name}" if len(found) > 1 else ""
        raise InputError(f"{error}{advice}") from None


def remove_old(out: Path, keep: int) -> None:
    """Remove the numbered checkpoints of the run in `out` except the newest `keep`."""
    for path in step_checkpoints(out)[keep:]:
        path.unlink(missing_ok=True)
