"""Lengths of programs against a loop over the programs one by one, and the order of answers."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny_data import EXAMPLES, VOCAB, padded

from iep.batching.reference import run_prefix
from iep.evaluation.metrics import answer_groups
from iep.programs import arity, program_lengths
from iep.synth.world import VALUES


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


KINDS = (
    *(("no", "yes"), ("0", "1", "2", "5", "10"), ("large", "small"), ("blue", "red"), ("metal", "rubber")),
    *(("cube", "sphere"), ("<UNK>", "zebra")),
)
ORDERED = [name for kind in KINDS for name in kind]


@given(st.permutations(ORDERED), st.lists(st.integers(0, len(ORDERED) - 1), min_size=1))
def test_answers_of_one_kind_stand_together_numbers_by_value_whatever_occurs(tokens, answers):
    found = answer_groups(answers, tokens)
    assert [tokens[answer] for answer in found] == [name for name in ORDERED if tokens.index(name) in answers]
    assert all(tokens[answer] in KINDS[group] for answer, group in found.items())


def test_every_answer_of_clevr_is_of_a_kind():
    tokens = [str(number) for number in range(11)] + ["no", "yes"] + [value for of in VALUES.values() for value in of]
    assert Counter(answer_groups(range(28), tokens).values()) == {0: 2, 1: 11, 2: 2, 3: 8, 4: 2, 5: 3}
