"""`iep-eval`: table, report and predictions agree with each other and with the networks."""

import html
import json
import re
import shlex
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ask_cases import SAMPLE, sample_data, trained
from evaluate_cases import evaluate, iep_eval
from killing import evaluation_parts
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

from iep.evaluation import run_evaluation
from iep.evaluation.html_report import PAGE, ReportOptions
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, OUTPUTS, PREDICTIONS
from iep.evaluation.settings import NetworkSettings, Selection
from iep.models.checkpoint import read_checkpoint
from iep.programs import QUESTION_TYPES
from iep.vocab import tokenize

CPU = torch.device("cpu")
Evaluated = tuple[dict[str, Any], list[dict[str, Any]], str]
"""The content of report.json, the rows of predictions.jsonl and the output."""


@pytest.fixture(scope="module")
def both(run: dict[str, Path]) -> tuple[object, ...]:
    return "--pg", run["pg"], "--ee", run["ee"]


@pytest.fixture(scope="module")
def whole(data: Path, both, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluated]:
    """The evaluation of generator and engine on the val split, by the programs that are run."""
    root = tmp_path_factory.mktemp("whole")
    return {
        programs: evaluate(root / programs, *both, "--data", data, "--programs", programs)
        for programs in ("predicted", "ground-truth")
    }


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


def page_notes(out: Path) -> list[str]:
    """The notes of an HTML report."""
    notes = re.search(r'<div id="notes">(.*?)</div>', (out / PAGE).read_text(), re.DOTALL)[1]
    return [html.unescape(note) for note in re.findall(r'<p class="hint">(.*?)</p>', notes)]


# What can be evaluated


def test_a_generator_alone_is_scored_by_exact_match(data: Path, run: dict[str, Path], tmp_path: Path):
    report, rows, output = evaluate(tmp_path, "--pg", run["pg"], "--data", data)
    assert report["accuracy"] is None
    assert report["program_exact_match"] == shares(rows, program_right)
    assert 0 < report["program_exact_match"]["overall"] < 1
    assert (report["programs"], report["checkpoints"]) == ("predicted", {"pg": str(run["pg"])})
    assert cells(output, "programs exact")[-1] == f"{100 * report['program_exact_match']['overall']:.1f}"
    assert not any("predicted_answer" in row for row in rows)
    beam, beam_rows, _ = evaluate(tmp_path, "--pg", run["pg"], "--data", data, "--beam-size", 4)
    assert beam["programs"] == "predicted, beam 4"
    assert beam["program_exact_match"] == shares(beam_rows, program_right)
    assert [row["predicted_program"] for row in beam_rows] != [row["predicted_program"] for row in rows]


def test_an_engine_runs_true_programs_or_those_of_its_generator(data, run, whole, tmp_path: Path):
    engine, maps = read_checkpoint(run["ee"]).network("engine").module.eval(), torch.from_numpy(features(1))
    for programs, key in (("ground-truth", "program"), ("predicted", "predicted_program")):
        report, rows, _ = whole[programs]
        assert report["programs"] == programs
        assert report["accuracy"] == shares(rows, answers_right)
        assert report["program_exact_match"] == shares(rows, program_right)
        programs_BL = padded([[VOCAB.program_index[token] for token in row[key]] for row in rows])
        logits_BA = engine.reference(maps[[row["image_index"] for row in rows]], torch.from_numpy(programs_BL).long())
        for row, shares_A in zip(rows, logits_BA.softmax(1), strict=True):
            ranked = sorted(zip(VOCAB.answer, shares_A.tolist(), strict=True), key=lambda pair: -pair[1])
            assert row["predicted_answer"] == ranked[0][0]
            assert row["probability"] == pytest.approx(ranked[0][1], abs=1e-4)
            assert row["runners_up"] == pytest.approx(dict(ranked[1:3]), abs=1e-4)
    assert whole["ground-truth"][0]["accuracy"] != whole["predicted"][0]["accuracy"]
    alone, _, _ = evaluate(tmp_path, "--ee", run["ee"], "--data", data)
    assert (alone["programs"], alone["program_exact_match"]) == ("ground-truth", None)
    assert alone["accuracy"] == whole["ground-truth"][0]["accuracy"]


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
    path = write_h5(other / "val_features.h5", {"features": features(1, channels=5)})
    assert_one_error(iep_eval("--ee", run["ee"], "--data", other), f"{path}: features are (5, 4, 4) an image")
    path.unlink()
    assert_one_error(iep_eval("--ee", run["ee"], "--data", other), f"{path}: no such file")
    assert iep_eval("--pg", run["pg"], "--data", other).exit_code == 0
    report, rows, _ = evaluate(tmp_path / "out", "--baseline", run["lstm"], "--data", other)
    assert report["accuracy"] == shares(rows, answers_right)
    assert report["programs"] == ""
    lstm = read_checkpoint(run["lstm"]).network("lstm").module.eval()
    answers = lstm(torch.from_numpy(arrays(VAL)["questions"]).long()).argmax(1)
    assert [row["predicted_answer"] for row in rows] == [VOCAB.answer[answer] for answer in answers]


