"""Checkpoints of the original toolkit: every option gives the logits and programs of an implementation of its own."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from evaluate_cases import evaluate
from hypothesis import example, given, settings
from original_cases import (
    GRID,
    baseline_file,
    baseline_logits,
    decode,
    engine_file,
    engine_logits,
    generator_file,
    write,
)
from tiny_data import CHANNELS, TEST, VAL, VOCAB, arrays, features, write_data, write_h5

from iep.config import BATCHING, Config
from iep.models.build import load_network
from iep.program_generator.decode import greedy
from iep.vocab import END

CPU = torch.device("cpu")
COUNT = 16
OF_VAL = arrays(VAL)
FEATURES_NCHW = torch.from_numpy(features(1, grid=GRID))

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
        "feature_dim": st.sampled_from([(CHANNELS, GRID, GRID), [CHANNELS, 14, 14]]),
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
OF_RNN = {"rnn_num_layers": st.integers(1, 3), "rnn_wordvec_dim": st.integers(3, 6), "rnn_dropout": DROPOUT}
OF_MLP = {"fc_dims": LAYERS, "fc_use_batchnorm": FLAGS, "fc_dropout": DROPOUT}
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


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data whose features have the sides of the original's options."""
    root = write_data(tmp_path_factory.mktemp("wide"))
    for seed, split in enumerate(("train", "val", "test")):
        write_h5(root / f"{split}_features.h5", {"features": features(seed, grid=GRID)})
    return root


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits to 1e-5."""
    assert expected.std() > 0.01
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def assert_rows_say(rows: list[dict], expected_BA: torch.Tensor) -> None:
    """predictions.jsonl has the likeliest answers of these logits, and their probabilities."""
    for row, probability_A in zip(rows, expected_BA.softmax(1), strict=True):
        said = {row["predicted_answer"]: row["probability"], **row["runners_up"]}
        assert len(said) == 3
        for answer, probability in said.items():
            assert probability == pytest.approx(probability_A[VOCAB.answer_index[answer]].item(), abs=1e-5)
        assert row["probability"] == pytest.approx(probability_A.max().item(), abs=1e-5)


@given(options=ENGINES, counted=st.booleans())
@example(options={}, counted=True)
@example(options=EVERYTHING, counted=False)
@settings(quick, max_examples=40)
def test_an_engine_with_any_options_has_the_originals_logits(tmp_path_factory, options, counted):
    """An older PyTorch did not count the minibatches that a batch norm has seen."""
    file = engine_file(counted=counted, **options)
    images_NCHW = torch.from_numpy(features(1, grid=file["execution_engine_kwargs"]["feature_dim"][1]))
    rows_B = OF_VAL["image_idxs"][:COUNT]
    programs_BL = OF_VAL["programs"][:COUNT].tolist()
    engine = load_network(write(tmp_path_factory.getbasetemp() / "ee.pt", file), "engine", VOCAB, CPU)
    with torch.inference_mode():
        found = engine(images_NCHW, engine.plan(np.array(programs_BL), rows_B))
    assert_close(found, engine_logits(file, images_NCHW[rows_B], programs_BL))


@pytest.mark.parametrize("batching", BATCHING)
def test_the_command_evaluates_end_to_end_with_every_batching(batching: str, wide: Path, tmp_path: Path):
    file = generator_file(seed=3) | engine_file(**EVERYTHING)
    path = write(tmp_path / "joint.pt", file)
    where = ["--pg", path, "--ee", path, "--data", wide, "--workers", 0, "--batching", batching]
    report, rows, _ = evaluate(tmp_path / "out", *where)
    assert report["questions"] == len(rows) == VAL
    programs = [decode(file, question_T) for question_T in OF_VAL["questions"].tolist()]
    for row, program in zip(rows, programs, strict=True):
        ended = program[1:-1] if program[-1] == 2 else program[1:]
        while ended and ended[-1] == 0:
            ended.pop()
        assert row["predicted_program"] == [VOCAB.program[token] for token in ended]
    assert_rows_say(rows, engine_logits(file, FEATURES_NCHW[OF_VAL["image_idxs"]], programs))


def assert_same_programs(file: dict[str, Any], path: Path) -> list[list[int]]:
    """Assert that the generator decodes the original's programs token for token, and return them."""
    generator = load_network(write(path, file), "generator", VOCAB, CPU)
    questions_BT = OF_VAL["questions"]
    found = greedy(generator, torch.from_numpy(questions_BT).long(), Config.max_program_length).tolist()
    expected = [decode(file, question_T) for question_T in questions_BT.tolist()]
    for mine, program in zip(found, expected, strict=True):
        assert mine == program + [0] * (len(mine) - len(program))
    return expected


