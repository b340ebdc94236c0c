"""Real processes killed at random moments and started again come to the files of one that never was.

A few kills for each job; `make soak` does a hundred. The last tests are about the harness: mistakes made on purpose,
which it must find.
"""

import signal
from pathlib import Path

import pytest
from fork_server import Server
from killing import Job, checkpointing, evaluation, kill_and_resume, preprocessing, synthesis, training
from tiny_data import tiny

KILL = (signal.SIGKILL,)
ASK = (signal.SIGINT, signal.SIGTERM)
MODELS = {
    "lstm": ("iterations=12", "validate_every=5"),
    "ee": ("iterations=8", "validate_every=3", "engine.stem_norm=true", "warmup=3", "decay=cosine"),
}


def assert_comes_to_the_same(
    server: Server, job: Job, root: Path, kills: int, seed: int, signals: tuple[int, ...]
) -> None:
    counts = kill_and_resume(server, job, root, kills, seed, signals)
    assert counts.mismatches == []
    assert counts.kills == kills
    assert counts.ends


@pytest.fixture(scope="module")
def clevr(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "clevr"
    sizes = ["--preset", "mini", "--train", 20, "--val", 2, "--test", 1, "--width", 64, "--height", 48]
    assert server.run("synth", [out, *sizes]).returncode == 0
    return out


@pytest.mark.parametrize(("model", "signals"), [("lstm", ASK), ("ee", KILL)])
def test_training(server: Server, data: Path, tmp_path: Path, model: str, signals: tuple[int, ...]):
    job = training(data, *tiny(model), f"model={model}", *MODELS[model])
    assert_comes_to_the_same(server, job, tmp_path, kills=4, seed=1, signals=signals)


def test_training_with_workers(server: Server, data: Path, tmp_path: Path):
    job = training(data, *tiny("ee"), "model=ee", "iterations=8", "validate_every=3", "workers=2")
    assert_comes_to_the_same(server, job, tmp_path, kills=2, seed=2, signals=(*KILL, *ASK))


def test_checkpointing(server: Server, data: Path, tmp_path: Path):
    assert_comes_to_the_same(server, checkpointing(data, *tiny("lstm")), tmp_path, kills=6, seed=3, signals=KILL)


@pytest.mark.parametrize("signals", [KILL, ASK])
def test_preprocessing(server: Server, clevr: Path, tmp_path: Path, signals: tuple[int, ...]):
    assert_comes_to_the_same(server, preprocessing(clevr), tmp_path, kills=4, seed=4, signals=signals)


def test_synthesis(server: Server, tmp_path: Path):
    assert_comes_to_the_same(server, synthesis(images=10), tmp_path, kills=4, seed=5, signals=(*KILL, *ASK))


def test_evaluation(server: Server, data: Path, runs: dict[str, Path], tmp_path: Path):
    assert_comes_to_the_same(server, evaluation(data, runs["ee"]), tmp_path, kills=4, seed=6, signals=(*KILL, *ASK))


# Would it notice?


def test_checkpoints_written_in_place_are_found_out(server: Server, data: Path, tmp_path: Path):
    job = checkpointing(data, *tiny("lstm"), setup="write in place")
    (problem,) = kill_and_resume(server, job, tmp_path, kills=60, seed=7).mismatches
    assert "not a whole checkpoint file" in problem


def test_a_run_that_resumes_to_other_weights_is_found_out(server: Server, data: Path, tmp_path: Path):
    job = checkpointing(data, *tiny("lstm"), setup="forget the optimizer")
    (problem,) = kill_and_resume(server, job, tmp_path, kills=60, seed=8).mismatches
    assert "other than in the whole job: ['last'" in problem


def test_temporary_files_that_stay_are_found_out(server: Server, data: Path, tmp_path: Path):
    job = training(data, *tiny("lstm"), "model=lstm", setup="leave a temporary file")
    (problem,) = kill_and_resume(server, job, tmp_path, kills=1, seed=9).mismatches
    assert "left over: ['.left.1.tmp']" in problem


def test_a_signal_that_is_answered_with_a_traceback_is_found_out(server: Server, data: Path, tmp_path: Path):
    job = training(data, *tiny("lstm"), "model=lstm", "iterations=50", setup="answer with a traceback")
    (problem,) = kill_and_resume(server, job, tmp_path, kills=20, seed=10, signals=ASK).mismatches
    assert "Traceback" in problem
