"""Data files: the original toolkit's are read unchanged, and ours hold what its scripts write."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from hypothesis import example, given, settings
from tiny_data import TEST, TRAIN, VAL, VOCAB, arrays, features, newest, tiny_config, write_h5

from iep.models.checkpoint import load_checkpoint
from iep.preprocess.encode_questions import build_vocab, encode, expand_vocab, load_questions
from iep.training.run_training import train
from iep.vocab import Vocab


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
    theirs, ours = (load_checkpoint(newest(tmp_path / name))["networks"] for name in ("theirs", "ours"))
    for name, network in ours.items():
        for key, value in network["weights"].items():
            assert torch.equal(theirs[name]["weights"][key], value)


# The same JSON, the same vocabulary and arrays: the rules once more


def words_of(text: str) -> list[str]:
    """Single spaces part words; ; and , are words that begin with what stands before them ending; ? and . go."""
    spaced = "".join(f" {letter}" if letter in ";," else "" if letter in "?." else letter for letter in text)
    return spaced.split(" ")


def table_of(words: Counter, threshold: int = 1) -> dict[str, int]:
    kept = sorted(word for word, count in words.items() if count >= threshold)
    return {word: index for index, word in enumerate(["<NULL>", "<START>", "<END>", "<UNK>", *kept])}


def prefix(program: list[dict], at: int = -1) -> list[str]:
    call = program[at]
    name = call["function"] + (f"[{call['value_inputs'][0]}]" if call["value_inputs"] else "")
    return [name, *(word for source in call["inputs"] for word in prefix(program, source))]


def rows_of(sequences: list[list[str]], table: dict[str, int], unknown: bool = False) -> np.ndarray:
    rows = [[1, *(table[word] if word in table or not unknown else 3 for word in words), 2] for words in sequences]
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows])


def by_the_rules(questions: list[dict], vocab: dict | None, expand: bool, threshold: int, unknown: bool) -> tuple:
    """vocab.json and the arrays of a questions file."""
    texts = [words_of(question["question"]) for question in questions]
    programs = [prefix(question["program"]) for question in questions if "program" in question]
    answers = [question["answer"] for question in questions if "answer" in question]
    new = {
        "question_token_to_idx": table_of(Counter(word for words in texts for word in words), threshold),
        "program_token_to_idx": table_of(Counter(word for words in programs for word in words)),
        "answer_token_to_idx": table_of(Counter(answers)),
    }
    if vocab is None:
        vocab = new
    elif expand:
        vocab = {name: dict(table) for name, table in vocab.items()}
        for word in new["question_token_to_idx"]:
            vocab["question_token_to_idx"].setdefault(word, len(vocab["question_token_to_idx"]))
    found = {"questions": rows_of(texts, vocab["question_token_to_idx"], unknown)}
    found["image_idxs"] = np.array([question["image_index"] for question in questions])
    found["orig_idxs"] = np.arange(len(questions))
    if programs:
        found["programs"] = rows_of(programs, vocab["program_token_to_idx"])
    if answers:
        found["answers"] = np.array([vocab["answer_token_to_idx"][answer] for answer in answers])
    if "question_family_index" in questions[0]:
        found["question_families"] = np.array([question["question_family_index"] for question in questions])
    return vocab, found


@st.composite
def programs(draw: st.DrawFn) -> list[dict]:
    """CLEVR's JSON: calls, arguments before those that use them."""
    calls: list[dict] = []

    def add(depth: int) -> int:
        function = (
            draw(st.sampled_from(["scene", "filter_color", "count", "union", "equal_size"])) if depth else "scene"
        )
        inputs = [add(depth - 1) for _ in range({"scene": 0, "union": 2, "equal_size": 2}.get(function, 1))]
        values = [draw(st.sampled_from(["red", "blue"]))] if function == "filter_color" else []
        calls.append({"function": function, "inputs": inputs, "value_inputs": values})
        return len(calls) - 1

    add(draw(st.integers(0, 4)))
    return calls


TEXTS = st.one_of(
    st.text(alphabet="ab ;,?.Aé", max_size=20),
    st.lists(st.sampled_from(["red", "Red", "red;", "red,", "", "größer", "物", "a.b", "what?", "\t", "\u00a0"])).map(
        " ".join
    ),
)


@st.composite
def question_files(draw: st.DrawFn) -> list[dict]:
    """Questions that all have a part or all have not."""
    with_program, with_answer, with_family = (draw(st.booleans()) for _ in range(3))
    questions = []
    for number in range(draw(st.integers(1, 6))):
        question: dict[str, Any] = {"question": draw(TEXTS), "image_index": draw(st.integers(0, 9))}
        question |= {"question_index": number} if draw(st.booleans()) else {}
        question |= {"program": draw(programs())} if with_program else {}
        question |= {"answer": draw(st.sampled_from(["yes", "no", "3", "metal"]))} if with_answer else {}
        question |= {"question_family_index": draw(st.integers(0, 89))} if with_family else {}
        questions.append(question)
    return questions


@given(
    known=st.none() | question_files(),
    questions=question_files(),
    threshold=st.integers(1, 3),
    unknown=st.booleans(),
    expand=st.booleans(),
)
@example(None, [{"question": "a  b; c, d?  . ", "image_index": 0}], 1, False, False)
@settings(quick, max_examples=200)
def test_the_same_questions_give_the_same_vocabulary_and_arrays(
    tmp_path_factory, known, questions, threshold, unknown, expand
):
    """The order of the vocabulary's entries included; `known` are questions whose vocabulary is given."""
    path = tmp_path_factory.getbasetemp() / "q.json"
    path.write_text(json.dumps({"questions": questions}))
    loaded = load_questions(path)
    given_vocab = mine = None
    if known is not None:
        given_vocab, _ = by_the_rules(known, None, False, 1, False)
        mine = Vocab.from_json(given_vocab, "given")
    if mine is None:
        mine = build_vocab(loaded, threshold)
    elif expand:
        mine = expand_vocab(mine, loaded, threshold)
    try:
        vocab, expected = by_the_rules(questions, given_vocab, expand, threshold, unknown)
    except KeyError:  # The vocabulary does not have some word.
        with pytest.raises(ValueError, match="is not in the vocabulary"):
            encode(loaded, mine, "vocab.json", unknown)
        return
    assert json.dumps(mine.to_json()) == json.dumps(vocab)
    found = encode(loaded, mine, "vocab.json", unknown)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name
        assert found[name].dtype == np.int32
