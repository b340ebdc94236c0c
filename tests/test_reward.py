"""The answer that is read in a response, and its reward."""

import pytest

from iep.reward import clevr_reward, read_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Yes", "yes"),
        ("yes, there is a red cube.", "yes"),
        ("<think>a <answer>red</answer> one?</think>\n<answer> Three </answer>", "3"),
        ("<answer>red <answer>blue</answer> or green</answer>", "blue"),
        (r"So it is \boxed{\text{Cyan}}.", "cyan"),
        ("I see a cube and a ball.\nThe answer is: a ball", "sphere"),
        ("The answer is red. No, the answer is blue.", "blue"),
        ("Answer: 007", "7"),
        ("There are 3.0 of them", "3"),
        ("a metallic thing", "metal"),
        ("12", "12"),
        ("crimson", "crimson"),
        ("true", "yes"),
        ("It is gray or green", None),
        ("the big red cube", None),
        ("<answer></answer>", None),
        ("...", None),
        ("", None),
    ],
)
def test_the_answer_of_a_response_is_read_in_clevrs_words(response: str, answer: str | None):
    assert read_answer(response) == answer


@pytest.mark.parametrize("unit", ["<answer>", r"\boxed{", "answer is ", " ", "0"])
def test_the_answer_is_read_after_200_000_repetitions(unit: str):
    """In quadratic time, a test would take many minutes."""
    assert read_answer(200_000 * unit + "\nThe answer is 3") == "3"


def test_the_reward_is_one_for_the_right_answer_however_either_is_marked():
    assert clevr_reward("I count <answer>two</answer>", "2") == 1.0
    assert clevr_reward("2", "<answer>2</answer>") == 1.0
    assert clevr_reward("<answer>3</answer>", "2") == 0.0
    assert clevr_reward("no idea", "2") == 0.0
    assert clevr_reward("", "") == 0.0
