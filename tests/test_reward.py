"""The answer that is read in a response, and its reward."""

import pytest

from iep.reward import clevr_reward, format_reward, read_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("yes, there is a red cube.", "yes"),
        ("<think>a <answer>red</answer> one?</think>\n<answer> Three </answer>", "3"),
        ("<think>...red cube and a blue one.</think>\nred", "red"),
        ("<think>It is <answer>red</answer>.</think>", None),
        ("<think>hmm 2", None),
        ("<answer>red <answer>blue</answer> or green</answer>", "blue"),
        ("<think>two of them</think><answer>3", "3"),
        ("I see a cube and a ball.\nThe answer is: a ball", "sphere"),
        ("The answer is red. No, the answer is blue.", "blue"),
        ("Two cubes and three spheres are large. [2]", "2"),
        ("Answer: 007", "7"),
        ("There are 3.0 of them", "3"),
        ("a metallic thing", "metal"),
        (3, "3"),
        (True, "yes"),
        ("crimson", "crimson"),
        ("It is gray or green", None),
        ("the big red cube", None),
        ("<answer></answer>", None),
        ("", None),
    ],
)
def test_the_answer_of_a_response_is_read_in_clevrs_words(response: object, answer: str | None):
    assert read_answer(response) == answer


# How models and trainers write an answer; each form with answers of every kind below.
FORMS = r"""
{}
**{}**
"{}"
Answer: {}
The answer is: **{}**
**Answer:** {}
### Answer: {}
The final answer is $\boxed{{{}}}$.
\boxed{{\text{{{}}}}}
[{}]
Therefore, [{}].
<answer>\n{}\n</answer>
<ANSWER>{}</ANSWER>
<answer>{}
<think>red? 4? yes, small metal cube</think><answer>{}</answer>
<think>red? 4? yes, small metal cube</think>\n\n{}
<think>red? 4? yes, small metal cube</think> The answer is {}.
red? 4? yes, small metal cube</think> {}
"""
SENTENCES = [
    ("There are 3 red cubes.", "3"),
    ("There are three red cubes left of the big ball.", "3"),
    ("Yes, there are 3 red cubes.", "3"),
    ("No, it is cyan.", "cyan"),
    ("There are no red cubes.", "0"),
    ("None of the red cubes are large.", "0"),
    ("3 objects are red", "3"),
    ("I see 2 cubes and 1 ball. So 3 things are red.", "3"),
    ("It is a grey sphere.", "gray"),
    ("The object left of the small metal ball has the color purple.", "purple"),
    ("The red cube is tiny.", "small"),
    ("The cyan ball is shiny.", "metal"),
    ("The big yellow thing is a block.", "cube"),
    ("It has a cylinder shape.", "cylinder"),
    ("No, there is one cube.", "no"),
    ("There are equally many, so yes", "yes"),
    ("There are 12 things.", "12"),
    ("The number of cubes is 3.", "3"),
    ("Both are cubes.", "cube"),
    ("Among the cubes, it is a ball.", "sphere"),
    ("It is spherical.", "sphere"),
    ("It has a cylindrical shape.", "cylinder"),
    ("It is a mountain bike.", "mountain bike"),
    ("mountain bike", "mountain bike"),
    ("It is a truck. A big truck.", "Truck"),
]


@pytest.mark.parametrize("form", FORMS.strip().splitlines())
def test_answers_of_every_kind_are_rewarded_in_every_form(form: str):
    form = form.replace(r"\n", "\n")
    for right, wrong in (("yes", "no"), ("3", "4"), ("large", "small"), ("cyan", "red"), ("metal", "rubber")):
        for said in (right, right.capitalize()):
            assert clevr_reward(form.format(said), right) == 1.0
            assert clevr_reward(form.format(said), wrong) == 0.0


@pytest.mark.parametrize(("sentence", "answer"), SENTENCES)
def test_a_sentence_is_read_by_the_kind_of_the_solution(sentence: str, answer: str):
    assert clevr_reward(sentence, answer) == 1.0
    others = {"3": "2", "0": "1", "yes": "no", "no": "yes"}
    assert clevr_reward(sentence, others.get(answer, "brown")) == 0.0


@pytest.mark.parametrize("form", ["red or green", "2 or 3", "It is red. It is also blue.", "not <answer>sure</answer>"])
def test_a_response_with_several_answers_or_none_has_no_reward(form: str):
    assert [clevr_reward(form, answer) for answer in ("red", "green", "2", "3", "yes")] == [0.0] * 5


@pytest.mark.parametrize("unit", ["<answer>", r"\boxed{", r"\text{", "answer is ", "answer*", "{", " ", "0", "[", ". "])
def test_the_answer_is_read_after_200_000_repetitions(unit: str):
    """In quadratic time, a test would take many minutes."""
    assert read_answer(200_000 * unit + "\nThe answer is 3") == "3"


@pytest.mark.parametrize(
    "same", ["mountain bike", "School Bus", "A", "C++", "-3", "none", "12", "red car", "a\tb", "是"]
)
def test_an_equal_answer_is_right_whatever_it_is(same: str):
    assert clevr_reward(same, same) == clevr_reward(f"<answer>{same}</answer>", same) == 1.0
    assert clevr_reward("another thing", same) == 0.0


@pytest.mark.parametrize(
    ("response", "solution"),
    [
        *(
            (None, "0"),
            ("-3", "3"),
            ("There are -3 cubes.", "3"),
            ("\N{MINUS SIGN}3", "3"),
            ("3", "-3"),
            ("red", "red car"),
        ),
        *(("It is not a mountain bike.", "mountain bike"), ("A school bus or a mountain bike", "mountain bike")),
    ],
)
def test_another_answer_is_wrong(response: object, solution: str):
    assert clevr_reward(response, solution) == 0.0


def test_the_answers_of_a_data_set_tell_short_answers_from_long_ones():
    answers = ["bike", "mountain bike", "truck"]
    assert read_answer("It is a mountain bike.", "bike", answers) == "mountain bike"
    assert read_answer("It is a bike, not a truck.", "bike", answers) is None
    assert read_answer("It is no truck. It is a bike.", "bike", answers) == "bike"


def test_the_solution_may_be_marked_and_either_may_be_a_number():
    assert clevr_reward("2", "<answer>2</answer>") == clevr_reward(3, "3") == clevr_reward("3", 3) == 1.0
    assert clevr_reward("no idea", "2") == clevr_reward("", "") == 0.0


def test_the_format_is_a_thought_and_then_an_answer():
    assert format_reward("<think>two\nof them</think>\n<answer>2</answer>") == 1.0
    for wrong in (
        "2",
        "{answer}",
        "{thought}",
        "<think></think>{answer}",
        "{thought} so {answer}",
        "{thought}{answer}{answer}",
    ):
        assert format_reward(wrong.format(thought="<think>2</think>", answer="<answer>2</answer>")) == 0.0
