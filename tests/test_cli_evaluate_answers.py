"""`iep-eval`: answers.txt and answers.json, what CLEVR's evaluation of the test split takes."""

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from evaluate_cases import evaluate, iep_eval
from tiny_data import TEST, VAL, arrays, assert_one_error, files_no_larger_than, write_h5

from iep.evaluation.outcome import OUTPUTS


def answers(out: Path) -> tuple[list[str], list[dict]]:
    """The lines of answers.txt and the objects of answers.json."""
    text = (out / "answers.txt").read_text()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n"), json.loads((out / "answers.json").read_text())


@pytest.mark.parametrize("options", [[], ["--order-by-image", "--batch-size", "4"], ["--workers", "1"]])
def test_the_answers_are_those_predicted_one_a_line_in_the_order_of_the_questions(data, run, tmp_path, options):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--split", "test", *options]
    _, rows, output = evaluate(tmp_path, *arguments)
    lines, objects = answers(tmp_path)
    assert lines == [row["predicted_answer"] for row in rows]
    assert objects == [{"question_index": 1000 + n, "answer": answer} for n, answer in enumerate(lines)]
    assert len(lines) == TEST
    assert "not complete" not in output
    for name in OUTPUTS:
        assert str(tmp_path / name) in output


def test_questions_out_of_order_are_answered_in_the_order_of_their_question_index(data, run, tmp_path: Path):
    shuffled = Path(shutil.copytree(data, tmp_path / "data"))
    order = np.random.default_rng(5).permutation(TEST)
    names = ("questions", "image_idxs", "orig_idxs")
    write_h5(shuffled / "test_questions.h5", {name: arrays(TEST)[name][order] for name in names})
    for name, path in (("straight", data), ("shuffled", shuffled)):
        arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", path, "--split", "test"]
        _, rows, _ = evaluate(tmp_path / name, *arguments)
    assert [row["question_index"] for row in rows] == (1000 + order).tolist()
    assert answers(tmp_path / "shuffled") == answers(tmp_path / "straight")


def test_answers_to_a_part_of_the_questions_are_said_to_be_incomplete(data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data, "--split", "test"]
    _, _, output = evaluate(tmp_path, *arguments, "--num-samples", 5)
    assert f"{tmp_path / 'answers.txt'} is not complete: it holds the answers to 5 of {TEST} questions." in output
    assert len(answers(tmp_path)[0]) == 5
    assert "not complete" not in evaluate(tmp_path, *arguments, "--num-samples", TEST)[2]
    assert len(answers(tmp_path)[0]) == TEST


def test_where_nothing_answers_no_answers_of_an_earlier_evaluation_are_left(data, run, tmp_path: Path):
    evaluate(tmp_path, "--baseline", run["lstm"], "--data", data)
    assert len(answers(tmp_path)[0]) == VAL
    _, _, output = evaluate(tmp_path, "--pg", run["pg"], "--data", data)
    assert {path.name for path in tmp_path.iterdir()} == {"predictions.jsonl", "report.json"}
    assert "answers.txt" not in output


def test_answers_under_one_number_are_said_not_to_be_told_apart(data, run, tmp_path: Path):
    twice = Path(shutil.copytree(data, tmp_path / "data"))
    content = {name: arrays(TEST)[name] for name in ("questions", "image_idxs", "orig_idxs")}
    content["orig_idxs"][7] = content["orig_idxs"][4]
    path = write_h5(twice / "test_questions.h5", content)
    arguments = ["--baseline", run["lstm"], "--split", "test", "--data"]
    _, _, output = evaluate(tmp_path / "out", *arguments, twice)
    said = f"2 questions have the question_index 1004; {tmp_path / 'out' / 'answers.json'} cannot distinguish their"
    assert f"{path}: {said}" in output
    assert len(answers(tmp_path / "out")[0]) == TEST
    assert "question_index" not in evaluate(tmp_path / "out", *arguments, data)[2]


def test_a_page_of_an_earlier_evaluation_is_said_to_be(data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data]
    said = f"{tmp_path / 'report.html'} is the page of another evaluation"
    assert said not in evaluate(tmp_path, *arguments, "--report", tmp_path)[2]
    assert said in evaluate(tmp_path, *arguments, "--num-samples", 5)[2]
    assert said in evaluate(tmp_path, *arguments, "--report", tmp_path / "elsewhere")[2]
    assert said not in evaluate(tmp_path, *arguments, "--report", tmp_path / "elsewhere" / "..")[2]


def test_a_full_disk_leaves_the_earlier_answers_whole(data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data, "--out", tmp_path]
    assert iep_eval(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    size = len(before["predictions.jsonl"]) - 1
    assert max(map(len, (before["answers.txt"], before["answers.json"]))) < size
    with files_no_larger_than(size):
        assert iep_eval(*arguments).exit_code == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["predictions.jsonl", "answers.txt"])
def test_an_end_between_two_renames_leaves_no_report_beside_files_of_another_evaluation(
    data, run, tmp_path: Path, monkeypatch, name: str
):
    arguments = ["--baseline", run["lstm"], "--data", data, "--out", tmp_path]
    assert iep_eval(*arguments).exit_code == 0

    def failing(source: Path, target: Path, replace=os.replace) -> None:
        if target.name == name:
            raise OSError(errno.EIO, "Input/output error", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    assert_one_error(iep_eval(*arguments, "--num-samples", 5), str(tmp_path / name))
    assert {path.name for path in tmp_path.iterdir()} == set(OUTPUTS) - {"report.json"}
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == VAL
