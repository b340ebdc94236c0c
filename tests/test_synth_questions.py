"""Questions about synthetic scenes: well posed, not degenerate, balanced, in CLEVR's words and functions."""

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from test_synth_executor import naive_answer, spelled

from iep.programs import json_to_prefix, prefix_to_json
from iep.synth.presets import PRESETS
from iep.synth.question_generator import Question
from iep.synth.synthesize import BLOCK, make_image
from iep.synth.tally import Tally, guessing_accuracy, most_common_shares
from iep.synth.templates import FAMILIES, GROUPS
from iep.synth.world import ATTRIBUTES
from iep.vocab import SPECIAL_TOKENS, Vocab, tokenize

CLEVR = Vocab.clevr()

# Those of CLEVR v1.0, without the empty word of doubled spaces, which our text does not have.
WORDS, FUNCTIONS, ANSWERS = (
    set(tokens) - {"", *SPECIAL_TOKENS} for tokens in (CLEVR.question, CLEVR.program, CLEVR.answer)
)


def made(preset: str, images: int) -> list[tuple[dict, Question]]:
    """Scenes' JSON and questions as the data set has them, without pictures."""
    pairs = []
    for index in range(images):
        if index % BLOCK == 0:
            balance: Counter = Counter()
        _, scene, questions = make_image(PRESETS[preset], "train", index, balance)
        pairs += [(scene, question) for question in questions]
    return pairs


@pytest.fixture(scope="module")
def clevr() -> list[tuple[dict, Question]]:
    return made("clevr", 400)


@pytest.fixture(scope="module")
def mini() -> list[tuple[dict, Question]]:
    return made("mini", 100)


def test_every_function_and_every_answer_occurs_and_no_other(clevr: list) -> None:
    assert {token for _, question in clevr for token in json_to_prefix(list(question.program))} == FUNCTIONS
    assert {question.answer for _, question in clevr} == ANSWERS


def test_words_are_clevrs_all_of_them_and_no_other(clevr: list) -> None:
    assert {token for _, question in clevr for token in tokenize(question.text)} == WORDS


def test_all_ninety_families_of_nine_groups_occur(clevr: list) -> None:
    assert {question.family for _, question in clevr} == set(range(90))
    assert {family.group for family in FAMILIES} == set(GROUPS)
    assert [family.index for family in FAMILIES] == list(range(90))


@pytest.mark.parametrize("preset", ["clevr", "mini"])
def test_answers_are_those_of_a_naive_executor_so_nothing_is_ill_posed(
    preset: str, request: pytest.FixtureRequest
) -> None:
    for scene, question in request.getfixturevalue(preset):
        assert spelled(naive_answer(list(question.program), scene)) == question.answer


def test_programs_survive_the_way_to_prefix_tokens_and_back(clevr: list) -> None:
    for _, question in clevr:
        program = list(question.program)
        assert prefix_to_json(json_to_prefix(program)) == program
        assert all(set(call) == {"inputs", "function", "value_inputs"} for call in program)


def test_filters_follow_the_order_size_color_material_shape(clevr: list) -> None:
    for _, question in clevr:
        # In prefix order the last filter of a description comes first.
        ranks = [ATTRIBUTES.index(t[7:].partition("[")[0]) if t.startswith("filter_") else -1 for t in prefix(question)]
        extra = FAMILIES[question.family].extra is not None
        for first, second in list(pairwise(ranks))[1 if extra else 0 :]:
            assert first > second or first == -1


def prefix(question: Question) -> list[str]:
    return json_to_prefix(list(question.program))


@pytest.mark.parametrize("preset", ["clevr", "mini"])
def test_dropping_a_relation_always_changes_the_set_that_its_phrase_names(
    preset: str, request: pytest.FixtureRequest
) -> None:
    tried = 0
    for scene, question in request.getfixturevalue(preset):
        program = list(question.program)
        for position, call in enumerate(program):
            if call["function"] != "relate" and not call["function"].startswith("same_"):
                continue
            last = position  # of the filters (and the intersection) that follow
            while (after := user_of(program, last)) is not None and is_part_of_phrase(program[after]["function"]):
                last = after
            without = [
                *program[:position],
                {"function": "scene", "inputs": [], "value_inputs": []},
                *program[position + 1 :],
            ]
            assert naive_answer(program[: last + 1], scene) != naive_answer(without[: last + 1], scene), question
            tried += 1
    assert tried > 1000


