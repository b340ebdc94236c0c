"""Training: every model learns, what is unused stays, what a run leaves, and what cannot be trained or resumed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from killing import digest, run_parts
from tiny_data import (
    CHANNELS,
    GRID,
    IMAGES,
    TRAIN,
    VAL,
    VOCAB,
    arrays,
    features,
    newest,
    tiny_config,
    write_data,
    write_h5,
)
from train_cases import before_each_step, rows, scalars, weights

import iep.training.run_data
import iep.training.run_training
from iep.config import Config, read_config, to_dict
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.models.checkpoint import BEST, WEIGHTS, WEIGHTS_CONFIG, read_checkpoint
from iep.models.network import Network
from iep.runtime import devices
from iep.runtime.records import METRICS
from iep.training.loop import Trainer, learning_rate
from iep.training.run_training import train
from iep.vocab import END

CPU = torch.device("cpu")


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
        ("cnn-lstm", ("cnn_lstm.cnn_res_blocks=1", "cnn_lstm.classifier_norm=true")),
        ("cnn-lstm-sa", ("precision=bfloat16",)),
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
        assert {value.dtype for value in weights(newest(tmp_path / precision), "engine").values()} == {torch.float32}
    exact, rounded = (rows(tmp_path / precision)[0]["loss"] for precision in ("float32", "bfloat16"))
    assert exact != rounded == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ("fpu avx512f avx512_bf16 sse", "bfloat16"),
        ("amx_bf16", "bfloat16"),
        ("fpu avx512f sse avx512_bf16_not", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_has_instructions_for_it(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    flags: str,
    precision: str,
):
    (tmp_path / "cpuinfo").write_text(f"model name\t: a processor\nflags\t\t: {flags}\n")
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    for each in ("auto", precision):
        train(tiny_config(data, "ee", f"precision={each}", "iterations=2"), tmp_path / each, resume=False)
        assert f"{tmp_path / each}: ee in {precision} on cpu" in capsys.readouterr().out
    assert rows(tmp_path / "auto")[0]["loss"] == rows(tmp_path / precision)[0]["loss"]


@pytest.mark.parametrize(
    ("capability", "precision"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")]
)
def test_auto_is_bfloat16_on_gpus_from_compute_capability_8(monkeypatch: pytest.MonkeyPatch, capability, precision):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert devices.resolve_precision("auto", torch.device("cuda")) == precision


# What moves and what does not


def test_modules_that_no_program_uses_keep_their_weights(data: Path, tmp_path: Path):
    config = tiny_config(data, "ee", "num_train_samples=1", "weight_decay=0.1")
    train(config, tmp_path, resume=False)
    torch.manual_seed(config.seed)
    initial = Network.new("engine", config.engine, VOCAB, (CHANNELS, GRID, GRID)).module
    after = weights(newest(tmp_path), "engine")
    used = {VOCAB.program[token] for token in arrays(1)["programs"][0] if token > END} | {"stem", "classifier"}
    assert {"exist", "scene"} < used < {name for name, _ in initial.named_children()}
    for child, module in initial.named_children():
        moved = [not torch.equal(value, after[f"{child}.{key}"]) for key, value in module.state_dict().items()]
        assert any(moved) == (child in used), child


def test_a_run_starts_from_the_checkpoints_it_is_given_and_takes_their_settings(data, parts, tmp_path: Path):
    config = tiny_config(data, "joint", *parts, "learning_rate=0", "iterations=1", "engine.module_dim=128")
    train(config, tmp_path, resume=False)
    for name, path in (("generator", config.pg), ("engine", config.ee)):
        assert digest(weights(newest(tmp_path), name)) == digest(weights(Path(path), name))
    saved = read_config(tmp_path / "config.yaml")
    assert saved.engine == tiny_config(data, "ee").engine != config.engine
    held = read_checkpoint(newest(tmp_path)).state.config
    assert {**to_dict(saved), **held} == to_dict(saved)


def test_every_step_uses_the_learning_rate_of_its_number(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm", "warmup=2", "decay=cosine")
    train(config, tmp_path, resume=False)
    used = [row["learning_rate"] for row in rows(tmp_path) if "learning_rate" in row]
    assert used == [learning_rate(config, step) for step in range(4)]


# What a run leaves


def test_only_training_counts_in_questions_per_second(data: Path, tmp_path: Path, monkeypatch):
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def take(seconds: float) -> float:
        clock.now += seconds
        return 0.0

    monkeypatch.setattr("iep.training.loop.time", clock)
    before_each_step(monkeypatch, lambda trainer, batch: take(1.0))
    monkeypatch.setattr(Trainer, "validate", lambda self, batches: take(100.0))
    train(tiny_config(data, "lstm", "validate_every=3", "log_every=2"), tmp_path, resume=False)
    recorded = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert [row["questions_per_second"] for row in recorded if "loss" in row] == [8.0, 8.0]


def test_a_row_holds_the_means_over_the_iterations_since_the_row_before(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm", "iterations=5")
    for every in (1, 3):
        train(replace(config, log_every=every), tmp_path / str(every), resume=False)
    each, found = ([row for row in rows(tmp_path / name) if "loss" in row] for name in "13")
    assert [row["step"] for row in found] == [3, 5]
    for row, part in zip(found, (each[:3], each[3:]), strict=True):
        for name in ("loss", "accuracy"):
            assert row[name] == pytest.approx(np.mean([one[name] for one in part]), rel=1e-12)


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
        *("config.yaml", "step-2.pt", "step-4.pt", BEST, WEIGHTS, WEIGHTS_CONFIG, METRICS, "tensorboard")
    }


def test_validation_is_the_share_of_right_answers(data: Path, tmp_path: Path):
    train(tiny_config(data, "lstm", "iterations=30", "validate_every=30"), tmp_path, resume=False)
    lstm = read_checkpoint(newest(tmp_path)).network("lstm").module.eval()
    val = arrays(VAL)
    answers = lstm(torch.from_numpy(val["questions"]).long()).argmax(1).numpy()
    expected = (answers == val["answers"]).mean()
    assert rows(tmp_path)[-1] == {"step": 30, "validation_accuracy": pytest.approx(expected)}
    assert expected > 0.2


def test_without_a_validation_split_the_last_checkpoint_is_the_best(data: Path, tmp_path: Path):
    write_data(tmp_path / "data")
    (tmp_path / "data" / "val_questions.h5").unlink()
    train(tiny_config(tmp_path / "data", "lstm", "iterations=5"), tmp_path / "run", resume=False)
    parts = run_parts(tmp_path / "run")
    assert parts["last"] == parts[BEST]
    assert read_checkpoint(newest(tmp_path / "run")).state.step == 5


def test_only_the_samples_asked_for_are_trained_and_validated_on(data: Path, tmp_path: Path, monkeypatch):
    seen, validated = set(), []
    before_each_step(monkeypatch, lambda trainer, batch: seen.update(batch.index.tolist()))
    monkeypatch.setattr(
        Trainer, "validate", lambda self, batches: validated.extend(len(batch.index) for batch in batches) or 0.0
    )
    train(tiny_config(data, "lstm", "num_train_samples=9", "num_val_samples=3", "iterations=8"), tmp_path, resume=False)
    assert seen == set(range(9))
    assert set(validated) == {3}


def test_a_curriculum_starts_with_short_programs(data: Path, tmp_path: Path, monkeypatch):
    lengths = []

    def measure(trainer: Trainer, batch: Batch) -> None:
        functions_BL = (batch.programs > END) & (batch.programs != VOCAB.program_index["scene"])
        lengths.append(int(functions_BL.sum(1).max()))

    before_each_step(monkeypatch, measure)
    train(tiny_config(data, "lstm", "curriculum=[[0, 4], [2, 99]]", "iterations=8"), tmp_path, resume=False)
    assert max(lengths[:2]) <= 4
    assert max(lengths[2:]) > 7


# The same again


def test_a_seed_repeats_a_run_with_any_number_of_workers_and_another_seed_does_not(data: Path, tmp_path: Path):
    for name, *settings in (("a",), ("b", "workers=2"), ("c", "seed=1")):
        train(tiny_config(data, "ee", *settings), tmp_path / name, resume=False)
    states = {name: dict(weights(newest(tmp_path / name), "engine")) for name in "abc"}
    assert digest(states["a"]) == digest(states["b"])
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert not torch.equal(states["a"]["classifier.0.weight"], states["c"]["classifier.0.weight"])


def test_predicted_programs_are_decoded_once_and_train_as_true_ones_would(data, parts, tmp_path: Path, monkeypatch):
    """The second run has data whose true programs are those that the first predicts."""
    decoded, greedy = [], iep.training.run_data.greedy

    def decode(*arguments):
        decoded.append(greedy(*arguments))
        return decoded[-1]

    monkeypatch.setattr(iep.training.run_data, "greedy", decode)
    settings = ("learning_rate=0.001", "iterations=8", "validate_every=4")
    train(tiny_config(data, "ee", "programs=predicted", parts[0], *settings), tmp_path / "predicted", resume=False)
    assert [len(programs_BL) for programs_BL in decoded] == [TRAIN, VAL]
    write_data(tmp_path / "data")
    for split, programs_BL in zip(("train", "val"), decoded, strict=True):
        datasets = arrays(len(programs_BL)) | {"programs": programs_BL.numpy()}
        write_h5(tmp_path / "data" / f"{split}_questions.h5", datasets)
    train(tiny_config(tmp_path / "data", "ee", *settings), tmp_path / "true", resume=False)
    assert rows(tmp_path / "predicted") == rows(tmp_path / "true")
    states = [dict(weights(newest(tmp_path / name), "engine")) for name in ("predicted", "true")]
    assert digest(states[0]) == digest(states[1])


# What cannot be trained or resumed


def refusal(config: Config, out: Path, resume: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        train(config, out, resume)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_that_stands_is_not_overwritten(data: Path, tmp_path: Path):
    train(tiny_config(data, "lstm"), tmp_path, resume=False)
    before = newest(tmp_path).read_bytes()
    assert refusal(tiny_config(data, "lstm"), tmp_path) == (
        f"{tmp_path}: already holds a run; add --resume to continue it, or choose another --out"
    )
    assert newest(tmp_path).read_bytes() == before


@pytest.mark.parametrize(
    ("model", "change", "problem"),
    [
        ("lstm", "lstm.hidden_dim=7", "lstm.hidden_dim 10, cannot resume with lstm.hidden_dim 7"),
        ("ee", "engine.stem_norm=true", "engine.stem_norm False, cannot resume with engine.stem_norm True"),
        ("joint", "freeze=engine", "freeze nothing, cannot resume with freeze engine"),
    ],
)
def test_a_run_cannot_be_resumed_as_another_network(data, parts, tmp_path: Path, model: str, change: str, problem: str):
    settings = ["iterations=2", *(parts if model == "joint" else [])]
    train(tiny_config(data, model, *settings), tmp_path, resume=False)
    message = refusal(tiny_config(data, model, *settings, "iterations=4", change), tmp_path, resume=True)
    assert message == f"{newest(tmp_path)}: was trained with {problem}"


def test_a_run_resumes_only_with_the_data_of_its_kind(data: Path, tmp_path: Path):
    train(tiny_config(data, "ee", "iterations=2"), tmp_path / "run", resume=False)
    other = write_data(tmp_path / "data")
    for split in ("train", "val"):
        write_h5(other / f"{split}_features.h5", {"features": features(0, grid=GRID + 1)})
    message = refusal(tiny_config(other, "ee"), tmp_path / "run", resume=True)
    assert message.startswith(f"{other}/train_features.h5: features are ({CHANNELS}, {GRID + 1}, {GRID + 1})")
    assert f"the engine of {newest(tmp_path / 'run')} is made for" in message


def without(name: str) -> Callable[[Path], object]:
    """Return what writes a file of questions without one of its data sets."""
    return lambda path: write_h5(path, {key: values for key, values in arrays(VAL).items() if key != name})


@pytest.mark.parametrize(
    ("model", "name", "damage", "problem"),
    [
        *(
            (model, f"{split}_questions.h5", without(missing), f"has no {missing}, which training {model} needs")
            for model, missing in (("pg", "programs"), ("ee", "answers"), ("lstm", "answers"))
            for split in ("train", "val")
        ),
        (
            "ee",
            "val_features.h5",
            lambda path: write_h5(path, {"features": features(1, channels=CHANNELS + 1)}),
            f"features are ({CHANNELS + 1}, {GRID}, {GRID}) an image",
        ),
        (
            "ee",
            "train_features.h5",
            lambda path: write_h5(path, {"features": features(0)[: IMAGES - 1]}),
            f"holds {IMAGES - 1} images, but",
        ),
        (
            "lstm",
            "train_questions.h5",
            lambda path: write_h5(path, {name: values[:0] for name, values in arrays(1).items()}),
            "holds no question",
        ),
    ],
)
def test_data_that_do_not_fit_the_model_are_named_before_anything_is_written(
    tmp_path: Path, model: str, name: str, damage, problem: str
):
    path = write_data(tmp_path / "data") / name
    damage(path)
    message = refusal(tiny_config(path.parent, model), tmp_path / "run")
    assert message.startswith(f"{path}: ")
    assert problem in message
    assert not (tmp_path / "run").exists()


def test_predicted_programs_and_baselines_need_no_programs_in_the_data(parts: list[str], tmp_path: Path):
    data = write_data(tmp_path / "data")
    for split, count in (("train", TRAIN), ("val", VAL)):
        datasets = arrays(count)
        del datasets["programs"]
        write_h5(data / f"{split}_questions.h5", datasets)
    assert train(tiny_config(data, "ee", "programs=predicted", parts[0]), tmp_path / "ee", resume=False)
    assert set(read_checkpoint(newest(tmp_path / "ee")).networks) == {"engine"}
    assert train(tiny_config(data, "joint", *parts), tmp_path / "joint", resume=False)
    assert train(tiny_config(data, "cnn-lstm"), tmp_path / "cnn-lstm", resume=False)


@pytest.mark.parametrize(
    ("model", "settings", "problem"),
    [
        ("ee", ["programs=predicted"], "give --pg CKPT, a trained program generator"),
        ("joint", [], "joint training starts from trained networks: give --pg CKPT"),
        ("joint", ["pg"], "joint training starts from trained networks: give --ee CKPT"),
        ("ee", ["pg"], "which training ee uses only with --programs predicted"),
        ("lstm", ["pg"], "which training lstm does not use"),
        ("pg", ["freeze=engine"], "freeze: 'engine' is not a part, expected encoder, decoder"),
        ("cnn-lstm", ["freeze=rnn,cnn,classifier"], "freeze: rnn, cnn, classifier have all the weights of the"),
        ("ee", ["device=quantum"], "device 'quantum': not available here"),
        ("ee", ["engine.stem=none"], "an execution engine cannot be built: features of 3 channels"),
        ("ee", ["engine.modules=tbd", "engine.scene=stem"], "scene is 'stem', a setting of the modules iep"),
        ("ee", ["engine.modules=tbd", "engine.module_norm=example"], "module_norm is 'example', a setting of"),
        ("ee", ["attention_penalty=1"], "attention_penalty is 1.0, but modules iep compute no attention maps"),
        ("ee", ["curriculum=[[0, 1]]"], "curriculum: no training program has at most 1 functions"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data, parts, tmp_path: Path, model, settings, problem: str):
    settings = [parts[0] if setting == "pg" else setting for setting in settings]
    assert problem in refusal(tiny_config(data, model, *settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
