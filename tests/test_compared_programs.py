"""Programs as indented lines, and two of them in rows of equal lines."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_data import VOCAB

from iep.evaluation.page_questions import FILLED_IN, IGNORED, Line, program_lines, side_by_side
from iep.execution_engine.choices import make_module_set
from iep.programs import NOT_USED
from iep.vocab import END, NULL, START

TOKENS = st.lists(st.integers(0, len(VOCAB.program) - 1), max_size=12)


def lines(program: str, end: bool = True, modules: str | None = None) -> list[Line]:
    tokens = [VOCAB.program_index[token] for token in program.split()]
    own = None if modules is None else make_module_set(modules, dim=1, residual=True, norm="none", scene="module")
    return program_lines([START, *tokens, *([END] if end else []), NULL], VOCAB, own)


def drawn(found: list[Line]) -> list[str]:
    marks = {"": "", FILLED_IN: "?", IGNORED: "!", NOT_USED: "-"}
    return ["." * line.depth + line.token + marks[line.kind] for line in found]


def test_arguments_stand_below_their_function_one_step_further_in():
    program = "count union filter_color[red] scene filter_shape[cube] scene"
    expected = ["count", ".union", "..filter_color[red]", "...scene", "..filter_shape[cube]", "...scene"]
    assert drawn(lines(program)) == expected


def test_what_is_filled_in_or_ignored_is_marked():
    assert drawn(lines("count", end=False)) == ["count", ".scene?"]
    assert drawn(lines("count")) == ["count", ".<END>", "..scene?"], "an <END> inside a tree runs as a function"
    assert drawn(lines("scene count exist")) == ["scene", "count!", "exist!"]
    assert drawn(lines("union <NULL> scene count")) == ["union", ".scene?", ".scene", "count!"]
    assert drawn(program_lines([], VOCAB)) == ["scene?"]


def test_values_of_a_kind_that_the_modules_do_not_take_are_marked_with_all_below_them():
    program = "count filter_color[red] exist filter_shape[cube] scene"
    expected = ["count", ".filter_color[red]", "..exist", "...filter_shape[cube]", "....scene"]
    assert drawn(lines(program)) == drawn(lines(program, modules="iep")) == expected
    assert drawn(lines(program, modules="tbd")) == [*expected[:2], *(line + "-" for line in expected[2:])]


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
