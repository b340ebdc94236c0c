"""`iep-train` run in this process, and what its tests read of a run."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from batching_cases import assert_same
from click.testing import CliRunner, Result
from killing import MEASURED
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_data import newest
from torch import Tensor

from iep.cli.train import main
from iep.data.datasets import Batch
from iep.models.checkpoint import read_checkpoint
from iep.runtime.records import METRICS
from iep.training.loop import Trainer
from iep.training.tasks import EngineTask


def iep_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def weights(checkpoint: Path, network: str) -> dict[str, Tensor]:
    """Return the weights of a network of a checkpoint."""
    return dict(read_checkpoint(checkpoint).networks[network].weights)


def rows(out: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.jsonl, without speed and memory, which differ from run to run."""
    recorded = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in recorded]


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard reads of a run, by name."""
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def assert_same_training(actual: Path, expected: Path) -> None:
    """Check that two runs of an engine have about the same weights at the end, and as many updates of each."""
    checkpoints = [read_checkpoint(newest(out)) for out in (actual, expected)]
    assert_same(*(each.networks["engine"].weights for each in checkpoints), 1e-3)
    updates, others = ({key: each["step"] for key, each in it.state.optimizer["state"].items()} for it in checkpoints)
    assert updates == others


def at_loss(monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[Tensor], Tensor | None]) -> None:
    """Apply `change` to the loss of the instance of an engine with this number, counted from 1 in this process.

    The loss stays the same if `change` returns None.
    """
    count, engine_loss = itertools.count(1), EngineTask.engine_loss

    def loss(self: EngineTask, *arguments: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value, metrics = engine_loss(self, *arguments)
        changed = change(value) if next(count) == number else None
        return (value if changed is None else changed), metrics

    monkeypatch.setattr(EngineTask, "engine_loss", loss)


def before_each_step(monkeypatch: pytest.MonkeyPatch, act: Callable[[Trainer, Batch], object]) -> None:
    """Call `act` with the trainer and the minibatch before every training step."""
    train_step = Trainer.train_step

    def step(self: Trainer, batch: Batch) -> dict[str, Tensor]:
        act(self, batch)
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", step)