# What it leaves


def test_the_report_adds_up_and_the_table_shows_it_beside_the_commonest_answers_of_the_train_split(whole):
    report, rows, output = whole["predicted"]
    counts = report["questions_by_type"]
    written = arrays(VAL)
    for row, number, image, family, example in zip(
        rows, written["orig_idxs"], written["image_idxs"], written["question_families"], EXAMPLES, strict=False
    ):
        assert (row["question_index"], row["image_index"], row["family"]) == (number, image, family)
        assert (tokenize(row["question"]), row["program"], row["answer"]) == example
    assert counts == Counter(row["type"] for row in rows) == dict.fromkeys(QUESTION_TYPES, 2)
    assert report["questions"] == sum(counts.values()) == len(rows) == VAL
    assert report["questions_per_second"] > 0
    assert report["peak_memory_gb"] > 0.01, "the process holds at least PyTorch"
    assert (report["split"], report["device"]) == ("val", "cpu")
    assert cells(output, "exist")[-1] == f"{100 * report['accuracy']['by_type']['exist']:.1f}"
    shown = [f"{100 * scores['overall']:.1f}" for scores in (report["baselines"]["most_common"], report["accuracy"])]
    assert cells(output, "overall") == [str(VAL), *shown]
    types, answers = [row["type"] for row in rows[: len(QUESTION_TYPES)]], defaultdict(list)
    for n, (_, _, answer) in enumerate(EXAMPLES):
        answers[types[n % len(types)]].append(answer)
    # Of equally common answers the first in the vocabulary, which is sorted.
    most_common = {name: max(sorted(set(given)), key=given.count) for name, given in answers.items()}
    assert report["baselines"]["most_common"] == shares(rows, lambda row: row["answer"] == most_common[row["type"]])


def test_earlier_reports_stand_beside_the_new_one_which_says_where_their_questions_are_others(data, run, tmp_path):
    arguments = ["--baseline", run["lstm"], "--data", data]
    lstm, _, _ = evaluate(tmp_path / "lstm", *arguments)
    evaluate(tmp_path / "fewer", *arguments, "--num-samples", 5)
    against = ["--against", "LSTM", tmp_path / "lstm", "--against", "fewer", tmp_path / "fewer" / "report.json"]
    given = ("--ee", run["ee"], "--data", data, *against, "--name", "IEP", "--report", tmp_path)
    report, _, output = evaluate(tmp_path, *given)
    headings = "questions most common answer LSTM questions fewer questions IEP"
    assert output.splitlines()[0].split() == headings.split()
    overall = [f"{100 * scores['accuracy']['overall']:.1f}" for scores in (lstm, report)]
    assert [cells(output, "overall")[number] for number in (2, -1)] == overall
    assert "<small>5 questions of val</small>" in (tmp_path / PAGE).read_text()


@pytest.mark.parametrize(
    "options",
    [
        ["--batching", "vanilla", "--no-sharing"],
        ["--workers", "1", "--features-in-memory"],
        ["--batch-size", "7"],
    ],
)
def test_how_the_work_is_done_changes_no_prediction(data, both, whole, tmp_path, options: list[str]):
    _, rows, _ = evaluate(tmp_path, *both, "--data", data, *options)
    for ours, theirs in zip(rows, whole["predicted"][1], strict=True):
        probability = {"probability": pytest.approx(theirs["probability"], abs=1e-4)}
        assert ours == theirs | probability | {"runners_up": pytest.approx(theirs["runners_up"], abs=1e-4)}


