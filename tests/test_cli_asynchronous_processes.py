"""Asynchronous training of an engine in two processes: weights, records, signals and errors."""

import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import together
from tiny_data import newest, tiny_config
from train_cases import assert_same_training, at_loss, rows

from iep.config import Config
from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint
from iep.runtime.distributed import rank
from iep.runtime.signals import Stopped, handled
from iep.training.run_training import train

SETTINGS = ("asynchronous=true", "instance_size=4")


def test_one_instance_at_a_time_trains_as_synchronously(data: Path, tmp_path: Path):
    """Every minibatch has the same questions, so that a part is updated once in each, with its last call."""
    same = ("num_train_samples=8", "weight_decay=0.1", "warmup=2", "decay=cosine", "engine.modules=tbd")
    assert train(tiny_config(data, "ee", *same), tmp_path / "synchronous", resume=False)
    one = tiny_config(data, "ee", *same, "asynchronous=true", "instance_size=8", "max_active_keys=1")
    assert all(together(train, one, tmp_path / "run", False))
    assert_same_training(tmp_path / "run", tmp_path / "synchronous")


def test_several_instances_in_flight_learn_the_training_questions(data: Path, tmp_path: Path):
    long = ("iterations=20", "validate_every=10", "log_every=5", "num_train_samples=16", "sharing=false", "workers=1")
    assert all(together(train, tiny_config(data, "ee", *SETTINGS, *long), tmp_path / "run", False))
    found = rows(tmp_path / "run")
    losses = [row["loss"] for row in found if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert [row["step"] for row in found if "validation_accuracy" in row] == [10, 20]
    assert all(0 < row["utilisation/worker_1"] <= 1 for row in found if "staleness/mean" in row)


def stop_one(config: Config, out: Path) -> int:
    at_loss(pytest.MonkeyPatch(), 7, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with handled(), pytest.raises(Stopped, match="which is saved") as stopped:
        train(config, out, resume=False)
    return int(str(stopped.value).partition("after iteration ")[2].partition(",")[0])


def test_a_signal_to_one_process_finishes_what_is_in_flight_in_all_and_the_run_resumes(data: Path, tmp_path: Path):
    config, out = tiny_config(data, "ee", *SETTINGS, "iterations=14", "validate_every=12"), tmp_path / "run"
    steps = together(stop_one, config, out)
    assert steps[0] == steps[1] == load_checkpoint(newest(out))["step"]
    assert 4 <= steps[0] < 12
    assert all(together(train, config, out, True))
    assert load_checkpoint(newest(out))["step"] == 14
    assert train(replace(config, iterations=15, devices=("cpu", "cpu"), placement="balanced", device="auto"), out, True)


def end(config: Config, out: Path, what: str) -> None:
    def change(loss: torch.Tensor) -> torch.Tensor:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss * math.nan

    at_loss(pytest.MonkeyPatch(), 6, change)  # only one process computes losses
    with pytest.raises(InputError) as caught:
        train(config, out, resume=False)
    (out.parent / f"{rank()}.txt").write_text(str(caught.value))


def test_a_loss_that_is_not_finite_and_a_killed_process_end_the_run_with_one_line_in_each(data: Path, tmp_path: Path):
    config = tiny_config(data, "ee", *SETTINGS)
    together(end, config, tmp_path / "run", "not finite")
    said = [(tmp_path / f"{number}.txt").read_text() for number in range(2)]
    (own,) = (number for number in range(2) if "on 4 questions (question_index " in said[number])
    assert "the loss is nan at iteration" in said[own]
    failed = f"worker {own} of 2 has failed: NotFiniteError: the loss is nan; --resume continues"
    assert said[1 - own].startswith(failed)
    with pytest.raises(AssertionError, match=f"process {own} ended without an answer"):
        together(end, config, tmp_path / "killed", "kill")
    assert (tmp_path / f"{1 - own}.txt").read_text().startswith(f"worker {own} of 2 has ended; --resume continues")


def errors(config: Config, out: Path) -> str:
    with pytest.raises(InputError) as caught:
        train(config, out, resume=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("device=cuda",), "asynchronous training in several processes runs on CPUs; remove --device"),
        (("devices=[cpu,cpu,cpu]", "placement=balanced", "device=auto"), "3 workers, but 2 processes, each of which"),
    ],
)
def test_other_devices_and_another_number_of_workers_are_errors(
    data: Path, tmp_path: Path, settings: tuple, words: str
):
    config = tiny_config(data, "ee", *SETTINGS, *settings)
    assert all(words in said for said in together(errors, config, tmp_path / "run"))
