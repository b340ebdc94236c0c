"""Every scheduler and the sharing of equal subtrees against their definitions, on trees and on any acyclic graph."""

import heapq
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from batching_cases import LEAF, UNARY_A, matrix, quick, toy_programs, tree_graph
from hypothesis import example, given, settings

from iep.batching import sharing, supersequence
from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.schedulers import SCHEDULERS, Schedule, lower_bound, make_schedule
from iep.batching.sharing import share
from iep.batching.supersequence import short_supersequence
from iep.programs import SCENE, arity, json_to_prefix
from iep.synth.presets import PRESETS
from iep.synth.synthesize import make_image


def random_dag(seed: int, num_inputs: int = 4, num_nodes: int = 40, num_ops: int = 5) -> Graph:
    """Return nodes that read any earlier slots: shared results, several inputs, and nodes that nothing reads."""
    rng = np.random.default_rng(seed)
    op = rng.integers(0, num_ops, num_nodes)
    args = np.full((num_nodes, 2), -1)
    for node in range(num_nodes):
        args[node, : 1 + op[node] % 2] = rng.integers(0, num_inputs + node, 1 + op[node] % 2)
    example = rng.integers(0, num_inputs, num_nodes)
    return Graph(num_inputs, op, args, example, rng.integers(0, num_inputs + num_nodes, num_inputs))


graphs = st.one_of(
    st.builds(tree_graph, toy_programs, st.booleans()),
    st.integers(0, 999).map(lambda seed: random_dag(seed, num_nodes=30)),
)
"""Trees with and without nodes for leaves, and graphs with shared nodes."""


def ladder(rungs: int, width: int, num_ops: int, seed: int = 0) -> Graph:
    """Return layers of nodes that read two nodes of the layer before: 2 ** rungs paths to each last node."""
    rng = np.random.default_rng(seed)
    below = np.arange(rungs * width) // width * width - width
    args = 1 + below[:, None] + rng.integers(0, width, (rungs * width, 2))
    args[:width] = 0
    nodes = rungs * width
    return Graph(1, rng.integers(0, num_ops, nodes), args, np.zeros(nodes, dtype=np.int64), np.array([nodes]))