# Splits that lack something, and answers for the test split


def answers(out: Path) -> tuple[list[str], list[dict]]:
    """The lines of answers.txt and the objects of answers.json."""
    text = (out / ANSWERS).read_text()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n"), json.loads((out / ANSWERS_JSON).read_text())


def test_a_split_without_answers_is_answered_in_the_order_of_question_indices_which_should_differ(
    data, both, other: Path, tmp_path: Path
):
    arguments = [*both, "--split", "test", "--batch-size", 4, "--data"]
    report, rows, output = evaluate(tmp_path / "straight", *arguments, data)
    assert (report["accuracy"], report["program_exact_match"], report["baselines"]) == (None, None, {})
    assert all("predicted_answer" in row and "answer" not in row and "correct" not in row for row in rows)
    assert "The test split has no answers: accuracies are unknown." in output
    assert "not complete" not in output
    assert cells(output, "overall") == [str(TEST), "-"]
    lines, objects = answers(tmp_path / "straight")
    assert lines == [row["predicted_answer"] for row in rows]
    assert objects == [{"question_index": 1000 + n, "answer": answer} for n, answer in enumerate(lines)]
    assert len(lines) == report["questions"] == TEST
    for name in OUTPUTS:
        assert str(tmp_path / "straight" / name) in output.partition("Wrote ")[2]

    order = np.random.default_rng(5).permutation(TEST)
    content = {name: arrays(TEST)[name][order] for name in ("questions", "image_idxs", "orig_idxs")}
    path = write_h5(other / "test_questions.h5", content)
    _, rows, output = evaluate(tmp_path / "shuffled", *arguments, other)
    assert [row["question_index"] for row in rows] == (1000 + order).tolist()
    assert answers(tmp_path / "shuffled") == (lines, objects)
    content["orig_idxs"][7] = content["orig_idxs"][4]
    write_h5(path, content)
    output = evaluate(tmp_path / "twice", *arguments, other)[2]
    assert f"{path}: 2 questions have the question_index {content['orig_idxs'][4]};" in output


def test_a_split_without_programs_is_answered_with_predicted_ones_and_types_are_theirs(
    data, run, both, other: Path, tmp_path: Path
):
    content = arrays(VAL)
    del content["programs"]
    path = write_h5(other / "val_questions.h5", content)
    result = iep_eval("--ee", run["ee"], "--data", other)
    assert_one_error(result, f"{path}: has no programs; evaluate with --pg CKPT and --programs predicted")
    report, rows, output = evaluate(tmp_path / "out", *both, "--data", other, "--report", tmp_path / "out")
    assert report["program_exact_match"] is None
    assert report["accuracy"]["overall"] == pytest.approx(np.mean([row["correct"] for row in rows]))
    types, most_common = page_notes(tmp_path / "out")
    assert types == "Question types are those of the predicted programs: the val split has no programs."
    assert most_common.startswith("There is no column “most common answer”, which needs programs and answers")
    assert {types, most_common} <= set(output.splitlines())
    generator = iep_eval(*both[:2], "--data", other).stdout
    assert "The val split has no programs: their exact match is unknown." in generator


def test_pictures_of_other_images_than_the_features_are_said_to_be_wrong(tmp_path: Path):
    made = sample_data(tmp_path / "data")
    model = trained(made, "lstm", tmp_path / "lstm", 1)
    other = Path(shutil.copytree(SAMPLE, tmp_path / "other"))
    with open(other / "images" / "val" / "CLEVR_val_000001.png", "ab") as image:
        image.write(b"x")
    notes = f"{other / 'images' / 'val'}: not the images that {made / 'val_features.h5'} was made of"
    out = tmp_path / "out"
    for images, found in ((SAMPLE, []), (other, [notes])):
        output = evaluate(out, "--baseline", model, "--data", made, "--report", out, "--images", images)[2]
        assert [line for line in output.splitlines() if "not the images" in line] == page_notes(out)
        assert [note[: len(notes)] for note in page_notes(out)] == found


# Several evaluations in one directory


