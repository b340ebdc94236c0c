"""A run stopped at any step, or in the middle of a validation, and resumed gives the bits of one that never stopped."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from killing import run_parts
from tiny_data import assert_one_error, newest, tiny, tiny_config
from torch import Tensor
from train_cases import iep_train

from iep.data.datasets import Batch
from iep.models.checkpoint import BEST, load_checkpoint, load_newest, save_checkpoint, step_checkpoints
from iep.training.loop import Trainer
from iep.training.run_training import train

LENGTH = 5
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def go(out: Path, data: Path, *settings: str) -> Result:
    """One process of the run: started, or resumed where the one before was stopped."""
    fixed = [f"iterations={LENGTH}", "validate_every=2", "keep=3"]
    (model,) = (setting.removeprefix("model=") for setting in settings if setting.startswith("model="))
    given = [*tiny(model), *fixed, *settings]
    return iep_train("--resume", "--data", data, "--out", out, *given)


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Moments at which a signal is sent, each once: ("step", n) is in step n, ("validation", n) in the one after it."""
    moments: list[tuple[str, int]] = []

    def reach(moment: tuple[str, int]) -> None:
        if moment in moments:
            moments.remove(moment)
            os.kill(os.getpid(), SIGNALS[len(moments) % 2])

    train_step, validate = Trainer.train_step, Trainer.validate

    def step(self: Trainer, batch: Batch) -> Any:
        reach(("step", self.step + 1))
        return train_step(self, batch)

    def validated(self: Trainer, batches: Any) -> float:
        reach(("validation", self.step))
        return validate(self, batches)

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(Trainer, "validate", validated)
    return moments


@pytest.mark.parametrize(
    "settings",
    [
        ("model=ee", "engine.stem_norm=true", "warmup=3", "decay=cosine", "curriculum=[[0, 5], [3, 99]]"),
        ("model=ee", "precision=bfloat16", "workers=2", "clip_gradients=1"),
        ("model=ee", "engine.modules=tbd", "attention_penalty=0.001", "workers=1", "defer_weight_grads=true"),
        ("model=pg", "generator.dropout=0.5", "generator.num_layers=2", "weight_decay=0.1"),
        ("model=lstm", "lstm.dropout=0.5", "lstm.num_layers=2", "precision=bfloat16"),
        ("model=cnn-lstm", "cnn_lstm.cnn_res_blocks=1", "cnn_lstm.classifier_norm=true", "questions_per_image=2"),
        ("model=cnn-lstm-sa", "cnn_lstm_sa.classifier_dropout=0.5", "precision=bfloat16", "freeze=rnn"),
        ("model=joint", "temperature=2"),
    ],
)
def test_a_run_stopped_everywhere_gives_the_bits_of_an_unbroken_one(data, parts, tmp_path: Path, stops, settings):
    settings = (*settings, *(parts if "model=joint" in settings else ()))
    assert go(tmp_path / "unbroken", data, *settings).exit_code == 0

    stops += [("step", n) for n in range(1, LENGTH + 1)] + [("validation", n) for n in (2, 4, LENGTH)]
    if "workers=2" in settings:  # which take long to start
        stops[:] = [("step", 1), ("validation", 2), ("step", 4)]
    for left in range(len(stops), 0, -1):
        result = go(tmp_path / "stopped", data, *settings)
        assert result.exit_code == 128 + SIGNALS[(left - 1) % 2], result.output
        step = load_newest(tmp_path / "stopped").content["step"]
        assert f"after iteration {step}, which is saved; --resume continues from there\n" in result.output
    assert not stops
    assert go(tmp_path / "stopped", data, *settings).exit_code == 0
    assert run_parts(tmp_path / "stopped") == run_parts(tmp_path / "unbroken")


def test_a_stopped_validation_is_done_again_and_its_row_is_there_once(data: Path, tmp_path: Path, stops):
    stops.append(("validation", 2))
    assert go(tmp_path, data, "model=lstm").exit_code == 143
    assert load_checkpoint(newest(tmp_path))["validation_due"]
    assert not (tmp_path / BEST).exists()
    copy = load_checkpoint(newest(tmp_path))
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    whole = run_parts(tmp_path)
    # As a kill just after the validation's row would leave it:
    for path in (*step_checkpoints(tmp_path), tmp_path / BEST):
        path.unlink()
    save_checkpoint(tmp_path / "step-2.pt", copy)
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    assert run_parts(tmp_path) == whole


def test_a_run_stopped_once_its_last_checkpoint_is_saved_is_finished(data: Path, tmp_path: Path, monkeypatch):
    save_step = Trainer.save_step

    def saved(self: Trainer) -> None:
        save_step(self)
        if self.step == LENGTH:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Trainer, "save_step", saved)
    result = go(tmp_path, data, "model=lstm")
    assert result.exit_code == 0
    assert f"{tmp_path}: trained lstm to iteration {LENGTH}; " in result.output


