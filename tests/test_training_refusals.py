"""What cannot be trained or resumed, and the line that says so."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_data import CHANNELS, GRID, IMAGES, TRAIN, VAL, arrays, features, newest, tiny_config, write_data, write_h5

from iep.config import Config
from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint
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


def without(name: str) -> Callable[[Path], object]:
    """Return what writes a file of questions without one of its data sets."""
    return lambda path: write_h5(path, {key: values for key, values in arrays(VAL).items() if key != name})


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("model", "name", "damage", "problem"),
    [
        *(
            (model, f"{split}_questions.h5", without(missing), f"has no {missing}, which training {model} needs")
            for model, missing in (("pg", "programs"), ("ee", "programs"), ("ee", "answers"), ("lstm", "answers"))
            for split in ("train", "val")
        ),
        ("ee", "train_questions.h5", cut_in_half, "not a whole HDF5 file"),
        ("ee", "val_features.h5", cut_in_half, "not a whole HDF5 file"),
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
        (
            "ee",
            "train_questions.h5",
            lambda path: write_h5(path, arrays(TRAIN) | {"answers": np.full(TRAIN, 300)}),
            "answers, row 0: index 300 is not in the vocabulary",
        ),
        (
            "ee",
            "vocab.json",
            lambda path: path.write_text(path.read_text().replace("answer_token_to_idx", "answers")),
            "'answer_token_to_idx' is missing",
        ),
    ],
)
def test_damaged_data_are_named_before_anything_is_written(tmp_path: Path, model: str, name: str, damage, problem: str):
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
    assert set(load_checkpoint(newest(tmp_path / "ee"))["networks"]) == {"engine"}
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
        ("pg", ["freeze=engine"], "freeze: 'engine' is not a part of pg, expected encoder, decoder"),
        ("joint", ["freeze=engin"], "freeze: 'engin' is not a part of joint, expected generator, engine; did you mean"),
        ("lstm", ["freeze=cnn"], "freeze: 'cnn' is not a part of lstm, expected rnn, classifier"),
        ("cnn-lstm", ["freeze=rnn,cnn,classifier"], "freeze: rnn, cnn, classifier are all parts of cnn-lstm; nothing"),
        (
            "cnn-lstm",
            ["freeze=rnn,classifier", "cnn_lstm.cnn_projection=0"],
            "freeze: rnn, classifier have all the weights of the model; nothing is left to train",
        ),
        ("lstm", ["batch_size=1", "lstm.classifier_norm=true"], "a minibatch has 1 question, expected at least 2"),
        ("ee", ["data=null"], "no data: give --data DIR"),
        ("ee", ["device=cuda:99"], "device 'cuda:99': not available here"),
        ("ee", ["device=quantum"], "device 'quantum': not available here"),
        ("ee", ["engine.stem=pixels", "engine.stem_stride=4"], "an execution engine cannot be built: stem widths []"),
        ("ee", ["engine.modules=tbd", "engine.scene=stem"], "scene is 'stem', a setting of the modules iep"),
        ("ee", ["engine.modules=tbd", "engine.module_norm=batch"], "module_norm are settings of the modules iep"),
        ("ee", ["attention_penalty=1"], "attention_penalty is 1.0, but modules iep compute no attention maps"),
        ("ee", ["curriculum=[[0, 1]]"], "curriculum: no training program has at most 1 functions"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(data, parts, tmp_path: Path, model, settings, problem: str):
    settings = [parts[0] if setting == "pg" else setting for setting in settings]
    assert problem in refusal(tiny_config(data, model, *settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()
