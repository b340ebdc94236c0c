"""Checkpoints of the original toolkit: what they compute, that training starts from them, and which are refused."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from click.testing import Result
from evaluate_cases import evaluate
from hypothesis import example, given, settings
from original_cases import (
    WIDE,
    baseline_file,
    baseline_logits,
    decode,
    engine_file,
    engine_logits,
    generator_file,
    vocab,
    write,
)
from tiny_data import (
    CHANNELS,
    GRID,
    VAL,
    VOCAB,
    arrays,
    features,
    newest,
    refused,
    tiny_config,
    write_data,
    write_h5,
)
from train_cases import iep_train, weights

from iep.config import Config
from iep.errors import InputError
from iep.models.checkpoint import load_checkpoint, load_network
from iep.program_generator.decode import greedy
from iep.training.run_training import train
from iep.vocab import END, NULL

CPU = torch.device("cpu")
COUNT = 8
OF_VAL = arrays(VAL)
FEATURES_NCHW = torch.from_numpy(features(1, grid=WIDE))
SMALL = {"feature_dim": (CHANNELS, GRID, GRID)}
BOTH_LAYOUTS = pytest.mark.parametrize("archive", [True, False], ids=["archive", "of PyTorch before 1.6"])

EVERYTHING: dict[str, Any] = {
    "stem_num_layers": 3,
    "stem_batchnorm": True,
    "module_dim": 5,
    "module_batchnorm": True,
    "module_residual": False,
    "classifier_proj_dim": 6,
    "classifier_downsample": "maxpool4",
    "classifier_fc_layers": (9, 4),
    "classifier_batchnorm": True,
    "classifier_dropout": 0.25,
}
"""No option of an engine has its default."""
FLAGS = st.sampled_from([False, True, 0, 1])
LAYERS = st.lists(st.integers(3, 8), max_size=3) | st.tuples(st.integers(3, 8))
DROPOUT = st.sampled_from([0, 0.5])
ENGINES = st.fixed_dictionaries(
    {},
    optional={
        "feature_dim": st.sampled_from([(CHANNELS, WIDE, WIDE), [CHANNELS, 14, 14]]),
        "stem_num_layers": st.integers(0, 4),
        "stem_batchnorm": FLAGS,
        "module_dim": st.integers(3, 7),
        "module_residual": FLAGS,
        "module_batchnorm": FLAGS,
        "classifier_proj_dim": st.sampled_from([0, None, 6]),
        "classifier_downsample": st.sampled_from(["none", "maxpool2", "maxpool4"]),
        "classifier_fc_layers": LAYERS,
        "classifier_batchnorm": FLAGS,
        "classifier_dropout": DROPOUT,
        "verbose": st.booleans(),
    },
).map(lambda options: options | ({"module_dim": CHANNELS} if options.get("stem_num_layers") == 0 else {}))
"""Options of engines: without a stem, modules read the features."""
OF_LSTM = {"rnn_num_layers": st.integers(1, 3), "rnn_wordvec_dim": st.integers(3, 6), "rnn_dropout": DROPOUT}
OF_LSTM |= {"fc_dims": LAYERS, "fc_use_batchnorm": FLAGS, "fc_dropout": DROPOUT}
OF_CNN = {
    "cnn_pooling": st.sampled_from(["none", "maxpool2"]),
    "cnn_proj_dim": st.sampled_from([0, 5]),
    "cnn_num_res_blocks": st.integers(0, 2),
    "cnn_res_block_dim": st.integers(3, 5),
}
OF_ATTENTION = {"num_stacked_attn": st.integers(0, 3), "stacked_attn_dim": st.integers(3, 8)}
KINDS = {"LSTM": {}, "CNN+LSTM": OF_CNN, "CNN+LSTM+SA": OF_ATTENTION}
GENERATORS = st.fixed_dictionaries(
    {},
    optional={
        "rnn_num_layers": st.integers(1, 3),
        "rnn_dropout": DROPOUT,
        "wordvec_dim": st.integers(4, 9),
        "hidden_dim": st.integers(5, 11),
        "null_token": st.just(0),
        "start_token": st.just(1),
        "end_token": st.just(2),
    },
)


def joint() -> dict[str, Any]:
    return generator_file() | engine_file(**SMALL)


# What they compute


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits agree to 1e-5."""
    assert expected.std() > 0.01
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@given(options=ENGINES, counted=st.booleans(), any_programs=st.booleans())
@example(options={}, counted=True, any_programs=True)
@example(options=EVERYTHING, counted=False, any_programs=False)
@settings(quick, max_examples=12)
def test_an_engine_with_any_options_has_the_originals_logits(tmp_path_factory, options, counted, any_programs):
    """The modules <NULL> and <START> never run, so that their weights do not matter."""
    file = engine_file(counted=counted, **options)
    images_NCHW = torch.from_numpy(features(1, grid=file["execution_engine_kwargs"]["feature_dim"][1]))
    rows_B, programs_BL = OF_VAL["image_idxs"][:COUNT], OF_VAL["programs"][:COUNT]
    if any_programs:
        programs_BL = np.random.default_rng(0).integers(0, len(VOCAB.program), (COUNT, 8))
    expected = engine_logits(file, images_NCHW[rows_B], programs_BL.tolist())
    for name, value in file["execution_engine_state"].items():
        if name.startswith(("<NULL>.", "<START>.")):
            value.fill_(-1)
    engine = load_network(write(tmp_path_factory.getbasetemp() / "ee.pt", file), "engine", VOCAB, CPU).module
    with torch.inference_mode():
        assert_close(engine(images_NCHW, engine.plan(programs_BL, rows_B)), expected)


