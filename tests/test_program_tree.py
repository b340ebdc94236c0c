"""Program tokens, well-formed or not, as the tree that runs; and that tree as text."""

import hypothesis.strategies as st
from batching_cases import quick
from hypothesis import example, given, settings

from iep.batching.reference import run_prefix
from iep.programs import arity, named, program_tree, tokens_run, tree_lines, without
from iep.vocab import NULL, SPECIAL_TOKENS, START

TOKENS = (*SPECIAL_TOKENS, "scene", "count", "filter_color[red]", "union", "equal_size")
SCENE = TOKENS.index("scene")


@given(st.lists(st.sampled_from(TOKENS), max_size=12))
@example([])
@example(["<START>", "union", "<END>", "<NULL>", "<NULL>"])
@settings(quick)
def test_the_tree_is_the_one_that_the_engine_walks(tokens):
    def nested(number):
        return tree.nodes[number].token, *map(nested, tree.nodes[number].arguments)

    def called(token, *arguments):
        return (TOKENS[token], *(() if token == SCENE else arguments))

    tree = program_tree(tokens)
    indices = [TOKENS.index(token) for token in tokens]
    expected = run_prefix(indices, lambda token: arity(TOKENS[token]), called, None, SCENE, skip=START, pad=NULL)
    assert nested(0) == expected


@given(st.lists(st.sampled_from(TOKENS), max_size=12))
@settings(quick)
def test_nodes_are_in_prefix_order_and_post_order_has_arguments_first(tokens):
    tree = program_tree(tokens)
    for number, node in enumerate(tree.nodes):
        assert all(argument > number for argument in node.arguments)
        assert all(tree.nodes[argument].depth == node.depth + 1 for argument in node.arguments)
    place = {number: index for index, number in enumerate(tree.post_order)}
    assert sorted(place) == list(range(len(tree.nodes)))
    for number, node in enumerate(tree.nodes):
        places = [place[argument] for argument in node.arguments]
        assert places == sorted(places)
        assert all(before < place[number] for before in places)


def test_a_well_formed_program_is_drawn_with_a_line_for_each_function():
    tokens = [
        "<START>",
        "equal_size",
        "count",
        "union",
        "scene",
        "filter_color[red]",
        "scene",
        "count",
        "scene",
        "<END>",
        "<NULL>",
    ]
    tree = program_tree(tokens)
    assert tree_lines(tree, named) == [
        "equal_size",
        "├─ count",
        "│  └─ union",
        "│     ├─ scene",
        "│     └─ filter_color[red]",
        "│        └─ scene",
        "└─ count",
        "   └─ scene",
    ]
    assert tree.ignored == ()


def test_what_is_filled_in_and_what_is_ignored_is_told():
    cut_off = program_tree(["<START>", "union", "<NULL>", "count"])
    assert tree_lines(cut_off, named) == ["union", "├─ scene (filled in)", "└─ count", "   └─ scene (filled in)"]
    ended_inside = program_tree(["<START>", "count", "<END>"])
    assert tree_lines(ended_inside, named) == ["count", "└─ <END>", "   └─ scene (filled in)"]
    too_long = program_tree(["<START>", "scene", "union", "<NULL>", "count", "<END>", "count"])
    assert too_long.ignored == ("union", "count")


def test_a_program_of_a_thousand_functions_is_no_deeper_than_python_can_go():
    tree = program_tree(["count"] * 1500)
    assert len(tree.nodes) == 1501
    assert len(tree_lines(tree, named)) == 1501
    assert tree.post_order == list(range(1501))[::-1]


def test_what_is_not_used_is_told_with_all_below_it_and_scene_runs_instead():
    tree = without(program_tree(["union", "count", "filter_color[red]"]), {1: "not used: why"})
    assert tree_lines(tree, named) == [
        "union",
        "├─ count (not used: why)",
        "│  └─ filter_color[red] (not used)",
        "│     └─ scene (filled in; not used)",
        "└─ scene (filled in)",
    ]
    assert tokens_run(tree) == ["union", "scene", "scene"]
