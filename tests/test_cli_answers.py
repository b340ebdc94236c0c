"""`iep-eval --answers`: any model's answers get the scores that networks with these answers get."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import h5py
import pyarrow
import pytest
from evaluate_cases import evaluate, iep_eval
from openpyxl import Workbook
from pyarrow import parquet
from tiny_data import assert_one_error

from iep.evaluation.answer_files import MISSING, UNREADABLE

TEXT = [
    {
        "question": "What color is it?",
        "answer": "red",
        "program": [("scene", []), ("unique", [0]), ("query_color", [1])],
    },
    {"question": "How many things are there?", "answer": "2", "program": [("scene", []), ("count", [0])]},
    {"question": "Are there any things?", "answer": "yes", "program": [("scene", []), ("exist", [0])]},
]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A question file in CLEVR's format."""
    rows = []
    for number, each in enumerate(TEXT):
        program = [{"function": name, "inputs": inputs, "value_inputs": []} for name, inputs in each["program"]]
        rows.append(each | {"question_index": 10 + number, "image_index": 0, "program": program})
    path = tmp_path / "CLEVR_val_questions.json"
    path.write_text(json.dumps({"questions": rows}))
    return path


def test_the_answers_of_a_network_have_its_scores(data: Path, run: dict[str, Path], tmp_path: Path):
    given = ("--data", data, "--split", "val", "--num-samples", 6, "--skip-samples", 1)
    networks, rows, _ = evaluate(tmp_path, "--ee", run["ee"], *given)
    columns = {key: [row[key] for row in rows] for key in ("question_index", "predicted_answer")}
    parquet.write_table(pyarrow.table(columns), tmp_path / "answers.parquet")
    for name in ("predictions.jsonl", "answers.json", "answers.txt", "answers.parquet"):
        answers, found, _ = evaluate(
            tmp_path / "out", "--answers", tmp_path / name, *given, "--against", "ee", tmp_path
        )
        assert [answers[key] for key in ("accuracy", "questions_by_type")] == [
            networks[key] for key in ("accuracy", "questions_by_type")
        ]
        assert [row["correct"] for row in found] == [row["correct"] for row in rows]


SAID = {10: "The thing is red.", 11: "There are 2 red things.", 12: "<think>yes?</think><answer>no</answer>"}


def write_lines(path: Path, row: Callable[[int, str], dict]) -> None:
    path.write_text("\ufeff" + "\n".join(json.dumps(row(index, said)) for index, said in SAID.items()))


def server_response(said: str) -> dict:
    message = {"role": "assistant", "content": said}
    return {"status_code": 200, "body": {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}}


def write_table(path: Path, delimiter: str, *rows: dict) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_workbook(path: Path) -> None:
    """Write a workbook with a cell at the far end of the sheet, and the result of a formula."""
    workbook = Workbook()
    workbook.active.append(["index", "question", "answer", "prediction"])
    for index, said in SAID.items():
        workbook.active.append([index, "", "", "=1+1" if index == 11 else said])
    workbook.active["XFD1048576"] = "x"
    workbook.save(path)
    with ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with ZipFile(path, "w") as file:
        for name, part in parts.items():
            file.writestr(name, re.sub(rb"<f>1\+1</f><v ?/>|<f>1\+1</f><v></v>", rb"<f>1+1</f><v>2</v>", part))


