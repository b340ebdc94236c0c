"""Training: every model learns, what is frozen or unused stays, REINFORCE is as published, resuming changes nothing."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_data import CHANNELS, GRID, IMAGES, TINY, TRAIN, VAL, VOCAB, arrays, features, write_data, write_h5
from torch import Tensor, nn

from iep.config import Config, read_config, to_dict
from iep.data_files import Features, read_questions
from iep.datasets import Batch, ClevrDataset
from iep.errors import InputError
from iep.networks import build, engine_kwargs, generator_kwargs, load_network
from iep.program_generator.decode import sample
from iep.training.checkpoint import BEST, LAST, load_checkpoint, seed_everything
from iep.training.loop import Trainer, learning_rate
from iep.training.records import METRICS, Records
from iep.training.run import train
from iep.training.tasks import JointTask
from iep.vocab import END, NULL, START

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def parts(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Settings that name a generator and an engine to start from, the generator good enough to be run."""
    root = tmp_path_factory.mktemp("parts")
    for model, iterations in (("pg", 60), ("ee", 1)):
        config = tiny_config(data, model, f"iterations={iterations}", "num_val_samples=1", "validate_every=100")
        train(config, root / model, resume=False)
    return [f"pg={root / 'pg'}", f"ee={root / 'ee'}"]


def tiny_config(data: Path, model: str, *settings: str) -> Config:
    return read_config(None, [*TINY, f"model={model}", f"data={data}", *settings])


def rows(out: Path) -> list[dict[str, float]]:
    """The rows of a run's metrics.jsonl, but for the speed, which differs from run to run."""
    recorded = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name != "questions_per_second"} for row in recorded]


def weights(checkpoint: Path, network: str) -> dict[str, Tensor]:
    return load_checkpoint(checkpoint)["networks"][network]["weights"]