def test_files_that_hold_a_part_or_are_of_another_evaluation_are_named_or_removed(data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data]
    assert "not complete" not in evaluate(tmp_path, *arguments, "--report", tmp_path, "--num-samples", VAL)[2]
    output = evaluate(tmp_path, *arguments, "--num-samples", 5)[2]
    assert f"{tmp_path / ANSWERS} is not complete: it holds the answers to 5 of {VAL} questions." in output
    assert len(answers(tmp_path)[0]) == 5
    assert ANSWERS not in evaluate(tmp_path, "--pg", run["pg"], "--data", data)[2]
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", PREDICTIONS, PAGE}


@pytest.mark.parametrize(("option", "name"), [("--out", PREDICTIONS), ("--report", PAGE)])
def test_a_full_disk_leaves_the_earlier_files_and_the_table_is_printed(data, run, tmp_path: Path, option, name):
    arguments = ["--baseline", run["lstm"], "--data", data, option, tmp_path]
    output = iep_eval(*arguments).stdout
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with files_no_larger_than(500):
        result = iep_eval(*arguments, "--name", "blind")
    assert_one_error(result, f"{tmp_path / name}: file size limit reached")
    assert cells(result.output, "overall") == cells(output, "overall")
    assert "Wrote" not in result.output
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# Two processes


def evaluate_in_process(settings: NetworkSettings, out: Path) -> bool:
    return run_evaluation.evaluate(settings, out, ReportOptions(out)) is not None


def test_two_processes_write_the_files_of_one(data, run, tmp_path: Path):
    settings = NetworkSettings(Selection(data), pg=run["pg"], ee=run["ee"], device="cpu", batch_size=4)
    assert run_evaluation.evaluate(settings, tmp_path / "one", ReportOptions(tmp_path / "one"))
    assert together(evaluate_in_process, settings, tmp_path / "two") == [True, False]
    one, two = (tmp_path / name for name in ("one", "two"))
    for name in (PREDICTIONS, ANSWERS, ANSWERS_JSON):
        assert (two / name).read_bytes() == (one / name).read_bytes()
    lengths = [len((out / PAGE).read_text()) for out in (one, two)]
    assert lengths[0] == pytest.approx(lengths[1], abs=200), "they differ in measured times and in paths"
    assert evaluation_parts(one)["report.json"] == evaluation_parts(two)["report.json"]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "problem", "code"),
    [
        ("--baseline {lstm}", "give --data DIR", 2),
        ("--data {data}", "nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT", 1),
        ("--data {data} --baseline {lstm} --ee {ee}", "--ee does not go with --baseline", 2),
        ("--data {data} --ee {ee} --programs predicted", "predicted needs a program generator: give --pg CKPT", 1),
        ("--data {data} --pg {pg} --programs ground-truth", "--programs does not go with --pg without --ee", 2),
        ("--data {data} --pg {pg} --execution triton", "--execution does not go with --pg without --ee", 2),
        ("--data {data} --pg {ee}", "{ee}: holds an execution engine, expected a checkpoint with a program", 1),
        ("--data {data} --baseline {lstm} --split vall", "vall_questions.h5: no such file", 1),
        ("--data {data} --baseline {lstm} --against old none.json", "none.json: no such file", 1),
        ("--data {data} --baseline {lstm} --beam-size 5", "--beam-size does not go with --baseline", 2),
        ("--data {data} --baseline {lstm} --images x", "--images is for the HTML report and for --ee symbolic", 2),
        ("--backbone synth --scenes {data} --against old x", "--against does not go with --scenes", 2),
        (
            "--data {data} --baseline {lstm} --report x --images {data}",
            "val: no such directory, expected the split's",
            1,
        ),
        ("--data {data} --baseline {lstm} --out {lstm}", "is a file", 2),
        ("--data {data} --baseline {lstm} --out {taken}", "{taken}/report.json", 1),
    ],
)
def test_refused_input_is_one_line(data, run, tmp_path: Path, arguments: str, problem: str, code: int):
    (tmp_path / "taken" / "report.json").mkdir(parents=True)
    names = {"data": data, "taken": tmp_path / "taken", **run}
    assert_one_error(iep_eval(*shlex.split(arguments.format(**names))), problem.format(**names), code=code)
