"""CLEVR's question files -> vocab.json and questions.h5, and what is said about bad ones."""

import json
import os
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from clevr_files import COLORS, question, write_clevr, write_questions
from features_cases import run as preprocess

from iep.vocab import Vocab


@pytest.fixture
def clevr(tmp_path):
    return write_clevr(tmp_path / "CLEVR")


run = partial(preprocess, only="questions")


def read(path: Path) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: dataset[()] for name, dataset in file.items()}


def text(tokens: tuple[str, ...], row: np.ndarray) -> str:
    return " ".join(tokens[index] for index in row)


def test_questions_programs_and_answers_decode_to_what_the_release_says(clevr, out):
    run(clevr, "--out", out)
    vocab, train = Vocab.load(out / "vocab.json"), read(out / "train_questions.h5")
    assert text(vocab.question, train["questions"][1]) == "<START> How many green things are there <END>"
    assert text(vocab.program, train["programs"][1]) == "<START> count filter_color[green] scene <END>"
    assert text(vocab.answer, train["answers"]) == "2 2 2 2 2 2"
    assert train["image_idxs"].tolist() == [0, 0, 1, 1, 2, 2]
    assert train["orig_idxs"].tolist() == [100, 101, 102, 103, 104, 105]
    assert train["question_families"].tolist() == [7] * 6
    assert {array.dtype for array in train.values()} == {np.dtype("int32")}
    assert set(read(out / "test_questions.h5")) == {"questions", "image_idxs", "orig_idxs", "question_families"}


def test_families_of_different_files_of_templates_are_different_and_the_same_in_every_split(clevr, out):
    files = ("one_hop.json", "zero_hop.json")
    for split, order in (("train", files), ("val", files[::-1])):
        asked = [
            question(n, 0, split) | {"template_filename": file, "question_family_index": index}
            for n, (file, index) in enumerate((file, index) for file in order for index in (0, 1))
        ]
        write_questions(clevr, split, asked)
    run(clevr, "--out", out, "--split", "train", "--split", "val")
    train, val = (read(out / f"{split}_questions.h5")["question_families"].tolist() for split in ("train", "val"))
    assert len(set(train)) == 4
    assert val == [*train[2:], *train[:2]]
    assert [number % 1000 for number in train] == [0, 1, 0, 1]


def test_the_public_generators_forms_give_the_same_arrays_as_the_release(clevr, out, tmp_path):
    released = [question(n, 0, "train", COLORS[n]) | {"answer": answer} for n, answer in enumerate(("yes", "no", "3"))]
    write_questions(clevr, "train", released)
    run(clevr, "--out", out, "--split", "train")
    generated = [released[n] | {"answer": answer} for n, answer in enumerate((True, False, 3))]
    for q in generated:
        calls = [{"type": call["function"], **call} for call in q["program"]]
        q["program"] = [
            {"side_inputs" if key == "value_inputs" else key: value for key, value in call.items() if key != "function"}
            for call in calls
        ]
    write_questions(clevr, "train", generated)
    run(clevr, "--out", tmp_path / "generated", "--split", "train")
    expected, found = read(out / "train_questions.h5"), read(tmp_path / "generated" / "train_questions.h5")
    assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_clevr_humans_is_read_with_an_expanded_vocabulary(clevr, out, tmp_path):
    run(clevr, "--out", out, "--split", "train")
    asked = (("CLEVR_val_000002.png", "How many red zebras?"), ("CLEVR_val_000000.png", "are there many aardvarks"))
    humans = [{"image_filename": name, "question": text, "answer": "2", "split": "val"} for name, text in asked]
    directory, made = tmp_path / "CLEVR-Humans", tmp_path / "humans"
    directory.mkdir()
    file = directory / "CLEVR-Humans-val.json"
    file.write_text(json.dumps({"questions": humans}))
    vocab = ("--vocab", out / "vocab.json")
    run(clevr, "--out", made, "--questions", file, "--split", "val", *vocab, "--expand-vocab")
    before, after = Vocab.load(out / "vocab.json"), Vocab.load(made / "vocab.json")
    assert after.question == (*before.question, "aardvarks", "zebras")
    assert (after.program, after.answer) == (before.program, before.answer)
    found = read(made / "val_questions.h5")
    assert set(found) == {"questions", "answers", "image_idxs", "orig_idxs"}
    assert found["image_idxs"].tolist() == [2, 0]
    assert found["orig_idxs"].tolist() == [0, 1]
    run(directory, "--out", tmp_path / "found by name", *vocab, "--encode-unk")
    row = read(tmp_path / "found by name" / "val_questions.h5")["questions"][0]
    assert text(before.question, row) == "<START> How many red <UNK> <END>"


