import numpy as np
import pytest
from batching_cases import ARITY_V, BINARY_A, LEAF, UNARY_A, UNARY_B, quick, toy_programs
from hypothesis import given, settings
from schedule_cases import (
    assert_valid,
    clevr_graph,
    images_graph,
    naive_distance,
    naive_height,
    naive_paths,
    random_dag,
    takes_of,
    tree_graph,
)

from iep.batching.graph import Graph
from iep.batching.schedulers import SCHEDULERS, lower_bound, make_schedule


@pytest.mark.parametrize("name", SCHEDULERS)
@given(tokens_BL=toy_programs)
@settings(quick, max_examples=60)
def test_every_schedule_of_trees_runs_each_node_once_after_its_arguments(name, tokens_BL):
    for leaf_is_input in (False, True):
        graph = tree_graph(tokens_BL, leaf_is_input)
        assert_valid(graph, make_schedule(graph, name))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("seed", range(8))
def test_every_schedule_of_a_graph_with_shared_nodes_runs_each_node_once_after_its_arguments(name, seed):
    graph = random_dag(seed)
    assert_valid(graph, make_schedule(graph, name))


@pytest.mark.parametrize("seed", range(4))
def test_improved_labels_a_shared_node_by_its_longest_path(seed):
    graph = random_dag(seed)
    labels = [(-distance, op) for distance, op in zip(naive_distance(graph), graph.op.tolist(), strict=True)]
    expected = [(label[1], [node for node, own in enumerate(labels) if own == label]) for label in sorted(set(labels))]
    assert as_lists(make_schedule(graph, "improved")) == expected


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=60)
def test_numbers_of_calls_are_those_of_the_definitions(tokens_BL):
    graph = tree_graph(tokens_BL)
    nodes, ops = range(graph.num_nodes), graph.op.tolist()
    first_of_example = {}
    for node, example in enumerate(graph.example.tolist()):
        first_of_example.setdefault(example, node)
    step = [node - first_of_example[graph.example[node]] for node in nodes]
    assert len(make_schedule(graph, "vanilla")) == graph.num_nodes
    assert len(make_schedule(graph, "standard")) == len(set(zip(step, ops, strict=True)))
    assert len(make_schedule(graph, "improved")) == len(set(zip(naive_distance(graph), ops, strict=True)))
    assert len(make_schedule(graph, "height")) == len(set(zip(naive_height(graph), ops, strict=True)))


# Two programs: A(leaf), and binary(A(leaf), B(A(leaf))). In post-order: leaf A | leaf A leaf A B binary.
TWO_TREES = [[UNARY_A, LEAF], [BINARY_A, UNARY_A, LEAF, UNARY_B, UNARY_A, LEAF]]


def as_lists(schedule):
    return [(group.op, group.nodes.tolist()) for group in schedule]


def test_vanilla_runs_example_by_example_children_first():
    expected = [LEAF, UNARY_A, LEAF, UNARY_A, LEAF, UNARY_A, UNARY_B, BINARY_A]
    assert as_lists(make_schedule(tree_graph(TWO_TREES), "vanilla")) == [(op, [n]) for n, op in enumerate(expected)]


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


def test_height_runs_the_nodes_nearest_to_the_leaves_first():
    assert as_lists(make_schedule(tree_graph(TWO_TREES), "height")) == [
        (LEAF, [0, 2, 4]),
        (UNARY_A, [1, 3, 5]),
        (UNARY_B, [6]),
        (BINARY_A, [7]),
    ]


def naive_agenda(graph):
    """One call after another, every average anew."""
    takes, height, ops = takes_of(graph), naive_height(graph), graph.op.tolist()
    left, schedule = set(range(graph.num_nodes)), []
    while left:
        ready = [node for node in sorted(left) if not left & set(takes[node])]
        heights = {op: [height[node] for node in left if ops[node] == op] for op in {ops[node] for node in ready}}
        best = min(heights, key=lambda op: (sum(heights[op]) / len(heights[op]), op))
        schedule.append((best, [node for node in ready if ops[node] == best]))
        left -= set(schedule[-1][1])
    return schedule


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=40)
def test_agenda_runs_what_is_ready_of_the_op_whose_remaining_nodes_are_the_lowest_on_average(tokens_BL):
    graph = tree_graph(tokens_BL)
    assert as_lists(make_schedule(graph, "agenda")) == naive_agenda(graph)


@pytest.mark.parametrize("seed", range(8))
def test_agenda_waits_for_all_arguments_of_a_node_of_a_graph_with_shared_nodes(seed):
    graph = random_dag(seed)
    assert as_lists(make_schedule(graph, "agenda")) == naive_agenda(graph)


def naive_lower_bound(graph):
    paths = naive_paths(graph)
    return sum(max(path.count(op) for path in paths) for op in set(graph.op.tolist()))


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=60)
def test_the_lower_bound_of_trees_is_that_of_their_paths_and_no_schedule_is_below_it(tokens_BL):
    graph = tree_graph(tokens_BL)
    assert lower_bound(graph) == naive_lower_bound(graph)
    for name in SCHEDULERS:
        assert len(make_schedule(graph, name)) >= lower_bound(graph)


