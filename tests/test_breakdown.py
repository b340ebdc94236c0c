"""Counts by kind of question, lengths of programs and confusions, against loops over the questions one by one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import EXAMPLES, VOCAB, padded

from iep.batching.reference import run_prefix
from iep.evaluation.breakdown import answer_groups, confusion, groups, program_lengths
from iep.programs import QUESTION_TYPES, arity

QUESTIONS = st.lists(st.tuples(st.integers(-1, 5), st.booleans(), st.booleans()), min_size=1, max_size=40)


@given(QUESTIONS)
def test_groups_count_what_a_loop_counts(questions):
    keys, right, exact = (np.array(column) for column in zip(*questions, strict=True))
    found = groups(keys, right, exact)
    assert [group.key for group in found] == sorted({key for key, _, _ in questions if key >= 0})
    for group in found:
        members = [question for question in questions if question[0] == group.key]
        assert group.questions == len(members)
        assert group.right == sum(is_right for _, is_right, _ in members)
        assert group.exact == sum(is_exact for _, _, is_exact in members)
        assert questions[group.first] == members[0]


def test_what_is_unknown_stays_unknown():
    (group,) = groups(np.array([7, 7]), None, np.array([True, False]))
    assert (group.key, group.questions, group.right, group.exact) == (7, 2, None, 1)
    assert groups(np.array([-1, -1]), np.array([True, True]), None) == []
    with pytest.raises(ValueError, match="2 results of 1 questions"):
        groups(np.array([0]), np.array([True, False]), None)


def test_the_length_is_the_number_of_functions_besides_scene():
    programs = padded([[VOCAB.program_index[token] for token in program] for _, program, _ in EXAMPLES])
    lengths = [sum(token != "scene" for token in program) for _, program, _ in EXAMPLES]
    assert program_lengths(programs, VOCAB.program).tolist() == lengths


@given(st.lists(st.lists(st.integers(0, len(VOCAB.program) - 1), min_size=6, max_size=6), min_size=1, max_size=4))
def test_the_length_of_an_ill_formed_program_is_what_the_engine_runs(programs):
    def size(program: list[int]) -> int:
        return run_prefix(
            program,
            lambda token: arity(VOCAB.program[token]),
            lambda token, *sizes: sum(sizes) + (token >= 4),
            input_value=0,
            leaf=VOCAB.program_index["scene"],
            skip=1,
            pad=0,
            leaf_is_input=True,
        )

    assert program_lengths(np.array(programs), VOCAB.program).tolist() == [size(program) for program in programs]


def test_without_scene_in_the_vocabulary_lengths_are_unknown():
    assert program_lengths(np.array([[1, 4, 2], [1, 2, 0]]), VOCAB.program[:6]).tolist() == [-1, -1]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60))
def test_the_confusion_counts_pairs(pairs):
    answers, predicted = (np.array(column) for column in zip(*pairs, strict=True))
    assert confusion(answers, predicted) == Counter(pairs)


def test_answers_of_one_kind_stand_together_numbers_in_their_order():
    tokens = ("<NULL>", "10", "2", "blue", "no", "red", "yes", "large")
    kinds = [
        *[("no", "exist")] * 5,  # "yes" is never true of `exist` here, but as "no" it is of `compare: size`
        *[("no", "compare: size")] * 5,
        *[("yes", "compare: size")] * 5,
        *[("10", "count"), ("2", "count")],
        *[("red", "query: color")] * 20,
        ("red", "exist"),  # once in twenty is not often
        ("blue", "query: color"),
    ]
    answers = np.array([tokens.index(answer) for answer, _ in kinds])
    types = np.array([QUESTION_TYPES.index(kind) for _, kind in kinds])
    predicted = np.full(len(kinds), tokens.index("large"))
    found = answer_groups(answers, predicted, types, tokens)
    assert [tokens[answer] for answer in found] == ["no", "yes", "2", "10", "blue", "red", "large"]
    exist, count, color = (QUESTION_TYPES.index(name) for name in ("exist", "count", "query: color"))
    assert list(found.values())[:6] == [exist, exist, count, count, color, color]


def test_without_types_answers_stand_in_one_group():
    answers = np.array([2, 1, 1])
    assert answer_groups(answers, answers, np.full(3, -1), ("<NULL>", "b", "a")) == {2: 1, 1: 1}
