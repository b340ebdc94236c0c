import numpy as np
import pytest
from batching_cases import ARITY_V, BINARY_A, LEAF, PAD, SKIP, UNARY_A, UNARY_B, matrix, quick, toy_programs
from hypothesis import given, settings

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.schedulers import SCHEDULERS, distance_from_root, make_schedule


def tree_graph(rows, leaf_is_input=False):
    tokens_BL = rows if isinstance(rows, np.ndarray) else matrix(rows)
    return graph_from_prefix(tokens_BL, ARITY_V, leaf=LEAF, skip=SKIP, pad=PAD, leaf_is_input=leaf_is_input)


def random_dag(seed, num_inputs=4, num_nodes=40, num_ops=5):
    """Nodes that take any earlier slots, of any example: shared results, several inputs, nodes that nothing uses."""
    rng = np.random.default_rng(seed)
    op = rng.integers(0, num_ops, num_nodes)
    args = np.full((num_nodes, 2), -1)
    for node in range(num_nodes):
        args[node, : 1 + op[node] % 2] = rng.integers(0, num_inputs + node, 1 + op[node] % 2)
    example = rng.integers(0, num_inputs, num_nodes)
    return Graph(num_inputs, op, args, example, rng.integers(0, num_inputs + num_nodes, num_inputs))


def assert_valid(graph, schedule):
    """Every node once, one op to a group, arguments in earlier groups."""
    done = set(range(graph.num_inputs))
    for group in schedule:
        assert len(group.nodes) > 0
        assert (graph.op[group.nodes] == group.op).all()
        slots = set(graph.args[group.nodes].ravel().tolist()) - {-1}
        assert slots <= done
        results = set((graph.num_inputs + group.nodes).tolist())
        assert len(results) == len(group.nodes)
        assert not results & done
        done |= results
    assert len(done) == graph.num_inputs + graph.num_nodes


def naive_distance(graph):
    """Longest path up from every node, by looking through all its takers."""
    takers = {
        n: [t for t in range(graph.num_nodes) if graph.num_inputs + n in graph.args[t]] for n in range(graph.num_nodes)
    }
    distance = {}
    for node in reversed(range(graph.num_nodes)):
        distance[node] = max((distance[taker] + 1 for taker in takers[node]), default=0)
    return [distance[node] for node in range(graph.num_nodes)]


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
    assert distance_from_root(graph).tolist() == naive_distance(graph)


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
    assert make_schedule(tree_graph([[LEAF], [LEAF]], leaf_is_input=True), name) == ()


def test_an_unknown_scheduler_is_refused_with_the_known_ones():
    known = "vanilla, standard, improved, height, agenda, lookahead"
    with pytest.raises(ValueError, match=f"'improve', expected one of {known}; did you mean 'improved'"):
        make_schedule(tree_graph(TWO_TREES), "improve")