@pytest.mark.parametrize("seed", range(8))
def test_the_lower_bound_of_a_graph_with_shared_nodes_is_that_of_its_paths(seed):
    graph = random_dag(seed, num_nodes=30)
    assert lower_bound(graph) == naive_lower_bound(graph)
    for name in SCHEDULERS:
        assert len(make_schedule(graph, name)) >= lower_bound(graph)


def test_a_chain_needs_as_many_calls_as_it_has_nodes_and_the_lower_bound_knows():
    graph = tree_graph([[UNARY_A, UNARY_B, UNARY_A, UNARY_A, LEAF]] * 3)
    assert [len(make_schedule(graph, name)) for name in ("height", "agenda", "lookahead")] == [5, 5, 5]
    assert lower_bound(graph) == 5


def test_improved_needs_fewer_calls_where_branches_run_side_by_side():
    branch = [UNARY_A] * 5 + [LEAF]
    graph = tree_graph([[BINARY_A, *branch, *branch]] * 7)
    assert len(make_schedule(graph, "vanilla")) == 7 * 13
    assert len(make_schedule(graph, "standard")) == 13
    assert len(make_schedule(graph, "improved")) == 7


def test_equal_chains_need_one_call_per_step_however_many_examples():
    graph = tree_graph([[UNARY_A, UNARY_B, UNARY_A, LEAF]] * 9)
    assert len(make_schedule(graph, "standard")) == len(make_schedule(graph, "improved")) == 4


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_graph_without_nodes_has_an_empty_schedule(name):
    graph = tree_graph([[LEAF], [LEAF]], leaf_is_input=True)
    assert make_schedule(graph, name) == ()
    assert lower_bound(graph) == 0


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_same_graph_has_the_same_schedule_every_time(name):
    first, second = (as_lists(make_schedule(clevr_graph(64, seed=0), name)) for _ in range(2))
    assert first == second


def test_an_unknown_scheduler_is_refused_with_the_known_ones():
    known = "vanilla, standard, improved, height, agenda, lookahead"
    with pytest.raises(ValueError, match=f"'improve', expected one of {known}"):
        make_schedule(tree_graph(TWO_TREES), "improve")


@pytest.mark.parametrize("seed", range(6))
def test_longest_paths_are_those_of_the_definition(seed):
    for graph in (random_dag(seed), random_dag(seed, num_inputs=1, num_nodes=3), clevr_graph(5, seed)):
        assert graph.height.tolist() == naive_height(graph)
        paths = naive_paths(graph)
        expected = {op: max(path.count(op) for path in paths) for op in set(graph.op.tolist())}
        assert lower_bound(graph) == sum(expected.values())


def test_lookahead_needs_no_more_calls_than_the_lower_bound_where_height_does():
    """Two chains of ops of their own: as many calls as nodes, of which one path has only half."""
    num_nodes = 12
    args = np.where(np.arange(num_nodes) % 6, np.arange(num_nodes), 0)[:, None]
    graph = Graph(1, np.arange(num_nodes) // 6, args, np.zeros(num_nodes, dtype=int), np.array([6, num_nodes]))
    assert len(make_schedule(graph, "height")) == num_nodes
    assert len(make_schedule(graph, "lookahead")) == lower_bound(graph) == num_nodes


@pytest.mark.parametrize("name", SCHEDULERS)
@given(tokens_BL=toy_programs)
@settings(quick, max_examples=10)
def test_a_schedule_over_families_runs_each_node_once_after_its_arguments_sorted_by_function(name, tokens_BL):
    graph = images_graph(tokens_BL)
    families = {op: 100 + int(arity) for op, arity in enumerate(ARITY_V.tolist()) if arity}
    done = set(range(graph.num_inputs))
    for op, nodes, segments in make_schedule(graph, name, families):
        functions = graph.op[nodes].tolist()
        if segments is None:
            assert set(functions) == {op}
        else:
            assert functions == sorted(functions)
            assert [each.op for each in segments for _ in range(each.rows.stop - each.rows.start)] == functions
        assert set(graph.args[nodes].ravel().tolist()) - {-1} <= done
        done |= set((graph.num_inputs + nodes).tolist())
    assert len(done) == graph.num_inputs + graph.num_nodes


@pytest.mark.parametrize(("questions", "most"), [(64, 23), (256, 25)])
def test_lookahead_over_families_needs_about_one_call_for_each_level(questions, most):
    graph = clevr_graph(questions, 0, scene_is_input=True)
    arity = (graph.args >= 0).sum(axis=1)
    families = {int(op): 100 + int(many) for op, many in zip(graph.op, arity, strict=True)}
    calls = len(make_schedule(graph, "lookahead", families))
    assert int(graph.height.max()) + 1 <= calls <= most
