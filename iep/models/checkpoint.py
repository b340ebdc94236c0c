"""A run's state <-> one file, written whole or not at all and loaded without executing anything in it.

A checkpoint holds plain containers and tensors only: weights and constructor arguments of its networks, optimiser,
step, resolved config, the question families that the config's file lists, vocabulary, and how the features that it was
trained on were made of images. It holds no random states, because the random numbers of a step are a function of the
seed and the step. A run keeps its newest checkpoints by number, and the best. `build.py` builds networks from one.
Checkpoints of the original toolkit load as well, to start from or to evaluate.
"""

import io
import pickle
import re
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
_MAGIC = 0x1950A86A20F9469CFC6C
"""The number that torch pickled at the beginning of a file until version 1.6, which made its files zip archives."""
_SAFE_PROTOCOLS = (2, 3)
"""The pickle protocols that torch loads without executing anything; it writes the first by default."""
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
    with the package. A checkpoint of the original toolkit is
    converted by `iep.models.original.from_original`. A `.safetensors` file holds the networks alone.

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
        return _load_first(found, parts, "to use it, name {good}").content
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
        InputError: it is of another number of parameters, or a tensor is missing, unknown, or of another shape or type.
    """

    def describe(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
        return {name: (tuple(each.shape), each.dtype, each.layout) for name, each in tensors.items()}

    groups = held["param_groups"]
    numbers = groups[0].get("params") if len(groups) == 1 and isinstance(groups[0], dict) else None
    if numbers != list(range(len(parameters))) or not held["state"].keys() <= set(numbers):
        raise InputError(f"optimizer is not the state of {len(parameters)} parameters, as these networks have")
    for number, tensors in held["state"].items():
        like = parameters[number]
        expected = describe({"step": torch.zeros(()), "exp_avg": like, "exp_avg_sq": like})
        if describe(tensors) != expected:
            raise InputError(f"optimizer.state.{number} holds {describe(tensors)}, expected {expected}")


def _read(path: Path) -> Any:
    """Return the content of a torch file without executing anything in it."""
    start = _start_of_pickle(path)
    if (protocol := start[1] if start.startswith(pickle.PROTO) else 0) not in _SAFE_PROTOCOLS:
        raise InputError(
            f"written with pickle protocol {protocol or '0 or 1'}, which torch does not load safely, expected "
            f"{_SAFE_PROTOCOLS[0]}; if you trust the file, torch.save anew what "
            "torch.load(FILE, 'cpu', weights_only=False) gives"
        )
    try:
        with torch.serialization.safe_globals(safe_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL \S+", str(error))
        what = f" ({found[0]})" if found else ""
        raise InputError(f"holds more than plain tensors; loading it could execute code{what}") from None


def _start_of_pickle(path: Path) -> bytes:
    """Return the first bytes of the pickle in a torch file, after checking all parts of a zip archive.

    Raises:
        BadZipFile: the file is neither an archive nor one of torch before 1.6, or a part differs from what was written.
    """
    with open(path, "rb") as file:
        start = file.read(32)
    if _MAGIC.to_bytes(10, "little") in start or str(_MAGIC).encode() in start:
        return start
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if not pickles:
            raise zipfile.BadZipFile("it is an archive without data.pkl")
        return archive.read(pickles[0])[:2]


def _load_first(paths: Sequence[Path], parts: Mapping[str, Any] | None, advice: str) -> Saved:
    """Return the first of a run's checkpoints `paths`.

    Raises:
        InputError: it is damaged or a part is missing (names the next checkpoint that is good, with the `advice`).
    """
    problem, bad = None, []
    for path in paths:
        try:
            saved = Saved(path, load_checkpoint(path, parts))
        except InputError as error:
            problem, bad = problem or error, [*bad, path.name]
            continue
        if problem is None:
            return saved
        good = f"the newest good checkpoint is {path.name}, of iteration {saved.content.get('step')}"
        raise InputError(f"{problem}; {good}: {advice.format(good=path, bad=' and '.join(bad))}")
    raise InputError(f"{problem}; {paths[0].parent} has no good checkpoint")


def load_newest(out: Path) -> Saved | None:
    """Return the newest checkpoint of the run in `out`, to resume from, or None if there is no checkpoint.

    Raises:
        InputError: it is damaged or not the checkpoint of a run (names the newest one that is good).
    """
    found = checkpoints(out)
    return _load_first(found, PARTS_OF_A_RUN, "to resume from it, remove {bad}") if found else None


def check_best(newest: Saved) -> None:
    """Check that the best checkpoint beside the newest one, if any, belongs to the same run.

    A run that resumes may never replace its best checkpoint. The best checkpoint is saved before the numbered one of
    its iteration, so that it can be ahead of the newest numbered one if the run was killed.

    Raises:
        InputError: the best checkpoint is damaged, its networks have other weights, or it is not the one that the
            newest checkpoint records.
    """
    path = newest.path.with_name(BEST)
    if path == newest.path or not path.exists():
        return
    without = "without it, the next validation's checkpoint becomes the best"
    try:
        held, run = load_checkpoint(path, PARTS_OF_A_RUN), newest.content
    except InputError as error:
        raise InputError(f"{error}; {without}") from None
    other = f"{path}: belongs to another run than {newest.path.name}"
    if _weight_shapes(held) != _weight_shapes(run):
        raise InputError(f"{other}: it has other networks; {without}")
    is_recorded = run.get("best_step") is None or (held["step"], held["best"]) == (run["best_step"], run["best"])
    if held["step"] < run["step"] and not is_recorded:
        found = f"it is of iteration {held['step']} and accuracy {held['best']:.4f}"
        recorded = f"the best one of this run of iteration {run['best_step']} and accuracy {run['best']:.4f}"
        raise InputError(f"{other}: {found}, {recorded}; {without}")


def _weight_shapes(content: Mapping[str, Any]) -> dict[str, dict[str, torch.Size]]:
    networks = content["networks"].items()
    return {name: {key: value.shape for key, value in packed["weights"].items()} for name, packed in networks}


def remove_old(out: Path, keep: int) -> None:
    """Remove the numbered checkpoints of the run in `out` except the newest `keep`."""
    for path in step_checkpoints(out)[keep:]:
        path.unlink(missing_ok=True)
