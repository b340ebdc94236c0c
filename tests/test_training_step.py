"""One training step: REINFORCE as published and by hand, its baseline, clipping, learning rates."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_data import CHANNELS, GRID, VOCAB, refused, tiny_config
from torch import nn

from iep.config import read_config
from iep.data.datasets import Batch, ClevrDataset
from iep.data.question_file import Split, open_split
from iep.models.network import Network
from iep.program_generator.decode import sample
from iep.training.freezing import freeze
from iep.training.loop import RunData, Trainer, learning_rate
from iep.training.run_training import train
from iep.training.tasks import JointTask
from iep.vocab import END, NULL, START

CPU = torch.device("cpu")


def small_joint(frozen: str | None = None, **settings: Any) -> JointTask:
    torch.manual_seed(0)
    given = [f"{name}={value}" for name, value in settings.items()]
    config = tiny_config(Path(), "joint", "batching=improved", *given)
    generator = Network.new("generator", config.generator, VOCAB).with_program_length(6)
    engine = Network.new("engine", config.engine, VOCAB, (CHANNELS, GRID, GRID))
    task = JointTask(config, {"generator": generator.module, "engine": engine.module})
    freeze(task.networks, () if frozen is None else (frozen,))
    return task


@pytest.fixture
def split(data: Path) -> Split:
    return open_split(data, "train", VOCAB, with_features=True, num_samples=None)


@pytest.fixture
def batch(split: Split) -> Batch:
    return ClevrDataset(split.questions, split.features).batch((np.arange(8), None))


def answers_of_its_own(task: JointTask, batch: Batch, seed: int) -> list[int]:
    """Return the engine's answers to the programs that are sampled with the seed `seed`."""
    torch.manual_seed(seed)
    programs_BL, _ = sample(task.generator, batch.questions, task.generator.max_program_length, task.config.temperature)
    return task.engine.reference(batch.features[batch.image_rows], programs_BL).argmax(1).tolist()


def rewarded(task: JointTask, batch: Batch, seed: int, right: list[bool]) -> Batch:
    """`batch` with answers such that the programs drawn after seeding with `seed` are rewarded as in `right`."""
    answers = answers_of_its_own(task, batch, seed)
    changed = [answer if good else answer ^ 1 for answer, good in zip(answers, right, strict=True)]
    return replace(batch, programs=None, answers=torch.tensor(changed))


RIGHT = [True, False, True, True, False, False, True, True]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_of_reinforce_is_reward_less_baseline_times_that_of_the_log_probability(batch, temperature: float):
    """Williams 1992, equation 4, one program after the other."""
    task = small_joint(temperature=temperature, frozen="engine")
    task.state["reward_baseline"] = 0.3
    batch = rewarded(task, batch, seed=1, right=RIGHT)
    torch.manual_seed(1)
    loss, metrics = task.loss(batch)
    loss.backward()

    torch.manual_seed(1)
    programs_BL, _ = sample(task.generator, batch.questions, task.generator.max_program_length, temperature)
    surrogate = torch.zeros(())
    for n, program in enumerate(programs_BL.tolist()):
        program = program[: program.index(END) + 1] if END in program else program
        tokens = torch.tensor([program])
        logits_LV = task.generator(batch.questions[n : n + 1], tokens)[0] / temperature
        logits_LV = logits_LV.index_fill(1, torch.tensor([NULL, START]), -torch.inf)
        log_probs_LV = logits_LV.log_softmax(1)
        advantage = (1.0 if RIGHT[n] else 0.0) - 0.3
        for log_probs_V, token in zip(log_probs_LV, program[1:], strict=True):
            surrogate = surrogate - advantage * log_probs_V[token] / len(programs_BL)

    assert loss.item() == pytest.approx(surrogate.item(), rel=1e-5)
    assert metrics["reward"].item() == pytest.approx(np.mean(RIGHT))
    names, parameters = zip(*task.generator.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(surrogate, parameters), strict=True):
        torch.testing.assert_close(dict(task.generator.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in task.engine.parameters())


def test_the_engine_is_trained_by_cross_entropy_on_the_programs_drawn(batch: Batch):
    task = small_joint(frozen="generator")
    torch.manual_seed(1)
    loss, metrics = task.loss(batch)
    loss.backward()
    gradients = [p.grad for p in task.engine.parameters()]
    torch.manual_seed(1)
    programs_BL, _ = sample(task.generator, batch.questions, task.generator.max_program_length)
    expected = nn.functional.cross_entropy(
        task.engine.reference(batch.features[batch.image_rows], programs_BL), batch.answers
    )
    task.engine.zero_grad()
    expected.backward()
    assert metrics["loss"].item() == loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, parameter in zip(gradients, task.engine.parameters(), strict=True):
        assert (ours is None) == (parameter.grad is None)
        if ours is not None:
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-5)


def test_with_nothing_frozen_the_loss_is_the_sum_of_both_parts(batch: Batch):
    losses = {}
    for frozen in (None, "generator", "engine"):
        task = small_joint(frozen)
        torch.manual_seed(2)
        losses[frozen], _ = task.loss(batch)
    assert losses[None].item() == pytest.approx((losses["generator"] + losses["engine"]).item(), rel=1e-5)


def test_the_baseline_is_a_moving_average_of_the_mean_reward(batch: Batch):
    task = small_joint(reward_decay=0.8)
    baseline = 0.0
    for seed, share in enumerate((8, 2, 5)):
        step = rewarded(task, batch, seed, [n < share for n in range(8)])
        torch.manual_seed(seed)
        _, metrics = task.loss(step)
        assert metrics["reward_baseline"].item() == pytest.approx(baseline)
        baseline = 0.8 * baseline + 0.2 * share / 8
        assert task.state["reward_baseline"] == pytest.approx(baseline)


def test_batch_norm_over_a_single_question_is_one_line(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm", "batch_size=1", "lstm.classifier_norm=true")
    with refused("batch_size is 1, but classifier_norm is over the questions of a minibatch; expected more"):
        train(config, tmp_path, resume=False)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_are_clipped_to_the_norm_given(split: Split, batch: Batch, tmp_path: Path, clip: float | None):
    config = tiny_config(Path(), "joint", f"clip_gradients={'null' if clip is None else clip}")
    trainer = Trainer(small_joint(), config, RunData(CPU, VOCAB, split), tmp_path, {})
    trainer.train_step(batch)
    norm = torch.stack([p.grad.norm() for p in trainer.parameters if p.grad is not None]).norm().item()
    assert norm > 0.1 if clip is None else norm == pytest.approx(clip, rel=1e-3)


def test_the_learning_rate_warms_up_and_falls_along_a_cosine_to_a_hundredth():
    config = read_config(None, ["learning_rate=0.1", "warmup=4", "decay=cosine", "iterations=104"])
    rates = [learning_rate(config, step) for step in range(105)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[29] == pytest.approx(0.1 * (0.01 + 0.99 * (1 + math.cos(math.pi / 4)) / 2))
    assert rates[54] == pytest.approx(0.1 * 0.505)
    assert rates[104] == pytest.approx(0.001)
    assert rates[4:] == sorted(rates[4:], reverse=True)
