"""What cannot be trained or resumed, and the line that says so."""

from pathlib import Path

import pytest
from tiny_data import CHANNELS, GRID, IMAGES, TRAIN, VAL, arrays, features, newest, tiny_config, write_data, write_h5

from iep.config import Config
from iep.errors import InputError
from iep.training.run_training import train


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
    assert "holds a run of model lstm, cannot resume it as ee" in refusal(tiny_config(data, "ee"), tmp_path, True)
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
    assert message.startswith(f"{newest(tmp_path / 'run')}: features are ({CHANNELS}, {GRID + 1}, {GRID + 1})")


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


def test_predicted_programs_and_baselines_need_no_programs_in_the_data(parts: list[str], tmp_path: Path):
    data = write_data(tmp_path / "data")
    for split, count in (("train", TRAIN), ("val", VAL)):
        datasets = arrays(count)
        del datasets["programs"]
        write_h5(data / f"{split}_questions.h5", datasets)
    assert train(tiny_config(data, "ee", "programs=predicted", parts[0]), tmp_path / "ee", resume=False)
    assert train(tiny_config(data, "joint", *parts), tmp_path / "joint", resume=False)
    assert train(tiny_config(data, "cnn-lstm"), tmp_path / "cnn-lstm", resume=False)


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
        ("pg", ["freeze=engine"], "freeze: 'engine' is no part of pg, expected encoder, decoder"),
        ("joint", ["freeze=engin"], "freeze: 'engin' is no part of joint, expected generator, engine; did you mean"),
        ("lstm", ["freeze=cnn"], "freeze: 'cnn' is no part of lstm, expected rnn, classifier"),
        ("cnn-lstm", ["freeze=rnn,cnn,classifier"], "freeze: rnn, cnn, classifier are all parts of cnn-lstm; nothing"),
        (
            "cnn-lstm",
            ["freeze=rnn,classifier", "cnn_lstm.cnn_projection=0"],
            "freeze: rnn, classifier have all the weights of the model; nothing is left to train",
        ),
        ("lstm", ["batch_size=1", "lstm.classifier_norm=true"], "a minibatch of 1 question, expected 2 at least"),
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


def test_features_without_the_images_of_the_questions_are_named(tmp_path: Path):
    data = write_data(tmp_path / "data")
    path = write_h5(data / "train_features.h5", {"features": features(0)[: IMAGES - 1]})
    assert refusal(tiny_config(data, "ee"), tmp_path / "run").startswith(f"{path}: holds {IMAGES - 1} images, but")
