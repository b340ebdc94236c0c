import numpy as np
import pytest
from batching_cases import BINARY_A, LEAF, UNARY_A, UNARY_B, quick, toy_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import (
    arguments_of,
    assert_valid,
    clevr_graph,
    graphs,
    naive_distance,
    naive_height,
    naive_paths,
    tree_graph,
)

from iep.batching.graph import Graph
from iep.batching.schedulers import SCHEDULERS, lower_bound, make_schedule


@pytest.mark.parametrize("name", SCHEDULERS)
@given(graph=graphs, families=st.booleans())
@settings(quick, max_examples=60)
def test_every_schedule_runs_each_node_once_after_its_arguments(name, graph, families):
    """A family here is all ops of one number of arguments."""
    arity = (graph.args >= 0).sum(axis=1)
    family = {int(op): 100 + int(many) for op, many in zip(graph.op, arity, strict=True)} if families else None
    assert_valid(graph, make_schedule(graph, name, family))


@given(graph=graphs)
@settings(quick, max_examples=60)
def test_schedules_and_their_bound_are_those_of_the_definitions(graph):
    ops = graph.op.tolist()
    assert as_lists(make_schedule(graph, "vanilla")) == [(op, [node]) for node, op in enumerate(ops)]
    assert as_lists(make_schedule(graph, "improved")) == grouped([-far for far in naive_distance(graph)], ops)
    assert as_lists(make_schedule(graph, "height")) == grouped(naive_height(graph), ops)
    paths = naive_paths(graph)
    assert lower_bound(graph) == sum(max(path.count(op) for path in paths) for op in set(ops))
    assert all(len(make_schedule(graph, name)) >= lower_bound(graph) for name in SCHEDULERS)


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=30)
def test_standard_makes_one_call_for_each_step_and_op(tokens_BL):
    graph = tree_graph(tokens_BL)
    step = np.arange(graph.num_nodes) - np.unique(graph.example, return_index=True)[1][graph.example]
    assert len(make_schedule(graph, "standard")) == len(set(zip(step.tolist(), graph.op.tolist(), strict=True)))


def as_lists(schedule):
    return [(group.op, group.nodes.tolist()) for group in schedule]


def grouped(turns, ops):
    """The calls where nodes of one turn and op run together."""
    nodes = {}
    for node, label in enumerate(zip(turns, ops, strict=True)):
        nodes.setdefault(label, []).append(node)
    return [(op, nodes[turn, op]) for turn, op in sorted(nodes)]


# Two programs: A(leaf), and binary(A(leaf), B(A(leaf))). In post-order: leaf A | leaf A leaf A B binary.
TWO_TREES = [[UNARY_A, LEAF], [BINARY_A, UNARY_A, LEAF, UNARY_B, UNARY_A, LEAF]]


def test_standard_runs_the_same_step_of_every_example_together():
    assert as_lists(make_schedule(tree_graph(TWO_TREES), "standard")) == [
        (LEAF, [0, 2]),
        (UNARY_A, [1, 3]),
        (LEAF, [4]),
        (UNARY_A, [5]),
        (UNARY_B, [6]),
        (BINARY_A, [7]),
    ]


def test_improved_runs_the_nodes_farthest_from_the_root_first():
    assert as_lists(make_schedule(tree_graph(TWO_TREES), "improved")) == [
        (LEAF, [4]),
        (LEAF, [2]),
        (UNARY_A, [5]),
        (LEAF, [0]),
        (UNARY_A, [3]),
        (UNARY_B, [6]),
        (UNARY_A, [1]),
        (BINARY_A, [7]),
    ]


def naive_agenda(graph):
    """One call after another, every average anew."""
    arguments, height, ops = arguments_of(graph), naive_height(graph), graph.op.tolist()
    left, schedule = set(range(graph.num_nodes)), []
    while left:
        ready = [node for node in sorted(left) if not left & set(arguments[node])]
        heights = {op: [height[node] for node in left if ops[node] == op] for op in {ops[node] for node in ready}}
        best = min(heights, key=lambda op: (sum(heights[op]) / len(heights[op]), op))
        schedule.append((best, [node for node in ready if ops[node] == best]))
        left -= set(schedule[-1][1])
    return schedule


@given(graph=graphs)
@settings(quick, max_examples=40)
def test_agenda_runs_all_ready_nodes_of_the_op_whose_remaining_nodes_are_lowest_on_average(graph):
    assert as_lists(make_schedule(graph, "agenda")) == naive_agenda(graph)


def test_improved_needs_fewer_calls_where_branches_run_side_by_side():
    branch = [UNARY_A] * 5 + [LEAF]
    graph = tree_graph([[BINARY_A, *branch, *branch]] * 7)
    assert len(make_schedule(graph, "vanilla")) == 7 * 13
    assert len(make_schedule(graph, "standard")) == 13
    assert len(make_schedule(graph, "improved")) == 7


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_graph_without_nodes_has_an_empty_schedule(name):
    graph = tree_graph([[LEAF], [LEAF]], leaf_is_input=True)
    assert make_schedule(graph, name) == ()
    assert lower_bound(graph) == 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_graph_has_the_same_schedule_every_time(name):
    first, second = (as_lists(make_schedule(clevr_graph(64, seed=0), name)) for _ in range(2))
    assert first == second


def test_an_unknown_scheduler_is_an_error_that_names_the_known_ones():
    known = "vanilla, standard, improved, height, agenda, lookahead"
    with pytest.raises(ValueError, match=f"'improve', expected one of {known}"):
        make_schedule(tree_graph(TWO_TREES), "improve")


def test_lookahead_needs_no_more_calls_than_the_lower_bound_where_height_does():
    """Two chains of ops of their own: as many calls as nodes, of which one path has only half."""
    num_nodes = 12
    args = np.where(np.arange(num_nodes) % 6, np.arange(num_nodes), 0)[:, None]
    graph = Graph(1, np.arange(num_nodes) // 6, args, np.zeros(num_nodes, dtype=int), np.array([6, num_nodes]))
    assert len(make_schedule(graph, "height")) == num_nodes
    assert len(make_schedule(graph, "lookahead")) == lower_bound(graph) == num_nodes


@pytest.mark.parametrize(("questions", "most"), [(64, 23), (256, 25)])
def test_lookahead_over_families_needs_about_one_call_for_each_level(questions, most):
    graph = clevr_graph(questions, 0, scene_is_input=True)
    arity = (graph.args >= 0).sum(axis=1)
    families = {int(op): 100 + int(many) for op, many in zip(graph.op, arity, strict=True)}
    calls = len(make_schedule(graph, "lookahead", families))
    assert int(graph.height.max()) + 1 <= calls <= most
