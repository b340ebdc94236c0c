"""Which examples a training step sees: a function of seed and step alone, whole epochs, short programs first."""

import numpy as np
import pytest
from tiny_data import VOCAB

from iep.data.ordering import make_order
from iep.errors import InputError
from iep.programs import program_lengths

IMAGES = np.arange(22) // 4


def test_every_epoch_sees_every_example_once_but_for_the_remainder():
    order = make_order(None, IMAGES, (), batch_size=5, seed=3)
    epochs = [[row for step in range(first, first + 4) for row in order.rows(step)] for first in (0, 4, 8)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 20
        assert set(epoch) <= set(range(22))
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_rows_of_a_step_depend_on_seed_and_step_alone():
    steps = list(range(40))
    unbroken = make_order(None, IMAGES, (), batch_size=5, seed=3)
    expected = [unbroken.rows(step).tolist() for step in steps]
    jumping = make_order(None, IMAGES, (), batch_size=5, seed=3)
    shuffled = np.random.default_rng(0).permutation(steps)
    assert {step: jumping.rows(step).tolist() for step in shuffled} == dict(zip(steps, expected, strict=True))
    other = make_order(None, IMAGES, (), batch_size=5, seed=4)
    assert [other.rows(step).tolist() for step in steps] != expected


def test_fewer_examples_than_a_batch_are_all_drawn_every_step():
    order = make_order(None, np.zeros(3, int), (), batch_size=8, seed=0)
    assert [sorted(order.rows(step)) for step in range(3)] == [[0, 1, 2]] * 3


def test_a_curriculum_draws_no_longer_program_than_its_stage_allows():
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    order = make_order(lengths, np.arange(8), ((0, 2), (3, 4), (6, 99)), batch_size=2, seed=0)
    longest = [lengths[order.rows(step)].max() for step in range(10)]
    assert all(length <= 2 for length in longest[:3])
    assert all(length <= 4 for length in longest[3:6])
    assert {int(row) for step in (3, 4) for row in order.rows(step)} == {0, 1, 2, 3}
    assert {int(row) for step in range(6, 10) for row in order.rows(step)} == set(range(8))


def test_a_programs_length_counts_its_functions_but_neither_scene_nor_special_tokens():
    index = VOCAB.program_index
    programs = np.array([[1, index["exist"], index["scene"], 2, 0], [1, index["count"], index["unique"], 0, 2]])
    assert program_lengths(programs, VOCAB.program).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("lengths", "curriculum", "problem"),
    [
        (np.array([3, 4]), ((5, 3),), "starts its stages at iterations [5], expected 0 first"),
        (np.array([3, 4]), ((0, 3), (9, 4), (9, 5)), "[0, 9, 9], expected 0 first and then rising"),
        (np.array([3, 4]), ((0, 3), (9, 4), (5, 5)), "[0, 9, 5]"),
        (np.array([3, 4]), ((0, 2), (9, 4)), "no training program has at most 2 functions"),
        (None, ((0, 3),), "a curriculum needs programs"),
    ],
)
def test_a_curriculum_that_cannot_be_followed_is_refused(lengths, curriculum, problem: str):
    with pytest.raises(InputError) as caught:
        make_order(lengths, np.arange(2), curriculum, batch_size=2, seed=0)
    assert problem in str(caught.value)


def test_questions_about_one_image_are_drawn_together_where_asked():
    image_idxs = np.repeat(np.arange(6), 7)
    order = make_order(None, image_idxs, (), batch_size=12, seed=0, questions_per_image=4)
    epochs = [np.concatenate([order.rows(step) for step in range(first, first + 3)]) for first in (0, 3)]
    for epoch in epochs:
        assert len(set(epoch.tolist())) == 36
        runs = np.flatnonzero(np.diff(image_idxs[epoch]))
        # Six images of seven questions make twelve groups, of four or three; ungrouped there would be some thirty runs.
        assert len(runs) < 12
    assert epochs[0].tolist() != epochs[1].tolist()


def test_groups_of_one_image_leave_nothing_out_of_an_epoch():
    image_idxs = np.array([0, 3, 3, 3, 9, 9, 0, 3])
    order = make_order(None, image_idxs, (), batch_size=8, seed=0, questions_per_image=3)
    assert all(sorted(order.rows(step)) == list(range(8)) for step in range(5))