def test_a_signal_before_the_first_step_leaves_no_checkpoint(data: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(
        "iep.training.run_training.open_split", lambda *arguments, **more: os.kill(os.getpid(), signal.SIGTERM)
    )
    result = go(tmp_path / "run", data, "model=lstm")
    assert (result.exit_code, result.output) == (143, "Stopped by SIGTERM\n")
    assert not (tmp_path / "run").exists()


# Checkpoints that stay


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept_and_the_best_always(data: Path, tmp_path: Path, monkeypatch, keep: int):
    scores = iter([0.0, 0.9, 0.1, 0.1, 0.1, 0.1])
    monkeypatch.setattr(Trainer, "validate", lambda self, batches: next(scores))
    result = go(tmp_path / "run", data, "model=lstm", "validate_every=1", "--keep", str(keep))
    assert result.exit_code == 0
    kept = [f"step-{step}.pt" for step in range(5, 5 - keep, -1)]
    assert [path.name for path in step_checkpoints(tmp_path / "run")] == kept
    assert load_checkpoint(tmp_path / "run" / BEST)["step"] == 1


def test_an_older_checkpoint_goes_only_when_the_new_one_is_there(data: Path, tmp_path: Path, monkeypatch):
    config = tiny_config(data, "lstm", "iterations=3", "validate_every=1", "keep=1")
    seen = []

    def watched(path: Path, content: dict) -> None:
        seen.append((path.name, [there.name for there in step_checkpoints(tmp_path)]))
        save_checkpoint(path, content)

    monkeypatch.setattr("iep.training.loop.save_checkpoint", watched)
    monkeypatch.setattr(Trainer, "validate", lambda self, batches: 0.0)
    train(config, tmp_path, resume=False)
    assert seen == [(BEST, []), ("step-1.pt", []), ("step-2.pt", ["step-1.pt"]), ("step-3.pt", ["step-2.pt"])]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, middle + 128):  # the archive has gaps of up to 63 bytes that hold nothing
        content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_named_with_the_newest_good_one(data: Path, tmp_path: Path):
    settings = ("model=lstm",)
    assert go(tmp_path, data, *settings).exit_code == 0
    whole = run_parts(tmp_path)
    damage(tmp_path / "step-5.pt")
    damage(tmp_path / "step-4.pt")
    result = go(tmp_path, data, *settings)
    assert_one_error(
        result,
        f"{tmp_path / 'step-5.pt'}: not a whole checkpoint file",
        "; the newest good checkpoint is step-2.pt, of iteration 2: to resume from it, remove step-5.pt and step-4.pt",
    )
    for name in ("step-5.pt", "step-4.pt"):
        (tmp_path / name).unlink()
    assert go(tmp_path, data, *settings).exit_code == 0
    assert run_parts(tmp_path) == whole


def test_the_best_checkpoint_is_one_to_go_on_from_when_no_other_is_good(data: Path, tmp_path: Path):
    assert go(tmp_path, data, "model=lstm", "keep=1").exit_code == 0
    whole = run_parts(tmp_path)
    damage(tmp_path / "step-5.pt")
    assert_one_error(go(tmp_path, data, "model=lstm"), "the newest good checkpoint is best.pt, of iteration")
    (tmp_path / "step-5.pt").unlink()
    assert go(tmp_path, data, "model=lstm", "keep=1").exit_code == 0
    assert run_parts(tmp_path)["last"] == whole["last"]
    damage(tmp_path / "step-5.pt")
    damage(tmp_path / BEST)
    assert_one_error(go(tmp_path, data, "model=lstm"), "step-5.pt: not a whole", "has no good checkpoint")


def test_resuming_reads_each_checkpoint_once(data: Path, tmp_path: Path, monkeypatch):
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    loaded, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: loaded.append(args[0]) or load(*args, **kwargs))
    assert go(tmp_path, data, "model=lstm", "iterations=7").exit_code == 0
    assert [path.name for path in loaded] == ["step-5.pt", BEST]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model=pg",), "it has other networks; without it, the next"),
        (("model=lstm", "lstm.hidden_dim=5"), "it has other networks; without it, the next"),
        (("model=lstm", "validate_every=1", "iterations=1"), "it is of iteration 1 and accuracy"),
    ],
)
def test_the_best_checkpoint_of_another_run_is_refused(data: Path, tmp_path: Path, settings, words: str):
    assert go(tmp_path / "run", data, "model=lstm").exit_code == 0
    assert go(tmp_path / "other", data, *settings).exit_code == 0
    (tmp_path / "other" / BEST).replace(tmp_path / "run" / BEST)
    result = go(tmp_path / "run", data, "model=lstm", "iterations=7")
    assert_one_error(result, f"{tmp_path / 'run' / BEST}: belongs to another run than step-5.pt: {words}")


OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB."),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("loss", "a batch of 8 questions; --resume continues from the last checkpoint; lower batch_size"),
        ("correct", "validation with 256 questions at a time; lower val_batch_size"),
    ],
)
def test_memory_that_runs_out_is_one_line_with_the_setting_that_helps(
    data: Path, tmp_path: Path, monkeypatch, method: str, words: str, error: Exception
):
    def greedy(self: object, batch: Batch) -> Tensor:
        raise error

    monkeypatch.setattr(f"iep.training.tasks.Task.{method}", greedy)
    assert_one_error(go(tmp_path / "run", data, "model=lstm"), f"cpu: not enough memory for {words}")
