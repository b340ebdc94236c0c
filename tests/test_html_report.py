"""report.html of `iep-eval --report` lists the right questions, with programs side by side."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from evaluate_cases import evaluate
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import TEST, VAL, VOCAB, arrays

from iep.data.question_file import Questions
from iep.evaluation.html_report import PAGE
from iep.evaluation.outcome import Outcome
from iep.evaluation.predict import Predictions
from iep.evaluation.question_cards import (
    FILLED_IN,
    IGNORED,
    Line,
    choose,
    program_lines,
    side_by_side,
)
from iep.execution_engine.choices import make_module_set
from iep.programs import NOT_USED
from iep.vocab import NULL, START


def outcome(seed: int, count: int = 120) -> Outcome:
    """The tiny questions over and over, some answers and programs predicted wrong by chance."""
    random = np.random.default_rng(seed)
    content = {name: values.astype(np.int64) for name, values in arrays(count).items()}
    answers = np.where(random.random(count) < 0.7, content["answers"], random.permutation(content["answers"]))
    programs = np.where(random.random((count, 1)) < 0.8, content["programs"], random.permutation(content["programs"]))
    questions = Questions(Path("val_questions.h5"), families=content.pop("question_families"), **content)
    shares = np.sort(random.random((count, 2)), axis=1)[:, ::-1]
    ranked = np.stack([answers, np.zeros_like(answers)], axis=1)
    return Outcome(VOCAB, questions, Predictions(programs, ranked, shares, 1.0))


@given(st.integers(0, 3), st.integers(0, 130), st.booleans(), st.booleans())
def test_as_many_questions_are_listed_as_asked_for_and_none_twice(seed: int, most: int, is_known: bool, is_answered):
    whole = outcome(seed)
    if not is_known:
        whole = replace(whole, questions=replace(whole.questions, answers=None, programs=None, families=None))
    if not is_answered:
        whole = replace(whole, predictions=Predictions(whole.predictions.programs, None, None, 1.0))
    rows = choose(whole, most)
    assert len(rows) == min(most, 120)
    assert len({*rows.tolist()}) == len(rows)
    if is_known and most >= len({*whole.questions.families}):
        assert {*whole.questions.families[rows]} == {*whole.questions.families}, "every family is listed"


@pytest.mark.parametrize(("split", "said"), [("val", "Wrong answers"), ("test", "the split has no answers")])
def test_the_page_needs_no_other_file_and_lists_a_part_of_a_long_split(data, run, tmp_path, split, said, monkeypatch):
    monkeypatch.setattr("iep.evaluation.html_report.MOST_QUESTIONS", 8)
    evaluate(tmp_path, "--baseline", run["lstm"], "--data", data, "--split", split, "--report", tmp_path)
    page = (tmp_path / PAGE).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert re.fullmatch(
        r"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-\S+'", policy
    )
    assert not re.search(r"(src|href)=\"(?!#)", page)
    total = {"val": VAL, "test": TEST}[split]
    for each in (said, f"Listed are 8 of {total} questions", "No images were given"):
        assert each in page
    assert ("in turn from every family" in page) == (split == "val")
    assert page.count("<article") == 8


TOKENS = st.lists(st.integers(0, len(VOCAB.program) - 1), max_size=12)


def lines(program: str, modules: str | None = None) -> list[Line]:
    tokens = [VOCAB.program_index[token] for token in program.split()]
    own = None if modules is None else make_module_set(modules, dim=1, residual=True, norm="none", scene="module")
    return program_lines([START, *tokens, NULL], VOCAB, own)


NESTED = "count filter_color[red] exist filter_shape[cube] scene"


@pytest.mark.parametrize(
    ("program", "modules", "expected"),
    [
        ("count union filter_color[red] scene scene", None, "count .union ..filter_color[red] ...scene ..scene"),
        ("count", None, "count .scene?"),
        ("count <END>", None, "count .<END> ..scene?"),  # inside a tree it runs as a function
        ("scene count exist <END>", None, "scene count! exist!"),
        ("union <NULL> scene count", None, "union .scene? .scene count!"),
        ("", None, "scene?"),
        (NESTED, "iep", "count .filter_color[red] ..exist ...filter_shape[cube] ....scene"),
        (NESTED, "tbd", "count .filter_color[red] ..exist- ...filter_shape[cube]- ....scene-"),
    ],
)
def test_a_line_tells_its_depth_and_what_is_filled_in_ignored_or_not_used(program, modules, expected):
    marks = {"": "", FILLED_IN: "?", IGNORED: "!", NOT_USED: "-"}
    assert ["." * depth + token + marks[kind] for depth, token, kind in lines(program, modules)] == expected.split()


@given(TOKENS, TOKENS)
def test_both_columns_hold_every_line_once_and_in_order(left_tokens: list[int], right_tokens: list[int]):
    left, right = program_lines(left_tokens, VOCAB), program_lines(right_tokens, VOCAB)
    rows = side_by_side(left, right)
    assert [line for line, _ in rows if line is not None] == left
    assert [line for _, line in rows if line is not None] == right
    assert (None, None) not in rows


def test_below_a_function_that_only_one_has_the_rest_is_the_same():
    left, right = lines("count filter_color[red] scene"), lines("count filter_shape[cube] filter_color[red] scene")
    rows = [(left[0], right[0]), (None, right[1]), (left[1], right[2]), (left[2], right[3])]
    assert side_by_side(left, right) == rows
    left, right = lines("count scene"), lines("exist scene")
    assert side_by_side(left, right) == list(zip(left, right, strict=True))