def test_tokens_below_the_threshold_are_left_out_and_become_unk(clevr, out):
    questions = [question(0, 0, "train", "red"), question(1, 0, "train", "red"), question(2, 0, "train", "blue")]
    write_questions(clevr, "train", questions)
    arguments = (clevr, "--out", out, "--split", "train", "--unk-threshold", 2)
    assert "question 2: question token 'blue'" in run(*arguments, code=1)
    assert not out.exists() or not list(out.iterdir())
    run(*arguments, "--encode-unk")
    vocab = Vocab.load(out / "vocab.json")
    assert "red" in vocab.question
    assert "blue" not in vocab.question
    assert "filter_color[blue]" in vocab.program
    row = read(out / "train_questions.h5")["questions"][2]
    assert text(vocab.question, row) == "<START> How many <UNK> things are there <END>"


def test_the_vocabulary_of_clevr_cogent_is_that_of_train_a(tmp_path, out):
    for split, color in (("valB", "cyan"), ("trainA", "red"), ("valA", "red"), ("testB", "red")):
        write_questions(tmp_path / "CoGenT", split, [question(0, 0, split, color)])
    assert "valB" in run(tmp_path / "CoGenT", "--out", out, code=1)
    write_questions(tmp_path / "CoGenT", "valB", [question(0, 0, "valB", "red")])
    lines = run(tmp_path / "CoGenT", "--out", out).splitlines()
    names = ("vocab.json", *(f"{split}_questions.h5" for split in ("trainA", "valA", "valB", "testB")))
    assert [line.split(":")[0] for line in lines] == [str(out / name) for name in names]
    alone = tmp_path / "alone"
    write_questions(tmp_path / "A", "trainA", [question(0, 0, "trainA", "red")])
    run(tmp_path / "A", "--out", alone)
    assert Vocab.load(out / "vocab.json") == Vocab.load(alone / "vocab.json")
    assert "already done" in run(tmp_path / "CoGenT", "--split", "valB", "--out", out)


def test_a_token_that_the_vocabulary_lacks_is_named_with_file_question_and_a_vocabulary_that_has_it(
    clevr, out, tmp_path
):
    foreign = tmp_path / "other_vocab.json"
    Vocab(*(("<NULL>", "<START>", "<END>", "<UNK>", "How"),) * 3).save(foreign)
    line = run(clevr, "--out", out, "--vocab", foreign, code=1)
    assert "CLEVR_train_questions.json: question 0: question token 'many' is not in the vocabulary" in line
    assert f"{foreign}; --vocab clevr has it" in line
    line = run(clevr, "--out", out, "--vocab", foreign, "--encode-unk", code=1)
    assert "question 0: program token 'count' is not in the vocabulary" in line
    write_questions(clevr, "train", [question(0, 0, "train") | {"question": "How many zebras?"}])
    line = run(clevr, "--out", out, "--vocab", "clevr", code=1)
    assert "question token 'zebras' is not in the vocabulary clevr; give a vocabulary that has it" in line