def assert_same(ours: Any, theirs: Any) -> None:
    """Two checkpoints' content is the same, to the last bit of every tensor."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert_same(our, their)
    elif isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    else:
        assert ours == theirs


# Every model learns


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("pg", ()),
        ("ee", ()),
        ("ee", ("programs=predicted",)),
        ("joint", ()),
        ("joint", ("freeze=generator",)),
        ("lstm", ()),
        ("ee", ("precision=bfloat16", "engine.initialization=torch")),
        ("joint", ("precision=bfloat16",)),
    ],
)
def test_the_loss_falls(data: Path, parts: list[str], tmp_path: Path, model: str, settings: tuple[str, ...]):
    starts = parts if model == "joint" else parts[:1] if "programs=predicted" in settings else []
    quick = ["iterations=24", "num_train_samples=8", "num_val_samples=1", "validate_every=100"]
    train(tiny_config(data, model, *quick, *settings, *starts), tmp_path, resume=False)
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert len(losses) == 24
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])


def test_weights_stay_float32_whatever_the_networks_compute_in(data: Path, tmp_path: Path):
    for precision in ("float32", "bfloat16"):
        config = tiny_config(data, "ee", f"precision={precision}", "iterations=2")
        train(config, tmp_path / precision, resume=False)
        assert {value.dtype for value in weights(tmp_path / precision / LAST, "engine").values()} == {torch.float32}
    exact, rounded = (rows(tmp_path / precision)[0]["loss"] for precision in ("float32", "bfloat16"))
    assert exact != rounded == pytest.approx(exact, rel=0.05)


# What moves and what does not


@pytest.mark.parametrize("freeze", [None, "generator", "engine"])
def test_joint_training_moves_both_parts_but_what_is_frozen(data: Path, parts: list[str], tmp_path: Path, freeze):
    start = tmp_path / "ee"
    train(tiny_config(data, "ee", "iterations=1", "engine.stem_norm=true"), start, resume=False)
    config = tiny_config(data, "joint", *parts, f"ee={start}", "weight_decay=0.1", f"freeze={freeze or 'null'}")
    train(config, tmp_path / "joint", resume=False)
    paths = {"generator": Path(config.pg), "engine": start}
    for name, path in paths.items():
        before, after = weights(path, name), weights(tmp_path / "joint" / LAST, name)
        same = [torch.equal(before[key], after[key]) for key in before]
        # Batch norm's running averages count too: a frozen part runs in evaluation mode.
        assert all(same) if name == freeze else not all(same)


def test_predicting_programs_leaves_their_generator_out_of_training(data: Path, parts: list[str], tmp_path: Path):
    train(tiny_config(data, "ee", "programs=predicted", parts[0]), tmp_path, resume=False)
    assert set(load_checkpoint(tmp_path / LAST)["networks"]) == {"engine"}


def test_modules_that_no_program_uses_keep_their_weights(data: Path, tmp_path: Path):
    config = tiny_config(data, "ee", "num_train_samples=1", "weight_decay=0.1")
    train(config, tmp_path, resume=False)
    seed_everything(config.seed)
    initial = build("engine", engine_kwargs(config.engine, VOCAB, (CHANNELS, GRID, GRID)))
    after = weights(tmp_path / LAST, "engine")
    used = {VOCAB.program[token] for token in arrays(1)["programs"][0] if token > END} | {"stem", "classifier"}
    assert {"exist", "scene"} < used < {name for name, _ in initial.named_children()}
    for child, module in initial.named_children():
        moved = [not torch.equal(value, after[f"{child}.{key}"]) for key, value in module.state_dict().items()]
        assert any(moved) == (child in used), child


def test_a_run_starts_from_the_checkpoints_it_is_given_and_takes_their_settings(data, parts, tmp_path: Path):
    config = tiny_config(data, "joint", *parts, "learning_rate=0", "iterations=1", "engine.module_dim=9")
    train(config, tmp_path, resume=False)
    for name, path in (("generator", config.pg), ("engine", config.ee)):
        assert_same(dict(weights(tmp_path / LAST, name)), dict(weights(Path(path), name)))
    saved = read_config(tmp_path / "config.yaml")
    assert saved.engine == tiny_config(data, "ee").engine != config.engine
    assert load_checkpoint(tmp_path / LAST)["config"] == to_dict(saved)


# One step


def small_joint(**kwargs: Any) -> JointTask:
    seed_everything(0)
    generator = build("generator", generator_kwargs(tiny_config(Path(), "joint").generator, VOCAB))
    engine = build("engine", engine_kwargs(tiny_config(Path(), "joint").engine, VOCAB, (CHANNELS, GRID, GRID)))
    return JointTask(generator, engine, "improved", max_length=6, **kwargs)


@pytest.fixture
def batch(data: Path) -> Batch:
    questions = read_questions(data / "train_questions.h5", VOCAB)
    return ClevrDataset(questions, Features(data / "train_features.h5"))[np.arange(8)]


def answers_of_its_own(task: JointTask, batch: Batch, seed: int) -> list[int]:
    """What the engine answers to the programs that are drawn after seeding with `seed`."""
    torch.manual_seed(seed)
    programs_BL, _ = sample(task.generator, batch.questions, task.max_length, task.temperature)
    return task.engine.reference(batch.features[batch.image_rows], programs_BL).argmax(1).tolist()


def rewarded(task: JointTask, batch: Batch, seed: int, right: list[bool]) -> Batch:
    """`batch` with answers such that the programs drawn after seeding with `seed` are rewarded as in `right`."""
    answers = answers_of_its_own(task, batch, seed)
    changed = [answer if good else answer ^ 1 for answer, good in zip(answers, right, strict=True)]
    return replace(batch, programs=None, answers=torch.tensor(changed))


RIGHT = [True, False, True, True, False, False, True, True]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_of_reinforce_is_reward_less_baseline_times_that_of_the_log_probability(batch, temperature: float):
    """By hand for the last bias, whose gradient is the logits': softmax minus one-hot, Williams 1992, equation 5."""
    task = small_joint(temperature=temperature, freeze="engine")
    task.state["reward_baseline"] = 0.3
    batch = rewarded(task, batch, seed=1, right=RIGHT)
    torch.manual_seed(1)
    loss, metrics = task.loss(batch)
    loss.backward()

    torch.manual_seed(1)
    programs_BL, _ = sample(task.generator, batch.questions, task.max_length, temperature)
    expected_V = np.zeros(len(VOCAB.program))
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
            one_hot_V = np.eye(len(VOCAB.program))[token]
            expected_V += advantage * (log_probs_V.exp().detach().numpy() - one_hot_V) / temperature / len(programs_BL)

    assert loss.item() == pytest.approx(surrogate.item(), rel=1e-5)
    assert metrics["reward"].item() == pytest.approx(np.mean(RIGHT))
    np.testing.assert_allclose(task.generator.decoder_linear.bias.grad, expected_V, atol=1e-6)
    names, parameters = zip(*task.generator.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(surrogate, parameters), strict=True):
        torch.testing.assert_close(dict(task.generator.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-6)
    assert all(p.grad is None for p in task.engine.parameters())


def test_the_engine_is_trained_by_cross_entropy_on_the_programs_drawn(batch: Batch):
    task = small_joint(freeze="generator")
    torch.manual_seed(1)
    loss, metrics = task.loss(batch)
    loss.backward()
    gradients = [p.grad for p in task.engine.parameters()]
    torch.manual_seed(1)
    programs_BL, _ = sample(task.generator, batch.questions, task.max_length)
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
    for freeze in (None, "generator", "engine"):
        task = small_joint(freeze=freeze)
        torch.manual_seed(2)
        losses[freeze], _ = task.loss(batch)
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


@pytest.mark.parametrize("clip", [None, 0.01])
def test_gradients_are_clipped_to_the_norm_given(batch: Batch, tmp_path: Path, clip: float | None):
    config = tiny_config(Path(), "joint", f"clip_gradients={'null' if clip is None else clip}")
    trainer = Trainer(small_joint(), config, VOCAB, tmp_path, CPU)
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


def test_a_constant_learning_rate_stays_after_its_warm_up():
    config = read_config(None, ["learning_rate=0.1", "warmup=2", "iterations=10"])
    assert [learning_rate(config, step) for step in range(5)] == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1])


