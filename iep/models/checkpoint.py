"""A run's state <-> one file, written whole or not at all and loaded without executing anything in it.

A checkpoint holds plain containers and tensors only: weights and constructor arguments of its networks, optimiser,
step, resolved config, which question families the config's file lists, vocabulary, and how the features that it was
trained on were made of images. Random states are none of it: a step's chance is a function of the seed and its number.
A run keeps its newest checkpoints by number, and the best. Building networks from one is `build.py`. Checkpoints of
the original toolkit load as well, to start from or to evaluate.
"""

import io
import pickle
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from iep.errors import InputError
from iep.models.original import from_original, is_original, safe_globals
from iep.runtime.files import write_bytes

FORMAT = "iep-checkpoint-1"
PARTS_OF_A_MODEL = {"networks": dict, "vocab": dict}
PARTS_OF_A_RUN = PARTS_OF_A_MODEL | {
    "model": str,
    "step": int,
    "best": float,
    "validation_due": bool,
    "task": dict,
    "optimizer": dict,
    "config": dict,
}
BEST = "best.pt"
_BEFORE_ARCHIVES = {
    pickle.dumps(0x1950A86A20F9469CFC6C, protocol): protocol for protocol in range(pickle.HIGHEST_PROTOCOL, -1, -1)
}
"""How torch's files began until version 1.6, which made them zip archives, and with which pickle protocol."""
_SAFE_PROTOCOLS = (2, 3)
"""Those that torch loads without executing anything; it writes the first unless told otherwise."""
_ARCHIVE = b"PK\x03\x04"
_NUMBERED = re.compile(r"step-(\d+)\.pt")


@dataclass(frozen=True)
class Saved:
    """A checkpoint of a run and where it was found."""

    path: Path
    content: dict[str, Any]


def step_name(step: int) -> str:
    """The file name of the checkpoint after `step` steps."""
    return f"step-{step}.pt"


def step_checkpoints(out: Path) -> list[Path]:
    """The numbered checkpoints in the run directory `out`, newest first."""
    found = [(int(match[1]), path) for path in out.glob("step-*.pt") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def checkpoints(out: Path) -> list[Path]:
    """What a run in `out` can go on from, newest first: its numbered checkpoints, after them the best one."""
    return step_checkpoints(out) + [path for path in [out / BEST] if path.exists()]


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write `content` (plain containers and tensors) to `path`, whole or not at all.

    Raises:
        OSError: the disk is full; what stood at `path` still stands.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT, **content}, buffer)
    write_bytes(path, buffer.getvalue())


