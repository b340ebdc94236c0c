"""Jobs that are killed at random moments and started again until they end, compared with one that was never killed.

After every kill, a file under a final name must be whole: a checkpoint that loads, or bytes of the finished job. At the
end there must be the same files, and no others. `scripts/soak.py` does the same a hundred times.
"""

import hashlib
import json
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from features_cases import SMALL
from processes import Ended, run
from tiny_data import content

from iep.errors import InputError
from iep.models.checkpoint import BEST, checkpoints, read_checkpoint, step_checkpoints
from iep.runtime.records import METRICS

MEASURED = ("questions_per_second", "peak_memory_gb")
KILLED = (-signal.SIGKILL, 143, 130, -signal.SIGTERM, -signal.SIGINT)
"""Exit codes of what a signal ended; the last two, 143 and 130 to a shell, once the command is over."""


@dataclass(frozen=True)
class Job:
    """A command to be killed.

    Args:
        name: of the job.
        command: `train` for iep-train.
        arguments: of the command, by its output directory; the same to start and to resume.
        parts: returns comparable values of the files of a finished job, by name.
        standing: returns those of a killed job; raises InputError if a file is not whole.
    """

    name: str
    command: str
    arguments: Callable[[Path], list[Any]]
    parts: Callable[[Path], dict[str, Any]]
    standing: Callable[[Path], dict[str, Any]]


@dataclass
class Counts:
    """The number of times that a job was killed, and the differences found afterwards."""

    kills: int = 0
    writing: int = 0
    """Kills while a file was written that is then renamed into place."""
    ends: int = 0
    """Times that the job came to its end and was compared."""
    mismatches: list[str] = field(default_factory=list)


def kill_and_resume(job: Job, root: Path, kills: int, seed: int, signals: Sequence[int] = (signal.SIGKILL,)) -> Counts:
    """Kill `job` so many times, at moments drawn evenly from the whole job's length; compare it whenever it ends."""
    random, counts, out = Random(seed), Counts(), root / "killed"
    whole = run(job.command, job.arguments(root / "whole"))
    assert whole.returncode == 0, whole.output
    expected, seconds = job.parts(root / "whole"), whole.seconds
    killed = True
    while not counts.mismatches and (counts.kills < kills or killed):
        # Once there were enough kills, the last job is left alone.
        after = [random.uniform(0, seconds)] if counts.kills < kills else []
        fresh = not out.exists()
        ended = run(job.command, job.arguments(out), after, random.choice(signals))
        killed = ended.signalled and ended.returncode in KILLED
        if killed:
            counts.kills += 1
            counts.writing += any(out.rglob(f".*.{ended.pid}.tmp"))
        else:
            counts.ends += 1
            seconds = min(seconds, ended.seconds) if fresh else seconds
        problem = _problem(job, out, ended, expected, killed)
        if problem:
            counts.mismatches.append(f"after {counts.kills} kills: {problem}")
        elif not killed:
            shutil.rmtree(out)
    return counts


def _problem(job: Job, out: Path, ended: Ended, expected: dict[str, Any], killed: bool) -> str | None:
    """Return what is wrong with what a process wrote and left, or None."""
    if ended.returncode > 0 and not (
        killed and ended.output.count("Stopped by") == 1 and "Traceback" not in ended.output
    ):
        return f"not one line: {ended.output}"
    try:
        found = job.standing(out) if killed else job.parts(out)
    except InputError as error:
        return str(error)
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if killed:
        names = [name for name in names if name in found]
    left = [] if killed else sorted(str(path.relative_to(out)) for path in out.rglob(".*"))
    return f"other than in the whole job: {names}, left over: {left}" if names or left else None


# What is compared


def run_parts(out: Path) -> dict[str, Any]:
    """Return digests of a run's last and best checkpoint, and its rows of metrics but for what is measured."""
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return {
        "last": digest(content(step_checkpoints(out)[0])),
        BEST: digest(content(out / BEST)),
        METRICS: [{name: value for name, value in row.items() if name not in MEASURED} for row in rows],
        "config.yaml": (out / "config.yaml").read_bytes(),
    }


def whole_checkpoints(out: Path) -> dict[str, Any]:
    """Return nothing to compare; raises InputError where a checkpoint is damaged."""
    for path in checkpoints(out):
        read_checkpoint(path)
    return {}


def file_bytes(out: Path) -> dict[str, Any]:
    """Return the digest of every file by its path, but for hidden ones."""
    paths = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(out)): _sha(path.read_bytes()) for path in paths}


def finished_bytes(out: Path) -> dict[str, Any]:
    """Return the digests of `file_bytes` without files that are still to be renamed."""
    return {name: value for name, value in file_bytes(out).items() if not name.endswith(".partial")}


def evaluation_parts(out: Path) -> dict[str, Any]:
    """Return predictions.jsonl and report.json but for what is measured."""
    parts = file_bytes(out)
    if "report.json" in parts:
        report = json.loads((out / "report.json").read_text())
        parts["report.json"] = {name: value for name, value in report.items() if name not in MEASURED}
    return parts


def digest(content: Any) -> str:
    """Return a digest of a checkpoint's content, to the last bit of every tensor."""
    if isinstance(content, torch.Tensor):
        return _sha(repr((content.dtype, content.shape)).encode() + content.contiguous().numpy().tobytes())
    if isinstance(content, dict):
        return _sha(repr([(key, digest(value)) for key, value in content.items()]).encode())
    if isinstance(content, (list, tuple)):
        return _sha(repr([digest(value) for value in content]).encode())
    return repr(content)


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# The jobs


def training(data: Path, *settings: str, name: str = "training") -> Job:
    """A run of iep-train with these settings."""

    def arguments(out: Path) -> list[Any]:
        return ["--resume", "--data", data, "--out", out, *settings]

    return Job(name, "train", arguments, run_parts, whole_checkpoints)


def synthesis(images: int) -> Job:
    """iep-synth, of so many training images and a few others."""
    sizes = ["--preset", "mini", "--train", images, "--val", 2, "--test", 1, "--width", 64, "--height", 48]

    return Job("synth", "synth", lambda out: [out, *sizes], file_bytes, file_bytes)


def preprocessing(clevr: Path) -> Job:
    """iep-preprocess of questions and features."""

    def arguments(out: Path) -> list[Any]:
        return [clevr, "--out", out, *SMALL, "--batch-size", 4, "--workers", 0]

    return Job("preprocessing", "preprocess", arguments, file_bytes, finished_bytes)


def checkpointing(data: Path, *settings: str) -> Job:
    """Training that saves after every step, checkpoints of some megabytes, so that kills meet the writing."""
    heavy = ("model=lstm", "iterations=10", "validate_every=1", "keep=1", "lstm.hidden_dim=300")
    return training(data, *settings, *heavy, name="checkpointing")


def evaluation(data: Path, run: Path) -> Job:
    """iep-eval --out of the engine in `run` on the training split."""

    def arguments(out: Path) -> list[Any]:
        return ["--ee", run, "--data", data, "--split", "train", "--batch-size", 4, "--device", "cpu", "--out", out]

    return Job("evaluation", "evaluate", arguments, evaluation_parts, evaluation_parts)