def clevr_graph(questions: int, seed: int, scene_is_input: bool = False) -> Graph:
    """Return the graph of programs of some questions that iep-synth asks about images like CLEVR's, ten an image."""
    options, balance = PRESETS["clevr"], Counter()
    first = 1000 * seed
    images = range(first, first + questions // 10 + 1)
    asked = [question for image in images for question in make_image(options, "train", image, balance)[2]]
    programs = [json_to_prefix(list(question.program)) for question in Random(seed).sample(asked, questions)]
    tokens = sorted({token for program in programs for token in program})
    number = {token: index for index, token in enumerate(tokens)}
    rows = [[number[token] for token in program] for program in programs]
    arity_V = np.array([arity(token) for token in tokens])
    leaf = number[SCENE]
    return graph_from_prefix(matrix(rows, leaf), arity_V, leaf=leaf, leaf_is_input=scene_is_input)


def op_groups_of(graph: Graph) -> dict[int, int]:
    """Return op groups of all ops of one number of arguments."""
    arity_N = (graph.args >= 0).sum(axis=1)
    return {int(op): 100 + int(many) for op, many in zip(graph.op, arity_N, strict=True)}


def as_lists(schedule: Schedule) -> list[tuple[int, list[int]]]:
    return [(group.op, group.nodes.tolist()) for group in schedule]


# Naive twins


def assert_valid(graph: Graph, schedule: Schedule) -> None:
    """Assert that every node runs once, after its arguments, and that a group has one op, or an op group's in order."""
    done = set(range(graph.num_inputs))
    for op, nodes, segments in schedule:
        functions = graph.op[nodes].tolist()
        assert functions == (
            [op] * len(nodes)
            if segments is None
            else [each.op for each in segments for _ in range(each.rows.start, each.rows.stop)]
        )
        assert functions
        assert list(zip(functions, nodes.tolist(), strict=True)) == sorted(zip(functions, nodes.tolist(), strict=True))
        assert set(graph.args[nodes].ravel().tolist()) - {-1} <= done
        results = set((graph.num_inputs + nodes).tolist())
        assert len(results) == len(nodes)
        assert not results & done
        done |= results
    assert len(done) == graph.num_inputs + graph.num_nodes


def arguments_of(graph: Graph) -> list[list[int]]:
    """Return for every node the nodes whose results it reads."""
    return [[slot - graph.num_inputs for slot in slots if slot >= graph.num_inputs] for slots in graph.args.tolist()]


def readers_of(graph: Graph) -> list[list[int]]:
    """Return for every node the nodes that read its result."""
    readers: list[list[int]] = [[] for _ in range(graph.num_nodes)]
    for reader, taken in enumerate(arguments_of(graph)):
        for node in set(taken):
            readers[node].append(reader)
    return readers


def naive_distance(graph: Graph) -> list[int]:
    """Return the length of the longest path up from every node, by looking through all its readers."""
    readers, distance = readers_of(graph), {}
    for node in reversed(range(graph.num_nodes)):
        distance[node] = max((distance[reader] + 1 for reader in readers[node]), default=0)
    return [distance[node] for node in range(graph.num_nodes)]


def naive_height(graph: Graph) -> list[int]:
    """Return the length of the longest path down from every node."""
    height: list[int] = []
    for taken in arguments_of(graph):
        height.append(max((height[node] + 1 for node in taken), default=0))
    return height


def naive_paths(graph: Graph) -> set[tuple[int, ...]]:
    """Return the ops along every path from a node that reads no other to one that no other reads."""
    arguments, readers, ops = arguments_of(graph), readers_of(graph), graph.op.tolist()

    def up(node: int) -> Iterator[tuple[int, ...]]:
        if not readers[node]:
            yield (ops[node],)
        for reader in readers[node]:
            for rest in up(reader):
                yield (ops[node], *rest)

    return {path for node in range(graph.num_nodes) if not arguments[node] for path in up(node)}


def naive_agenda(graph: Graph) -> list[tuple[int, list[int]]]:
    """Return one call after another, with every average computed anew."""
    arguments, height, ops = arguments_of(graph), naive_height(graph), graph.op.tolist()
    left, schedule = set(range(graph.num_nodes)), []
    while left:
        ready = [node for node in sorted(left) if not left & set(arguments[node])]
        heights = {op: [height[node] for node in left if ops[node] == op] for op in {ops[node] for node in ready}}
        best = min(heights, key=lambda op: (sum(heights[op]) / len(heights[op]), op))
        schedule.append((best, [node for node in ready if ops[node] == best]))
        left -= set(schedule[-1][1])
    return schedule


def grouped(turns: list[int], ops: list[int]) -> list[tuple[int, list[int]]]:
    """Return the calls where nodes of one turn and op run together."""
    nodes: dict[tuple[int, int], list[int]] = {}
    for node, label in enumerate(zip(turns, ops, strict=True)):
        nodes.setdefault(label, []).append(node)
    return [(op, nodes[turn, op]) for turn, op in sorted(nodes)]


def is_subsequence(short, long) -> bool:
    rest = iter(long)
    return all(item in rest for item in short)


def fewest_calls(graph: Graph) -> int:
    """Return the length of the shortest common supersequence of the paths' ops, by A* over how far each has run."""
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


# All schedulers


@pytest.mark.parametrize("name", SCHEDULERS)
@given(graph=graphs, op_groups=st.booleans())
@settings(quick, max_examples=60)
def test_every_schedule_runs_each_node_once_after_its_arguments(name, graph, op_groups):
    assert_valid(graph, make_schedule(graph, name, op_groups_of(graph) if op_groups else None))


@given(graph=graphs)
@example(graph=tree_graph([[LEAF], [LEAF]], leaf_is_input=True))
@settings(quick, max_examples=60)
def test_schedules_and_their_bound_are_those_of_the_definitions(graph):
    ops = graph.op.tolist()
    assert as_lists(make_schedule(graph, "vanilla")) == [(op, [node]) for node, op in enumerate(ops)]
    assert as_lists(make_schedule(graph, "improved")) == grouped([-far for far in naive_distance(graph)], ops)
    assert as_lists(make_schedule(graph, "height")) == grouped(naive_height(graph), ops)
    assert as_lists(make_schedule(graph, "agenda")) == naive_agenda(graph)
    paths = naive_paths(graph)
    assert lower_bound(graph) == sum(max(path.count(op) for path in paths) for op in set(ops))
    assert all(len(make_schedule(graph, name)) >= lower_bound(graph) for name in SCHEDULERS)


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=30)
def test_standard_runs_the_same_step_of_every_example_together(tokens_BL):
    graph = tree_graph(tokens_BL)
    step = np.arange(graph.num_nodes) - np.unique(graph.example, return_index=True)[1][graph.example]
    assert as_lists(make_schedule(graph, "standard")) == grouped(step.tolist(), graph.op.tolist())


def test_an_unknown_scheduler_is_an_error_that_names_the_known_ones():
    known = "vanilla, standard, improved, height, agenda, lookahead"
    with pytest.raises(ValueError, match=f"'improve', expected one of {known}"):
        make_schedule(tree_graph([[UNARY_A]]), "improve")


# Lookahead


some_strings = st.integers(1, 5).flatmap(
    lambda ops: st.lists(st.lists(st.integers(0, ops - 1), min_size=1, max_size=12), max_size=10)
)


@given(strings=some_strings, window=st.sampled_from([3, 7, supersequence.WINDOW]))
@settings(quick, max_examples=150)
def test_a_supersequence_holds_every_string_and_none_of_its_ops_can_be_left_out(strings, window):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supersequence, "WINDOW", window)
        calls = short_supersequence(matrix(strings, pad=-1))
    assert all(is_subsequence(string, calls) for string in strings)
    for left_out in range(len(calls)):
        shorter = calls[:left_out] + calls[left_out + 1 :]
        assert not all(is_subsequence(string, shorter) for string in strings)