def test_options_that_an_older_file_does_not_name_are_the_originals_defaults(tmp_path: Path):
    published = {"stem_num_layers": 2, "module_dim": 128, "classifier_proj_dim": 512, "classifier_fc_layers": (1024,)}
    full = engine_file(**published)
    kwargs = {name: full["execution_engine_kwargs"][name] for name in ("vocab", "feature_dim")}
    engine = load_network(
        write(tmp_path / "ee.pt", full | {"execution_engine_kwargs": kwargs}), "engine", VOCAB, CPU
    ).module
    with torch.inference_mode():
        found = engine(FEATURES_NCHW[:2], engine.plan(OF_VAL["programs"][:2]))
    expected = engine_logits(full, FEATURES_NCHW[:2], OF_VAL["programs"][:2].tolist())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@given(options=GENERATORS, seed=st.integers(0, 9), bias=st.sampled_from([(END, 0), (END, -50), (NULL, 1.5)]))
@settings(quick, max_examples=6)
def test_a_generator_of_any_size_decodes_the_originals_programs_token_for_token(tmp_path_factory, options, seed, bias):
    """Programs that do not end and nulls within programs are decoded likewise."""
    file = generator_file(seed, **options)
    file["program_generator_state"]["decoder_linear.bias"][bias[0]] += bias[1]
    generator = load_network(write(tmp_path_factory.getbasetemp() / "pg.pt", file), "generator", VOCAB, CPU).module
    found = greedy(generator, torch.from_numpy(OF_VAL["questions"]).long(), Config.max_program_length).tolist()
    for mine, question_T in zip(found, OF_VAL["questions"].tolist(), strict=True):
        expected = decode(file, question_T)
        assert mine == expected + [0] * (len(mine) - len(expected))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), counted=st.booleans())
@settings(quick, max_examples=5)
def test_a_baseline_with_any_options_has_the_originals_logits(tmp_path_factory, kind, data, counted):
    file = baseline_file(kind, counted=counted, **data.draw(st.fixed_dictionaries({}, optional=OF_LSTM | KINDS[kind])))
    rows_B, questions_BT = OF_VAL["image_idxs"][:COUNT], OF_VAL["questions"][:COUNT]
    expected = baseline_logits(file, FEATURES_NCHW[rows_B], questions_BT.tolist())
    baseline = load_network(write(tmp_path_factory.getbasetemp() / "baseline.pt", file), "baseline", VOCAB, CPU).module
    with torch.inference_mode():
        assert_close(baseline(torch.from_numpy(questions_BT).long(), FEATURES_NCHW, rows_B), expected)


def words_of(program: list[int]) -> list[str]:
    """Return the tokens after <START> and before <END>, without <NULL>s at the end."""
    while program[-1] in (NULL, END):
        program = program[:-1]
    return [VOCAB.program[token] for token in program[1:]]


