"""Checkpoints of the original toolkit: every option gives the logits and programs of an implementation of its own."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import original_cases
import pytest
import torch
from evaluate_cases import evaluate
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

from iep.batching.schedulers import SCHEDULERS
from iep.config import BATCHING, Config
from iep.models.build import load_network
from iep.program_generator.decode import greedy
from iep.vocab import END

CPU = torch.device("cpu")
COUNT = 16
OF_VAL = arrays(VAL)
FEATURES_NCHW = torch.from_numpy(features(1, grid=GRID))

ENGINES: dict[str, dict[str, Any]] = {
    "as published": {},
    "no stem": {"stem_num_layers": 0, "module_dim": CHANNELS},
    "stem of one layer": {"stem_num_layers": 1},
    "deep stem": {"stem_num_layers": 4},
    "stem batch norm": {"stem_batchnorm": True},
    "deep stem batch norm": {"stem_num_layers": 3, "stem_batchnorm": True},
    "wider modules": {"module_dim": 7},
    "no residual": {"module_residual": False},
    "module batch norm": {"module_batchnorm": True},
    "module batch norm, no residual": {"module_batchnorm": True, "module_residual": False},
    "no projection": {"classifier_proj_dim": 0},
    "projection None": {"classifier_proj_dim": None},
    "no pooling": {"classifier_downsample": "none"},
    "maxpool4": {"classifier_downsample": "maxpool4"},
    "maxpool4 on 14x14": {"classifier_downsample": "maxpool4", "feature_dim": [CHANNELS, 14, 14]},
    "no projection, no pooling": {"classifier_proj_dim": 0, "classifier_downsample": "none"},
    "several linear layers": {"classifier_fc_layers": (8, 5, 6)},
    "no linear layer but the last": {"classifier_fc_layers": []},
    "classifier batch norm": {"classifier_batchnorm": True},
    "dropout": {"classifier_dropout": 0.5},
    "classifier batch norm and dropout": {
        "classifier_batchnorm": True,
        "classifier_dropout": 0.5,
        "classifier_fc_layers": (8, 5),
    },
    "classifier batch norm, neither projection nor pooling": {
        "classifier_batchnorm": True,
        "classifier_proj_dim": 0,
        "classifier_downsample": "none",
    },
    "everything": {
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
    },
    "numbers for flags": {"module_batchnorm": 1, "stem_batchnorm": 1, "module_residual": 0, "classifier_batchnorm": 1},
    "verbose": {"verbose": True},
}
BASELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "LSTM": ("LSTM", {}),
    "LSTM, one layer": ("LSTM", {"rnn_num_layers": 1, "rnn_wordvec_dim": 3, "rnn_dim": 4}),
    "LSTM, perceptron": ("LSTM", {"fc_dims": [8, 5], "fc_use_batchnorm": True, "fc_dropout": 0.5}),
    "LSTM, linear": ("LSTM", {"fc_dims": (), "fc_dropout": 0.5}),
    "LSTM, norm": ("LSTM", {"fc_use_batchnorm": 1, "rnn_dropout": 0.5}),
    "CNN+LSTM": ("CNN+LSTM", {}),
    "CNN+LSTM, no pooling": ("CNN+LSTM", {"cnn_pooling": "none"}),
    "CNN+LSTM, no projection": ("CNN+LSTM", {"cnn_proj_dim": 0}),
    "CNN+LSTM, residual blocks": ("CNN+LSTM", {"cnn_num_res_blocks": 2, "cnn_res_block_dim": 3}),
    "CNN+LSTM, blocks alone": ("CNN+LSTM", {"cnn_num_res_blocks": 1, "cnn_proj_dim": 0, "fc_use_batchnorm": True}),
    "CNN+LSTM+SA": ("CNN+LSTM+SA", {}),
    "CNN+LSTM+SA, one step": ("CNN+LSTM+SA", {"num_stacked_attn": 1, "stacked_attn_dim": 8}),
    "CNN+LSTM+SA, no step": ("CNN+LSTM+SA", {"num_stacked_attn": 0}),
    "CNN+LSTM+SA, three steps": ("CNN+LSTM+SA", {"num_stacked_attn": 3, "fc_dropout": 0.5, "fc_use_batchnorm": True}),
}
GENERATORS: dict[str, dict[str, Any]] = {
    "two layers": {},
    "one layer": {"rnn_num_layers": 1},
    "three layers": {"rnn_num_layers": 3},
    "dropout": {"rnn_dropout": 0.5},
    "other widths": {"wordvec_dim": 9, "hidden_dim": 11},
    "tokens named": {"null_token": 0, "start_token": 1, "end_token": 2},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Data whose features have the sides of the original's options, by side."""
    found = {}
    for side in (GRID, 14):
        root = write_data(tmp_path_factory.mktemp(f"grid{side}"))
        for seed, split in enumerate(("train", "val", "test")):
            write_h5(root / f"{split}_features.h5", {"features": features(seed, grid=side)})
        found[side] = root
    return found


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


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("counted", [True, False], ids=["", "of an older PyTorch"])
def test_an_engine_with_each_option_has_the_originals_logits_with_every_schedule(options, counted, tmp_path: Path):
    file = engine_file(counted=counted, **options)
    images_NCHW = torch.from_numpy(features(1, grid=file["execution_engine_kwargs"]["feature_dim"][1]))
    rows_B = OF_VAL["image_idxs"][:COUNT]
    programs_BL = OF_VAL["programs"][:COUNT].tolist()
    expected = engine_logits(file, images_NCHW[rows_B], programs_BL)
    engine = load_network(write(tmp_path / "ee.pt", file), "engine", VOCAB, CPU)
    for batching in SCHEDULERS:
        for sharing in (False, True):
            with torch.inference_mode():
                plan = engine.plan(np.array(programs_BL), rows_B, batching, sharing)
                assert_close(engine(images_NCHW, plan), expected)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_the_command_evaluates_an_engine_with_each_option_and_batching(options, wide: dict[int, Path], tmp_path: Path):
    file = engine_file(**options)
    side = file["execution_engine_kwargs"]["feature_dim"][1]
    path = write(tmp_path / "ee.pt", file)
    images = torch.from_numpy(features(1, grid=side))[OF_VAL["image_idxs"][:COUNT]]
    expected = engine_logits(file, images, OF_VAL["programs"][:COUNT].tolist())
    for batching in BATCHING:
        where = ["--ee", path, "--data", wide[side], "--workers", 0, "--num-samples", COUNT, "--batching", batching]
        _, rows, _ = evaluate(tmp_path / batching, *where)
        assert_rows_say(rows, expected)


