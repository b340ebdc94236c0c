"""Training with batch norm in the engine's modules: by one process and by several, and what is said about it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import together
from tiny_data import CHANNELS, GRID, VOCAB, tiny, tiny_config
from torch import nn
from train_cases import iep_train

from iep.config import Config
from iep.data.datasets import ClevrDataset
from iep.data.features import Features
from iep.data.ordering import deal
from iep.data.question_file import read_questions
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.modules import ExampleNorm
from iep.models.build import build, network_kwargs
from iep.runtime.distributed import rank, world_size
from iep.training.joined_norms import JoinedStatistics
from iep.training.parallel import Replicas
from iep.training.run_training import train
from iep.training.tasks import EngineTask
from iep.vocab import index_tokens

SETTINGS = (
    "batch_size=6",
    "iterations=3",
    "validate_every=3",
    "learning_rate=0.001",
    "engine.initialization=torch",
    "engine.classifier_norm=true",
    "engine.stem_norm=true",
    "sharing=false",
)


def _gradients(data: Path) -> dict[str, torch.Tensor | None]:
    """Of a minibatch, of which this process has a part, and the counts of rows that norms have seen."""
    torch.manual_seed(0)
    config = tiny_config(data, "ee", *SETTINGS, "engine.module_norm=example", "sharing=null")
    engine = build("engine", network_kwargs("engine", config.engine, VOCAB, (CHANNELS, GRID, GRID))).double().train()
    task = EngineTask(config, {"engine": engine})
    replicas = Replicas(task, list(engine.parameters()))
    questions, features = read_questions(data / "train_questions.h5", VOCAB), Features(data / "train_features.h5")
    dataset = ClevrDataset(questions, features, engine.planner(training=True))
    rows = np.arange(13)
    batch = dataset.batch((rows[deal(questions.image_idxs[rows], world_size())[rank()]], None))
    batch = replace(batch, features=batch.features.double())
    loss, _ = task.loss(batch)
    replicas.backward(loss, replicas.agree(batch, loss.item()).weight)
    seen = {name: count for name, count in engine.named_buffers() if name.endswith("num_batches_tracked")}
    return {name: parameter.grad for name, parameter in engine.named_parameters()} | seen


def test_two_processes_with_example_norm_have_the_gradients_of_one(data: Path):
    expected = _gradients(data)
    for found in together(_gradients, data):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
    assert sum(int(value) for name, value in expected.items() if name.endswith("num_batches_tracked")) > 50


def _see(rows: tuple[int, ...]) -> list[dict[str, torch.Tensor]]:
    """The statistics after two steps in which the process has seen so many rows."""
    engine = _engine().train()
    joined = JoinedStatistics([engine, nn.BatchNorm2d(3)])
    norm = engine.get_submodule("count").bn2
    found = []
    for step in range(2):
        if rows[rank()]:
            norm(_maps(step, rank(), rows[rank()]))
        joined.join()
        found.append({name: value.clone() for name, value in engine.named_buffers()})
    return found


def _engine() -> ExecutionEngine:
    sides = {"feature_dim": 3, "feature_height": 3, "feature_width": 3, "module_dim": 3, "stem_widths": ()}
    vocabulary = {"program_tokens": index_tokens(["count", "scene"]), "num_answers": 2}
    return build("engine", vocabulary | sides | {"module_norm": "example"})


def _maps(step: int, process: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, 3, 3, generator=torch.Generator().manual_seed(10 * step + process)) + process


@pytest.mark.parametrize("rows", [(3, 2), (0, 4), (2, 0), (0, 0), (1, 5, 2)])
def test_statistics_of_several_processes_are_those_of_one_that_sees_their_rows_in_turn(rows: tuple[int, ...]):
    one = ExampleNorm(3).train()
    expected = []
    for step in range(2):
        for process, count in enumerate(rows):
            if count:
                one(_maps(step, process, count))
        expected.append({name: value.clone() for name, value in one.named_buffers()})
    for found in together(_see, rows, world_size=len(rows)):
        for step in range(2):
            for name, value in expected[step].items():
                torch.testing.assert_close(found[step][f"count.bn2.{name}"], value, rtol=1e-5, atol=1e-6)
            assert found[step]["scene.bn1.running_mean"].eq(0).all()


def _refused(config: Config, out: Path) -> str:
    with pytest.raises(InputError) as caught:
        train(config, out, False)
    return str(caught.value)


def test_batch_norm_in_modules_is_refused_in_several_processes_before_any_waits(data: Path, tmp_path: Path):
    config = tiny_config(data, "ee", *SETTINGS, "engine.module_norm=batch")
    for problem in together(_refused, config, tmp_path):
        assert "no process sees all of them: train in one process, or with engine.module_norm=example" in problem


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (("engine.module_norm=batch",), True),
        (("engine.module_norm=batch", "batching=vanilla"), False),
        (("engine.module_norm=batch", "batching=vanilla", "sharing=true"), True),
        (("engine.module_norm=example",), False),
        ((), False),
    ],
)
def test_that_batch_norm_is_batched_is_said_in_a_line(
    data: Path, tmp_path: Path, settings: tuple[str, ...], warned: bool
):
    start = ("--model", "ee", "--data", data, "--out", tmp_path / "run", *tiny("ee"), "iterations=1")
    result = iep_train(*start, *settings)
    assert result.exit_code == 0, result.output
    said = "normalises over all examples of a call, not over one as the original toolkit does"
    assert (result.output.count(said) == 1) == warned
