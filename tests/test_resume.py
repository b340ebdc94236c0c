"""A run stopped at any step, or in the middle of a validation, and resumed gives the bits of one that never stopped."""

import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import Result
from killing import MEASURED, digest, run_parts
from tiny_data import assert_one_error, content, newest, save_content, tiny, tiny_config
from torch import Tensor
from train_cases import before_each_step, iep_train, rows, scalars

from iep.data.datasets import Batch
from iep.models.checkpoint import (
    BEST,
    Checkpoint,
    checkpoints,
    read_checkpoint,
    read_newest,
    step_checkpoints,
    write_checkpoint,
)
from iep.runtime.records import METRICS, Records
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

    validate = Trainer.validate

    def validated(self: Trainer, batches: Iterable[Batch]) -> float:
        reach(("validation", self.step))
        return validate(self, batches)

    before_each_step(monkeypatch, lambda trainer, batch: reach(("step", trainer.step + 1)))
    monkeypatch.setattr(Trainer, "validate", validated)
    return moments


@pytest.mark.parametrize(
    "settings",
    [
        ("model=ee", "engine.stem_norm=true", "warmup=3", "decay=cosine", "curriculum=[[0, 5], [3, 99]]"),
        ("model=ee", "engine.modules=tbd", "workers=1", "defer_weight_grads=true", "clip_gradients=1", "log_every=3"),
        ("model=ee", "programs=predicted", "log_every=4"),
        ("model=pg", "generator.dropout=0.5", "generator.num_layers=2", "weight_decay=0.1"),
        ("model=cnn-lstm", "cnn_lstm.classifier_norm=true", "precision=bfloat16", "freeze=rnn"),
        ("model=joint", "temperature=2"),
    ],
)
def test_a_run_stopped_everywhere_gives_the_bits_of_an_unbroken_one(data, parts, tmp_path: Path, stops, settings):
    starts = {"model=joint": parts, "programs=predicted": parts[:1]}
    settings += tuple(start for setting in settings for start in starts.get(setting, ()))
    assert go(tmp_path / "unbroken", data, *settings).exit_code == 0

    stops += [("step", n) for n in range(1, LENGTH + 1)] + [("validation", n) for n in (2, 4, LENGTH)]
    if "workers=1" in settings:  # which take long to start
        stops[:] = [("step", 1), ("validation", 2), ("step", 4)]
    for left in range(len(stops), 0, -1):
        result = go(tmp_path / "stopped", data, *settings)
        assert result.exit_code == 128 + SIGNALS[(left - 1) % 2], result.output
        step = read_newest(tmp_path / "stopped").state.step
        assert f"after iteration {step}, which is saved; --resume continues from there\n" in result.output
    assert not stops
    assert go(tmp_path / "stopped", data, *settings).exit_code == 0
    assert run_parts(tmp_path / "stopped") == run_parts(tmp_path / "unbroken")


def test_a_stopped_validation_is_done_again_and_its_row_is_there_once(data: Path, tmp_path: Path, stops):
    stops.append(("validation", 2))
    assert go(tmp_path, data, "model=lstm").exit_code == 143
    assert read_checkpoint(newest(tmp_path)).state.validation_due
    assert not (tmp_path / BEST).exists()
    copy = content(newest(tmp_path))
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    whole = run_parts(tmp_path)
    # As a kill just after the validation's row would leave it:
    for path in (*step_checkpoints(tmp_path), tmp_path / BEST):
        path.unlink()
    save_content(tmp_path / "step-2.pt", copy)
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


# A run that ends without a signal


class CrashError(Exception):
    """Stands for whatever ends a run in the middle."""


def test_a_run_that_crashed_resumes_to_the_same_bits(data, parts, tmp_path: Path, monkeypatch):
    crashes = [1, 5, 8]
    config = tiny_config(data, "joint", "iterations=9", "validate_every=3", *parts, "precision=bfloat16")
    train(config, tmp_path / "unbroken", resume=False)

    def crash(trainer: Trainer, batch: Batch) -> None:
        if crashes and trainer.step == crashes[0]:
            raise CrashError

    before_each_step(monkeypatch, crash)
    while crashes:
        with pytest.raises(CrashError):
            train(config, tmp_path / "broken", resume=True)
        assert rows(tmp_path / "broken")[-1]["step"] == crashes.pop(0)
    assert train(config, tmp_path / "broken", resume=True)
    assert run_parts(tmp_path / "broken") == run_parts(tmp_path / "unbroken")
    ours, theirs = scalars(tmp_path / "broken"), scalars(tmp_path / "unbroken")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in theirs.keys() - set(MEASURED))


