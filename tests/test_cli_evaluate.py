"""`iep-eval`: table, report and predictions agree with each other and with the networks."""

import errno
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ask_cases import SAMPLE, sample_data, trained
from clevr_files import write_images
from evaluate_cases import evaluate, iep_eval
from processes import together
from tiny_data import (
    EXAMPLES,
    TEST,
    VAL,
    VOCAB,
    arrays,
    assert_one_error,
    features,
    files_no_larger_than,
    padded,
    write_h5,
)

from iep.batching.schedulers import SCHEDULERS
from iep.config import Evaluation
from iep.evaluation import run_evaluation
from iep.evaluation.html_report import PAGE, Page
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, OUTPUTS, PREDICTIONS
from iep.models.build import load_network
from iep.programs import QUESTION_TYPES
from iep.runtime.files import write_json
from iep.vocab import tokenize

CPU = torch.device("cpu")


@pytest.fixture
def other(data: Path, tmp_path: Path) -> Path:
    """A copy of the data to change."""
    return Path(shutil.copytree(data, tmp_path / "data"))


def shares(rows: list[dict[str, Any]], right: Any) -> dict[str, Any]:
    """The scores of a report, counted from predictions."""
    by_type = defaultdict(list)
    for row in rows:
        by_type[row["type"]].append(bool(right(row)))
    return {
        "overall": pytest.approx(np.mean([right(row) for row in rows])),
        "by_type": {name: pytest.approx(np.mean(values)) for name, values in by_type.items()},
    }


def cells(output: str, label: str) -> list[str]:
    """The cells of one row of the printed table."""
    row = next(line for line in output.splitlines() if line.strip().startswith(label))
    return row.strip().removeprefix(label).split()


def answers_right(row: dict[str, Any]) -> bool:
    return row["answer"] == row["predicted_answer"]


def program_right(row: dict[str, Any]) -> bool:
    return row["program"] == row["predicted_program"]


# What can be evaluated