def test_iep_eval_predicts_the_programs_and_answers_of_a_file(tmp_path: Path):
    data = write_data(tmp_path / "data")
    write_h5(data / "val_features.h5", {"features": FEATURES_NCHW.numpy()})
    file = generator_file(seed=3) | engine_file(**EVERYTHING)
    programs = [decode(file, question_T) for question_T in OF_VAL["questions"].tolist()]
    expected_BA = engine_logits(file, FEATURES_NCHW[OF_VAL["image_idxs"]], programs)
    path = write(tmp_path / "old.pt", file)
    _, rows, _ = evaluate(tmp_path / "out", "--pg", path, "--ee", path, "--data", data, "--workers", 0)
    for row, program, probability_A in zip(rows, programs, expected_BA.softmax(1), strict=True):
        assert row["probability"] == pytest.approx(probability_A.max().item(), abs=1e-4)
        assert probability_A[VOCAB.answer_index[row["predicted_answer"]]] == pytest.approx(row["probability"], abs=1e-4)
        assert row["predicted_program"] == words_of(program)


# Training that starts from them


def started(model: str, data: Path, out: Path, *arguments: object) -> Result:
    plain = ("workers=0", "batch_size=8", "iterations=1", "validate_every=1", "log_every=1", "device=cpu")
    return iep_train("--model", model, "--data", data, "--out", out, *plain, *arguments)


OF_NORM = {"fc_dims": [8, 5], "fc_use_batchnorm": True, "fc_dropout": 0.5}
STARTS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("ee", {"--ee": engine_file(**SMALL, **EVERYTHING)}),
    ("joint", {"--pg": generator_file(), "--ee": engine_file(**SMALL)}),
    ("cnn-lstm-sa", {"--baseline": baseline_file("CNN+LSTM+SA", cnn_feat_dim=SMALL["feature_dim"], **OF_NORM)}),
]


@pytest.mark.parametrize(("model", "files"), STARTS)
def test_training_starts_from_the_weights_of_a_file_and_resumes(model: str, files, data: Path, tmp_path: Path):
    given = [item for flag, file in files.items() for item in (flag, write(tmp_path / f"{flag}.pt", file))]
    parts = {"--pg": "program_generator", "--ee": "execution_engine", "--baseline": "baseline"}
    begun = {name: value for flag, file in files.items() for name, value in file[f"{parts[flag]}_state"].items()}
    result = started(model, data, tmp_path / "run", *given, "learning_rate=0")
    assert result.exit_code == 0, result.output
    networks = load_checkpoint(newest(tmp_path / "run"))["networks"]
    still = {name: value for network in networks.values() for name, value in network["weights"].items()}
    assert begun.keys() - still.keys() == {name for name in begun if name.startswith(("<NULL>.", "<START>."))}
    assert all(torch.equal(value, begun[name]) for name, value in still.items() if not re.search("running|num_", name))
    again = iep_train("--resume", "--out", tmp_path / "run", "iterations=2", "learning_rate=0.01")
    assert again.exit_code == 0, again.output
    for name in networks:
        moved = weights(newest(tmp_path / "run"), name)
        assert any(not torch.equal(value, still[key]) for key, value in moved.items() if key.endswith("weight"))


@pytest.mark.parametrize(("asked", "norm"), [("batch", "batch"), (None, "example")])
def test_module_batch_norm_is_per_example_unless_asked_otherwise(
    asked: str | None, norm: str, data: Path, tmp_path: Path
):
    path = write(tmp_path / "ee.pt", engine_file(**SMALL, module_batchnorm=True))
    result = started("ee", data, tmp_path / "run", "--ee", path, *[f"engine.module_norm={asked}"] * bool(asked))
    assert result.exit_code == 0, result.output
    held = load_checkpoint(newest(tmp_path / "run"))
    assert held["networks"]["engine"]["kwargs"]["module_norm"] == held["config"]["engine"]["module_norm"] == norm


# What old files hold besides tensors


class Made:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