def test_a_finished_run_goes_on_to_the_bits_of_a_longer_one(data: Path, parts: list[str], tmp_path: Path):
    short, long = (tiny_config(data, "joint", f"iterations={n}", *parts) for n in (4, 8))
    train(long, tmp_path / "long", resume=False)
    train(short, tmp_path / "resumed", resume=False)
    train(long, tmp_path / "resumed", resume=True)
    assert run_parts(tmp_path / "resumed") == run_parts(tmp_path / "long")


def test_resuming_a_complete_run_does_nothing(data: Path, tmp_path: Path):
    config = tiny_config(data, "lstm")
    train(config, tmp_path, resume=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert not train(config, tmp_path, resume=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_line_of_the_metrics_that_a_kill_cut_short_is_dropped(tmp_path: Path):
    whole = '{"step": 1, "loss": 2.0}\n'
    (tmp_path / METRICS).write_text(whole + '{"step": 2, "loss": 1.5}\n{"step": 1, "lo')
    Records(tmp_path, step=1).write(2, {"loss": 1.0})
    assert (tmp_path / METRICS).read_text() == whole + '{"step": 2, "loss": 1.0}\n'


# Checkpoints that stay


@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_few_are_kept_until_the_next_is_there_and_the_best_always(data, tmp_path, monkeypatch, keep: int):
    """Check the checkpoints of a run in which two validations have the best score, and the newer one is kept."""
    scores, seen = iter([0.0, 0.1, 0.9, 0.9, 0.3, 0.1]), []

    def watched(checkpoint: Checkpoint) -> None:
        seen.append((checkpoint.path.name, [there.name for there in step_checkpoints(tmp_path)]))
        write_checkpoint(checkpoint)

    monkeypatch.setattr("iep.training.loop.write_checkpoint", watched)
    monkeypatch.setattr(Trainer, "validate", lambda self, batches: next(scores))
    train(tiny_config(data, "lstm", f"iterations={LENGTH}", "validate_every=1", f"keep={keep}"), tmp_path, resume=False)
    names = [f"step-{step}.pt" for step in range(LENGTH, 0, -1)]
    assert [path.name for path in step_checkpoints(tmp_path)] == names[:keep]
    for step, name in enumerate(reversed(names)):
        assert (name, names[LENGTH - step :][:keep]) in seen
    best, last = (read_checkpoint(path).state for path in (tmp_path / BEST, newest(tmp_path)))
    assert (best.step, best.best, last.best) == (3, 0.9, 0.9)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, middle + 128):  # the archive has gaps of up to 63 bytes that hold nothing
        content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_named_with_the_one_before_it(data: Path, tmp_path: Path):
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    whole = run_parts(tmp_path)
    for name, before in (("step-5.pt", "step-4.pt"), ("step-4.pt", "step-2.pt"), ("step-2.pt", BEST)):
        damage(tmp_path / name)
        problem = f"{tmp_path / name}: not a whole checkpoint file"
        assert_one_error(go(tmp_path, data, "model=lstm"), problem, f"; remove it to resume from {before}")
        (tmp_path / name).unlink()
    assert go(tmp_path, data, "model=lstm").exit_code == 0
    assert digest(content(checkpoints(tmp_path)[0])) == whole["last"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("loss", "a batch of 8 questions; --resume continues from the last checkpoint; lower batch_size"),
        ("correct", "validation with 256 questions at a time; lower val_batch_size"),
    ],
)
def test_memory_that_runs_out_is_one_line_with_the_setting_that_helps(
    data: Path, tmp_path: Path, monkeypatch, method: str, words: str
):
    def greedy(self: object, batch: Batch) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")

    monkeypatch.setattr(f"iep.training.tasks.Task.{method}", greedy)
    assert_one_error(go(tmp_path / "run", data, "model=lstm"), f"cpu: not enough memory for {words}")
