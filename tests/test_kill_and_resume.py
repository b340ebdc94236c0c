"""Real processes killed at random moments and started again leave the files of one that was never killed.

A few kills for each job; `make soak` does a hundred.
"""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from killing import Job, checkpointing, evaluation, kill_and_resume, preprocessing, synthesis, training
from processes import run
from tiny_data import tiny

KILL = (signal.SIGKILL,)
ASK = (signal.SIGINT, signal.SIGTERM)
BENT = ("engine.stem_norm=true", "warmup=3", "decay=cosine")


@pytest.fixture(scope="module")
def clevr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "clevr"
    sizes = ["--preset", "mini", "--train", 20, "--val", 2, "--test", 1, "--width", 64, "--height", 48]
    assert run("synth", [out, *sizes]).returncode == 0
    return out


@pytest.mark.parametrize(
    ("make", "kills", "signals"),
    [
        (lambda data, *_: training(data, *tiny("lstm"), "model=lstm", "iterations=12", "validate_every=5"), 4, ASK),
        (lambda data, *_: training(data, *tiny("ee"), "model=ee", "iterations=8", "validate_every=3", *BENT), 4, KILL),
        (lambda data, *_: training(data, *tiny("ee"), "model=ee", "iterations=8", "workers=2"), 2, (*KILL, *ASK)),
        (lambda data, *_: checkpointing(data, *tiny("lstm")), 6, KILL),
        (lambda *_: synthesis(images=10), 4, (*KILL, *ASK)),
        (lambda data, runs, clevr: evaluation(data, runs["ee"]), 4, (*KILL, *ASK)),
        (lambda data, runs, clevr: preprocessing(clevr), 4, KILL),
        (lambda data, runs, clevr: preprocessing(clevr), 4, ASK),
    ],
)
def test_a_killed_job_ends_with_the_files_of_a_whole_one(
    data: Path, runs, clevr: Path, tmp_path: Path, make: Callable[..., Job], kills: int, signals: tuple[int, ...]
):
    counts = kill_and_resume(make(data, runs, clevr), tmp_path, kills, seed=1, signals=signals)
    assert counts.mismatches == []
    assert counts.kills == kills
    assert counts.ends
