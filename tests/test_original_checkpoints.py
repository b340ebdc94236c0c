"""Checkpoints of the original toolkit: what they compute, that training starts from them, and which are refused."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from click.testing import Result
from device_cases import DEVICES
from hypothesis import example, given, settings
from original_cases import (
    WIDE,
    baseline_file,
    baseline_logits,
    decode,
    engine_file,
    engine_logits,
    generator_file,
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
)
from torch import nn
from train_cases import iep_train, weights

from iep.models.checkpoint import read_checkpoint
from iep.program_generator.decode import greedy
from iep.training.run_training import train
from iep.vocab import END, NULL

CPU = torch.device("cpu")
COUNT = 8
OF_VAL = arrays(VAL)
FEATURES_NCHW = torch.from_numpy(features(1, grid=WIDE))
SMALL = {"feature_dim": (CHANNELS, GRID, GRID)}

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
        "end_token": st.just(2),
    },
)


# What they compute


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Assert that logits agree."""
    assert expected.std() > 0.01
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


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
    engine = read_checkpoint(write(tmp_path_factory.getbasetemp() / "ee.pt", file)).network("engine").module.eval()
    with torch.inference_mode():
        assert_close(engine(images_NCHW, engine.plan(programs_BL, rows_B)), expected)


def test_options_that_an_older_file_does_not_name_are_the_originals_defaults(tmp_path: Path):
    published = {"stem_num_layers": 2, "module_dim": 128, "classifier_proj_dim": 512, "classifier_fc_layers": (1024,)}
    full = engine_file(**published)
    kwargs = {name: full["execution_engine_kwargs"][name] for name in ("vocab", "feature_dim")}
    path = write(tmp_path / "ee.pt", full | {"execution_engine_kwargs": kwargs})
    engine = read_checkpoint(path).network("engine").module.eval()
    with torch.inference_mode():
        found = engine(FEATURES_NCHW[:2], engine.plan(OF_VAL["programs"][:2]))
    assert_close(found, engine_logits(full, FEATURES_NCHW[:2], OF_VAL["programs"][:2].tolist()), 1e-4)


@given(options=GENERATORS, seed=st.integers(0, 9), bias=st.sampled_from([(END, 0), (END, -50), (NULL, 1.5)]))
@settings(quick, max_examples=6)
def test_a_generator_of_any_size_decodes_the_originals_programs_token_for_token(tmp_path_factory, options, seed, bias):
    """Programs that do not end and nulls within programs are decoded likewise."""
    file = generator_file(seed, **options)
    file["program_generator_state"]["decoder_linear.bias"][bias[0]] += bias[1]
    generator = (
        read_checkpoint(write(tmp_path_factory.getbasetemp() / "pg.pt", file)).network("generator").module.eval()
    )
    found = greedy(generator, torch.from_numpy(OF_VAL["questions"]).long(), generator.max_program_length).tolist()
    for mine, question_T in zip(found, OF_VAL["questions"].tolist(), strict=True):
        expected = decode(file, question_T)
        assert mine == expected + [0] * (len(mine) - len(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), counted=st.booleans())
@settings(quick, max_examples=6)
def test_a_baseline_with_any_options_has_the_originals_logits_and_gradients(
    tmp_path_factory, kind, device, data, counted
):
    file = baseline_file(kind, counted=counted, **data.draw(st.fixed_dictionaries({}, optional=OF_LSTM | KINDS[kind])))
    path = write(tmp_path_factory.getbasetemp() / "baseline.pt", file)
    rows_B, questions_BT = OF_VAL["image_idxs"][:COUNT], OF_VAL["questions"][:COUNT]
    baseline = read_checkpoint(path).network("baseline").module.to(device).eval().double()
    for part in baseline.modules():
        part.train(isinstance(part, nn.LSTM) and device != "cpu")  # where LSTMs in evaluation have no backward pass
        if isinstance(part, nn.LSTM):
            part.dropout = 0.0
    found = baseline(torch.from_numpy(questions_BT).long().to(device), FEATURES_NCHW.double().to(device), rows_B)
    named = dict(baseline.named_parameters())
    for name in named:
        file["baseline_state"][name].requires_grad_()
    expected = baseline_logits(file, FEATURES_NCHW[rows_B], questions_BT.tolist())
    assert_close(found.cpu(), expected)
    weights = {name: file["baseline_state"][name] for name in named}
    unused = {"allow_unused": True, "materialize_grads": True}  # without a step of attention, the CNN is unused
    of_ours = torch.autograd.grad(found.square().sum(), [*named.values()], **unused)
    of_theirs = torch.autograd.grad(expected.square().sum(), [*weights.values()], **unused)
    torch.testing.assert_close([each.cpu().float() for each in of_ours], [*of_theirs])


# Training that starts from them


def started(model: str, data: Path, out: Path, *arguments: object) -> Result:
    plain = ("workers=0", "batch_size=8", "iterations=1", "validate_every=1", "log_every=1", "device=cpu")
    return iep_train("--model", model, "--data", data, "--out", out, *plain, *arguments)


PG, EE = generator_file(), engine_file(**SMALL)
OF_NORM = {"fc_dims": [8, 5], "fc_use_batchnorm": True, "fc_dropout": 0.5}
STARTS: list[tuple[str, dict[str, dict[str, Any]]]] = [
    ("ee", {"--ee": engine_file(**SMALL, **EVERYTHING)}),
    ("joint", {"--pg": PG, "--ee": EE}),
    ("cnn-lstm-sa", {"--baseline": baseline_file("CNN+LSTM+SA", cnn_feat_dim=SMALL["feature_dim"], **OF_NORM)}),
]