HARMLESS: dict[str, Any] = {
    "args": argparse.Namespace(model_type="PG", num_val_samples=None, lr=5e-4),
    "val_accs": [np.float64(0.5), np.float32(0.25), np.int64(3), np.bool_(True)],
    "confusion": [np.arange(6).reshape(2, 3), np.array(["yes", "no"])],
    "train_rewards": [torch.tensor(0.5), torch.nn.Parameter(torch.ones(2))],
}


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_what_old_files_hold_besides_tensors_loads(core: bytes, tmp_path: Path):
    """Numbers and arrays of numpy load by the paths of all its versions."""
    path = write(tmp_path / "old.pt", joint() | HARMLESS, _use_new_zipfile_serialization=False)
    before = set(torch.serialization.get_safe_globals())  # torch gives them in any order
    path.write_bytes(re.sub(rb"numpy\._?core\.multiarray", core + b".multiarray", path.read_bytes()))
    assert set(load_checkpoint(path)["networks"]) == {"generator", "engine"}
    assert set(torch.serialization.get_safe_globals()) == before, "what is allowed is allowed for the file alone"


@BOTH_LAYOUTS
def test_a_malicious_file_executes_nothing_and_is_named_with_what_it_holds(archive: bool, tmp_path: Path):
    victim = tmp_path / "executed"
    content = joint() | {"args": argparse.Namespace(seed=Made(os.system, f"touch {victim}"))}
    path = write(tmp_path / "old.pt", content, _use_new_zipfile_serialization=archive)
    with refused(path, "holds more than plain tensors", "; loading it could execute code (GLOBAL "):
        load_checkpoint(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the trap would not have sprung"


# What does not fit


def _changed(file: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """Return a file with other values in a part; None takes one away."""
    changed = file[part] | changes
    return file | {part: {name: value for name, value in changed.items() if value is not None}}


EE, PG, STATE, KWARGS = engine_file(**SMALL), generator_file(), "execution_engine_state", "execution_engine_kwargs"
SHORT = vocab()
SHORT["answer_token_to_idx"] = dict(list(SHORT["answer_token_to_idx"].items())[:-1])
OF_ENGINE = [
    (KWARGS, {"module_depth": 3}, "unknown option 'module_depth'"),
    (KWARGS, {"module_dim": "4"}, "module_dim is '4', expected a whole number"),
    (STATE, {"scene.conv2.bias": None}, 'Missing key(s) in state_dict: "scene.conv2.bias"'),
    (STATE, {"stem.0.bias": [1, 2]}, "stem.0.bias"),
]
OF_GENERATOR = [
    ({"encoder_vocab_size": 7}, "encoder_vocab_size is 7, expected"),
    ({"end_token": 5}, "end_token is 5, expected 2"),
]
MISMATCHES: list[tuple[str, dict[str, Any], str]] = [
    *(("engine", _changed(EE, part, **changes), problem) for part, changes, problem in OF_ENGINE),
    *(("generator", _changed(PG, "program_generator_kwargs", **each), problem) for each, problem in OF_GENERATOR),
    ("engine", EE | {STATE: None}, "not a whole checkpoint file"),
    ("engine", _changed(EE | {"vocab": SHORT}, KWARGS, vocab=SHORT), "size mismatch for classifier"),
    ("engine", EE | {"vocab": None}, "vocab: not a vocabulary"),
    ("engine", {}, "a checkpoint of the original toolkit without any network"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "GRU"}, "baseline_type is 'GRU', expected one of LSTM, CNN"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "CNN+LSTM"}, "holds a CNN+LSTM, expected"),
]


@pytest.mark.parametrize(("name", "content", "problem"), MISMATCHES, ids=[problem for *_, problem in MISMATCHES])
def test_a_file_that_does_not_fit_itself_is_one_line(name: str, content: dict[str, Any], problem: str, tmp_path: Path):
    with refused("", problem):
        load_network(write(tmp_path / "old.pt", content), name, VOCAB, CPU)


def test_a_run_cannot_be_resumed_from_a_file_of_the_originals(data: Path, tmp_path: Path):
    write((tmp_path / "step-4.pt"), generator_file())
    with pytest.raises(
        InputError, match=r"step-4.pt: of the original toolkit; a run can start from it, but not resume"
    ):
        train(tiny_config(data, "pg"), tmp_path, resume=True)