def test_lookahead_needs_hardly_more_calls_than_the_exact_answer_and_no_more_than_other_schedulers_on_small_graphs():
    excess = Counter()
    for seed in range(20):
        trees = tree_graph(np.random.default_rng(seed).choice([4, 6, 7, 8, 9], (5, 6)), leaf_is_input=True)
        for graph in (random_dag(seed, 4, 12, 3), random_dag(seed, 6, 20, 5), trees):
            calls = {name: len(make_schedule(graph, name)) for name in SCHEDULERS}
            assert calls["lookahead"] == min(calls.values())
            excess[calls["lookahead"] - fewest_calls(graph)] += 1
    assert set(excess) <= {0, 1}
    assert excess[0] >= 0.95 * excess.total()


@pytest.mark.parametrize(("questions", "scene_is_input", "most"), [(64, True, 1.4), (256, False, 1.5)])
def test_lookahead_needs_few_calls_for_clevr_programs_and_always_the_same(questions, scene_is_input, most):
    graph = clevr_graph(questions, 0, scene_is_input)
    schedule = make_schedule(graph, "lookahead")
    assert_valid(graph, schedule)
    assert as_lists(schedule) == as_lists(make_schedule(graph, "lookahead"))
    assert len(schedule) <= most * lower_bound(graph)
    assert len(schedule) <= min(len(make_schedule(graph, name)) for name in SCHEDULERS)


def test_lookahead_over_op_groups_needs_about_one_call_for_each_level():
    graph = clevr_graph(64, 0, scene_is_input=True)
    calls = len(make_schedule(graph, "lookahead", op_groups_of(graph)))
    assert int(graph.height.max()) + 1 <= calls <= 23


def chains_of(lengths: list[int], num_ops: int) -> Graph:
    """Return chains of random ops, as of sequences of different lengths."""
    rng, firsts = np.random.default_rng(0), np.cumsum([0, *lengths])
    args = np.arange(firsts[-1]) + len(lengths) - 1
    args[firsts[:-1]] = np.arange(len(lengths))
    example = np.repeat(np.arange(len(lengths)), lengths)
    ops = rng.integers(0, num_ops, len(args))
    return Graph(len(lengths), ops, args[:, None], example, len(lengths) + firsts[1:] - 1)


@pytest.mark.parametrize(
    ("lengths", "num_ops"), [([2000, 1500], 1), ([2000, 1500], 4), ([300] * 16, 3), ([40] * 64, 20)]
)
def test_long_sequences_are_scheduled_in_memory_that_grows_with_their_nodes(lengths: list[int], num_ops: int):
    graph = chains_of(lengths, num_ops)
    tracemalloc.start()
    schedule = make_schedule(graph, "lookahead")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert_valid(graph, schedule)
    assert peak < 2_000 * graph.num_nodes
    assert len(schedule) <= min(len(make_schedule(graph, name)) for name in SCHEDULERS)


def test_the_agenda_of_a_wide_graph_is_that_of_the_definition():
    graph = chains_of([3, 2] * 150, num_ops=3)
    assert as_lists(make_schedule(graph, "agenda")) == naive_agenda(graph)


def test_a_graph_of_too_many_paths_has_a_schedule_as_good_as_that_of_other_schedulers():
    graph = ladder(rungs=40, width=4, num_ops=20)
    schedule = make_schedule(graph, "lookahead")
    assert_valid(graph, schedule)
    assert lower_bound(graph) <= len(schedule) <= min(len(make_schedule(graph, name)) for name in SCHEDULERS)


# Sharing


def meanings(graph):
    """Return what every slot computes, written out: nested tuples of ops and inputs."""
    written = list(range(graph.num_inputs))
    for op, args in zip(graph.op.tolist(), graph.args.tolist(), strict=True):
        written.append((op, *(written[slot] for slot in args if slot >= 0)))
    return written


@given(tokens_BL=toy_programs, examples_an_input=st.integers(1, 4), largest_key=st.sampled_from([sharing.LARGEST, 100]))
@settings(quick, max_examples=60)
def test_sharing_keeps_one_of_equal_subtrees_and_what_every_root_computes(tokens_BL, examples_an_input, largest_key):
    graph = tree_graph(tokens_BL, True, np.arange(len(tokens_BL)) // examples_an_input)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LARGEST", largest_key)
        shared = share(graph)
    before, after = meanings(graph), meanings(shared)
    assert len(set(after)) == len(after)
    assert set(after) == set(before)
    assert [after[root] for root in shared.roots] == [before[root] for root in graph.roots]
    first: dict[tuple, int] = {}
    for meaning, example_index in zip(before[graph.num_inputs :], graph.example.tolist(), strict=True):
        first.setdefault(meaning, example_index)
    assert [first[meaning] for meaning in after[shared.num_inputs :]] == shared.example.tolist()
    assert meanings(share(shared)) == after