@pytest.mark.parametrize(("model", "files"), STARTS)
def test_training_starts_from_the_weights_of_a_file_and_resumes(model: str, files, data: Path, tmp_path: Path):
    given = [item for flag, file in files.items() for item in (flag, write(tmp_path / f"{flag}.pt", file))]
    parts = {"--pg": "program_generator", "--ee": "execution_engine", "--baseline": "baseline"}
    begun = {name: value for flag, file in files.items() for name, value in file[f"{parts[flag]}_state"].items()}
    result = started(model, data, tmp_path / "run", *given, "learning_rate=0")
    assert result.exit_code == 0, result.output
    networks = read_checkpoint(newest(tmp_path / "run")).networks
    still = {name: value for network in networks.values() for name, value in network.weights.items()}
    assert begun.keys() - still.keys() == {name for name in begun if name.startswith(("<NULL>.", "<START>."))}
    assert all(torch.equal(value, begun[name]) for name, value in still.items() if not re.search("running|num_", name))
    again = iep_train("--resume", "--out", tmp_path / "run", "iterations=2", "learning_rate=0.01")
    assert again.exit_code == 0, again.output
    for name in networks:
        moved = weights(newest(tmp_path / "run"), name)
        assert any(not torch.equal(value, still[key]) for key, value in moved.items() if key.endswith("weight"))


def test_module_batch_norm_is_per_example(data: Path, tmp_path: Path):
    path = write(tmp_path / "ee.pt", engine_file(**SMALL, module_batchnorm=True))
    result = started("ee", data, tmp_path / "run", "--ee", path)
    assert result.exit_code == 0, result.output
    held = read_checkpoint(newest(tmp_path / "run"))
    assert held.networks["engine"].settings["module_norm"] == held.state.config["engine"]["module_norm"] == "example"


# What old files hold besides tensors


@pytest.mark.parametrize("core", [b"numpy.core", b"numpy._core"])
def test_what_old_files_hold_besides_tensors_loads(core: bytes, tmp_path: Path):
    """Numbers and arrays of numpy load by the paths of all its versions."""
    content = PG | {
        "args": argparse.Namespace(model_type="PG", num_val_samples=None, lr=5e-4),
        "val_accs": [np.float64(0.5), np.float32(0.25), np.int64(3), np.bool_(True)],
        "confusion": [np.arange(6).reshape(2, 3), np.array(["yes", "no"])],
        "train_rewards": [torch.tensor(0.5), torch.nn.Parameter(torch.ones(2))],
    }
    path = write(tmp_path / "old.pt", content, _use_new_zipfile_serialization=False)
    path.write_bytes(re.sub(rb"numpy\._?core\.multiarray", core + b".multiarray", path.read_bytes()))
    assert set(read_checkpoint(path).networks) == {"generator"}


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "of PyTorch before 1.6"])
def test_a_malicious_file_executes_nothing_and_is_named_with_what_it_holds(archive: bool, tmp_path: Path):
    victim = tmp_path / "executed"
    content = PG | {"args": argparse.Namespace(seed=Trap(victim))}
    path = write(tmp_path / "old.pt", content, _use_new_zipfile_serialization=archive)
    with refused(path, "holds more than plain tensors", "; loading it could execute code (GLOBAL "):
        read_checkpoint(path)
    assert not victim.exists()
    torch.load(path, weights_only=False)
    assert victim.exists(), "the trap would not have sprung"


# What does not fit


def changed(file: dict[str, Any], part: str, **changes: Any) -> dict[str, Any]:
    """Return a file with other values in a part; None takes one away."""
    return file | {part: {name: value for name, value in (file[part] | changes).items() if value is not None}}


STATE, KWARGS = "execution_engine_state", "execution_engine_kwargs"
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
    *(("engine", changed(EE, part, **changes), problem) for part, changes, problem in OF_ENGINE),
    *(("generator", changed(PG, "program_generator_kwargs", **each), problem) for each, problem in OF_GENERATOR),
    ("engine", EE | {STATE: None}, "not a whole checkpoint file"),
    ("engine", EE | {"vocab": None}, "vocab: not a vocabulary"),
    ("engine", {}, "a checkpoint of the original toolkit without any network"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "GRU"}, "baseline_type is 'GRU', expected one of LSTM, CNN"),
    ("lstm", baseline_file("LSTM") | {"baseline_type": "CNN+LSTM"}, "holds a CNN+LSTM, expected"),
]


@pytest.mark.parametrize(("name", "content", "problem"), MISMATCHES, ids=[problem for *_, problem in MISMATCHES])
def test_a_file_that_does_not_fit_itself_is_one_line(name: str, content: dict[str, Any], problem: str, tmp_path: Path):
    with refused("", problem):
        read_checkpoint(write(tmp_path / "old.pt", content)).network(name)


def test_a_run_cannot_be_resumed_from_a_file_of_the_originals(data: Path, tmp_path: Path):
    write((tmp_path / "step-4.pt"), generator_file())
    with refused("", "step-4.pt: of the original toolkit; a run can start from it, but not resume"):
        train(tiny_config(data, "pg"), tmp_path, resume=True)