@pytest.mark.parametrize("batching", BATCHING)
def test_the_command_evaluates_end_to_end_with_every_batching(batching: str, wide: dict[int, Path], tmp_path: Path):
    file = generator_file(seed=3) | engine_file(**ENGINES["everything"])
    path = write(tmp_path / "joint.pt", file)
    where = ["--pg", path, "--ee", path, "--data", wide[GRID], "--workers", 0, "--batching", batching]
    report, rows, _ = evaluate(tmp_path / "out", *where)
    assert report["questions"] == len(rows) == VAL
    programs = [decode(file, question_T) for question_T in OF_VAL["questions"].tolist()]
    for row, program in zip(rows, programs, strict=True):
        ended = program[1:-1] if program[-1] == 2 else program[1:]
        while ended and ended[-1] == 0:
            ended.pop()
        assert row["predicted_program"] == [VOCAB.program[token] for token in ended]
    assert_rows_say(rows, engine_logits(file, FEATURES_NCHW[OF_VAL["image_idxs"]], programs))


@pytest.mark.parametrize("options", GENERATORS.values(), ids=GENERATORS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_generator_with_each_size_decodes_the_originals_programs_token_for_token(options, seed, tmp_path: Path):
    file = generator_file(seed, **options)
    generator = load_network(write(tmp_path / "pg.pt", file), "generator", VOCAB, CPU)
    questions_BT = OF_VAL["questions"]
    found = greedy(generator, torch.from_numpy(questions_BT).long(), Config.max_program_length).tolist()
    expected = [decode(file, question_T) for question_T in questions_BT.tolist()]
    assert len({tuple(program) for program in expected}) > 3
    for mine, program in zip(found, expected, strict=True):
        assert mine == program + [0] * (len(mine) - len(program))


def test_a_program_that_does_not_end_has_as_many_tokens_as_the_originals(tmp_path: Path):
    file = generator_file(seed=2)
    file["program_generator_state"]["decoder_linear.bias"][END] -= 50
    generator = load_network(write(tmp_path / "pg.pt", file), "generator", VOCAB, CPU)
    questions_BT = OF_VAL["questions"][:COUNT]
    found = greedy(generator, torch.from_numpy(questions_BT).long(), Config.max_program_length).tolist()
    assert found == [decode(file, question_T) for question_T in questions_BT.tolist()]
    assert {len(program) for program in found} == {31}


def test_a_null_within_a_program_is_fed_on(tmp_path: Path):
    file = generator_file(seed=2)
    file["program_generator_state"]["decoder_linear.bias"][0] += 1.5
    generator = load_network(write(tmp_path / "pg.pt", file), "generator", VOCAB, CPU)
    questions_BT = OF_VAL["questions"]
    expected = [decode(file, question_T) for question_T in questions_BT.tolist()]
    inside = [program for program in expected if any(a == 0 != b for a, b in pairwise(program))]
    assert inside
    found = greedy(generator, torch.from_numpy(questions_BT).long(), Config.max_program_length).tolist()
    for mine, program in zip(found, expected, strict=True):
        assert mine == program + [0] * (len(mine) - len(program))


@pytest.mark.parametrize(("kind", "options"), BASELINES.values(), ids=BASELINES)
@pytest.mark.parametrize("counted", [True, False], ids=["", "of an older PyTorch"])
def test_a_baseline_with_each_option_has_the_originals_logits(kind, options, counted, tmp_path: Path):
    file = baseline_file(kind, counted=counted, **options)
    rows_B = OF_VAL["image_idxs"][:COUNT]
    questions_BT = OF_VAL["questions"][:COUNT]
    expected = baseline_logits(file, FEATURES_NCHW[rows_B], questions_BT.tolist())
    baseline = load_network(write(tmp_path / "baseline.pt", file), "baseline", VOCAB, CPU)
    with torch.inference_mode():
        assert_close(baseline(torch.from_numpy(questions_BT).long(), FEATURES_NCHW, rows_B), expected)


@pytest.mark.parametrize(("kind", "options"), BASELINES.values(), ids=BASELINES)
def test_the_command_evaluates_a_baseline_with_each_option(kind, options, wide: dict[int, Path], tmp_path: Path):
    file = baseline_file(kind, **options)
    path = write(tmp_path / "baseline.pt", file)
    where = ["--baseline", path, "--data", wide[GRID], "--workers", 0, "--num-samples", COUNT]
    _, rows, _ = evaluate(tmp_path / "out", *where)
    images = FEATURES_NCHW[OF_VAL["image_idxs"][:COUNT]]
    assert_rows_say(rows, baseline_logits(file, images, OF_VAL["questions"][:COUNT].tolist()))


def test_the_test_split_is_answered_end_to_end(wide: dict[int, Path], tmp_path: Path):
    path = write(tmp_path / "joint.pt", generator_file() | engine_file())
    evaluate(tmp_path / "out", "--pg", path, "--ee", path, "--data", wide[GRID], "--workers", 0, "--split", "test")
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
    published = {
        "stem_num_layers": 2,
        "module_dim": 128,
        "classifier_proj_dim": 512,
        "classifier_fc_layers": (1024,),
    }
    file = engine_file(**published)
    file["execution_engine_kwargs"] = {name: file["execution_engine_kwargs"][name] for name in ("vocab", "feature_dim")}
    engine = load_network(write(tmp_path / "ee.pt", file), "engine", VOCAB, CPU)
    with torch.inference_mode():
        found = engine(FEATURES_NCHW[:2], engine.plan(OF_VAL["programs"][:2]))
    full = engine_file(**published)
    expected = engine_logits(full, FEATURES_NCHW[:2], OF_VAL["programs"][:2].tolist())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    assert original_cases.ENGINE["module_residual"]
