"""`iep-train` run in this process, and what its tests read of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from killing import MEASURED
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from iep.cli.train import main
from iep.data.datasets import Batch
from iep.models.checkpoint import load_checkpoint
from iep.runtime.records import METRICS
from iep.training.loop import Trainer


def iep_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def weights(checkpoint: Path, network: str) -> dict[str, Tensor]:
    """Return the weights of a network of a checkpoint."""
    return load_checkpoint(checkpoint)["networks"][network]["weights"]


def rows(out: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.jsonl, without speed and memory, which differ from run to run."""
    recorded = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in recorded]


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard reads of a run, by name."""
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def before_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Trainer, Batch], object]) -> None:
    """Call `act` with the trainer and the minibatch before every training step."""
    train_step = Trainer.train_step

    def step(self: Trainer, batch: Batch) -> dict[str, Tensor]:
        act(self, batch)
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", step)
