"""Jobs that are killed at random moments and started again until they end; then compared with one that never was.

After every kill, what stands under a final name must be whole: a checkpoint that loads, or bytes of the finished job.
At the end there must be the same files, and nothing else. `scripts/soak.py` does the same a hundred times.
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
from fork_server import Ended, Server

from iep.errors import InputError
from iep.models.checkpoint import BEST, checkpoints, load_checkpoint, step_checkpoints
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
        arguments: of the command, by its output directory; the same to begin and to go on.
        parts: what the finished job must have left: comparable values by name.
        standing: the same for what stands after a kill; raises InputError where a file is not whole.
        begun: whether there is anything to go on from.
        setup: what the process calls first, see `fork_server.SETUPS`.
    """

    name: str
    command: str
    arguments: Callable[[Path], list[Any]]
    parts: Callable[[Path], dict[str, Any]]
    standing: Callable[[Path], dict[str, Any]]
    begun: Callable[[Path], bool]
    setup: str | None = None


@dataclass
class Counts:
    """What became of a job's kills."""

    job: str
    kills: int = 0
    writing: int = 0
    """while a file was written that is then renamed into place"""
    early: int = 0
    """otherwise, before there was anything to go on from"""
    elsewhere: int = 0
    resumes: int = 0
    """starts that found something to go on from"""
    ends: int = 0
    """jobs that came to their end and were compared"""
    mismatches: list[str] = field(default_factory=list)


def kill_and_resume(
    server: Server, job: Job, root: Path, kills: int, seed: int, signals: Sequence[int] = (signal.SIGKILL,)
) -> Counts:
    """Kill `job` so many times, at moments spread evenly over the whole run's length; compare whenever it ends."""
    random, counts = Random(seed), Counts(job.name)
    whole = server.run(job.command, job.arguments(root / "whole"), setup=job.setup)
    assert whole.returncode == 0, whole.output
    expected, seconds = job.parts(root / "whole"), whole.seconds
    while counts.kills < kills and not counts.mismatches:
        out = root / "killed"
        shutil.rmtree(out, ignore_errors=True)
        problem = None
        while problem is None:
            # Once there were enough kills, the last job is left alone.
            after = [random.uniform(0, seconds)] if counts.kills < kills else []
            fresh = not out.exists()
            ended = server.run(job.command, job.arguments(out), after, random.choice(signals), job.setup)
            if not _was_killed(ended):
                problem = ended.output if ended.returncode else _difference(expected, job.parts(out), _hidden(out))
                counts.ends += 1
                seconds = min(seconds, ended.seconds) if fresh else seconds
                break
            problem = _count_kill(counts, job, out, ended, expected)
        if problem:
            counts.mismatches.append(f"after {counts.kills} kills: {problem}")
    return counts


def _was_killed(ended: Ended) -> bool:
    return ended.signalled and ended.returncode in KILLED


def _count_kill(counts: Counts, job: Job, out: Path, ended: Ended, expected: dict[str, Any]) -> str | None:
    """Count a kill; returns what is wrong with what it left, if anything is."""
    counts.kills += 1
    counts.resumes += job.begun(out)
    if any(out.rglob(f".*.{ended.pid}.tmp")):
        counts.writing += 1
    elif not job.begun(out):
        counts.early += 1
    else:
        counts.elsewhere += 1
    if ended.returncode > 0 and (ended.output.count("Stopped by") != 1 or "Traceback" in ended.output):
        return f"not one line: {ended.output}"
    try:
        standing = job.standing(out)
    except InputError as error:
        return str(error)
    return _difference({name: value for name, value in expected.items() if name in standing}, standing, ())


def _difference(expected: dict[str, Any], found: dict[str, Any], hidden: Sequence[str]) -> str | None:
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    return f"other than in the whole job: {names}, left over: {list(hidden)}" if names or hidden else None


def _hidden(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob(".*"))


# What is compared


def run_parts(out: Path) -> dict[str, Any]:
    """The weights and all else of a run's last and best checkpoint, and its rows but for what is measured."""
    rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return {
        "last": digest(load_checkpoint(step_checkpoints(out)[0])),
        BEST: digest(load_checkpoint(out / BEST)),
        METRICS: [{name: value for name, value in row.items() if name not in MEASURED} for row in rows],
        "config.yaml": (out / "config.yaml").read_bytes(),
    }


def whole_checkpoints(out: Path) -> dict[str, Any]:
    """Nothing to compare; raises InputError where a checkpoint is damaged."""
    for path in checkpoints(out):
        load_checkpoint(path)
    return {}


def file_bytes(out: Path) -> dict[str, Any]:
    """Every file by its path, but for hidden ones."""
    paths = [path for path in out.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(out)): _sha(path.read_bytes()) for path in paths}


def finished_bytes(out: Path) -> dict[str, Any]:
    """The same, without files that are on their way to another name."""
    return {name: value for name, value in file_bytes(out).items() if not name.endswith((".partial", ".progress"))}


def evaluation_parts(out: Path) -> dict[str, Any]:
    """predictions.jsonl and report.json but for what is measured."""
    parts = file_bytes(out)
    if "report.json" in parts:
        report = json.loads((out / "report.json").read_text())
        parts["report.json"] = {name: value for name, value in report.items() if name not in MEASURED}
    return parts


def digest(content: Any) -> str:
    """A digest of a checkpoint's content, to the last bit of every tensor."""
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


def training(data: Path, *settings: str, name: str = "training", setup: str | None = None) -> Job:
    """A run of iep-train with these settings."""

    def arguments(out: Path) -> list[Any]:
        return ["--resume", "--data", data, "--out", out, *settings]

    return Job(name, "train", arguments, run_parts, whole_checkpoints, lambda out: bool(checkpoints(out)), setup)


def synthesis(images: int) -> Job:
    """iep-synth, of so many training images and a few others."""
    sizes = ["--preset", "mini", "--train", images, "--val", 2, "--test", 1, "--width", 64, "--height", 48]

    def begun(out: Path) -> bool:
        return any(out.glob("images/*/*.png"))

    return Job("synth", "synth", lambda out: [out, *sizes], file_bytes, file_bytes, begun)


def preprocessing(clevr: Path) -> Job:
    """iep-preprocess of questions and features."""

    def arguments(out: Path) -> list[Any]:
        return [clevr, "--out", out, "--backbone", "patches", "--batch-size", 4, "--workers", 0]

    def begun(out: Path) -> bool:
        return (out / "vocab.json").exists()

    return Job("preprocessing", "preprocess", arguments, file_bytes, finished_bytes, begun, "flush often")


def checkpointing(data: Path, *settings: str, setup: str | None = None) -> Job:
    """Training that saves after every step, checkpoints of some megabytes, so that kills meet the writing."""
    heavy = ("model=lstm", "iterations=10", "validate_every=1", "keep=1", "lstm.hidden_dim=300")
    return training(data, *settings, *heavy, name="checkpointing", setup=setup)


def evaluation(data: Path, run: Path) -> Job:
    """iep-eval --out of the engine in `run` on the training split."""

    def arguments(out: Path) -> list[Any]:
        return ["--ee", run, "--data", data, "--split", "train", "--batch-size", 4, "--device", "cpu", "--out", out]

    def begun(out: Path) -> bool:
        return (out / "predictions.jsonl").exists()

    return Job("evaluation", "evaluate", arguments, evaluation_parts, evaluation_parts, begun)
