"""Training in several processes gives the losses, weights and files of one, however its minibatches are split."""

import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from processes import together
from tiny_data import CHANNELS, GRID, VOCAB, content, newest, open_train, tiny_config, write_data
from torch import nn
from train_cases import before_each_step, rows, weights

import iep.models.checkpoint
import iep.training.run_training
from iep.config import Config
from iep.data.datasets import Batch
from iep.data.ordering import deal
from iep.errors import InputError
from iep.execution_engine.modules import ExampleNorm
from iep.models.checkpoint import BEST, read_checkpoint, step_name
from iep.models.network import Network
from iep.runtime.distributed import rank, world_size
from iep.runtime.files import row_checksums
from iep.runtime.signals import Stopped, handled
from iep.training.loop import Trainer
from iep.training.parallel import Replicas, synchronize_norms
from iep.training.run_training import load_start, train
from iep.training.tasks import EngineTask, Task

SMALL_BATCHES = ("batch_size=12", "iterations=6", "validate_every=3", "questions_per_image=2", "learning_rate=0.002")
TORCHS_OWN = "engine.initialization=torch"  # Adam makes much of rounding where activations blow up
IDLE = re.compile(r"stacked-attn-\d\.Wp\.bias")
"""Biases of the baselines that a softmax behind them cancels: their gradients are rounding, of which Adam makes whole
steps."""
NORM = ("engine.stem_norm=true", "engine.stem_widths=[3]")
SHARED = (TORCHS_OWN, "sharing=true")


def assert_same_run(one: Path, two: Path, iterations: int) -> None:
    """Assert the same losses and scores at every step, and the same weights and optimiser states, up to rounding."""
    for ours, theirs in zip(rows(two), rows(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    ours, theirs = (content(out / step_name(iterations)) for out in (two, one))
    assert ours["task"] == pytest.approx(theirs["task"])
    for name, network in theirs["networks"].items():
        for key, weight in network["weights"].items():
            if name.startswith("cnn_") and IDLE.fullmatch(key):
                continue
            torch.testing.assert_close(ours["networks"][name]["weights"][key], weight, rtol=2e-3, atol=2e-4)
    assert set(ours["optimizer"]["state"]) == set(theirs["optimizer"]["state"])
    for number, state in theirs["optimizer"]["state"].items():
        assert ours["optimizer"]["state"][number]["step"] == state["step"]
    assert {path.name for path in two.iterdir()} == {path.name for path in one.iterdir()}
    assert read_checkpoint(two / BEST).state.step == read_checkpoint(one / BEST).state.step


CASES = {
    "pg": ("log_every=4",),
    "lstm": (),
    "cnn-lstm-sa": (),
    "cnn-lstm-sa, partly frozen": ("freeze=rnn,cnn",),
    "ee, shared, deferred, clipped": (*SHARED, "defer_weight_grads=true", "clip_gradients=0.5"),
    "ee, not shared": (TORCHS_OWN, "sharing=false", "questions_per_image=1", "workers=2"),
    "ee, attention modules, penalized": (TORCHS_OWN, "engine.modules=tbd", "attention_penalty=0.001"),
    "ee, predicted": (TORCHS_OWN, "programs=predicted"),
    "joint": (),
    "joint, generator frozen": ("freeze=generator",),
}


def _train_all(configs: dict[str, Config], root: Path) -> None:
    for case, config in configs.items():
        train(config, root / case / "two", resume=False)


def test_two_processes_train_as_one(data: Path, parts: list[str], tmp_path: Path):
    configs = {}
    for case, settings in CASES.items():
        model = case.split(",")[0]
        starts = parts if model == "joint" else parts[:1] if case == "ee, predicted" else []
        configs[case] = tiny_config(data, model, *SMALL_BATCHES, *starts, *settings)
    together(_train_all, configs, tmp_path)
    for case, config in configs.items():
        assert train(config, tmp_path / case / "one", resume=False)
        try:
            assert_same_run(tmp_path / case / "one", tmp_path / case / "two", iterations=6)
        except AssertionError as error:
            error.add_note(f"in the case {case!r}")
            raise


def _gradients(data: Path, *settings: str) -> dict[str, torch.Tensor | None]:
    """Return the gradients of a minibatch of which this process has a part, in float64 but for the loss."""
    torch.manual_seed(0)
    config = tiny_config(data, "ee", *settings)
    engine = Network.new("engine", config.engine, VOCAB, (CHANNELS, GRID, GRID)).module.double().train()
    task = EngineTask(config, {"engine": engine})
    replicas = Replicas(task, list(engine.parameters()))
    dataset = open_train(data, make_plan=engine.planner(sharing=config.sharing, training=True))
    rows = np.array([0, 1, 2, 13, 26, 4, 5])
    batch = dataset.batch((rows[deal(dataset.questions.image_idxs[rows], world_size())[rank()]], None))
    batch = replace(batch, features=batch.features.double())
    replicas.backward(batch, *replicas.loss(batch))
    return {name: parameter.grad for name, parameter in engine.named_parameters()}


@pytest.mark.parametrize(
    "settings",
    [
        ("sharing=true",),
        ("sharing=true", "defer_weight_grads=true"),
        ("engine.module_norm=example", "engine.initialization=torch"),
    ],
)
def test_the_gradients_of_several_processes_are_those_of_one(data: Path, settings: tuple[str, ...]):
    expected = _gradients(data, *settings)
    assert 0 < sum(value is None for value in expected.values()) < len(expected)
    for found in together(_gradients, data, *settings, world_size=3 if "defer_weight_grads=true" in settings else 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert (found[name] is None) == (value is None), name
            if value is not None:
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)


def _gradients_without_a_loss_in_one_process() -> list[torch.Tensor | None]:
    """Return the gradients of two weights after a minibatch in which the second process uses neither of them."""
    weights = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])

    class Constant(Task):
        def loss(self, batch: None) -> tuple[torch.Tensor, dict]:
            return (weights[0].sum() if rank() == 0 else torch.ones(())), {}

        def count(self, batch: None) -> int:
            return 3 - 2 * rank()

    replicas = Replicas(Constant(Config(), {"weights": weights}), list(weights))
    replicas.backward(None, *replicas.loss(None))
    return [weight.grad for weight in weights]


