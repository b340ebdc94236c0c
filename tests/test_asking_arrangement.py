"""Where things lie in the picture of an answer."""

import hypothesis.strategies as st
from batching_cases import quick
from hypothesis import example, given, settings

from iep.asking.picture import LEFT, arrange, tree_columns, wrapped
from iep.programs import program_tree

TOKENS = ["scene", "count", "filter_color[red]", "union", "equal_size", "relate[left]"]
programs = st.lists(st.sampled_from(TOKENS), max_size=60)


def width(text):
    return 0.07 * len(text)


def assert_apart(boxes):
    slack = 1e-9
    for place, one in enumerate(boxes):
        for other in boxes[:place]:
            across = min(one.right, other.right) - max(one.x, other.x)
            down = min(one.bottom, other.bottom) - max(one.y, other.y)
            assert across <= slack or down <= slack, (one, other)


@given(programs, st.integers(1, 800), st.integers(1, 800), st.integers(0, 5), st.integers(1, 9), st.integers(1, 6))
@example(["count"] * 60, 480, 320, 4, 3, 2)
@example(["union"] * 60, 128, 128, 4, 3, 2)
@settings(quick)
def test_no_two_boxes_overlap_and_all_lie_in_the_picture(tokens, across, down, question, answers, notes):
    tree = program_tree(tokens)
    labels = [[node.token, "(filled in)"] for node in tree.nodes]
    found = arrange(tree, labels, width, (across, down), question, answers, notes)
    assert len(found.pictures) == len(found.labels) == len(tree.nodes)
    assert_apart([box for box in found.boxes if box.width > 0 and box.height > 0])
    for box in found.boxes:
        assert min(box.x, box.y) >= -1e-9
        assert box.right <= found.width + 1e-9
        assert box.bottom <= found.height + 1e-9


@given(programs)
@settings(quick)
def test_arguments_stand_in_order_below_the_middle_of_what_takes_them(tokens):
    tree = program_tree(tokens)
    columns = tree_columns([node.arguments for node in tree.nodes])
    assert min(columns) == 0
    for node, column in zip(tree.nodes, columns, strict=True):
        places = [columns[argument] for argument in node.arguments]
        assert places == sorted(places)
        if places:
            assert abs((places[0] + places[-1]) / 2 - column) < 1e-9


def test_a_chain_is_one_column_and_a_pair_two():
    assert tree_columns([(1,), (2,), ()]) == [0, 0, 0]
    assert tree_columns([(1, 2), (), ()]) == [0.5, 0, 1]


@given(st.text(alphabet="ab ", max_size=80), st.floats(0.2, 3.0))
@settings(quick)
def test_wrapped_lines_fit_and_hold_every_letter(text, most):
    lines = wrapped(text, most, width)
    assert all(width(line) <= most for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert all(lines)


def test_a_question_wraps_between_words():
    assert wrapped("How many things are there?", 14 * 0.07, width) == ["How many", "things are", "there?"]
    assert wrapped("", LEFT, width) == []
