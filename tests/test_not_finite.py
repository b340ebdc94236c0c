"""Numbers that are not finite end training before the weights change, and an evaluation before it says NaN."""

import re
import shutil
from pathlib import Path

import pytest
from evaluate_cases import iep_eval
from tiny_data import (
    arrays,
    assert_one_error,
    content,
    features,
    newest,
    save_content,
    tiny_config,
    write_data,
    write_h5,
)
from torch import Tensor
from train_cases import before_each_step, iep_train

from iep.errors import InputError
from iep.models.checkpoint import read_newest
from iep.training.run_training import train
from iep.training.tasks import Task


@pytest.fixture
def failing_at(monkeypatch: pytest.MonkeyPatch):
    """A function that makes the LSTM's loss a number that is not finite in the step after so many."""

    def fail(step: int, value: float) -> None:
        seen, loss = [0], Task.loss

        def broken(self, batch) -> tuple[Tensor, dict[str, Tensor]]:
            result, metrics = loss(self, batch)
            seen[0] += 1
            return (result * value if seen[0] == step + 1 else result), metrics

        monkeypatch.setattr(Task, "loss", broken)

    return fail


def test_the_run_stops_at_that_step_and_names_the_questions(data, tmp_path, monkeypatch, failing_at):
    batches = []
    before_each_step(monkeypatch, lambda trainer, batch: batches.append(batch))
    failing_at(3, float("nan"))
    with pytest.raises(InputError) as caught:  # neither logged nor saved at that step
        train(tiny_config(data, "lstm", "iterations=9", "log_every=50"), tmp_path / "run", resume=False)
    positions = batches[3].index.tolist()
    questions = [int(arrays(39)["orig_idxs"][position]) for position in positions]
    assert str(caught.value) == (
        f"{tmp_path / 'run'}: the loss is nan at iteration 4, on 8 questions (question_index "
        f"{', '.join(map(str, questions))}); try a lower learning_rate or clip_gradients=1"
    )
    assert read_newest(tmp_path / "run").state.step == 2


def test_features_that_are_not_finite_are_named_by_file_and_image_and_found_by_their_question(tmp_path: Path):
    data = write_data(tmp_path / "data")
    values = features(0)
    values[2] = float("nan")
    write_h5(data / "train_features.h5", {"features": values})
    about = arrays(39)["orig_idxs"][arrays(39)["image_idxs"] == 2]
    arguments = ["--model", "ee", "--data", data, "--out", tmp_path / "run", "batch_size=1", "workers=0", "seed=3"]
    arguments += ["engine.stem_norm=true"]  # whose running statistics the features spoil
    result = iep_train(*arguments)
    path = data / "train_features.h5"
    assert_one_error(result, "on 1 questions (question_index ", f"; {path}: the features of image 2 are not finite")
    assert int(re.search(r"question_index (\d+)", result.output)[1]) in about


def test_weights_that_are_not_finite_are_not_saved(data: Path, tmp_path: Path, monkeypatch):
    """A finite loss may have gradients that are not: that of the square root at 0, say."""
    loss = Task.loss

    def steep(self, batch) -> tuple[Tensor, dict[str, Tensor]]:
        result, metrics = loss(self, batch)
        return (result + (0 * self.networks["lstm"].rnn.embed.weight.sum()).sqrt() * 0, metrics)

    train(tiny_config(data, "lstm", "iterations=2"), tmp_path / "run", resume=False)
    kept = shutil.copy(newest(tmp_path / "run"), tmp_path / "kept.pt")
    monkeypatch.setattr(Task, "loss", steep)
    with pytest.raises(InputError, match="weights are not finite after iteration 3; nothing was saved since"):
        train(tiny_config(data, "lstm", "iterations=9", "validate_every=1"), tmp_path / "run", resume=True)
    assert newest(tmp_path / "run").read_bytes() == Path(kept).read_bytes()
    assert [path.name for path in (tmp_path / "run").glob("*.pt")].count("step-3.pt") == 0


# Answers


def test_a_weight_that_is_not_finite_is_named(data, run, tmp_path: Path):
    path, held = tmp_path / "bad.pt", content(run["lstm"])
    held["networks"]["lstm"]["weights"]["rnn.embed.weight"].view(-1)[-1] = float("-inf")
    save_content(path, held)
    result = iep_eval("--baseline", path, "--data", data, "--out", tmp_path / "out")
    assert_one_error(result, f"{path}: rnn.embed.weight of a", "holds -inf, expected finite numbers")
    assert not (tmp_path / "out" / "predictions.jsonl").exists()


def test_features_that_are_not_finite_are_told_of_by_the_question(run, tmp_path: Path):
    data = write_data(tmp_path / "data")
    values = features(1)
    values[2] = float("nan")
    write_h5(data / "val_features.h5", {"features": values})
    first = arrays(26)["orig_idxs"][arrays(26)["image_idxs"] == 2][0]
    result = iep_eval("--ee", run["ee"], "--data", data, "--workers", 0, "--out", tmp_path / "out")
    assert_one_error(result, f"{data / 'val_questions.h5'}: question_index {first}: the answers' scores are not finite")
    assert not (tmp_path / "out" / "predictions.jsonl").exists()