@given(options=GENERATORS, seed=st.integers(0, 9))
@settings(quick, max_examples=15)
def test_a_generator_of_any_size_decodes_the_originals_programs_token_for_token(tmp_path_factory, options, seed):
    assert_same_programs(generator_file(seed, **options), tmp_path_factory.getbasetemp() / "pg.pt")


def test_programs_that_do_not_end_and_nulls_within_programs_are_decoded_as_the_original_does(tmp_path: Path):
    file = generator_file(seed=2)
    bias_V = file["program_generator_state"]["decoder_linear.bias"]
    bias_V[END] -= 50
    assert {len(program) for program in assert_same_programs(file, tmp_path / "pg.pt")} == {31}
    bias_V[END] += 50
    bias_V[0] += 1.5
    programs = assert_same_programs(file, tmp_path / "pg.pt")
    assert any(a == 0 != b for program in programs for a, b in pairwise(program))
    assert len({tuple(program) for program in programs}) > 3


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), counted=st.booleans())
@settings(quick, max_examples=15)
def test_a_baseline_with_any_options_has_the_originals_logits(tmp_path_factory, kind, data, counted):
    options = data.draw(st.fixed_dictionaries({}, optional=OF_RNN | OF_MLP | KINDS[kind]))
    file = baseline_file(kind, counted=counted, **options)
    rows_B = OF_VAL["image_idxs"][:COUNT]
    questions_BT = OF_VAL["questions"][:COUNT]
    expected = baseline_logits(file, FEATURES_NCHW[rows_B], questions_BT.tolist())
    baseline = load_network(write(tmp_path_factory.getbasetemp() / "baseline.pt", file), "baseline", VOCAB, CPU)
    with torch.inference_mode():
        assert_close(baseline(torch.from_numpy(questions_BT).long(), FEATURES_NCHW, rows_B), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_evaluates_every_baseline(kind: str, wide: Path, tmp_path: Path):
    file = baseline_file(kind, fc_dims=(8, 5), fc_use_batchnorm=True, fc_dropout=0.5)
    path = write(tmp_path / "baseline.pt", file)
    where = ["--baseline", path, "--data", wide, "--workers", 0, "--num-samples", COUNT]
    _, rows, _ = evaluate(tmp_path / "out", *where)
    images = FEATURES_NCHW[OF_VAL["image_idxs"][:COUNT]]
    assert_rows_say(rows, baseline_logits(file, images, OF_VAL["questions"][:COUNT].tolist()))


def test_the_test_split_is_answered_end_to_end(wide: Path, tmp_path: Path):
    path = write(tmp_path / "joint.pt", generator_file() | engine_file())
    evaluate(tmp_path / "out", "--pg", path, "--ee", path, "--data", wide, "--workers", 0, "--split", "test")
    answers = (tmp_path / "out" / "answers.txt").read_text().split()
    assert len(answers) == TEST
    assert set(answers) <= set(VOCAB.answer)


def test_null_and_start_never_run_so_that_their_weights_do_not_matter(tmp_path: Path):
    file = engine_file()
    loaded = load_network(write(tmp_path / "one.pt", file), "engine", VOCAB, CPU)
    for name, value in file["execution_engine_state"].items():
        if name.startswith(("<NULL>.", "<START>.")):
            value.fill_(float("nan"))
    other = load_network(write(tmp_path / "two.pt", file), "engine", VOCAB, CPU)
    programs_BL = np.random.default_rng(0).integers(0, len(VOCAB.program), (COUNT, 20))
    rows_B = OF_VAL["image_idxs"][:COUNT]
    logits = [engine(FEATURES_NCHW, engine.plan(programs_BL, rows_B)) for engine in (loaded, other)]
    assert torch.equal(*logits)
    assert_close(logits[0].detach(), engine_logits(file, FEATURES_NCHW[rows_B], programs_BL.tolist()))
    assert {"<NULL>", "<START>"}.isdisjoint(dict(loaded.named_children()))


def test_options_that_an_older_file_does_not_name_are_the_originals_defaults(tmp_path: Path):
    published = {"stem_num_layers": 2, "module_dim": 128, "classifier_proj_dim": 512, "classifier_fc_layers": (1024,)}
    full = engine_file(**published)
    kwargs = {name: full["execution_engine_kwargs"][name] for name in ("vocab", "feature_dim")}
    path = write(tmp_path / "ee.pt", full | {"execution_engine_kwargs": kwargs})
    engine = load_network(path, "engine", VOCAB, CPU)
    with torch.inference_mode():
        found = engine(FEATURES_NCHW[:2], engine.plan(OF_VAL["programs"][:2]))
    expected = engine_logits(full, FEATURES_NCHW[:2], OF_VAL["programs"][:2].tolist())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
