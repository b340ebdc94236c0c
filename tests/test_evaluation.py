"""Scores, groups of answers and most common answers against counts by hand; reports and predictions in their files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_data
import torch
from hypothesis import given
from hypothesis import strategies as st

from iep.baselines.most_common import count_most_common, predict
from iep.batching.reference import run_prefix
from iep.data.question_file import Questions
from iep.evaluation.json_report import Report, format_table, read_report, write_report
from iep.evaluation.metrics import Scores, exact_match, score
from iep.evaluation.outcome import Outcome, write_outputs
from iep.evaluation.predict import Predictions
from iep.programs import arity, program_lengths
from iep.vocab import SPECIAL_TOKENS, Vocab

TOKENS = st.integers(0, len(tiny_data.VOCAB.program) - 1)

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
    baselines={"most_common": Scores(0.4, {"exist": 0.5, "query: size": 0.0, "query: shape": 1.0})},
)


def test_questions_of_unknown_type_count_only_overall():
    assert score(np.array([True, False, False, True]), np.array([0, 0, -1, -1])) == Scores(0.5, {"exist": 0.5})


@given(*2 * [st.lists(st.integers(0, 7), min_size=3, max_size=6)], st.integers(0, 2))
def test_programs_are_the_same_up_to_end_whatever_the_padding(predicted, program, padding):
    def until_end(tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(2) + 1] if 2 in tokens else tokens

    program = [*program, 2]
    for mine in (predicted, [*program, *predicted]):
        same = until_end(mine) == until_end(program)
        rows = [mine + [0] * padding], [program + [0] * (2 - padding)]
        assert exact_match(*map(np.array, rows)).tolist() == [same]
        assert exact_match(*map(torch.tensor, rows)).tolist() == [same]


def test_a_report_reads_back_as_it_was_written(tmp_path: Path):
    for report in (REPORT, Report("test", 5, {})):
        write_report(tmp_path / "report.json", report)
        assert read_report(tmp_path / "report.json") == report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "something else"}, "not a report"),
        ({"baselines": {"most_common": {"overall": 0.4}}}, "missing 1 required positional argument: 'by_type'"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_a_file_that_is_not_a_report_is_named_with_what_is_wrong(tmp_path: Path, change, message):
    path = tmp_path / "report.json"
    write_report(path, REPORT)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with tiny_data.refused(f"{path}: ", message):
        read_report(path)


def test_the_table_sets_models_and_baselines_side_by_side():
    better = replace(REPORT, accuracy=Scores(1.0, dict.fromkeys(REPORT.questions_by_type, 1.0)), baselines={})
    assert format_table([("iep", REPORT), ("iep joint", better)]).splitlines() == [
        "                questions  most common answer    iep  iep joint",
        "overall                10                40.0   70.0      100.0",
        "exist                   4                50.0   75.0      100.0",
        "query                   4                25.0   75.0      100.0",
        "  size                  3                 0.0  100.0      100.0",
        "  shape                 1               100.0    0.0      100.0",
        "programs exact                              -   90.0       90.0",
        "questions/s                                 -   1234       1234",
    ]


def test_a_prediction_has_the_texts_of_all_that_is_known_of_its_question(tmp_path: Path):
    """The first program has no type, the predicted one does not end, and punctuation is joined to the words before."""
    words = ("", ",", ";", "red", "things")
    vocab = Vocab(*((*SPECIAL_TOKENS, *own) for own in (words, ("filter_color[red]", "scene"), ("0", "1", "2"))))
    questions = Questions(
        path=Path("questions.h5"),
        orig_idxs=np.array([11]),
        image_idxs=np.array([1]),
        questions=np.array([[1, 7, 6, 4, 8, 5, 2]]),
        families=np.array([3]),
        programs=np.array([[1, 5, 2, 0, 0]]),
        answers=np.array([5]),
    )
    ranked = np.array([[6, 5]]), np.array([[0.5, 0.25]], dtype=np.float32)
    predictions = Predictions(np.array([[1, 5, 0, 4, 5, 0]]), *ranked, seconds=1.0)
    write_outputs(tmp_path, Outcome(vocab, questions, predictions), REPORT)
    assert json.loads((tmp_path / "predictions.jsonl").read_text()) == {
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
    }


@given(st.lists(st.lists(TOKENS, min_size=6, max_size=6), min_size=1, max_size=4))
def test_the_length_of_an_ill_formed_program_is_what_the_engine_runs(programs):
    def size(program: list[int]) -> int:
        return run_prefix(
            program,
            lambda token: arity(tiny_data.VOCAB.program[token]),
            lambda token, *sizes: sum(sizes) + (token >= 4),
            input_value=0,
            leaf=tiny_data.VOCAB.program_index["scene"],
            skip=1,
            pad=0,
            leaf_is_input=True,
        )

    assert program_lengths(np.array(programs), tiny_data.VOCAB.program).tolist() == [*map(size, programs)]


def test_the_most_common_answer_of_all_serves_types_without_questions_and_unknown_types():
    types = np.array([0, 2, 2, 2, -1, -1, -1, 3, 3, 3, 3])
    answers = np.array([4, 6, 6, 6, 9, 9, 6, 7, 7, 4, 4])
    most_common = count_most_common(answers, types, num_types=4)  # 6 is the answer to four questions, 9 to two
    assert predict(most_common, np.array([0, 1, 2, -1, 3])).tolist() == [4, 6, 6, 6, 4], "the smaller of equal ones"
