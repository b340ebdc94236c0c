"""Scores against counts by hand; reports and predictions through their files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from iep.data.question_file import Questions
from iep.errors import InputError
from iep.evaluation.json_report import Report, format_table, mean_accuracy, read_report, write_report
from iep.evaluation.metrics import Scores, count_types, exact_match, question_types, score
from iep.evaluation.outcome import Outcome, content_tokens, question_text, write_outputs
from iep.evaluation.predict import Predictions
from iep.programs import QUESTION_TYPES
from iep.vocab import SPECIAL_TOKENS, Vocab

PROGRAM_TOKENS = (
    *SPECIAL_TOKENS,
    *("count", "equal_color", "exist", "filter_color[red]", "greater_than", "query_shape", "scene", "unique"),
)
VOCAB = Vocab(
    question=(*SPECIAL_TOKENS, "", ",", ";", "How", "many", "red", "things"),
    program=PROGRAM_TOKENS,
    answer=(*SPECIAL_TOKENS, "0", "1", "2"),
)
QUERY_SHAPE = QUESTION_TYPES.index("query: shape")

REPORT = Report(
    split="val",
    questions=10,
    questions_by_type={"exist": 4, "query: size": 3, "query: shape": 1},
    accuracy=Scores(0.7, {"exist": 0.75, "query: size": 1.0, "query: shape": 0.0}),
    program_exact_match=Scores(0.9, {"exist": 1.0, "query: size": 1.0, "query: shape": 0.0}),
    questions_per_second=1234.4,
    device="cpu",
    programs="predicted, greedy",
    checkpoints={"program_generator": "pg.pt", "execution_engine": "ee.pt"},
    baselines={"commonest": Scores(0.4, {"exist": 0.5, "query: size": 0.0, "query: shape": 1.0})},
)


def test_the_type_of_a_question_comes_from_its_programs_root():
    index = {token: position for position, token in enumerate(PROGRAM_TOKENS)}
    roots = ["exist", "greater_than", "query_shape", "equal_color", "unique", "<END>", "<NULL>", "scene"]
    programs = np.array([[1, index[root], index["scene"], 2] for root in roots])
    known = ["exist", "compare integer: more", "query: shape", "compare: color"]
    expected = [*map(QUESTION_TYPES.index, known), -1, -1, -1, -1]
    assert question_types(programs, PROGRAM_TOKENS).tolist() == expected
    assert question_types(torch.from_numpy(programs), PROGRAM_TOKENS).tolist() == expected


def test_accuracy_per_type_matches_a_count_by_hand():
    types = np.array([0, 0, 0, QUERY_SHAPE, QUERY_SHAPE, -1])
    correct = np.array([True, False, True, False, False, True])
    assert count_types(types) == {"exist": 3, "query: shape": 2}
    assert score(correct, types) == Scores(0.5, {"exist": 2 / 3, "query: shape": 0.0})


def test_types_come_in_clevrs_order():
    types = np.arange(len(QUESTION_TYPES))[::-1]
    assert tuple(count_types(types)) == QUESTION_TYPES
    assert tuple(score(np.ones(len(types)), types).by_type) == QUESTION_TYPES


@pytest.mark.parametrize(("correct", "types"), [([], []), ([True], [0, 0])])
def test_scores_of_nothing_or_of_unequal_numbers_are_refused(correct, types):
    with pytest.raises(ValueError, match=f"{len(correct)} results and {len(types)} types"):
        score(np.array(correct, dtype=bool), np.array(types, dtype=int))


@pytest.mark.parametrize(
    ("predicted", "program", "same"),
    [
        ([1, 5, 6, 2], [1, 5, 6, 2], True),
        ([1, 5, 6, 2, 0, 0], [1, 5, 6, 2], True),
        ([1, 5, 6, 2], [1, 5, 6, 2, 0, 0], True),
        ([1, 5, 6, 2, 7, 7], [1, 5, 6, 2, 0], True),
        ([1, 5, 7, 2], [1, 5, 6, 2], False),
        ([1, 5, 6], [1, 5, 6, 2], False),
        ([1, 5, 6, 6, 2], [1, 5, 6, 2], False),
        ([1, 5, 2], [1, 5, 6, 2], False),
        ([1, 5, 0, 6, 2], [1, 5, 6, 2], False),
    ],
)
def test_programs_are_the_same_up_to_end_whatever_the_padding(predicted, program, same):
    assert exact_match(np.array([predicted]), np.array([program])).tolist() == [same]
    assert exact_match(torch.tensor([predicted]), torch.tensor([program])).tolist() == [same]


def test_a_report_reads_back_as_it_was_written(tmp_path: Path):
    for report in (REPORT, Report("test", 5, {})):
        write_report(tmp_path / "report.json", report)
        assert read_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something else"}, "not a report"),
        ({"accuracy": 0.5}, "'accuracy' is 0.5, expected a JSON object"),
        ({"accuracy": {"overall": "high", "by_type": {}}}, "'overall' is 'high', expected a finite number"),
        ({"accuracy": {"overall": float("nan"), "by_type": {}}}, "'overall' is nan, expected a finite number"),
        ({"accuracy": {"overall": 0.5, "by_type": {"exist": float("inf")}}}, "'exist' is inf"),
        ({"questions": "ten"}, "'questions' is 'ten', expected a whole number"),
        ({"questions": -1}, "'questions' is -1, expected a whole number"),
        ({"questions_by_type": {"exist": None}}, "'questions_by_type': 'exist' is None"),
        ({"questions_by_type": {"exist": 10**400}}, "'exist' is 1000"),
        ({"peak_memory_gb": 10**400}, "'peak_memory_gb' is 1000"),
        ({"questions_per_second": "fast"}, "'questions_per_second' is 'fast', expected a finite number"),
        ({"baselines": {"commonest": {"overall": 0.4}}}, "'commonest': 'by_type' is missing"),
        ({"checkpoints": ["pg.pt"]}, "'checkpoints' is ['pg.pt'], expected a JSON object"),
        ({"split": 3}, "'split' is 3, expected text"),
        ({"colour": "red"}, "'colour' is unknown"),
    ],
)
def test_a_file_that_is_not_a_report_is_named_with_what_is_wrong(tmp_path: Path, change, message):
    path = tmp_path / "report.json"
    write_report(path, REPORT)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError) as caught:
        read_report(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_the_table_sets_models_and_baselines_side_by_side():
    better = replace(REPORT, accuracy=Scores(1.0, dict.fromkeys(REPORT.questions_by_type, 1.0)), baselines={})
    assert format_table([("iep", REPORT), ("iep joint", better)]).splitlines() == [
        "                questions  commonest    iep  iep joint",
        "overall                10       40.0   70.0      100.0",
        "exist                   4       50.0   75.0      100.0",
        "query                   4       25.0   75.0      100.0",
        "  size                  3        0.0  100.0      100.0",
        "  shape                 1      100.0    0.0      100.0",
        "programs exact                     -   90.0       90.0",
        "questions/s                        -   1234       1234",
    ]


def test_the_row_of_a_family_is_the_share_of_its_right_answers_to_the_last_bit():
    """58.75 is half way between two digits; 79 * (47 / 79) is a little less than 47."""
    types = ("query: size", "query: shape")
    scores = Scores(47 / 80, dict(zip(types, (0.0, 47 / 79), strict=True)))
    report = Report("val", 80, dict(zip(types, (1, 79), strict=True)), scores)
    assert mean_accuracy(report, types) == mean_accuracy(report, None) == 47 / 80


def test_five_columns_fit_in_100_characters():
    every_type = dict.fromkeys(QUESTION_TYPES, 11000)
    report = Report(
        "val", 149_991, every_type, Scores(1.0, dict.fromkeys(QUESTION_TYPES, 1.0)), baselines=REPORT.baselines
    )
    names = ["LSTM", "iep 18K programs", "iep 9K programs", "iep all programs"]
    table = format_table([(name, report) for name in names])
    assert max(map(len, table.splitlines())) <= 100
    assert len(table.splitlines()) == 1 + 1 + len(QUESTION_TYPES) + 3 + 2


def test_the_table_says_dash_on_a_split_without_answers():
    report = Report("test", 5, {}, questions_per_second=10.0)
    assert format_table([("iep", report)]).splitlines() == [
        "                questions  iep",
        "overall                 5    -",
        "programs exact               -",
        "questions/s                 10",
    ]


def test_reports_on_different_questions_have_numbers_of_questions_of_their_own():
    other = Report("train", 3, {"exist": 3}, Scores(1.0, {"exist": 1.0}))
    header, overall, exist, *_ = format_table([("a", REPORT), ("b", other)]).splitlines()
    assert header.split() == ["questions", "commonest", "a", "questions", "b"]
    assert overall.split() == ["overall", "10", "40.0", "70.0", "3", "100.0"]
    assert exist.split() == ["exist", "4", "50.0", "75.0", "3", "100.0"]


def outcome(**changes: np.ndarray | None) -> Outcome:
    """Two questions with all that can be known of them, but for `changes`."""
    arrays = {
        "orig_idxs": np.array([10, 11]),
        "image_idxs": np.array([1, 1]),
        "questions": np.array([[1, 7, 8, 9, 10, 2, 0], [1, 9, 6, 4, 10, 5, 2]]),
        "families": np.array([47, 3]),
        "programs": np.array([[1, 4, 7, 10, 2], [1, 10, 2, 0, 0]]),
        "answers": np.array([4, 5]),
        "ranked_answers": np.array([[4, 6], [6, 5]]),
        **changes,
    }
    predictions = Predictions(
        np.array([[1, 4, 10, 2, 5, 0], [1, 10, 0, 7, 10, 0]]),
        arrays.pop("ranked_answers"),
        np.array([[0.75, 0.125], [0.5, 0.25]], dtype=np.float32),
        seconds=1.0,
    )
    return Outcome(VOCAB, Questions(Path("questions.h5"), **arrays), predictions)


def test_predictions_are_one_object_for_each_question(tmp_path: Path):
    write_outputs(tmp_path, outcome(), REPORT)
    assert [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()] == [
        {
            "question_index": 10,
            "image_index": 1,
            "question": "How many red things?",
            "type": "count",
            "family": 47,
            "program": ["count", "filter_color[red]", "scene"],
            "predicted_program": ["count", "scene"],
            "answer": "0",
            "predicted_answer": "0",
            "probability": 0.75,
            "runners_up": {"2": 0.125},
            "correct": True,
        },
        {
            "question_index": 11,
            "image_index": 1,
            "question": "red;  things,?",
            "family": 3,
            "program": ["scene"],
            "predicted_program": ["scene", "<NULL>", "filter_color[red]", "scene"],
            "answer": "1",
            "predicted_answer": "2",
            "probability": 0.5,
            "runners_up": {"1": 0.25},
            "correct": False,
        },
    ]


def test_predictions_leave_out_what_is_unknown():
    first = next(outcome(families=None, programs=None, answers=None).rows())
    assert first.keys() == {
        *("question_index", "image_index", "question", "type"),
        *("predicted_program", "predicted_answer", "probability", "runners_up"),
    }


def test_content_tokens_stop_at_end_or_at_the_padding():
    assert content_tokens([1, 4, 10, 2, 5], PROGRAM_TOKENS) == ["count", "scene"]
    assert content_tokens([1, 4, 10, 0, 0], PROGRAM_TOKENS) == ["count", "scene"]
    assert content_tokens([0, 0], PROGRAM_TOKENS) == []
    assert question_text(np.array([1, 7, 8, 6, 9, 2]), VOCAB.question) == "How many; red?"


def test_predictions_that_fail_halfway_leave_the_old_file_as_it_was(tmp_path: Path):
    path = tmp_path / "predictions.jsonl"
    path.write_text("old\n")
    with pytest.raises(IndexError):
        write_outputs(tmp_path, outcome(ranked_answers=np.array([[4, 6], [999, 5]])), REPORT)
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