def user_of(program: list[dict], position: int) -> int | None:
    return next((i for i, call in enumerate(program) if position in call["inputs"]), None)


def is_part_of_phrase(function: str) -> bool:
    return function.startswith("filter_") or function == "intersect"


def test_both_sides_of_an_or_add_something_and_compared_sets_differ(clevr: list) -> None:
    seen = Counter()
    for scene, question in clevr:
        group = FAMILIES[question.family].group
        program = list(question.program)
        if group not in ("single_or", "compare_integer"):
            continue
        seen[group] += 1
        root = next(call for call in program if call["function"] == "union") if group == "single_or" else program[-1]
        ends = root["inputs"] if group == "single_or" else [program[i]["inputs"][0] for i in root["inputs"]]
        left, right = (naive_answer(program[: end + 1], scene) for end in ends)
        assert left != right
        if group == "single_or":
            assert left - right
            assert right - left
    assert min(seen.values()) > 100


def test_a_phrase_never_gives_away_the_attribute_that_is_asked_or_compared(clevr: list) -> None:
    for _, question in clevr:
        program = list(question.program)
        for call in program:
            kind, _, attribute = call["function"].partition("_")
            if kind == "query":
                position = program[call["inputs"][0]]["inputs"][0]  # below `unique`
                while is_part_of_phrase(program[position]["function"]):
                    assert program[position]["function"] != f"filter_{attribute}"
                    position = program[position]["inputs"][0]
                assert program[position]["function"] != f"same_{attribute}"


def test_questions_of_an_image_are_all_different(clevr: list) -> None:
    programs = defaultdict(list)
    for scene, question in clevr:
        programs[scene["image_index"]].append(tuple(prefix(question)))
    assert all(len(set(asked)) == len(asked) == 10 for asked in programs.values())


@pytest.mark.parametrize(("preset", "most_modules"), [("clevr", 9.7), ("mini", 7.6)])
def test_blind_guessing_gets_what_it_gets_on_clevr(
    preset: str, most_modules: float, request: pytest.FixtureRequest
) -> None:
    tally = Tally()
    for _, question in request.getfixturevalue(preset):
        tally.add(question.program, question.answer)
    assert 0.35 < guessing_accuracy(tally.answers) < 0.45  # about 42% on CLEVR
    for kind, (_, share, count) in most_common_shares(tally.answers).items():
        limit = {"count": 0.42, "query: color": 0.20, "query: shape": 0.40}.get(kind, 0.60)
        if preset == "mini" and kind.startswith("compare: "):
            limit = 0.75  # two or three things seldom share a colour or a shape
        assert share < limit, kind
        assert count > 30, kind
    assert tally.modules / tally.answers.total() == pytest.approx(most_modules, abs=0.3)


def test_sentences_begin_with_a_capital_end_with_a_question_mark_and_hold_no_placeholder(clevr: list) -> None:
    for _, question in clevr:
        assert question.text[0].isupper()
        assert question.text.endswith("?")
        assert not set(question.text) & set("{}_[]")
        assert "  " not in question.text
        assert " a object" not in question.text
        assert len(tokenize(question.text)) <= 46  # the longest question of CLEVR


def test_words_say_the_values_that_the_program_filters_by(clevr: list) -> None:
    spoken = {"large": {"large", "big"}, "small": {"small", "tiny"}, "metal": {"metal", "metallic", "shiny"}}
    spoken |= {"rubber": {"rubber", "matte"}, "cube": {"cube", "cubes", "block", "blocks"}}
    spoken |= {"sphere": {"sphere", "spheres", "ball", "balls"}, "cylinder": {"cylinder", "cylinders"}}
    for _, question in clevr:
        values = Counter(call["value_inputs"][0] for call in question.program if call["function"].startswith("filter_"))
        words = Counter(tokenize(question.text.replace("ow big is", "")))
        for value, count in values.items():
            assert sum(words[word] for word in spoken.get(value, {value})) == count, question