def test_every_step_uses_the_learning_rate_of_its_number(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm", "warmup=2", "decay=cosine")
    train(config, tmp_path, resume=False)
    used = [row["learning_rate"] for row in rows(tmp_path) if "learning_rate" in row]
    assert used == [learning_rate(config, step) for step in range(4)]


# What a run leaves


def test_only_training_counts_in_questions_per_second(data: Path, tmp_path: Path, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("iep.training.loop.time", clock)

    def timed(name: str, seconds: float) -> None:
        function = getattr(Trainer, name)

        def run(*arguments):
            clock.now += seconds
            return function(*arguments)

        monkeypatch.setattr(Trainer, name, run)

    timed("train_step", 1.0)
    timed("validate", 100.0)
    train(tiny_config(data, "lstm", "validate_every=3", "log_every=2"), tmp_path, resume=False)
    recorded = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [row["questions_per_second"] for row in recorded if "loss" in row] == [8.0, 8.0]


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_rewards_are_in_the_metrics_and_on_the_board(data: Path, parts: list[str], tmp_path: Path):
    train(tiny_config(data, "joint", *parts), tmp_path, resume=False)
    recorded = rows(tmp_path)
    assert [row["step"] for row in recorded if "reward" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in recorded if "validation_accuracy" in row] == [2, 4]
    board = scalars(tmp_path)
    for name in ("loss", "reward", "reward_baseline", "generator_loss", "accuracy", "validation_accuracy"):
        expected = [(row["step"], row[name]) for row in recorded if name in row]
        assert expected
        assert [step for step, _ in board[name]] == [step for step, _ in expected]
        assert [value for _, value in board[name]] == pytest.approx([value for _, value in expected])
    rewards = [row["reward"] for row in recorded if "reward" in row]
    assert all(0 <= reward <= 1 and (8 * reward).is_integer() for reward in rewards)


def test_the_resolved_config_is_beside_the_checkpoints(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm", "seed=3")
    train(config, tmp_path / "new" / "run", resume=False)
    assert read_config(tmp_path / "new" / "run" / "config.yaml") == config
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {
        *("config.yaml", LAST, BEST, METRICS, "tensorboard")
    }


def test_validation_picks_the_best_checkpoint_and_an_equal_later_one_does_not(data, tmp_path: Path, monkeypatch):
    scores = iter([0.1, 0.5, 0.5, 0.3])
    monkeypatch.setattr(Trainer, "validate", lambda self, batches: next(scores))
    train(tiny_config(data, "lstm", "iterations=8"), tmp_path, resume=False)
    best, last = load_checkpoint(tmp_path / BEST), load_checkpoint(tmp_path / LAST)
    assert (best["step"], best["best"]) == (4, 0.5)
    assert (last["step"], last["best"]) == (8, 0.5)


def test_validation_is_the_share_of_right_answers(data: Path, tmp_path: Path):
    train(tiny_config(data, "lstm", "iterations=30", "validate_every=30"), tmp_path, resume=False)
    lstm = load_network(tmp_path / LAST, "lstm", VOCAB, CPU)
    val = arrays(VAL)
    answers = lstm(torch.from_numpy(val["questions"]).long()).argmax(1).numpy()
    expected = (answers == val["answers"]).mean()
    assert rows(tmp_path)[-1] == {"step": 30, "validation_accuracy": pytest.approx(expected)}
    assert expected > 0.2


def test_without_a_validation_split_the_last_checkpoint_is_the_best(data: Path, tmp_path: Path):
    write_data(tmp_path / "data")
    (tmp_path / "data" / "val_questions.h5").unlink()
    train(tiny_config(tmp_path / "data", "lstm", "iterations=5"), tmp_path / "run", resume=False)
    assert_same(load_checkpoint(tmp_path / "run" / BEST), load_checkpoint(tmp_path / "run" / LAST))
    assert load_checkpoint(tmp_path / "run" / LAST)["step"] == 5


def test_only_the_samples_asked_for_are_trained_and_validated_on(data: Path, tmp_path: Path, monkeypatch):
    seen, train_step = set(), Trainer.train_step

    def watched(self: Trainer, batch: Batch) -> dict[str, Tensor]:
        seen.update(batch.index.tolist())
        return train_step(self, batch)

    validated = []
    monkeypatch.setattr(Trainer, "train_step", watched)
    monkeypatch.setattr(
        Trainer, "validate", lambda self, batches: validated.extend(len(batch.index) for batch in batches) or 0.0
    )
    train(tiny_config(data, "lstm", "num_train_samples=9", "num_val_samples=3", "iterations=8"), tmp_path, resume=False)
    assert seen == set(range(9))
    assert set(validated) == {3}


def test_a_curriculum_starts_with_short_programs(data: Path, tmp_path: Path, monkeypatch):
    lengths, train_step = [], Trainer.train_step

    def watched(self: Trainer, batch: Batch) -> dict[str, Tensor]:
        functions_BL = (batch.programs > END) & (batch.programs != VOCAB.program_index["scene"])
        lengths.append(int(functions_BL.sum(1).max()))
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", watched)
    train(tiny_config(data, "lstm", "curriculum=[[0, 4], [2, 99]]", "iterations=8"), tmp_path, resume=False)
    assert max(lengths[:2]) <= 4
    assert max(lengths[2:]) > 7


# The same again


def test_a_seed_repeats_a_run_with_any_number_of_workers_and_another_seed_does_not(data: Path, tmp_path: Path):
    for name, *settings in (("a",), ("b", "workers=2"), ("c", "seed=1")):
        train(tiny_config(data, "ee", *settings), tmp_path / name, resume=False)
    states = {name: dict(weights(tmp_path / name / LAST, "engine")) for name in "abc"}
    assert_same(states["a"], states["b"])
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert not torch.equal(states["a"]["classifier.0.weight"], states["c"]["classifier.0.weight"])


class InterruptionError(Exception):
    """Stands for whatever ends a run in the middle."""


@pytest.fixture
def interrupted_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that makes training fail before the step of a number, or no more with None."""
    fatal: list[int | None] = [None]
    train_step = Trainer.train_step

    def fragile(self: Trainer, batch: Batch) -> dict[str, Tensor]:
        if self.step == fatal[0]:
            raise InterruptionError
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", fragile)
    return lambda step: fatal.__setitem__(0, step)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("ee", ("decay=cosine", "warmup=3", "curriculum=[[0, 5], [4, 99]]", "engine.stem_norm=true")),
        ("joint", ("precision=bfloat16",)),
        ("pg", ("generator.dropout=0.5", "generator.num_layers=2")),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(data, parts, tmp_path: Path, interrupted_at, model, settings):
    starts = parts if model == "joint" else []
    config = tiny_config(data, model, "iterations=9", "validate_every=3", *settings, *starts)
    train(config, tmp_path / "unbroken", resume=False)

    interrupted_at(5)
    with pytest.raises(InterruptionError):
        train(config, tmp_path / "broken", resume=False)
    assert load_checkpoint(tmp_path / "broken" / LAST)["step"] == 3
    assert rows(tmp_path / "broken")[-1]["step"] == 5
    interrupted_at(8)
    with pytest.raises(InterruptionError):
        train(config, tmp_path / "broken", resume=True)
    interrupted_at(None)
    assert train(config, tmp_path / "broken", resume=True)

    for name in (LAST, BEST):
        assert_same(load_checkpoint(tmp_path / "broken" / name), load_checkpoint(tmp_path / "unbroken" / name))
    assert rows(tmp_path / "broken") == rows(tmp_path / "unbroken")
    assert scalars(tmp_path / "broken").keys() == scalars(tmp_path / "unbroken").keys()
    for name, values in scalars(tmp_path / "unbroken").items():
        if name != "questions_per_second":
            assert scalars(tmp_path / "broken")[name] == values, name


@pytest.mark.parametrize("model", ["ee", "joint"])
def test_a_finished_run_goes_on_to_the_bits_of_a_longer_one(data: Path, parts: list[str], tmp_path: Path, model: str):
    starts = parts if model == "joint" else []
    short, long = (tiny_config(data, model, f"iterations={n}", *starts) for n in (4, 8))
    train(long, tmp_path / "long", resume=False)
    train(short, tmp_path / "resumed", resume=False)
    train(long, tmp_path / "resumed", resume=True)
    assert_same(load_checkpoint(tmp_path / "resumed" / LAST), load_checkpoint(tmp_path / "long" / LAST))
    assert rows(tmp_path / "resumed") == rows(tmp_path / "long")


def test_a_run_that_failed_before_its_first_checkpoint_starts_afresh(data: Path, tmp_path: Path, interrupted_at):
    config = tiny_config(data, "lstm")
    interrupted_at(1)
    with pytest.raises(InterruptionError):
        train(config, tmp_path / "broken", resume=False)
    assert [row["step"] for row in rows(tmp_path / "broken")] == [1]
    interrupted_at(None)
    train(config, tmp_path / "broken", resume=True)
    train(config, tmp_path / "unbroken", resume=False)
    assert rows(tmp_path / "broken") == rows(tmp_path / "unbroken")
    assert_same(load_checkpoint(tmp_path / "broken" / LAST), load_checkpoint(tmp_path / "unbroken" / LAST))


def test_resuming_a_complete_run_does_nothing(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm")
    train(config, tmp_path, resume=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert not train(config, tmp_path, resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_line_of_the_metrics_that_a_kill_cut_short_is_dropped(tmp_path: Path):
    whole = '{"step": 1, "loss": 2.0}\n'
    (tmp_path / METRICS).write_text(whole + '{"step": 2, "loss": 1.5}\n{"step": 1, "lo')
    with Records(tmp_path, step=1) as records:
        records.write(2, {"loss": 1.0})
    assert (tmp_path / METRICS).read_text() == whole + '{"step": 2, "loss": 1.0}\n'


# What cannot be trained


def refusal(config: Config, out: Path, resume: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        train(config, out, resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_stands_is_not_overwritten(data: Path, tmp_path: Path):
    train(tiny_config(data, "lstm"), tmp_path, resume=False)
    before = (tmp_path / LAST).read_bytes()
    assert refusal(tiny_config(data, "lstm"), tmp_path) == (
        f"{tmp_path}: already holds a run; add --resume to go on with it, or choose another --out"
    )
    assert "holds a run of model lstm, cannot resume it as ee" in refusal(tiny_config(data, "ee"), tmp_path, True)
    assert (tmp_path / LAST).read_bytes() == before


@pytest.mark.parametrize(
    ("model", "change", "problem"),
    [
        ("lstm", "lstm.hidden_dim=7", "was trained with lstm.hidden_dim 10, cannot go on with 7"),
        ("ee", "engine.classifier_hidden=[3]", "was trained with engine.classifier_hidden [12], cannot go on with [3]"),
        ("joint", "freeze=engine", "was trained with freeze None, cannot go on with engine"),
    ],
)
def test_a_run_cannot_go_on_as_another_network(data, parts, tmp_path: Path, model: str, change: str, problem: str):
    settings = ["iterations=2", *(parts if model == "joint" else [])]
    train(tiny_config(data, model, *settings), tmp_path, resume=False)
    message = refusal(tiny_config(data, model, *settings, "iterations=4", change), tmp_path, resume=True)
    assert message == f"{tmp_path / LAST}: {problem}"


def test_a_run_resumes_only_with_the_data_of_its_kind(data: Path, tmp_path: Path):
    train(tiny_config(data, "ee", "iterations=2"), tmp_path / "run", resume=False)
    other = write_data(tmp_path / "data")
    for split in ("train", "val"):
        write_h5(other / f"{split}_features.h5", {"features": features(0, grid=GRID + 1)})
    message = refusal(tiny_config(other, "ee"), tmp_path / "run", resume=True)
    assert message.startswith(f"{tmp_path / 'run' / LAST}: features are ({CHANNELS}, {GRID + 1}, {GRID + 1})")


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    ("model", "missing"), [("pg", "programs"), ("ee", "programs"), ("ee", "answers"), ("lstm", "answers")]
)
def test_a_split_that_lacks_what_training_needs_is_named(tmp_path: Path, split: str, model: str, missing: str):
    data = write_data(tmp_path / "data")
    datasets = arrays(VAL)
    del datasets[missing]
    path = write_h5(data / f"{split}_questions.h5", datasets)
    message = refusal(tiny_config(data, model), tmp_path / "run")
    assert message.startswith(f"{path}: has no {missing}, which training {model} needs")
    assert not (tmp_path / "run").exists()


def test_predicted_programs_and_the_lstm_need_no_programs_in_the_data(parts: list[str], tmp_path: Path):
    data = write_data(tmp_path / "data")
    for split, count in (("train", TRAIN), ("val", VAL)):
        datasets = arrays(count)
        del datasets["programs"]
        write_h5(data / f"{split}_questions.h5", datasets)
    assert train(tiny_config(data, "ee", "programs=predicted", parts[0]), tmp_path / "ee", resume=False)
    assert train(tiny_config(data, "joint", *parts), tmp_path / "joint", resume=False)
    assert train(tiny_config(data, "lstm"), tmp_path / "lstm", resume=False)


def test_validation_features_of_another_shape_are_named(tmp_path: Path):
    data = write_data(tmp_path / "data")
    path = write_h5(data / "val_features.h5", {"features": features(1, channels=CHANNELS + 1)})
    message = refusal(tiny_config(data, "ee"), tmp_path / "run")
    assert message.startswith(f"{path}: features are ({CHANNELS + 1}, {GRID}, {GRID}) an image")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        ("ee", ["programs=predicted"], "give --pg CKPT, a trained program generator"),
        ("joint", [], "joint training starts from trained parts: give --pg CKPT"),
        ("joint", ["pg"], "joint training starts from trained parts: give --ee CKPT"),
        ("ee", ["pg"], "which training ee does not use; --programs predicted runs its programs"),
        ("lstm", ["pg"], "which training lstm does not use"),
        ("pg", ["freeze=engine"], "freeze is engine, which training pg does not use"),
        ("ee", ["data=null"], "no data: give --data DIR"),
        ("ee", ["device=cuda:99"], "device 'cuda:99': not available here"),
        ("ee", ["device=quantum"], "device 'quantum': not available here"),
        ("ee", ["engine.stem=pixels", "engine.stem_stride=4"], "an execution engine cannot be built: stem widths []"),
        ("ee", ["curriculum=[[0, 1]]"], "curriculum: no training program has at most 1 functions"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data, parts, tmp_path: Path, model, settings, problem: str):
    settings = [parts[0] if setting == "pg" else setting for setting in settings]
    assert problem in refusal(tiny_config(data, model, *settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_split_without_questions_is_named(tmp_path: Path):
    data = write_data(tmp_path / "data")
    path = write_h5(data / "train_questions.h5", {name: values[:0] for name, values in arrays(1).items()})
    assert refusal(tiny_config(data, "lstm"), tmp_path / "run") == f"{path}: holds no question"


def test_an_engine_of_another_vocabulary_is_no_start(parts: list[str], tmp_path: Path):
    data = write_data(tmp_path / "data")
    vocab = json.loads((data / "vocab.json").read_text())
    vocab["answer_token_to_idx"]["zebra"] = len(vocab["answer_token_to_idx"])
    (data / "vocab.json").write_text(json.dumps(vocab))
    message = refusal(tiny_config(data, "ee", parts[1]), tmp_path / "run")
    assert message.startswith(f"{parts[1].removeprefix('ee=')}: trained with another vocabulary: answer token")


def test_a_vocabulary_without_scene_is_refused(tmp_path: Path):
    data = write_data(tmp_path / "data")
    (data / "vocab.json").write_text((data / "vocab.json").read_text().replace('"scene"', '"view"'))
    message = refusal(tiny_config(data, "ee"), tmp_path / "run")
    assert message.startswith("an execution engine cannot be built: the program vocabulary")
    assert message.endswith("lacks 'scene'")


def test_features_without_the_images_of_the_questions_are_named(tmp_path: Path):
    data = write_data(tmp_path / "data")
    path = write_h5(data / "train_features.h5", {"features": features(0)[: IMAGES - 1]})
    assert refusal(tiny_config(data, "ee"), tmp_path / "run").startswith(f"{path}: holds {IMAGES - 1} images, but")