def test_a_process_that_uses_no_trained_weight_gets_the_gradients_of_the_others():
    for used, unused in together(_gradients_without_a_loss_in_one_process):
        torch.testing.assert_close(used, torch.full((2,), 0.75))
        assert unused is None


def _train_and_return_buffers(config: Config, out: Path) -> list[dict[str, torch.Tensor]]:
    """Train, and return the running statistics after each step."""
    found = []

    def note(trainer: Trainer, batch: Batch) -> None:
        found.append({name: each.clone() for name, each in trainer.task.engine.named_buffers() if "running" in name})

    before_each_step(pytest.MonkeyPatch(), note)
    train(config, out, resume=False)
    return found


def test_running_statistics_are_the_mean_over_the_processes_and_resume_to_the_same_bits(data: Path, tmp_path: Path):
    def config(iterations: int) -> Config:
        settings = (*SMALL_BATCHES, *SHARED, *NORM, "engine.module_norm=example", f"iterations={iterations}")
        return tiny_config(data, "ee", *settings)

    first, second = together(_train_and_return_buffers, config(6), tmp_path / "whole")
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert not torch.equal(first[-1]["stem.1.running_mean"], first[0]["stem.1.running_mean"])
    assert all(together(train, config(2), tmp_path / "resumed", False))
    assert all(together(train, config(6), tmp_path / "resumed", True))
    whole, resumed = (weights(newest(tmp_path / out), "engine") for out in ("whole", "resumed"))
    assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())


def test_batch_norm_on_gpus_is_synchronised_except_in_an_engines_modules(data: Path, monkeypatch):
    config = tiny_config(data, "ee", *NORM, "engine.classifier_norm=true", "engine.module_norm=example")
    engine = Network.new("engine", config.engine, VOCAB, (CHANNELS, GRID, GRID)).module
    before = engine.state_dict()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    synchronize_norms({"engine": engine})
    kinds = {type(layer) for part in (engine.stem, engine.classifier) for layer in part.modules()}
    assert nn.SyncBatchNorm in kinds
    assert not kinds & {nn.BatchNorm1d, nn.BatchNorm2d}
    assert type(engine.get_submodule("count").bn1) is ExampleNorm
    assert all(before[name].data_ptr() == value.data_ptr() for name, value in engine.state_dict().items())


def test_three_processes_train_as_one_on_unequal_parts_and_small_stages(data: Path, tmp_path: Path):
    settings = ("curriculum=[[0, 3], [3, 99]]", "batch_size=10", "iterations=5", "validate_every=5")
    config = tiny_config(data, "ee", *SMALL_BATCHES, TORCHS_OWN, *settings)
    assert train(config, tmp_path / "one", resume=False)
    assert all(together(train, config, tmp_path / "three", False, world_size=3))
    assert_same_run(tmp_path / "one", tmp_path / "three", 5)


def test_a_run_of_two_processes_resumes_in_one_and_in_two_again(data: Path, tmp_path: Path):
    def config(iterations: int) -> Config:
        return tiny_config(data, "ee", *SMALL_BATCHES, *SHARED, f"iterations={iterations}")

    assert train(config(6), tmp_path / "one", resume=False)
    assert all(together(train, config(2), tmp_path / "changing", False))
    assert train(config(4), tmp_path / "changing", resume=True)
    assert all(together(train, config(6), tmp_path / "changing", True))
    one, changing = (weights(newest(tmp_path / out), "engine") for out in ("one", "changing"))
    for name, weight in one.items():
        torch.testing.assert_close(changing[name], weight, rtol=2e-3, atol=2e-4)