def test_the_vocabulary_of_clevr_comes_with_the_package(clevr, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clevr").mkdir()
    run(clevr, "--out", out, "--vocab", "clevr")
    assert Vocab.load(out / "vocab.json") == Vocab.clevr()
    assert run(clevr, "--out", out, "--vocab", "clevr").count("already done") == 4


@pytest.mark.parametrize(
    ("change", "difference"),
    [("questions", "questions_digest"), ("--encode-unk", "encode_unk"), ("--unk-threshold=3", "vocab_digest")],
)
def test_files_made_otherwise_are_refused_untouched_unless_overwritten(clevr, out, change, difference):
    run(clevr, "--out", out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    options = [] if change == "questions" else [change]
    if change == "questions":
        write_questions(clevr, "val", [question(0, 0, "val")])
    if difference == "vocab_digest":
        options.append("--encode-unk")
    line = run(clevr, "--out", out, *options, code=1)
    assert f"_questions.h5: was made with {difference}" in line
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    run(clevr, "--out", out, *options, "--overwrite")
    assert {path.name: path.read_bytes() for path in out.iterdir()} != before
    assert "already done" in run(clevr, "--out", out, *options)


def test_done_files_are_skipped_and_truncated_ones_named(clevr, out):
    run(clevr, "--out", out, "--split", "train")
    assert [path.name for path in out.glob("*_questions.h5")] == ["train_questions.h5"]
    assert run(clevr, "--out", out).count("already done") == 2  # the vocabulary and the train split
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()}
    assert set(before) == {"vocab.json", "train_questions.h5", "val_questions.h5", "test_questions.h5"}
    assert run(clevr, "--out", out).count("already done") == 4
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} == before
    broken = out / "val_questions.h5"
    os.truncate(broken, 1000)
    assert f"{broken}: not a whole HDF5 file" in run(clevr, "--out", out, code=1)
    run(clevr, "--out", out, "--overwrite")
    assert broken.read_bytes() == before[broken.name][0]


ONE = '{"question": "How?", "image_index": 0'
CALL = '{"function": "count", "inputs": []}'
BAD_QUESTIONS = [
    ("3", "question 0 is 3, expected an object"),
    ('{"text": "How?"}', "question 0: 'question' is None, expected a text; the keys are text"),
    ('{"question": "How?"}', "question 0: expected the key 'image_index', or 'image_filename'"),
    ('{"question": "How?", "image_index": "0"}', "'image_index' is '0', expected an integer"),
    (ONE + ', "answer": 1}, ' + ONE + "}", "1 of 2 questions have 'answer', expected all or none"),
    (ONE + ', "program": [' + CALL + "]}", "question 0: program call 0 (count) has inputs [], expected 1"),
]
BAD_FILES = [
    *((f'{{"questions": [{questions}]}}', message) for questions, message in BAD_QUESTIONS),
    ('{"scenes": []}', "with a list under the key 'questions'"),
    ('{"questions": []}', "the list 'questions' is empty"),
    ('{"questions": [' + ONE + "}", "line 1 column 54"),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES, ids=[message for _, message in BAD_FILES])
def test_a_file_that_is_not_clevr_is_named_with_what_was_expected(clevr, out, content, message):
    path = clevr / "questions" / "CLEVR_train_questions.json"
    path.write_text(content)
    line = run(clevr, "--out", out, "--split", "train", code=1)
    assert f"{path}: " in line
    assert message in line
    assert not out.exists() or not list(out.iterdir())


REFUSED = [
    (("--questions", "x.json"), "--questions goes with exactly one --split", 2),
    (("--expand-vocab",), "--expand-vocab goes with --vocab", 2),
    (("--backbone", "synth", "--stage", 3), "--stage does not go with --backbone synth", 2),
    (("--only", "questions", "--split", "valid"), "no questions of split 'valid' (found: train, val, test)", 1),
    (("--split", "val"), "preprocess the train split first or give --vocab FILE", 1),
    (("--questions", "absent.json", "--split", "val", "--vocab", "v"), "absent.json: no such file", 1),
]


@pytest.mark.parametrize(("flags", "message", "code"), REFUSED)
def test_arguments_that_cannot_be_followed_are_one_line(clevr, out, flags, message, code):
    assert message in preprocess(clevr, "--out", out, *flags, only=None, code=code)
    assert not out.exists()
