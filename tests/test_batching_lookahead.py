"""From a graph's paths to a schedule of few calls: the steps of `lookahead`, and what they reach together."""

import heapq
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from batching_cases import quick, toy_programs
from hypothesis import given, settings
from schedule_cases import (
    assert_valid,
    clevr_graph,
    is_subsequence,
    ladder,
    naive_paths,
    random_dag,
    takes_of,
    tree_graph,
)

from iep.batching import paths, supersequence
from iep.batching.graph import Graph
from iep.batching.paths import op_strings
from iep.batching.schedulers import SCHEDULERS, lower_bound, make_schedule
from iep.batching.supersequence import short_supersequence


def strings_of(graph: Graph) -> list[tuple[int, ...]]:
    takes_NA = np.where(graph.args >= graph.num_inputs, graph.args - graph.num_inputs, -1)
    return as_tuples(op_strings(graph.op, takes_NA, np.ones(graph.num_nodes, dtype=bool)))


def as_tuples(strings_PL: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row[: (row >= 0).sum()].tolist()) for row in strings_PL]


def as_matrix(strings: list[list[int]]) -> np.ndarray:
    width = max(map(len, strings), default=0)
    return np.array([[*s, *[-1] * (width - len(s))] for s in strings], dtype=np.int64).reshape(len(strings), width)


