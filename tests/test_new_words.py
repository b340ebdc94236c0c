"""Question words that a trained network has not seen: what they change, who may learn them, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from evaluate_cases import iep_eval
from tiny_data import TRAIN, VAL, VOCAB, arrays, assert_one_error, newest, tiny, write_data, write_h5

from iep.cli.train import main as train_main
from iep.models.build import NEW_WORDS_STD, add_words, build
from iep.models.checkpoint import load_checkpoint
from iep.vocab import count_new_words

NEW = ("hello", "world", "Ünï")
EXPANDED = replace(VOCAB, question=(*VOCAB.question, *NEW))
KNOWN = len(VOCAB.question)
STILL = ("learning_rate=0", "iterations=1")


def iep_train(*arguments: object) -> Result:
    return CliRunner().invoke(train_main, [str(argument) for argument in arguments])


def weights(path: Path, name: str = "generator") -> dict[str, torch.Tensor]:
    return load_checkpoint(path)["networks"][name]["weights"]


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data set with the new words at the end of its vocabulary and in its questions."""
    out = write_data(tmp_path_factory.mktemp("expanded"))
    EXPANDED.save(out / "vocab.json")
    for split, count in (("train", TRAIN), ("val", VAL)):
        datasets = arrays(count)
        datasets["questions"][:, 1] = KNOWN + torch.arange(count) % len(NEW)
        write_h5(out / f"{split}_questions.h5", datasets)
    return out


def test_words_are_new_only_after_all_old_ones_in_their_order():
    assert count_new_words(VOCAB, EXPANDED) == 3
    assert count_new_words(VOCAB, VOCAB) == 0
    assert count_new_words(EXPANDED, VOCAB) == 0
    assert count_new_words(VOCAB, replace(VOCAB, question=(*VOCAB.question[:5], "hello", *VOCAB.question[5:]))) == 0


def test_old_words_keep_every_bit_and_new_ones_are_small_and_seeded():
    kwargs = {"num_question_tokens": 9, "num_program_tokens": 5, "embedding_dim": 400, "hidden_dim": 8}
    networks = [build("generator", kwargs) for _ in range(3)]
    for network, seed in zip(networks, (1, 1, 2), strict=True):
        before, told = network.encoder_embed.weight.detach().clone(), network.kwargs
        add_words(network, "generator", 50, seed)
        assert torch.equal(network.encoder_embed.weight[:9], before)
        assert network.encoder_embed.weight.shape == (59, 400)
        assert network.kwargs == told | {"num_question_tokens": 59}
    one, again, other = (network.encoder_embed.weight[9:].detach() for network in networks)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.std().item() == pytest.approx(NEW_WORDS_STD, rel=0.02)
    assert abs(one.mean().item()) < NEW_WORDS_STD / 20


def test_questions_in_old_words_are_read_as_before():
    torch.manual_seed(0)
    kwargs = {"num_question_tokens": 9, "num_program_tokens": 5, "embedding_dim": 6, "hidden_dim": 8}
    network = build("generator", kwargs)
    questions_BT, programs_BL = torch.randint(4, 9, (7, 5)), torch.randint(1, 5, (7, 4))
    before = network(questions_BT, programs_BL)
    add_words(network, "generator", 2, seed=0)
    assert torch.equal(network(questions_BT, programs_BL), before)
    assert network(questions_BT + 2, programs_BL).isfinite().all()


@pytest.mark.parametrize("model", ["pg", "joint"])
def test_training_that_starts_from_a_generator_learns_new_words(
    run: dict[str, Path], expanded: Path, tmp_path: Path, model: str
):
    starts = ["--pg", run["pg"], *(["--ee", run["ee"]] if model == "joint" else [])]
    arguments = ("--model", model, "--data", expanded, *starts, *tiny(model))
    still, learning = tmp_path / "still", tmp_path / "learning"
    result = iep_train("--out", still, *arguments, *STILL)
    assert result.exit_code == 0, result.output
    assert re.findall(r"\S+: \d+ new question words", result.stdout) == [f"{run['pg']}: 3 new question words"]
    before, after = weights(run["pg"]), weights(newest(still))
    assert torch.equal(after["encoder_embed.weight"][:KNOWN], before["encoder_embed.weight"])
    assert after["encoder_embed.weight"].shape[0] == KNOWN + 3
    assert all(torch.equal(after[name], before[name]) for name in before if name != "encoder_embed.weight")
    assert iep_train("--out", learning, *arguments).exit_code == 0
    learnt = weights(newest(learning))["encoder_embed.weight"]
    assert not torch.equal(learnt[KNOWN:], after["encoder_embed.weight"][KNOWN:])


