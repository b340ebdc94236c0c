"""Programs as indented lines: the tree that the engine runs, and two of them in rows of equal lines."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_data import VOCAB

from iep.batching.reference import run_prefix
from iep.evaluation.program_trees import Kind, Line, side_by_side, tree_lines
from iep.programs import arity
from iep.vocab import END, NULL, START

TOKENS = st.lists(st.integers(0, len(VOCAB.program) - 1), max_size=12)
SCENE = VOCAB.program_index["scene"]


def lines(program: str, end: bool = True) -> list[Line]:
    tokens = [VOCAB.program_index[token] for token in program.split()]
    return tree_lines([START, *tokens, *([END] if end else []), NULL], VOCAB)


def drawn(found: list[Line]) -> list[str]:
    marks = {Kind.FUNCTION: "", Kind.IMPLIED: "?", Kind.IGNORED: "!"}
    return ["." * line.depth + VOCAB.program[line.token] + marks[line.kind] for line in found]


def test_arguments_stand_below_their_function_one_step_further_in():
    program = "count union filter_color[red] scene filter_shape[cube] scene"
    expected = ["count", ".union", "..filter_color[red]", "...scene", "..filter_shape[cube]", "...scene"]
    assert drawn(lines(program)) == expected


def test_what_the_engine_makes_up_for_or_leaves_out_is_marked():
    assert drawn(lines("count", end=False)) == ["count", ".scene?"]
    assert drawn(lines("count")) == ["count", ".<END>", "..scene?"], "an <END> inside a tree runs as a function"
    assert drawn(lines("scene count exist")) == ["scene", "count!", "exist!"]
    assert drawn(lines("union <NULL> scene count")) == ["union", ".scene?", ".scene", "count!"]
    assert drawn(tree_lines([], VOCAB)) == ["scene?"]


@given(TOKENS)
def test_any_tokens_give_the_tree_that_the_reference_runs(tokens: list[int]):
    def run(token: int, *arguments: list[Line]) -> list[Line]:
        below = [line._replace(depth=line.depth + 1) for argument in arguments for line in argument]
        return [Line(0, token, Kind.FUNCTION), *below]

    tree = run_prefix(tokens, lambda token: arity(VOCAB.program[token]), run, [], SCENE, skip=START, pad=NULL)
    found = tree_lines(tokens, VOCAB)
    ran = [line for line in found if line.kind != Kind.IGNORED]
    assert [line[:2] for line in ran] == [line[:2] for line in tree]
    ignored = [line.token for line in found if line.kind == Kind.IGNORED]
    assert [*(line.token for line in ran if line.kind == Kind.FUNCTION), *ignored] == [
        token for token in tokens if token not in (NULL, START)
    ][: len(found) - sum(line.kind == Kind.IMPLIED for line in found)]


@given(TOKENS, TOKENS)
def test_both_columns_hold_every_line_once_and_in_order(left_tokens: list[int], right_tokens: list[int]):
    left, right = tree_lines(left_tokens, VOCAB), tree_lines(right_tokens, VOCAB)
    rows = side_by_side(left, right)
    assert [at for at, _ in rows if at is not None] == list(range(len(left)))
    assert [at for _, at in rows if at is not None] == list(range(len(right)))
    assert (None, None) not in rows


def test_below_a_function_that_only_one_has_the_rest_is_the_same():
    left, right = lines("count filter_color[red] scene"), lines("count filter_shape[cube] filter_color[red] scene")
    assert side_by_side(left, right) == [(0, 0), (None, 1), (1, 2), (2, 3)]
    assert side_by_side(lines("count scene"), lines("exist scene")) == [(0, 0), (1, 1)]