def _train_and_signal_one(config: Config, out: Path) -> None:
    def signal_one(trainer: Trainer, batch: Batch) -> None:
        if (rank(), trainer.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    before_each_step(pytest.MonkeyPatch(), signal_one)
    with handled(), pytest.raises(Stopped, match="after iteration 3, which is saved"):
        train(config, out, resume=False)


def test_two_processes_of_which_one_is_signalled_stop_together_and_resume_to_the_same_bits(data: Path, tmp_path: Path):
    config = tiny_config(data, "pg", "generator.dropout=0.5", "generator.num_layers=2", "iterations=4")
    assert all(together(train, config, tmp_path / "whole", False))
    together(_train_and_signal_one, config, tmp_path / "stopped")
    assert all(together(train, config, tmp_path / "stopped", True))
    whole, stopped = (weights(newest(tmp_path / out), "generator") for out in ("whole", "stopped"))
    assert all(torch.equal(stopped[name], weight) for name, weight in whole.items())


def _load_where_one_process_sees_an_older_run(out: Path) -> int:
    if rank() == 1:
        iep.models.checkpoint.step_checkpoints = lambda out: [out / step_name(2)]
    return load_start(out).state.step


def test_all_processes_resume_from_the_checkpoint_that_the_first_finds(data: Path, tmp_path: Path):
    train(tiny_config(data, "lstm", "keep=2"), tmp_path, resume=False)
    assert together(_load_where_one_process_sees_an_older_run, tmp_path) == [4, 4]


def _fail(config: Config, out: Path) -> str:
    with pytest.raises((InputError, SystemExit)) as caught:
        train(config, out, False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        ("lstm", ("lstm.classifier_norm=true",), "train in one process, or without classifier_norm"),
        ("ee", ("asynchronous=true",), "asynchronous training is for one process, and there are 2; leave out torchrun"),
    ],
)
def test_what_several_processes_cannot_train_is_refused_by_all(data: Path, tmp_path: Path, model, settings, problem):
    for said in together(_fail, tiny_config(data, model, *settings), tmp_path):
        assert problem in said


def _fail_with_a_loss_of_one(config: Config, out: Path) -> str:
    loss = Task.loss

    def not_finite_in_one(self, batch):
        value, metrics = loss(self, batch)
        return value * (math.nan if rank() == 1 else 1.0), metrics

    Task.loss = not_finite_in_one
    return _fail(config, out)


def test_a_loss_that_is_not_finite_in_one_process_stops_all_and_names_the_questions_of_all(data, tmp_path: Path):
    first, second = together(_fail_with_a_loss_of_one, tiny_config(data, "lstm"), tmp_path)
    assert "loss is nan at iteration 1, on 8 questions" in first
    assert "loss is nan at iteration 1" in second
    assert len(set(re.findall(r"\b10\d\d\b", first))) == 8


def _train_on_data_of_their_own(config: Config, of_ranks: list[Path], out: Path) -> bool:
    return train(replace(config, data=str(of_ranks[rank()])), out, resume=False)


def _fail_on_data_of_their_own(config: Config, copies: list[list[Path]], out: Path) -> list[str]:
    return [_fail(replace(config, data=str(of_ranks[rank()])), out) for of_ranks in copies]


def test_processes_whose_data_differ_train_nothing_and_name_the_file(tmp_path: Path):
    first = write_data(tmp_path / "first")
    changes = {f"{split}_{kind}.h5": kind for split in ("train", "val") for kind in ("questions", "features")}
    for name, kind in changes.items():
        with h5py.File(write_data(tmp_path / name) / name, "r+") as file:
            if kind == "questions":
                file["programs"][1] = file["programs"][2]
            else:
                file["checksums"] = row_checksums(file["features"][()])
    replace(VOCAB, answer=[*VOCAB.answer, "maybe"]).save(write_data(tmp_path / "vocab.json") / "vocab.json")
    copies = [[first, tmp_path / name] for name in (*changes, "vocab.json")]
    copies.append([first, write_data(tmp_path / "without val")])
    (tmp_path / "without val/val_questions.h5").unlink()
    said, _ = together(_fail_on_data_of_their_own, tiny_config(first, "ee"), copies, tmp_path / "out")
    for name, (_, second), line in zip((*changes, "vocab.json", "val_questions.h5"), copies, said, strict=True):
        assert f"process 1: {second / name} is not the same as in process 0" in line
    assert not (tmp_path / "out").exists()


def test_processes_may_read_copies_of_the_same_data(data: Path, tmp_path: Path):
    copies = [data, write_data(tmp_path / "copy")]
    settings = ("iterations=1", "features_in_memory=true")
    assert all(together(_train_on_data_of_their_own, tiny_config(data, "ee", *settings), copies, tmp_path / "out"))
