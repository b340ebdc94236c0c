"""The commonest-answer baseline: counted by type, and where a type has no questions."""

import numpy as np
import pytest

from iep.baselines.commonest import count_commonest, predict


def test_commonest_answer_is_counted_for_each_type_by_itself():
    types = np.array([0, 0, 0, 1, 1, 1, 1])
    answers = np.array([4, 5, 5, 7, 7, 4, 4])
    commonest = count_commonest(answers, types, num_types=2)
    assert commonest.tolist() == [5, 4, 4]  # of 4 and 7, equally common, the smaller
    assert predict(commonest, np.array([1, 0, 0])).tolist() == [4, 5, 5]


def test_commonest_answer_of_all_serves_types_without_questions_and_unknown_types():
    types = np.array([0, 2, 2, 2, -1, -1, -1])
    answers = np.array([4, 6, 6, 6, 9, 9, 6])
    commonest = count_commonest(answers, types, num_types=3)
    assert predict(commonest, np.array([0, 1, 2, -1])).tolist() == [4, 6, 6, 6]  # 6 four times, 9 twice


def test_commonest_matches_a_count_by_hand_on_many_questions():
    rng = np.random.default_rng(0)
    types, answers = rng.integers(0, 5, 2000), rng.integers(3, 12, 2000)
    commonest = count_commonest(answers, types, num_types=5)
    for kind in range(5):
        of_kind = answers[types == kind].tolist()
        assert of_kind.count(commonest[kind]) == max(of_kind.count(answer) for answer in range(12))


@pytest.mark.parametrize(("answers", "types"), [([], []), ([4, 5], [0])])
def test_no_questions_or_unequal_numbers_are_refused(answers, types):
    with pytest.raises(ValueError, match=f"{len(answers)} answers and {len(types)} types"):
        count_commonest(np.array(answers, dtype=int), np.array(types, dtype=int), num_types=2)