def without_ends(strings: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Those that are not the end of another."""
    return {s for s in strings if not any(len(t) > len(s) and t[-len(s) :] == s for t in strings)}


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=40)
def test_the_strings_of_trees_are_those_of_their_paths(tokens_BL):
    graph = tree_graph(tokens_BL, leaf_is_input=True)
    strings = strings_of(graph)
    assert len(set(strings)) == len(strings)
    assert set(strings) == without_ends(naive_paths(graph))


@pytest.mark.parametrize("seed", range(8))
def test_the_strings_of_a_graph_with_shared_nodes_are_those_of_its_paths(seed):
    graph = random_dag(seed, num_nodes=30)
    strings = strings_of(graph)
    assert len(set(strings)) == len(strings)
    assert set(strings) == without_ends(naive_paths(graph))


some_strings = st.integers(1, 5).flatmap(
    lambda ops: st.lists(st.lists(st.integers(0, ops - 1), min_size=1, max_size=12), max_size=10)
)


@given(strings=some_strings)
@settings(quick, max_examples=150)
def test_a_supersequence_holds_every_string_and_none_of_its_ops_can_be_left_out(strings):
    calls = short_supersequence(as_matrix(strings))
    assert all(is_subsequence(string, calls) for string in strings)
    for left_out in range(len(calls)):
        shorter = calls[:left_out] + calls[left_out + 1 :]
        assert not all(is_subsequence(string, shorter) for string in strings)


@pytest.mark.parametrize("seed", range(10))
def test_exactly_the_calls_that_can_be_left_out_are_found(seed):
    rng = np.random.default_rng(seed)
    strings = [rng.integers(0, 4, rng.integers(1, 8)).tolist() for _ in range(5)]
    places = supersequence._positions(as_matrix(strings))
    calls = [*rng.integers(0, 4, 20).tolist(), *[op for string in strings for op in string]]
    naive, left = [], calls.copy()
    while left:
        op, *left = left
        if not all(is_subsequence(string, naive + left) for string in strings):
            naive.append(op)
    masks = places.of_op
    assert supersequence._needed(places, [masks[op] for op in calls]) == [masks[op] for op in naive]


def test_one_string_is_its_own_supersequence():
    assert short_supersequence(as_matrix([[2, 0, 0, 1, 2]])) == [2, 0, 0, 1, 2]
    assert short_supersequence(as_matrix([[2, 0, 0, 1, 2], [0, 1], [2, 2], [0, 0, 2]])) == [2, 0, 0, 1, 2]


def test_long_random_strings_are_searched_from_a_good_beginning_and_to_their_ends():
    rng = np.random.default_rng(0)
    strings = rng.integers(0, 5, (4, 300)).tolist()
    calls = short_supersequence(as_matrix(strings))
    assert all(is_subsequence(string, calls) for string in strings)
    # 614 were found; 621 from the longest string first, 632 with a single sweep.
    assert len(calls) < 620


def fewest_calls(graph: Graph) -> int:
    """The length of the shortest common supersequence of the paths' ops, by A* over how far each path has run."""
    strings = sorted(naive_paths(graph))
    strings = [s for s in strings if not any(s != t and is_subsequence(s, t) for t in strings)]

    def bound(places):
        most = Counter()
        for string, place in zip(strings, places, strict=True):
            most |= Counter(string[place:])
        return most.total()

    start = (0,) * len(strings)
    calls, queue = {start: 0}, [(bound(start), 0, start)]
    while queue:
        _, negative, places = heapq.heappop(queue)
        if places == tuple(map(len, strings)):
            return -negative
        pairs = list(zip(strings, places, strict=True))
        for op in {string[place] for string, place in pairs if place < len(string)}:
            after = tuple(place + (string[place : place + 1] == (op,)) for string, place in pairs)
            if 1 - negative < calls.get(after, len(queue) + graph.num_nodes + 1):
                calls[after] = 1 - negative
                heapq.heappush(queue, (1 - negative + bound(after), negative - 1, after))
    raise AssertionError("the queue ran out")


def small_graphs():
    for seed in range(60):
        yield random_dag(seed, num_inputs=4, num_nodes=12, num_ops=3)
        yield random_dag(seed, num_inputs=6, num_nodes=20, num_ops=5)
        rng = np.random.default_rng(seed)
        yield tree_graph(rng.choice([4, 6, 7, 8, 9], (5, 6)), leaf_is_input=True)


def test_lookahead_needs_hardly_more_calls_than_the_exact_answer_on_small_graphs():
    excess = Counter(len(make_schedule(graph, "lookahead")) - fewest_calls(graph) for graph in small_graphs())
    assert min(excess) == 0
    assert max(excess) <= 1
    assert excess[0] >= 0.95 * excess.total(), excess


def test_lookahead_needs_no_more_calls_than_another_scheduler_on_small_graphs():
    for graph in small_graphs():
        calls = {name: len(make_schedule(graph, name)) for name in SCHEDULERS}
        assert calls["lookahead"] == min(calls.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("questions", "most"), [(64, 1.4), (256, 1.5), (1024, 1.6)])
def test_lookahead_needs_few_calls_for_clevr_programs(questions, most, seed):
    graph = clevr_graph(questions, seed, scene_is_input=seed % 2 == 1)
    schedule = make_schedule(graph, "lookahead")
    assert_valid(graph, schedule)
    assert len(schedule) <= most * lower_bound(graph)
    assert len(schedule) <= min(len(make_schedule(graph, name)) for name in SCHEDULERS)


def test_the_order_of_the_programs_and_of_their_nodes_changes_no_call():
    graph = clevr_graph(64, seed=1)
    rng = np.random.default_rng(0)
    # Children first still: nodes sorted by height, those of a height in any order.
    height = np.zeros(graph.num_nodes, dtype=np.int64)
    for node, taken in enumerate(takes_of(graph)):
        height[node] = max((height[n] + 1 for n in taken), default=0)
    order = np.lexsort((rng.random(graph.num_nodes), height))
    new_id = np.argsort(order)
    slot = np.concatenate([np.arange(graph.num_inputs), graph.num_inputs + new_id, [-1]])
    shuffled = Graph(
        graph.num_inputs, graph.op[order], slot[graph.args[order]], graph.example[order], slot[graph.roots]
    )
    before, after = make_schedule(graph, "lookahead"), make_schedule(shuffled, "lookahead")
    assert [group.op for group in before] == [group.op for group in after]
    for one, other in zip(before, after, strict=True):
        assert sorted(new_id[one.nodes].tolist()) == other.nodes.tolist()


def test_every_node_runs_in_the_last_call_before_its_takers():
    graph = clevr_graph(64, seed=2)
    schedule = make_schedule(graph, "lookahead")
    call = np.zeros(graph.num_nodes, dtype=np.int64)
    for number, group in enumerate(schedule):
        call[group.nodes] = number
    first_taker = np.full(graph.num_nodes, len(schedule))
    for node, taken in enumerate(takes_of(graph)):
        first_taker[taken] = np.minimum(first_taker[taken], call[node])
    for node in range(graph.num_nodes):
        between = schedule[call[node] + 1 : first_taker[node]]
        assert graph.op[node] not in [group.op for group in between]


@pytest.mark.parametrize("most_paths", [1, 3, 50])
def test_a_graph_of_more_paths_than_are_followed_still_has_a_valid_schedule(most_paths, monkeypatch):
    monkeypatch.setattr(paths, "MOST_PATHS", most_paths)
    for graph in (ladder(6, 5, 4), random_dag(0), clevr_graph(64, seed=0)):
        assert_valid(graph, make_schedule(graph, "lookahead"))


def test_paths_that_multiply_from_layer_to_layer_are_not_followed_one_by_one():
    graph = ladder(rungs=40, width=4, num_ops=20)
    schedule = make_schedule(graph, "lookahead")
    assert_valid(graph, schedule)
    assert len(schedule) <= len(make_schedule(graph, "improved"))


@pytest.mark.parametrize("window", [3, 7, 20])
def test_a_sweep_never_loses_a_string_nor_needs_more_calls(window, monkeypatch):
    monkeypatch.setattr(supersequence, "WINDOW", window)
    rng = np.random.default_rng(window)
    strings_PL = rng.integers(0, 6, (12, 15))
    places = supersequence._positions(strings_PL)
    calls = places.of_op * 15
    op = {mask: op for op, mask in enumerate(places.of_op)}
    turn = 0
    for _ in range(10):
        shorter, windows = supersequence._sweep(places, calls, turn)
        assert len(shorter) <= len(calls)
        assert windows > 0
        assert all(is_subsequence(string, [op[call] for call in shorter]) for string in strings_PL.tolist())
        calls, turn = shorter, turn + windows
    assert len(calls) < 50