def load_checkpoint(path: Path, parts: Mapping[str, type] | None = None) -> dict[str, Any]:
    """The content of a checkpoint, tensors on the CPU. A run directory stands for its best checkpoint, or else its
    newest. Of a checkpoint of the original toolkit, what `iep.models.original.from_original` makes of it.

    `parts` are the keys that it must have and the kinds of their values.

    Raises:
        InputError: the file is missing, truncated, no checkpoint, or holds more than plain data.
    """
    path = Path(path)
    if path.is_dir():
        return _load_best(path, parts)
    if not path.is_file():
        raise InputError(f"{path}: no such file, expected a checkpoint or a run directory")
    content = _read(path)
    if is_original(content):
        if "step" in (parts or {}):
            raise InputError(f"{path}: of the original toolkit; a run can start from it, but not go on from it")
        return from_original(content, path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a checkpoint of this toolkit, expected format {FORMAT}")
    for part, kind in (parts or {}).items():
        if not isinstance(content.get(part), kind):
            raise InputError(f"{path}: a checkpoint without {part!r}, or with one of another kind than {kind.__name__}")
    return content


def _read(path: Path) -> Any:
    """What a torch file holds, whoever wrote it; nothing in it is executed."""
    with open(path, "rb") as file:
        start = file.read(max(map(len, _BEFORE_ARCHIVES)))
    protocol = next((number for begins, number in _BEFORE_ARCHIVES.items() if start.startswith(begins)), None)
    if protocol is None:
        _check_archive(path)
        protocol = _protocol_in_archive(path)
    if protocol not in _SAFE_PROTOCOLS:
        what = (
            f"pickle protocol {protocol or '0 or 1'}, which torch does not load safely, expected {_SAFE_PROTOCOLS[0]}"
        )
        how = "if you trust the file, torch.save anew what torch.load(FILE, 'cpu', weights_only=False) gives"
        raise InputError(f"{path}: written with {what}; {how}")
    try:
        with torch.serialization.safe_globals(safe_globals()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL \S+", str(error))
        what = f" ({found[0]})" if found else ""
        raise InputError(
            f"{path}: holds more than plain tensors; not loaded, for that could execute code{what}"
        ) from None
    except Exception as error:
        # A file that is damaged outside of what checksums cover can make torch fail in any way.
        raise InputError(f"{path}: not a checkpoint file ({_first_line(error)})") from None


def _protocol_in_archive(path: Path) -> int:
    """The pickle protocol of a torch file that is an archive; 0 stands for 1 too."""
    with zipfile.ZipFile(path) as archive:
        pickled = next((name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"), None)
        if pickled is None:
            raise InputError(f"{path}: not a checkpoint file, it is an archive without data.pkl")
        with archive.open(pickled) as part:
            start = part.read(2)
    return start[1] if start[:1] == pickle.PROTO and len(start) > 1 else 0


def _load_best(out: Path, parts: Mapping[str, type] | None) -> dict[str, Any]:
    """The best checkpoint of the run in `out`, or else its newest."""
    found = [path for path in (out / BEST, *step_checkpoints(out)) if path.exists()]
    if not found:
        raise InputError(f"{out}: holds no checkpoint, expected {BEST} or {step_name(0).replace('0', 'N')}")
    try:
        return load_checkpoint(found[0], parts)
    except InputError as error:
        good = next((path for path in found[1:] if _is_good(path, parts)), None)
        raise InputError(f"{error}{'' if good is None else f'; {good} is good'}") from None


def _is_good(path: Path, parts: Mapping[str, type] | None) -> bool:
    with suppress(InputError):
        return bool(load_checkpoint(path, parts))
    return False


def load_newest(out: Path) -> Saved | None:
    """The newest checkpoint of the run in `out`, to go on from; None when it has none.

    Raises:
        InputError: the newest is damaged, or no checkpoint of a run. Names the newest one that is good.
    """
    problem, bad = None, []
    for path in checkpoints(out):
        try:
            content = load_checkpoint(path, PARTS_OF_A_RUN)
        except InputError as error:
            problem, bad = problem or error, [*bad, path.name]
            continue
        if problem is None:
            _check_best(out)
            return Saved(path, content)
        raise InputError(
            f"{problem}; the newest good checkpoint is {path.name}, of iteration {content['step']}: "
            f"to go on from it, remove {' and '.join(bad)}"
        )
    if problem is not None:
        raise InputError(f"{problem}; {out} has no good checkpoint") from None
    return None


def _check_best(out: Path) -> None:
    """See that the best checkpoint, if there is one, is what was written: nothing may ever replace it."""
    if (out / BEST).exists():
        try:
            _check_archive(out / BEST)
        except InputError as error:
            raise InputError(f"{error}; without it, the next validation's checkpoint becomes the best") from None


def remove_old(out: Path, keep: int) -> None:
    """Remove the numbered checkpoints of the run in `out` but for the newest `keep`."""
    for path in step_checkpoints(out)[keep:]:
        path.unlink(missing_ok=True)


def _check_archive(path: Path) -> None:
    """Compare the parts of a checkpoint, which is a zip archive, with their checksums before anything is unpickled.

    Raises:
        InputError: the file is no archive, or a part differs from what was written.
    """
    with open(path, "rb") as file:
        start = file.read(len(_ARCHIVE))
    if not start:
        raise InputError(f"{path}: not a whole checkpoint file, it is empty")
    if not _ARCHIVE.startswith(start) and not zipfile.is_zipfile(path):
        raise InputError(f"{path}: not a checkpoint file, it is none that torch writes")
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