def test_a_generator_alone_is_scored_by_exact_match(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, output = evaluate(tmp_path, "--pg", run["pg"], "--data", data)
    assert report["accuracy"] is None
    assert report["program_exact_match"] == shares(rows, program_right)
    assert 0 < report["program_exact_match"]["overall"] < 1
    assert (report["programs"], report["checkpoints"]) == ("predicted", {"pg": str(run["pg"])})
    assert cells(output, "programs exact")[-1] == f"{100 * report['program_exact_match']['overall']:.1f}"
    assert not any("predicted_answer" in row for row in rows)


def assert_answers_of(run: Path, rows: list[dict[str, Any]], program: str) -> None:
    """The answers of an engine's reference, to a program of each row."""
    engine = load_network(run, "engine", VOCAB, CPU)
    maps = torch.from_numpy(features(1)[[row["image_index"] for row in rows]])
    programs = padded([[VOCAB.program_index[token] for token in row[program]] for row in rows])
    for row, shares_A in zip(rows, engine.reference(maps, torch.from_numpy(programs).long()).softmax(1), strict=True):
        ranked = sorted(zip(VOCAB.answer, shares_A.tolist(), strict=True), key=lambda pair: -pair[1])
        assert row["predicted_answer"] == ranked[0][0]
        assert row["probability"] == pytest.approx(ranked[0][1], abs=1e-4)
        assert row["runners_up"] == pytest.approx(dict(ranked[1:3]), abs=1e-4)


def test_an_engine_runs_true_programs_or_those_of_its_generator_which_is_scored_in_both_cases(data, run, tmp_path):
    engine, generator = ("--ee", run["ee"], "--data", data), ("--pg", run["pg"])
    alone, alone_rows, _ = evaluate(tmp_path / "alone", *engine)
    truth, truth_rows, _ = evaluate(tmp_path / "truth", *engine, *generator, "--programs", "ground-truth")
    predicted, rows, _ = evaluate(tmp_path / "predicted", *engine, *generator)
    assert [report["programs"] for report in (alone, truth, predicted)] == ["ground-truth", "ground-truth", "predicted"]
    assert alone["program_exact_match"] is None
    assert_answers_of(run["ee"], alone_rows, "program")
    assert_answers_of(run["ee"], rows, "predicted_program")
    assert truth["accuracy"] == alone["accuracy"] == shares(alone_rows, answers_right)
    assert truth["accuracy"] != predicted["accuracy"] == shares(rows, answers_right)
    assert [row["probability"] for row in truth_rows] == [row["probability"] for row in alone_rows]
    assert truth["program_exact_match"] == predicted["program_exact_match"] == shares(rows, program_right)


def test_beam_search_finds_programs_no_less_likely_than_greedy_ones(data: Path, run: dict[str, Path], tmp_path: Path):
    _, greedy_rows, _ = evaluate(tmp_path / "1", "--pg", run["pg"], "--data", data)
    beam, rows, _ = evaluate(tmp_path / "4", "--pg", run["pg"], "--data", data, "--beam-size", 4)
    assert beam["programs"] == "predicted, beam 4"
    assert beam["program_exact_match"] == shares(rows, program_right)
    generator = load_network(run["pg"], "generator", VOCAB, CPU)

    def log_probability(row: dict[str, Any]) -> float:
        question = padded([[VOCAB.question_index[word] for word in tokenize(row["question"])]])
        program = padded([[VOCAB.program_index[token] for token in row["predicted_program"]]])
        loss = generator.loss(torch.from_numpy(question).long(), torch.from_numpy(program).long())
        return -loss.item() * (program.shape[1] - 1)

    changed = [n for n in range(VAL) if rows[n]["predicted_program"] != greedy_rows[n]["predicted_program"]]
    assert changed
    assert all(log_probability(rows[n]) >= log_probability(greedy_rows[n]) - 1e-4 for n in changed)


def test_a_joint_checkpoint_serves_as_generator_and_as_engine_and_nothing_is_written_unasked(
    data: Path, run: dict[str, Path], tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    joint = ["--pg", run["joint"], "--ee", run["joint"].parent, "--data", data]
    result = iep_eval(*joint)
    assert (result.exit_code, "Wrote" in result.stdout, list(tmp_path.iterdir())) == (0, False, [])
    report, rows, _ = evaluate(tmp_path, *joint)
    assert cells(result.stdout, "overall")[-1] == f"{100 * report['accuracy']['overall']:.1f}"
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["checkpoints"] == {"pg": str(run["joint"]), "ee": str(run["joint"].parent)}


def test_only_what_reads_images_needs_the_features(run: dict[str, Path], other: Path, tmp_path: Path):
    blind = other
    (blind / "val_features.h5").unlink()
    report, rows, _ = evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", blind)
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["programs"] == ""
    lstm = load_network(run["lstm"], "lstm", VOCAB, CPU)
    answers = lstm(torch.from_numpy(arrays(VAL)["questions"]).long()).argmax(1)
    assert [row["predicted_answer"] for row in rows] == [VOCAB.answer[answer] for answer in answers]
    assert iep_eval("--pg", run["pg"], "--data", blind).exit_code == 0
    assert_one_error(iep_eval("--ee", run["ee"], "--data", blind), f"{blind / 'val_features.h5'}: no such file")


# What it leaves


@pytest.fixture(scope="module")
def whole(data: Path, run: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """Report, predictions and output of generator and engine on the val split."""
    return evaluate(tmp_path_factory.mktemp("whole"), "--pg", run["pg"], "--ee", run["ee"], "--data", data)


def test_the_report_adds_up_and_the_table_shows_it_in_percent(whole):
    report, rows, output = whole
    counts = report["questions_by_type"]
    written = arrays(VAL)
    for row, number, image, family, example in zip(
        rows, written["orig_idxs"], written["image_idxs"], written["question_families"], EXAMPLES, strict=False
    ):
        assert (row["question_index"], row["image_index"], row["family"]) == (number, image, family)
        assert (tokenize(row["question"]), row["program"], row["answer"]) == example
    assert counts == Counter(row["type"] for row in rows) == dict.fromkeys(QUESTION_TYPES, 2)
    assert report["questions"] == sum(counts.values()) == len(rows) == VAL
    for scores in (report["accuracy"], report["program_exact_match"], report["baselines"]["most_common"]):
        weighted = sum(counts[name] * share for name, share in scores["by_type"].items()) / VAL
        assert scores["overall"] == pytest.approx(weighted)
    assert report["questions_per_second"] > 0
    assert (report["split"], report["device"]) == ("val", "cpu")
    assert cells(output, "exist")[-1] == f"{100 * report['accuracy']['by_type']['exist']:.1f}"
    shown = [f"{100 * scores['overall']:.1f}" for scores in (report["baselines"]["most_common"], report["accuracy"])]
    assert cells(output, "overall") == [str(VAL), *shown]


def test_the_most_common_answers_are_counted_on_the_train_split(whole):
    report, rows, _ = whole
    types = [row["type"] for row in rows[: len(QUESTION_TYPES)]]
    answers = defaultdict(list)
    for n, (_, _, answer) in enumerate(EXAMPLES):
        answers[types[n % len(types)]].append(answer)
    # Of equally common answers the first in the vocabulary, which is sorted.
    most_common = {name: max(sorted(set(given)), key=given.count) for name, given in answers.items()}
    assert report["baselines"]["most_common"] == shares(rows, lambda row: row["answer"] == most_common[row["type"]])


def test_earlier_reports_stand_beside_the_new_one(data: Path, run: dict[str, Path], tmp_path: Path):
    lstm, _, _ = evaluate(tmp_path / "lstm", "--baseline", run["lstm"], "--data", data)
    against = ["--against", "LSTM", tmp_path / "lstm", "--against", "again", tmp_path / "lstm" / "report.json"]
    report, _, output = evaluate(tmp_path / "ee", "--ee", run["ee"], "--data", data, *against, "--name", "IEP")
    assert output.splitlines()[0].split() == ["questions", "most_common", "LSTM", "again", "IEP"]
    earlier, again, new = cells(output, "overall")[2:]
    assert earlier == again == f"{100 * lstm['accuracy']['overall']:.1f}"
    assert new == f"{100 * report['accuracy']['overall']:.1f}"


@pytest.mark.parametrize(
    "options",
    [
        *(["--batching", name] for name in SCHEDULERS),
        ["--batch-size", "7"],
        ["--workers", "1", "--features-in-memory"],
        ["--no-sharing"],
        ["--batch-size", "7", "--order-by-image"],
    ],
)
@pytest.mark.parametrize("programs", ["predicted", "ground-truth"])
def test_how_the_work_is_done_changes_no_prediction(data, run, tmp_path: Path, options: list[str], programs: str):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--programs", programs]
    _, expected, _ = evaluate(tmp_path / "expected", *arguments)
    _, rows, _ = evaluate(tmp_path / "rows", *arguments, *options)
    for ours, theirs in zip(rows, expected, strict=True):
        probability = {"probability": pytest.approx(theirs["probability"], abs=1e-4)}
        assert ours == theirs | probability | {"runners_up": pytest.approx(theirs["runners_up"], abs=1e-4)}


def test_bfloat16_changes_probabilities_by_no_more_than_its_rounding(data, run, tmp_path: Path):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--programs", "ground-truth"]
    report, expected, _ = evaluate(tmp_path / "expected", *arguments)
    _, rows, _ = evaluate(tmp_path / "rows", *arguments, "--precision", "bfloat16")
    differences = [abs(our["probability"] - their["probability"]) for our, their in zip(rows, expected, strict=True)]
    assert 0 < max(differences) < 0.05
    assert report["peak_memory_gb"] > 0.01, "the process holds at least PyTorch"


# Splits that lack something


def test_a_split_without_answers_gets_predictions_and_the_table_says_so(data, run, tmp_path: Path):
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, "--split", "test"]
    report, rows, output = evaluate(tmp_path, *arguments)
    assert (report["accuracy"], report["program_exact_match"], report["baselines"]) == (None, None, {})
    assert len(rows) == report["questions"] == TEST
    assert all("predicted_answer" in row and "answer" not in row and "correct" not in row for row in rows)
    assert "The test split has no answers: accuracies are unknown." in output
    assert str(tmp_path / "answers.txt") in output.partition("Wrote ")[2]
    assert cells(output, "overall") == [str(TEST), "-"]


def test_a_split_without_programs_is_answered_with_predicted_ones_and_types_are_theirs(
    data, run, other: Path, tmp_path: Path
):
    content = arrays(VAL)
    del content["programs"]
    path = write_h5(other / "val_questions.h5", content)
    result = iep_eval("--ee", run["ee"], "--data", other)
    assert_one_error(result, f"{path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    both = ("--pg", run["pg"], "--ee", run["ee"], "--data")
    assert_one_error(iep_eval(*both, other, "--programs", "ground-truth"), f"{path}: has no programs")
    report, rows, output = evaluate(tmp_path / "out", *both, other, "--report", tmp_path / "out")
    assert report["program_exact_match"] is None
    assert report["accuracy"]["overall"] == pytest.approx(np.mean([row["correct"] for row in rows]))
    types = "Question types are those of the predicted programs: the val split has no programs."
    most_common = "There is no column most_common: the val split has no programs or no answers."
    assert {types, most_common} <= set(output.splitlines())
    assert page_notes(tmp_path / "out") == [types, most_common]
    generator, blind = (iep_eval(*model, "--data", other).stdout for model in (both[:2], ("--baseline", run["lstm"])))
    assert "The val split has no programs: their exact match is unknown." in generator
    assert "Question types" not in blind
    _, _, output = evaluate(tmp_path / "whole", *both, data, "--report", tmp_path / "whole")
    assert "Question types" not in output
    assert page_notes(tmp_path / "whole") == []


# Answers for the test split


def answers(out: Path) -> tuple[list[str], list[dict]]:
    """The lines of answers.txt and the objects of answers.json."""
    text = (out / "answers.txt").read_text()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n"), json.loads((out / "answers.json").read_text())


def test_the_answers_are_those_predicted_one_a_line_in_the_order_of_the_questions(data, run, tmp_path: Path):
    options = ["--split", "test", "--order-by-image", "--batch-size", "4"]
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--data", data, *options]
    _, rows, output = evaluate(tmp_path, *arguments)
    lines, objects = answers(tmp_path)
    assert lines == [row["predicted_answer"] for row in rows]
    assert objects == [{"question_index": 1000 + n, "answer": answer} for n, answer in enumerate(lines)]
    assert len(lines) == TEST
    assert "not complete" not in output
    for name in OUTPUTS:
        assert str(tmp_path / name) in output


def test_answers_stand_in_the_order_of_question_indices_which_should_differ(data, run, other: Path, tmp_path: Path):
    order = np.random.default_rng(5).permutation(TEST)
    names = ("questions", "image_idxs", "orig_idxs")
    content = {name: arrays(TEST)[name][order] for name in names}
    path = write_h5(other / "test_questions.h5", content)
    arguments = ["--pg", run["pg"], "--ee", run["ee"], "--split", "test", "--data"]
    evaluate(tmp_path / "straight", *arguments, data)
    _, rows, output = evaluate(tmp_path / "shuffled", *arguments, other)
    assert [row["question_index"] for row in rows] == (1000 + order).tolist()
    assert answers(tmp_path / "shuffled") == answers(tmp_path / "straight")
    assert "question_index" not in output
    content["orig_idxs"][7] = content["orig_idxs"][4]
    write_h5(path, content)
    _, _, output = evaluate(tmp_path / "twice", *arguments, other)
    number, twice = content["orig_idxs"][4], tmp_path / "twice" / "answers.json"
    assert f"{path}: 2 questions have the question_index {number}; {twice} cannot distinguish their" in output
    assert len(answers(tmp_path / "twice")[0]) == TEST


def test_files_that_hold_a_part_or_are_of_another_evaluation_are_named_or_removed(data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data]
    page = f"{tmp_path / 'report.html'} is the page of another evaluation"
    output = evaluate(tmp_path, *arguments, "--report", tmp_path, "--num-samples", VAL)[2]
    assert page not in output
    assert "not complete" not in output
    output = evaluate(tmp_path, *arguments, "--num-samples", 5)[2]
    assert page in output
    assert f"{tmp_path / 'answers.txt'} is not complete: it holds the answers to 5 of {VAL} questions." in output
    assert len(answers(tmp_path)[0]) == 5
    assert page in evaluate(tmp_path, *arguments, "--report", tmp_path / "elsewhere")[2]
    assert page not in evaluate(tmp_path, *arguments, "--report", tmp_path / "elsewhere" / "..")[2]
    assert "answers.txt" not in evaluate(tmp_path, "--pg", run["pg"], "--data", data)[2]
    assert {path.name for path in tmp_path.iterdir()} == {
        "predictions.jsonl",
        "report.json",
        "report.html",
        "elsewhere",
    }


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


# Notes


def page_notes(out: Path) -> list[str]:
    """The notes of an HTML report."""
    notes = re.search(r'<div id="notes">(.*?)</div>', (out / "report.html").read_text(), re.DOTALL)[1]
    return [html.unescape(note) for note in re.findall(r'<p class="hint">(.*?)</p>', notes)]


def test_without_a_train_split_the_missing_column_is_said(run, other: Path, tmp_path: Path):
    (other / "train_questions.h5").unlink()
    report, _, output = evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", other)
    assert report["baselines"] == {}
    assert f"There is no column most_common: {other} has no train split to count answers on." in output.splitlines()
    unanswered = iep_eval("--baseline", run["lstm"], "--data", other, "--split", "test").stdout
    assert "no column most_common" not in unanswered


def test_pictures_of_other_images_than_the_features_are_said_to_be_wrong(data, run, tmp_path: Path):
    made = sample_data(tmp_path / "data", "--backbone", "patches", "--patch-size", 16)
    models = ["--baseline", trained(made, "lstm", tmp_path / "lstm", 1)]

    def noted(images: Path, data: Path = made, models: list[object] = models) -> list[str]:
        out = tmp_path / "out"
        _, _, output = evaluate(out, *models, "--data", data, "--report", out, "--images", images)
        notes = page_notes(out)
        assert [line for line in output.splitlines() if "not the images" in line] == notes
        return notes

    assert noted(SAMPLE) == []
    other = Path(shutil.copytree(SAMPLE, tmp_path / "other"))
    more = other / "images" / "val" / "CLEVR_val_000004.png"
    shutil.copy(SAMPLE / "images" / "val" / "CLEVR_val_000000.png", more)
    assert noted(other) == []
    for change in (lambda path: path.write_bytes(path.read_bytes() + b"x"), Path.unlink):
        change(other / "images" / "val" / "CLEVR_val_000001.png")
        (note,) = noted(other)
        made_of = f"not the images that {made / 'val_features.h5'} was made of"
        assert note.startswith(f"{other / 'images' / 'val'}: {made_of}")
    write_images(tmp_path / "CLEVR", "val", 5)
    assert noted(tmp_path / "CLEVR", data, ["--baseline", run["lstm"]]) == []


# Two processes


MEASURED = ("questions_per_second", "peak_memory_gb")


def evaluate_in_process(settings: Evaluation, out: Path) -> bool:
    return run_evaluation.evaluate(settings, out, Page(out)) is not None


@pytest.mark.parametrize("batch_size", [4, 100])
@pytest.mark.parametrize(("programs", "by_image"), [("predicted", True), ("ground-truth", False)])
def test_two_processes_write_the_files_of_one(data, run, tmp_path: Path, programs: str, by_image: bool, batch_size):
    settings = Evaluation(data, pg=run["pg"], ee=run["ee"], programs=programs, device="cpu")
    settings = replace(settings, batch_size=batch_size, order_by_image=by_image)
    assert run_evaluation.evaluate(settings, tmp_path / "one", Page(tmp_path / "one"))
    assert together(evaluate_in_process, settings, tmp_path / "two") == [True, False]
    one, two = (tmp_path / name for name in ("one", "two"))
    for name in (PREDICTIONS, ANSWERS, ANSWERS_JSON):
        assert (two / name).read_bytes() == (one / name).read_bytes()
    lengths = [len((out / PAGE).read_text()) for out in (one, two)]
    assert lengths[0] == pytest.approx(lengths[1], abs=200), "they differ in measured times and in paths"
    reports = [json.loads((out / "report.json").read_text()) for out in (one, two)]
    assert all(report[name] > 0 for report in reports for name in MEASURED)
    unmeasured = [{name: value for name, value in report.items() if name not in MEASURED} for report in reports]
    assert unmeasured[0] == unmeasured[1]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        ([], "nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT", 1),
        (["--baseline", "{lstm}", "--ee", "{ee}"], "--baseline answers alone", 1),
        (["--ee", "{ee}", "--programs", "predicted"], "predicted needs a program generator: give --pg CKPT", 1),
        (["--pg", "{pg}", "--programs", "ground-truth"], "needs an execution engine: give --ee CKPT", 1),
        (["--baseline", "{lstm}", "--programs", "ground-truth"], "--baseline answers alone", 1),
        (["--pg", "{ee}"], "{ee}: holds an execution engine, expected a checkpoint with a program generator", 1),
        (["--ee", "{pg}"], "{pg}: holds a program generator, expected a checkpoint with an execution engine", 1),
        (["--baseline", "{joint}"], "{joint}: holds a program generator, an execution engine, expected", 1),
        (["--ee", "none.pt"], "none.pt: no such file", 1),
        (["--baseline", "{lstm}", "--split", "vall"], "vall_questions.h5: no such file", 1),
        (["--baseline", "{lstm}", "--device", "cuda:99"], "device 'cuda:99': not available here", 1),
        (["--baseline", "{lstm}", "--against", "old", "none.json"], "none.json: no such file", 1),
        (["--baseline", "{lstm}", "--against", "old"], "requires 2 arguments", 2),
        (["--baseline", "{lstm}", "--batching", "best"], "'best' is not one of", 2),
        (["--pg", "{pg}", "--beam-size", "0"], "0 is not in the range x>=1", 2),
        (["--pg", "{pg}", "--max-program-length", "1"], "1 is not in the range 2<=x<=1000", 2),
        (["--baseline", "{lstm}", "--beam-size", "5"], "--beam-size and --max-program-length are for", 2),
        (["--ee", "{ee}", "--max-program-length", "9"], "are for a program generator: give --pg CKPT", 2),
        (["--baseline", "{lstm}", "--images", "CLEVR"], "are for the HTML report: give --report DIR too", 2),
        (["--baseline", "{lstm}", "--report-questions", "5"], "are for the HTML report: give --report DIR too", 2),
        (["--baseline", "{lstm}", "--data", "none"], "none/vocab.json: no such file", 1),
        (["--baseline", "{lstm}", "--data", "{lstm}"], "{lstm}", 1),
        (["--baseline", "{lstm}", "--report", ""], "'--report': the name is empty, expected a directory", 2),
        (["--baseline", "{lstm}", "--out", ""], "'--out': the name is empty, expected a directory", 2),
        (["--baseline", "{lstm}", "--num-samples", "0"], "0 is not in the range x>=1", 2),
        (["--baseline", "{lstm}", "--out", "{lstm}"], "is a file", 2),
        (["--baseline", "{lstm}", "--name", "a\udcff"], "--name: the name 'a\\udcff' is not UTF-8 text", 2),
        (["--baseline", "{lstm}", "--against", "\udcff", "x"], "--against: the name '\\udcff' is not UTF-8 text", 2),
    ],
)
def test_refused_input_is_one_line(data, run, tmp_path, arguments, problem: str, code: int):
    arguments = [argument.format(**run) for argument in arguments]
    assert_one_error(iep_eval("--data", data, *arguments), problem.format(**run), code=code)


def test_the_data_directory_is_required(run: dict[str, Path]):
    assert_one_error(iep_eval("--baseline", run["lstm"]), "Missing option '--data'", code=2)


@pytest.mark.parametrize("option", ["--out", "--report"])
def test_the_table_is_printed_even_where_no_file_can_be_written(data, run, tmp_path: Path, option: str):
    arguments = ["--baseline", run["lstm"], "--data", data, option, tmp_path / "full"]
    output = iep_eval(*arguments).stdout
    before = {path.name: path.read_bytes() for path in (tmp_path / "full").iterdir()}
    with files_no_larger_than(500):
        result = iep_eval(*arguments, "--name", "blind")
    assert_one_error(result, "file size limit reached")
    assert cells(result.output, "overall") == cells(output, "overall")
    assert cells(result.output, "exist") == cells(output, "exist")
    assert "Wrote" not in result.output
    assert {path.name: path.read_bytes() for path in (tmp_path / "full").iterdir()} == before


@pytest.mark.parametrize(
    ("flag", "kind"), [("pg", "question"), ("pg", "program"), ("ee", "answer"), ("baseline", "answer")]
)
def test_data_of_another_vocabulary_are_refused(run, other: Path, flag: str, kind: str):
    content = VOCAB.to_json()
    key = f"{kind}_token_to_idx"
    content[key] = content[key] | {"zebra": len(content[key])}
    write_json(other / "vocab.json", content)
    checkpoint = run["lstm" if flag == "baseline" else flag]
    result = iep_eval(f"--{flag}", checkpoint, "--data", other)
    assert_one_error(result, f"{checkpoint}: trained with another vocabulary: {kind} token", "'zebra' in the data")


def test_damaged_files_are_named_and_leave_the_earlier_report(run, other: Path, tmp_path: Path):
    arguments = ("--baseline", run["lstm"], "--data", other, "--out", tmp_path / "out")
    assert iep_eval(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    # Of one question the report is the largest file, of all of them the predictions, which are written first.
    for name, samples in (("predictions.jsonl", VAL), ("report.json", 1)):
        with files_no_larger_than(500):
            result = iep_eval(*arguments, "--num-samples", samples)
        assert_one_error(result, f"{tmp_path / 'out' / name}: file size limit reached")
        assert (tmp_path / "out" / name).read_bytes() == before[name]
    assert iep_eval(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    path = write_h5(other / "val_features.h5", {"features": features(1, channels=5)})
    assert_one_error(iep_eval("--ee", run["ee"], "--data", other), f"{path}: features are (5, 4, 4) an image")
    checkpoint = Path(shutil.copy(run["lstm"], tmp_path / "cut.pt"))
    for path, kind in ((checkpoint, "checkpoint"), (other / "val_questions.h5", "HDF5")):
        os.truncate(path, path.stat().st_size - 100)
        result = iep_eval(*arguments, *(("--baseline", checkpoint) if path == checkpoint else ()))
        assert_one_error(result, f"{path}: not a whole {kind} file")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    result = iep_eval(*arguments[:4], "--out", tmp_path / "taken")
    assert_one_error(result, f"{tmp_path / 'taken' / 'report.json'}")
    assert not (tmp_path / "taken" / "predictions.jsonl").exists()


def test_help_needs_no_torch_and_names_every_option():
    code = "import sys; from iep.cli.evaluate import main; main(['--help'], standalone_mode=False);"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    for option in ("--pg", "--ee", "--baseline", "--split", "--against", "--beam-size", "--num-samples"):
        assert option in done.stdout