@pytest.mark.parametrize("model", ["lstm", "cnn-lstm"])
def test_a_baseline_that_starts_from_a_trained_one_learns_new_words(
    data: Path, expanded: Path, tmp_path: Path, model: str
):
    common = ("--model", model, *tiny(model))
    assert iep_train(*common, "--data", data, "--out", tmp_path / "first").exit_code == 0
    first = newest(tmp_path / "first")
    result = iep_train(*common, "--data", expanded, "--baseline", first, "--out", tmp_path / "second", *STILL)
    assert result.exit_code == 0, result.output
    assert f"{first}: 3 new question words" in result.stdout
    before, after = (weights(path, model.replace("-", "_")) for path in (first, newest(tmp_path / "second")))
    assert after["rnn.embed.weight"].shape[0] == KNOWN + 3
    assert torch.equal(after["rnn.embed.weight"][:KNOWN], before["rnn.embed.weight"])
    assert iep_eval("--baseline", tmp_path / "second", "--data", expanded).exit_code == 0


def test_a_run_with_new_words_is_resumed_and_evaluated_as_any_other(
    run: dict[str, Path], expanded: Path, tmp_path: Path
):
    arguments = ("--model", "pg", "--data", expanded, "--pg", run["pg"], *tiny("pg"))
    assert iep_train("--out", tmp_path / "whole", *arguments).exit_code == 0
    assert iep_train("--out", tmp_path / "cut", *arguments, "iterations=2").exit_code == 0
    resumed = iep_train("--out", tmp_path / "cut", "--resume", "iterations=4")
    assert resumed.exit_code == 0
    assert "new question words" not in resumed.output
    whole, cut = weights(newest(tmp_path / "whole")), weights(newest(tmp_path / "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert iep_eval("--pg", tmp_path / "cut", "--data", expanded).exit_code == 0


def test_the_same_vocabulary_is_no_news(run: dict[str, Path], data: Path, tmp_path: Path):
    result = iep_train(
        "--model", "pg", "--data", data, "--pg", run["pg"], "--out", tmp_path / "run", *tiny("pg"), *STILL
    )
    assert result.exit_code == 0
    assert "new question words" not in result.output


HINT = "question token {n} is missing there and 'hello' in the data; training that starts from it learns the 3 new"


def test_a_model_without_the_new_words_is_not_evaluated_on_them(run: dict[str, Path], expanded: Path):
    result = iep_eval("--pg", run["pg"], "--data", expanded)
    assert_one_error(result, str(run["pg"]), HINT.format(n=KNOWN))


def test_a_generator_that_only_predicts_learns_no_words(run: dict[str, Path], expanded: Path, tmp_path: Path):
    arguments = ("--model", "ee", "--programs", "predicted", "--pg", run["pg"], "--data", expanded, *tiny("ee"))
    assert_one_error(iep_train(*arguments, "--out", tmp_path / "run"), HINT.format(n=KNOWN))


def test_a_frozen_generator_is_refused_new_words(run: dict[str, Path], expanded: Path, tmp_path: Path):
    arguments = ("--model", "joint", "--pg", run["pg"], "--ee", run["ee"], "--data", expanded, *tiny("joint"))
    result = iep_train(*arguments, "--freeze", "generator", "--out", tmp_path / "run")
    assert_one_error(result, f"{run['pg']}: 3 question words are new to it, and frozen it cannot learn them")


@pytest.mark.parametrize(
    ("vocab", "problem"),
    [
        (replace(EXPANDED, question=(*VOCAB.question[:-1], *NEW)), "trained with another vocabulary: question token"),
        (replace(EXPANDED, program=(*VOCAB.program, "new")), "program token"),
        (replace(VOCAB, question=VOCAB.question[:-1]), "in the data"),
    ],
)
def test_any_other_difference_of_the_vocabularies_is_refused(run: dict[str, Path], tmp_path: Path, vocab, problem: str):
    data = write_data(tmp_path / "data")
    vocab.save(data / "vocab.json")
    for split, count in (("train", 5), ("val", 5)):
        datasets = arrays(count)
        datasets["questions"][:, 1:] = 4
        write_h5(data / f"{split}_questions.h5", datasets)
    result = iep_train("--model", "pg", "--pg", run["pg"], "--data", data, "--out", tmp_path / "run", *tiny("pg"))
    assert_one_error(result, problem)
    assert "learns the" not in result.output
