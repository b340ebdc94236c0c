"""`iep-train --asynchronous`: it trains like synchronous training, stops when nothing is in flight, and resumes."""

import math
import os
import signal
from pathlib import Path

import pytest
from tiny_data import assert_one_error, tiny
from torch import Tensor
from train_cases import assert_same_training, at_loss, iep_train, rows, scalars

from iep.models.checkpoint import read_newest

SETTINGS = [*(each for each in tiny("ee") if each != "device=cpu"), "model=ee"]
ASYNCHRONOUS = ("--asynchronous", "--threads", 2, "instance_size=4")


def train(data: Path, out: Path, *arguments: object) -> str:
    result = iep_train("--data", data, "--out", out, *SETTINGS, *arguments)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("modules", ["iep", "tbd"])
def test_one_instance_at_a_time_trains_as_synchronously(data: Path, tmp_path: Path, modules: str):
    """Every minibatch has the same questions, so that a part is updated once in each, with its last call."""
    same = ("num_train_samples=8", "weight_decay=0.1", "warmup=2", "decay=cosine", "--modules", modules)
    same += ("attention_penalty=0.01",) if modules == "tbd" else ()
    train(data, tmp_path / "synchronous", "device=cpu", *same)
    one = ("--threads", 3, "--asynchronous", "instance_size=8", "--max-active-keys", 1)
    train(data, tmp_path / "run", *same, *one)
    runs = [tmp_path / name for name in ("run", "synchronous")]
    assert_same_training(*runs)
    rates = [{row["step"]: row["learning_rate"] for row in rows(out) if "loss" in row} for out in runs]
    assert 4 in rates[0]
    assert rates[0].items() <= rates[1].items()


@pytest.mark.parametrize(
    "settings",
    [
        ("--max-active-keys", 3, "sharing=false", "workers=1"),
        (
            "--min-update-frequency",
            5,
            "precision=bfloat16",
            "engine.classifier_dropout=0.1",
            "engine.stem_norm=true",
            "curriculum=[[0, 4], [20, 99]]",
        ),
        ("--modules", "tbd", "clip_gradients=1", "max_active_keys=9"),
        ("--freeze", "stem", "--placement", "round-robin", "questions_per_image=2", "engine.classifier_norm=true"),
    ],
    ids=lambda settings: str(settings[0]) + str(settings[1]),
)
def test_several_instances_in_flight_learn_the_training_questions(data: Path, tmp_path: Path, settings: tuple):
    long = ("iterations=60", "validate_every=30", "log_every=10", "num_train_samples=16")
    output = train(data, tmp_path / "run", *ASYNCHRONOUS, *long, *settings)
    assert "placement " in output
    found = [row["loss"] for row in rows(tmp_path / "run") if "loss" in row]
    assert found[-1] < 0.6 * found[0]
    board = scalars(tmp_path / "run")
    assert [step for step, _ in board["staleness/mean"]] == [30, 60]
    assert all(0 < value <= 1 for _, value in board["utilisation/worker_1"])
    assert all(value > 0 for _, value in board["updates/classifier"])


def test_predicted_programs_and_a_change_to_synchronous_training(data: Path, tmp_path: Path, runs):
    out = tmp_path / "run"
    predicted = ("--programs", "predicted", "--pg", runs["pg"])
    train(data, out, *ASYNCHRONOUS, *predicted, "--max-active-keys", 2)
    output = train(data, out, "--resume", "--no-asynchronous", "device=cpu", "iterations=6")
    assert "ee iteration 6 of 6" in output
    train(data, out, "--resume", *ASYNCHRONOUS, "iterations=8")
    assert [row["step"] for row in rows(out) if "validation_accuracy" in row] == [2, 4, 6, 8]
    assert read_newest(out).state.step == 8


def test_a_signal_finishes_what_is_in_flight_and_the_run_resumes(data: Path, tmp_path: Path, monkeypatch):
    out = tmp_path / "run"
    at_loss(monkeypatch, 7, lambda _: os.kill(os.getpid(), signal.SIGINT))
    result = iep_train("--data", data, "--out", out, *SETTINGS, *ASYNCHRONOUS, "iterations=40", "validate_every=30")
    assert result.exit_code == 130
    saved = read_newest(out).state
    assert 4 <= saved.step < 30
    assert f"Stopped by SIGINT after iteration {saved.step}, which is saved" in result.output
    assert scalars(out)["updates/classifier"] == [(saved.step, saved.step)]
    assert iep_train("--out", out, "--resume").exit_code == 0  # with the workers of the run
    assert read_newest(out).state.step == 40
    found = [row["step"] for row in rows(out) if "loss" in row]
    assert found == sorted(found)


def test_a_loss_that_is_not_finite_ends_the_run_with_its_questions(data: Path, tmp_path: Path, monkeypatch):
    at_loss(monkeypatch, 6, lambda loss: loss * math.nan)
    result = iep_train("--data", data, "--out", tmp_path / "run", *SETTINGS, *ASYNCHRONOUS)
    assert_one_error(result, "the loss is nan at iteration", "on 4 questions (question_index ")


def test_an_error_in_a_worker_ends_the_run(data: Path, tmp_path: Path, monkeypatch):
    def fail(loss: Tensor) -> Tensor:
        raise OSError(28, "No space left on device", "somewhere")

    at_loss(monkeypatch, 6, fail)
    result = iep_train("--data", data, "--out", tmp_path / "run", *SETTINGS, *ASYNCHRONOUS)
    assert_one_error(result, "somewhere: no space left on the device")


@pytest.mark.parametrize(
    ("arguments", "words", "code"),
    [
        (("--asynchronous",), "asynchronous training needs workers: give --threads N, or --placement", 1),
        (("--threads", 2), "--threads is for --asynchronous", 2),
        ((*ASYNCHRONOUS, "--device", "cpu"), "--threads places the parts on the CPU; it cannot go", 2),
        ((*ASYNCHRONOUS, "instance_size=3"), "batch_size is 8 and instance_size 3; expected a multiple", 1),
        ((*ASYNCHRONOUS, "defer_weight_grads=true"), "defer_weight_grads is True, which training ee asynchronously", 1),
        (("--max-active-keys", 2), "max_active_keys is 2, which training ee does not use", 1),
    ],
)
def test_invalid_settings_are_errors_of_one_line(data: Path, tmp_path: Path, arguments: tuple, words: str, code: int):
    result = iep_train("--data", data, "--out", tmp_path / "run", *SETTINGS, *arguments)
    assert_one_error(result, words, code=code)
    assert not list(tmp_path.glob("run/*.pt"))
