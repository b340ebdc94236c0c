"""Networks built from settings and checkpoints, what does not fit them, and question words new to them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluate_cases import iep_eval
from tiny_data import TRAIN, VAL, VOCAB, arrays, assert_one_error, newest, tiny, write_data, write_h5
from train_cases import iep_train, weights

from iep.config import GeneratorConfig
from iep.errors import InputError
from iep.models.checkpoint import Checkpoint, read_checkpoint
from iep.models.network import NEW_WORDS_STD, Network, Packed
from iep.vocab import Vocab, count_new_words

CPU = torch.device("cpu")


# Checkpoints that do not fit


@pytest.mark.parametrize(
    ("model", "name", "problem"),
    [
        ("pg", "engine", "holds a program generator, expected a checkpoint with an execution engine"),
        ("ee", "generator", "holds an execution engine, expected a checkpoint with a program generator"),
        ("lstm", "engine", "holds a question-only LSTM, expected"),
        ("pg", "lstm", "expected a checkpoint with a question-only LSTM"),
    ],
)
def test_a_checkpoint_of_another_model_is_named(runs: dict[str, Path], model: str, name: str, problem: str):
    with pytest.raises(InputError) as caught:
        read_checkpoint(runs[model]).network(name)
    assert str(caught.value).startswith(f"{runs[model]}: ")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("model", "name", "key", "value", "problem"),
    [
        ("pg", "generator", "colour", 3, "a program generator cannot be built: .*colour"),
        ("pg", "generator", "hidden_dim", 11, "the weights do not fit .* a program generator .*size mismatch"),
        ("pg", "generator", "hidden_dim", 10**7, "a program generator cannot be built: .*memory"),
        ("ee", "engine", "stem", "stone", "an execution engine cannot be built: stem is 'stone', expected"),
        ("ee", "engine", "feature_height", 9, "the weights do not fit .* an execution engine .*size mismatch"),
    ],
)
def test_arguments_that_make_no_network_of_the_weights_are_named(
    runs: dict[str, Path], recwarn: pytest.WarningsRecorder, model: str, name: str, key: str, value: Any, problem: str
):
    held = read_checkpoint(runs[model])
    packed = held.networks[name]
    changed = Packed({**packed.settings, key: value}, packed.weights)
    with pytest.raises(InputError, match=f"^run: {problem}") as caught:
        Checkpoint(Path("run"), {name: changed}, held.vocab, held.recipe).network(name)
    assert "\n" not in str(caught.value)
    assert not recwarn.list


USED = {
    "generator": {"question", "program"},
    "engine": {"program", "answer"},
    "lstm": {"question", "answer"},
    "cnn_lstm_sa": {"question", "answer"},
}


@pytest.mark.parametrize("name", USED)
@pytest.mark.parametrize("kind", ["question", "program", "answer"])
def test_a_vocabulary_matters_to_the_networks_that_use_it(name: str, kind: str):
    tokens = getattr(VOCAB, kind)
    longer = replace(VOCAB, **{kind: (*tokens, "zebra")})
    if kind not in USED[name]:
        network(name, VOCAB).check_fits(longer)
        return
    for old, new, difference in (
        (VOCAB, longer, "missing there and 'zebra' in the data"),
        (longer, VOCAB, "'zebra' there and missing in the data"),
    ):
        remedy = "preprocess them with --vocab run" + " --encode-unk" * (kind == "question")
        problem = f"run: trained with another vocabulary: {kind} token {len(tokens)} is {difference}; {remedy}"
        with pytest.raises(InputError, match=re.escape(problem)):
            network(name, old).check_fits(new)


def network(name: str, vocab: Vocab) -> Network:
    return Network(name, None, {}, vocab, source=Path("run"))


# New question words

NEW = ("hello", "world", "Ünï")
EXPANDED = replace(VOCAB, question=(*VOCAB.question, *NEW))
KNOWN = len(VOCAB.question)


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
    vocab, section = replace(VOCAB, question=VOCAB.question[:9]), GeneratorConfig(embedding_dim=400, hidden_dim=8)
    longer, news = replace(vocab, question=(*vocab.question, *map(str, range(50)))), []
    for seed in (1, 1, 2):
        short = Network.new("generator", section, vocab)
        module, before = short.module, short.module.encoder_embed.weight.detach().clone()
        settings = {**short.settings, "num_question_tokens": 59}
        assert short.with_words(longer, seed) == replace(short, settings=settings, vocab=longer)
        assert torch.equal(module.encoder_embed.weight[:9], before)
        assert module.encoder_embed.weight.shape == (59, 400)
        news.append(module.encoder_embed.weight[9:].detach())
    one, again, other = news
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.std().item() == pytest.approx(NEW_WORDS_STD, rel=0.02)
    assert abs(one.mean().item()) < NEW_WORDS_STD / 20


@pytest.mark.parametrize(
    ("model", "flag", "start", "network", "embedding"),
    [
        ("pg", "--pg", "pg", "generator", "encoder_embed.weight"),
        ("joint", "--pg", "pg", "generator", "encoder_embed.weight"),
        ("lstm", "--baseline", "lstm", "lstm", "rnn.embed.weight"),
    ],
)
def test_training_that_starts_from_a_network_that_reads_questions_learns_new_words(
    run: dict[str, Path], expanded: Path, tmp_path: Path, model: str, flag: str, start: str, network: str, embedding
):
    starts = [flag, run[start], *(["--ee", run["ee"]] if model == "joint" else [])]
    arguments = ("--model", model, "--data", expanded, *starts, *tiny(model))
    still, learning = tmp_path / "still", tmp_path / "learning"
    result = iep_train("--out", still, *arguments, "learning_rate=0", "iterations=1")
    assert result.exit_code == 0, result.output
    assert re.findall(r"\S+: \d+ new question words", result.stdout) == [f"{run[start]}: 3 new question words"]
    before, after = weights(run[start], network), weights(newest(still), network)
    assert torch.equal(after[embedding][:KNOWN], before[embedding])
    assert after[embedding].shape[0] == KNOWN + 3
    assert all(torch.equal(after[name], before[name]) for name in before if name != embedding)
    assert iep_train("--out", learning, *arguments).exit_code == 0
    assert not torch.equal(weights(newest(learning), network)[embedding][KNOWN:], after[embedding][KNOWN:])
    resumed = iep_train("--out", learning, "--resume", "iterations=5")
    assert (resumed.exit_code, "new question words" in resumed.output) == (0, False)
    assert iep_eval(flag, learning, "--data", expanded).exit_code == 0


HINT = "question token {n} is missing there and 'hello' in the data; preprocess them with --vocab {pg} --encode-unk"


def test_new_words_are_refused_where_nothing_learns_them(run: dict[str, Path], expanded: Path, tmp_path: Path):
    start = ("--out", tmp_path / "run", "--pg", run["pg"], "--data", expanded)
    assert_one_error(iep_eval("--pg", run["pg"], "--data", expanded), HINT.format(n=KNOWN, pg=run["pg"]))
    result = iep_train(*start, "--model", "ee", "--programs", "predicted", *tiny("ee"))
    assert_one_error(result, HINT.format(n=KNOWN, pg=run["pg"]))
    result = iep_train(*start, "--model", "joint", "--ee", run["ee"], *tiny("joint"), "--freeze", "generator")
    assert_one_error(result, f"{run['pg']}: 3 question words are new to it, and a frozen part cannot learn them")
