"""Data files: the original toolkit's are read unchanged, and ours hold what its scripts write."""

import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from hypothesis import given, settings
from tiny_data import TEST, TRAIN, VAL, VOCAB, arrays, features, newest, tiny_config, write_h5

from iep.models.checkpoint import read_checkpoint
from iep.preprocess.encode_questions import build_vocab, encode, load_questions
from iep.programs import prefix_to_json
from iep.training.run_training import train


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny data set as the original's scripts write it: bare data sets, tokens in int32, all else in int64."""
    out = tmp_path_factory.mktemp("original")
    (out / "vocab.json").write_text(json.dumps(VOCAB.to_json()))
    for seed, (split, count) in enumerate((("train", TRAIN), ("val", VAL), ("test", TEST))):
        names = ("questions", "image_idxs", "orig_idxs", *(() if split == "test" else ("programs", "answers")))
        held = {name: values for name, values in arrays(count).items() if name in names}
        long = {name: values.astype(np.int64) for name, values in held.items() if values.ndim == 1}
        write_h5(out / f"{split}_questions.h5", held | long)
        write_h5(out / f"{split}_features.h5", {"features": features(seed)})
    return out


@pytest.mark.parametrize("model", ["pg", "cnn-lstm-sa"])
def test_a_run_on_the_originals_files_is_that_on_ours(model: str, original: Path, data: Path, tmp_path: Path):
    for name, where in (("theirs", original), ("ours", data)):
        assert train(tiny_config(where, model, "iterations=2"), tmp_path / name, resume=False)
    theirs, ours = (read_checkpoint(newest(tmp_path / name)).networks for name in ("theirs", "ours"))
    for name, network in ours.items():
        for key, value in network.weights.items():
            assert torch.equal(theirs[name].weights[key], value)


PROGRAMS = st.recursive(
    st.just(["scene"]),
    lambda trees: st.one_of(
        st.builds(lambda token, tree: [token, *tree], st.sampled_from(["filter_color[red]", "count"]), trees),
        st.builds(
            lambda token, *pair: [token, *pair[0], *pair[1]], st.sampled_from(["union", "equal_size"]), trees, trees
        ),
    ),
    max_leaves=4,
)
WORDS = st.sampled_from(["red", "Red", "red;", "red,", "", "größer", "物", "a.b", "what?", "\t", "\u00a0"])
TEXTS = st.text(alphabet="ab ;,?.Aé", max_size=20) | st.lists(WORDS).map(" ".join)
ANSWERS = st.sampled_from(["yes", "no", "3", "metal"])


def words_of(text: str) -> list[str]:
    """Single spaces part words; ; and , are words that begin with what stands before them ending; ? and . go."""
    spaced = "".join(f" {letter}" if letter in ";," else "" if letter in "?." else letter for letter in text)
    return spaced.split(" ")


def numbered(rows: list[list[str]]) -> tuple[dict[str, int], list[list[int]]]:
    """Return the index of each word, in the order of the alphabet after the special tokens, and the rows of indices."""
    words = sorted({word for row in rows for word in row})
    table = {word: index for index, word in enumerate(["<NULL>", "<START>", "<END>", "<UNK>", *words])}
    return table, [[table[word] for word in row] for row in rows]


def matrix(rows: list[list[int]]) -> list[list[int]]:
    """Return rows between the indices of <START> and <END>, padded on the right."""
    width = max(map(len, rows))
    return [[1, *row, 2, *[0] * (width - len(row))] for row in rows]


@given(st.lists(st.tuples(TEXTS, PROGRAMS, ANSWERS, st.integers(0, 9), st.integers(0, 89)), min_size=1, max_size=6))
@settings(quick, max_examples=200)
def test_the_same_questions_give_the_same_vocabulary_and_arrays(tmp_path_factory, drawn):
    """The order of the vocabulary's entries included."""
    names = ("question", "program", "answer", "image_index", "question_family_index")
    questions = [dict(zip(names, each, strict=True)) | {"program": prefix_to_json(each[1])} for each in drawn]
    path = tmp_path_factory.getbasetemp() / "q.json"
    path.write_text(json.dumps({"questions": questions}))
    loaded = load_questions(path)
    vocab = build_vocab(loaded, 1)
    texts, programs, answers, images, families = zip(*drawn, strict=True)
    tables, rows = zip(*map(numbered, ([*map(words_of, texts)], programs, [[each] for each in answers])), strict=True)
    keys = ("question_token_to_idx", "program_token_to_idx", "answer_token_to_idx")
    assert json.dumps(vocab.to_json()) == json.dumps(dict(zip(keys, tables, strict=True)))
    found = encode(loaded, vocab, "vocab.json", False)
    assert {array.dtype for array in found.values()} == {np.dtype("int32")}
    assert {name: array.tolist() for name, array in found.items()} == {
        "questions": matrix(rows[0]),
        "programs": matrix(rows[1]),
        "answers": [row[0] for row in rows[2]],
        "image_idxs": [*images],
        "orig_idxs": [*range(len(drawn))],
        "question_families": [*families],
    }
