"""Which examples a training step sees: a function of seed and step alone, whole epochs, short programs first."""

import numpy as np
import pytest
from batching_cases import quick
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_data import refused

from iep.data.ordering import deal, make_order, step_numbers, step_seed

IMAGES = np.arange(22) // 4


@given(
    images=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    batch_size=st.integers(1, 12),
    questions_per_image=st.integers(1, 4),
    seed=st.integers(0, 9),
)
@settings(quick)
def test_every_epoch_sees_every_example_at_most_once(images, batch_size: int, questions_per_image: int, seed: int):
    """Where examples are fewer than a batch, every step sees all of them."""
    order = make_order(None, np.array(images), (), batch_size, seed, questions_per_image)
    steps = max(1, len(images) // batch_size)
    for epoch in range(3):
        rows = [row for step in range(steps * epoch, steps * (epoch + 1)) for row in order.rows(step).tolist()]
        assert len(rows) == len(set(rows)) == min(len(images), steps * batch_size)
        assert set(rows) <= set(range(len(images)))


def test_the_rows_of_a_step_depend_on_seed_and_step_alone():
    steps = list(range(40))
    unbroken = make_order(None, IMAGES, (), batch_size=5, seed=3)
    expected = [unbroken.rows(step).tolist() for step in steps]
    jumping = make_order(None, IMAGES, (), batch_size=5, seed=3)
    shuffled = np.random.default_rng(0).permutation(steps)
    assert {step: jumping.rows(step).tolist() for step in shuffled} == dict(zip(steps, expected, strict=True))
    other = make_order(None, IMAGES, (), batch_size=5, seed=4)
    assert [other.rows(step).tolist() for step in steps] != expected


def test_a_curriculum_draws_programs_no_longer_than_its_stage_allows():
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    order = make_order(lengths, np.arange(8), ((0, 2), (3, 4), (6, 99)), batch_size=2, seed=0)
    longest = [lengths[order.rows(step)].max() for step in range(10)]
    assert all(length <= 2 for length in longest[:3])
    assert all(length <= 4 for length in longest[3:6])
    assert {int(row) for step in (3, 4) for row in order.rows(step)} == {0, 1, 2, 3}
    assert {int(row) for step in range(6, 10) for row in order.rows(step)} == set(range(8))


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
def test_an_invalid_curriculum_is_an_error(lengths, curriculum, problem: str):
    with refused("", problem):
        make_order(lengths, np.arange(2), curriculum, batch_size=2, seed=0)


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


@given(images=st.lists(st.integers(0, 40), min_size=1, max_size=64), parts=st.integers(1, 5))
@settings(quick)
def test_a_minibatch_is_split_evenly_and_at_images_unless_one_has_most_questions(images: list[int], parts: int):
    images = np.array(images)
    if len(images) < parts:
        with pytest.raises(ValueError, match=f"{len(images)} examples for {parts} processes"):
            deal(images, parts)
        return
    dealt = deal(images, parts)
    assert len(dealt) == parts
    assert sorted(np.concatenate(dealt).tolist()) == list(range(len(images)))
    assert all((np.diff(part) > 0).all() for part in dealt)
    sizes, most = [len(part) for part in dealt], np.bincount(images).max()
    assert all(size > 0 and abs(size - len(images) / parts) <= most for size in sizes)
    images_of_parts = [set(images[part].tolist()) for part in dealt]
    assert sum(map(len, images_of_parts)) == len(set(images.tolist())) or max(sizes) - min(sizes) <= 1


def test_random_numbers_are_a_function_of_seed_step_and_process():
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(10) for rank in range(3)}
    assert len(seeds) == 90
    assert step_seed(1, 2, 0) == step_seed(1, 2)
    numbers = step_numbers(1, 2, (4, 5))
    assert numbers.shape == (4, 5)
    assert numbers.dtype == np.float32
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert np.array_equal(numbers, step_numbers(1, 2, (4, 5)))
    assert not np.array_equal(numbers, step_numbers(1, 3, (4, 5)))
    assert not np.array_equal(numbers, step_numbers(2, 2, (4, 5)))