LINES: dict[str, Callable[[int, str], dict]] = {
    "of_llava": lambda index, said: {"question_id": f"val_{index}", "text": f"\u2028{said}"},
    "samples_of_lmms_eval": lambda index, said: {"doc_id": index, "target": "?", "filtered_resps": [said]},
    "batch_of_openai": lambda index, said: {"custom_id": f"request-{index}", "response": server_response(said)},
    "completions_of_trl": lambda index, said: {
        "question_index": index,
        "answer": "?",
        "completion": [{"role": "assistant", "content": said}],
    },
}
ROWS: dict[str, Callable[[Path], object]] = {
    **{f"{name}.jsonl": lambda path, row=row: write_lines(path, row) for name, row in LINES.items()},
    "in.txt": lambda path: path.write_text("Red\nThere are two.\n<answer>no</answer>\n"),
    "in.json": lambda path: path.write_text(json.dumps(["red", 2, False])),
    "by_index.json": lambda path: path.write_text(json.dumps({"12": "no", "10": "red", "11": "2"})),
    "of_r1_v.json": lambda path: path.write_text(
        json.dumps({"results": [{"ground_truth": "?", "model_output": said} for said in SAID.values()]})
    ),
    "of_vlmevalkit.xlsx": write_workbook,
    "of_vlmevalkit.tsv": lambda path: write_table(
        path, "\t", *({"index": index, "image": "x" * 200_000, "prediction": said} for index, said in SAID.items())
    ),
    "of_excel.csv": lambda path: write_table(
        path, ";", *({"ID": index, "Said, why": "", "Response": said} for index, said in SAID.items())
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_answers_are_read_in_every_format_and_scored_on_a_question_file(questions: Path, tmp_path: Path, name: str):
    ROWS[name](tmp_path / name)
    report, rows, _ = evaluate(tmp_path, "--answers", tmp_path / name, "--questions", questions)
    assert [row["predicted_answer"] for row in rows] == ["red", "2", "no"]
    assert report["accuracy"]["by_type"] == {"exist": 0.0, "count": 1.0, "query: color": 1.0}
    assert report["accuracy"]["overall"] == pytest.approx(2 / 3)


def test_missing_and_unreadable_answers_are_wrong_counted_and_listed(questions: Path, tmp_path: Path):
    answers = tmp_path / "in.jsonl"
    failed = {"status_code": 429, "body": {"error": {"message": "Rate limit reached"}}}
    responses = {10: "red or blue", 11: failed, 12: "yes"}
    answers.write_text(
        "\n".join(json.dumps({"question_index": index, "response": said}) for index, said in responses.items())
    )
    given = ("--answers", answers, "--questions", questions, "--report", tmp_path)
    found, rows, output = evaluate(tmp_path, *given)
    assert [row["predicted_answer"] for row in rows] == [UNREADABLE, MISSING, "yes"]
    assert found["accuracy"]["overall"] == pytest.approx(1 / 3)
    assert "1 of 3 responses have no readable answer: 10: 'red or blue'" in output
    assert "no answer to 1 of 3 questions, the first with index 11; 50.0% of the others are right" in output
    assert UNREADABLE in (page := (tmp_path / "report.html").read_text())
    assert "None%" not in page


@pytest.mark.parametrize(("column", "is_named"), [("my_model", True), ("prediction", False), ("question_id", False)])
def test_answers_that_are_all_right_beside_an_unread_column_are_named(
    questions, tmp_path: Path, column, is_named: bool
):
    answers = tmp_path / "of_the_data_set.csv"
    write_table(answers, ",", *({"answer": each["answer"], column: 10 + n} for n, each in enumerate(TEXT)))
    output = iep_eval("--answers", answers, "--questions", questions).output
    assert ("every answer is right. Answers were read from 'answer', and not from my_model;" in output) == is_named


@pytest.mark.parametrize("count", [1, None], ids=["one", "all"])
def test_answers_that_are_not_in_the_vocabulary_are_scored_on_preprocessed_data(data: Path, tmp_path: Path, count):
    with h5py.File(data / "val_questions.h5") as file:
        rows = [{"question_index": int(index), "response": "7"} for index in file["orig_idxs"]]
    (path := tmp_path / "answers.json").write_text(json.dumps(rows[:count]))
    found, _, _ = evaluate(tmp_path, "--answers", path, "--data", data, "--split", "val", "--against", "the same", path)
    assert found["accuracy"]["overall"] == 0
    assert "most_common" in found["baselines"]


@pytest.mark.parametrize("name", ["in.txt", "by_index.json"])
def test_answers_to_all_questions_are_scored_on_some(questions: Path, tmp_path: Path, name: str):
    ROWS[name](tmp_path / name)
    some = ("--skip-samples", 1, "--num-samples", 1)
    _, rows, output = evaluate(tmp_path, "--answers", tmp_path / name, "--questions", questions, *some)
    assert [row["predicted_answer"] for row in rows] == ["2"]
    assert "no answer" not in output


def test_answers_to_questions_without_programs_are_compared_with_others(questions: Path, tmp_path: Path):
    content = json.loads(questions.read_text())
    for each in content["questions"]:
        del each["program"]
    questions.write_text(json.dumps(content))
    (tmp_path / "a.txt").write_text("red\n2\nyes\n")
    (tmp_path / "b.txt").write_text("red\n3\nno\n")
    given = ("--questions", questions, "--against", "the second", tmp_path / "b.txt", "--report", tmp_path)
    assert iep_eval("--answers", tmp_path / "a.txt", *given).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "the second" in page
    assert "33.3" in page
    assert not re.search(">(Device|beam_size|split)<", page), "names only what applies"


@pytest.mark.parametrize(
    ("name", "content", "given", "message"),
    [
        ("a.txt", "red\n", (), "1 answers without a question_index for 3 questions, expected one for each"),
        ("a.jsonl", '{"question_index": 99, "answer": "red"}', (), "row 1: no question has the index 99"),
        ("a.json", '[{"id": 10, "answer": "a"}, {"id": 10, "answer": "b"}]', (), "row 2: a second answer to the"),
        ("a.jsonl", '"red"\n{"id": 10,', (), "a.jsonl: line 2: not JSON: "),
        ("a.csv", "number,said\n10,red\n", (), "a.csv: row 1: the keys are number, said; expected one of"),
        ("a.xlsx", "red\n", (), "a.xlsx: not a file of answers"),
        ("a.jsonl", '{"id": "ten", "answer": "a"}', (), "row 1: the question_index is 'ten', expected a whole number"),
        ("a.txt", "", ("--num-samples", 1, "--skip-samples", 7), "has no question after the first 7"),
        ("a.txt", "", ("--ee", "x"), "--ee does not go with --answers"),
    ],
)
def test_answers_that_do_not_fit_are_one_line(questions: Path, tmp_path: Path, name, content, given, message):
    (tmp_path / name).write_text(content)
    result = iep_eval("--answers", tmp_path / name, "--questions", questions, *given)
    assert_one_error(result, message, code=result.exit_code)
    assert result.exit_code != 0
