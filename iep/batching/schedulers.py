"""Graph -> schedule: the nodes that run together, and their order. Schedulers are pure functions of integers.

A schedule is a tuple of groups, each of which is one module call. `vanilla`, `standard` and `improved` are from Suarez
& Zhu (Effective Approaches to Batch Parallelization for Dynamic Neural Network Architectures, section 2). `height` and
`agenda` are from frameworks for dynamic neural networks (Neubig et al. 2017, On-the-fly operation batching in dynamic
computation graphs). `lookahead` is this package's own and needs the fewest calls. All of them accept any directed
acyclic graph whose nodes are numbered children first.

Shapes: N nodes, A greatest number of arguments, K calls.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from iep.batching import supersequence
from iep.batching.graph import Graph, Links, distinct, farthest, stable_order
from iep.batching.paths import op_strings, roots

MANY = 128
"""The number of nodes from which array code is faster than a loop."""
MOST_LETTERS, MOST_STEPS, NODES_A_STEP = 1 << 14, 32, 256
"""The search of `lookahead` is for graphs of at most `MOST_LETTERS` ops on all paths, and of at most `MOST_STEPS` nodes
on the longest path, or one more for each `NODES_A_STEP` nodes. Those of CLEVR's programs are such graphs."""


class Segment(NamedTuple):
    """The nodes of one function in a call of its op group."""

    op: int
    rows: slice
    """The rows of these nodes in the call."""


class Group(NamedTuple):
    """One module call, of `op` on all of `nodes`: (G,) node ids in the order of the call's rows."""

    op: int
    nodes: np.ndarray
    segments: tuple[Segment, ...] | None = None
    """The functions of an op group's call, each with adjacent nodes; `op` is then the number of the op group."""


Schedule = tuple[Group, ...]


def vanilla(graph: Graph) -> Schedule:
    """Run every node by itself, in the order of the ids, that is example by example (Johnson et al. 2017): N calls."""
    nodes = np.arange(graph.num_nodes)
    return tuple(Group(op, nodes[node : node + 1]) for node, op in enumerate(graph.op.tolist()))


def standard(graph: Graph) -> Schedule:
    """Take one step at a time through every example's nodes in depth-first order, with one call per op of a step.

    With p ops and s nodes in the longest program, there are O(p * s) calls (Suarez & Zhu, section 2, "standard
    topological sort"). If examples share nodes, a node waits until the step after its arguments.
    """
    by_example = np.argsort(graph.example, kind="stable")
    sorted_example = graph.example[by_example]
    step = np.empty(graph.num_nodes, dtype=np.int64)
    step[by_example] = np.arange(graph.num_nodes) - np.searchsorted(sorted_example, sorted_example)
    return one_group_per_op(farthest(*graph.edges, step), graph.op)


def improved(graph: Graph) -> Schedule:
    """Pool nodes by their greatest distance from the root, the farthest pool first, with one call per op of a pool.

    With p ops and tree depth d, there are O(p * d) calls (Suarez & Zhu, section 2, "improved topological sort").
    """
    return one_group_per_op(-graph.distance, graph.op)


def height(graph: Graph) -> Schedule:
    """Pool nodes by their greatest distance from the leaves, the leaves first, with one call per op of a pool.

    With p ops and tree depth d, there are O(p * d) calls, as for `improved`. This is depth-based batching (Looks et al.
    2017, Deep learning with dynamic computation graphs, section 2; Neubig et al. 2017, section 3.2).
    """
    return one_group_per_op(graph.height, graph.op)


def agenda(graph: Graph) -> Schedule:
    """Run all ready nodes of one op at a time, always of the op whose remaining nodes have the lowest average depth.

    This is agenda-based batching, the default of DyNet (Neubig et al. 2017, section 3.2; summarised by Qiao & Taura, An
    Efficient Operation Auto-batching Strategy for Neural Networks Having Dynamic Computation Graphs, section 2.2). A
    node is ready when its arguments have run. Its depth is its greatest distance from the leaves. Of equal ops, the
    lowest is chosen.
    """
    return _one_op_at_a_time(graph, graph.height, _average) or ()


def lookahead(graph: Graph) -> Schedule:
    """Run the fewest calls that a quick search finds, and never more than `height`, `improved` and `agenda`.

    The nodes of a path run one after another, so that the ops of the calls contain those of every path, in order.
    Conversely, any such sequence of ops is a schedule: every node runs in the last call of its op that is before the
    calls of all its readers. In a small graph of short paths, a short common supersequence of the ops along all paths
    is therefore searched for. It has nearly the fewest possible calls if there are few nodes, and about 1.25 times the
    `lower_bound` for CLEVR's programs. Other graphs are scheduled by `urgent`, in time proportional to their size.
    """
    longest = int(graph.height.max(initial=-1)) + 1
    if (by_height := _num_calls(graph, graph.height)) == longest:
        return height(graph)
    _, kind = graph.kinds
    is_shallow = longest <= MOST_STEPS + graph.num_nodes / NODES_A_STEP
    strings = op_strings(kind, graph.reads, min(MOST_LETTERS, 16 * graph.num_nodes)) if is_shallow else None
    if strings is None:
        found = urgent(graph)
    else:
        calls = np.array(supersequence.short_supersequence(strings))
        found = one_group_per_op(last_calls(calls, kind, graph.reads), graph.op)
    by_distance = _num_calls(graph, graph.distance)
    most = min(len(found), by_height, by_distance)
    by_agenda = _one_op_at_a_time(graph, graph.height, _average, most)
    if by_agenda is not None:
        return by_agenda
    return found if len(found) == most else height(graph) if by_height == most else improved(graph)


def urgent(graph: Graph) -> Schedule:
    """Run all ready nodes of one op at a time, of the op that has the most of them with the longest paths to the root.

    These are measured by the sum over the nodes of their squared distances from the root. An op comes first if all its
    remaining nodes are ready, as a later call would run no more of them. This is list scheduling by the critical path
    (Hu 1961, Parallel sequencing and assembly line problems) for calls of many nodes.
    """

    def rank(op: _Op) -> float:
        return -math.inf if len(op.ready) == op.count else -op.ready_weight

    return _one_op_at_a_time(graph, graph.distance**2, rank) or ()


@dataclass(slots=True)
class _Op:
    """The nodes of an op that have not run, and the sum of their weights."""

    count: int
    weight: float
    ready: list[int] = field(default_factory=list)
    """The nodes whose arguments have all run."""
    ready_weight: int = 0
    rank: float | None = None
    """The rank in the queue."""


def _one_op_at_a_time(
    graph: Graph, weight_N: np.ndarray, rank: Callable[[_Op], float], most: float = math.inf
) -> Schedule | None:
    """Return calls, each of which runs all ready nodes of the op with the lowest rank; of equal ops, the first.

    Args:
        rank: called for an op when nodes of it become ready.
        most: return None if there would be so many calls or more.
    """
    names, op_N = graph.kinds
    ops = [_Op(*each) for each in zip(np.bincount(op_N).tolist(), np.bincount(op_N, weight_N).tolist(), strict=True)]
    op_of, weight_of, run = memoryview(op_N), memoryview(weight_N), _runner(graph)
    queue, calls, nodes, ends, remaining = list[tuple[float, int]](), list[int](), list[int](), [0], len(ops)
    found: Any = np.flatnonzero(graph.reads.count == 0)
    while True:
        changed = set()
        if len(found) >= MANY:
            found = np.asarray(found)
            changed = set(distinct(op_N[found]).tolist())
            for number in changed:
                those = found[op_N[found] == number]
                ops[number].ready += those.tolist()
                ops[number].ready_weight += int(weight_N[those].sum())
        else:
            for node in found:
                changed.add(op_of[node])
                ops[op_of[node]].ready.append(node)
                ops[op_of[node]].ready_weight += weight_of[node]
        for number in changed:
            if (new := rank(ops[number])) != ops[number].rank:
                ops[number].rank = new
                heappush(queue, (new, number))
        while queue and queue[0][0] != ops[queue[0][1]].rank:
            heappop(queue)  # it has another rank now
        if not queue:
            groups, order = zip(names[calls].tolist(), pairwise(ends), strict=True), np.array(nodes, dtype=np.int64)
            return tuple([Group(name, order[start:stop]) for name, (start, stop) in groups])
        if len(calls) + remaining >= most:
            return None
        _, number = heappop(queue)
        op, runs = ops[number], sorted(ops[number].ready)
        ops[number] = _Op(op.count - len(runs), op.weight - op.ready_weight)
        remaining -= op.count == len(runs)
        calls.append(number)
        nodes += runs
        ends.append(len(nodes))
        found = run(runs)


def _runner(graph: Graph) -> Callable[[list[int]], Any]:
    """Return a function that runs nodes and returns the nodes that are then ready: an array if many nodes run."""
    readers, missing_N = graph.readers, graph.reads.count.copy()
    # Views give single integers about as fast as lists do.
    first, count, reader_of = (memoryview(each) for each in readers)
    missing = memoryview(missing_N)

    def run(nodes: list[int]) -> Any:
        if len(nodes) >= MANY:
            reached = readers(np.array(nodes))
            np.subtract.at(missing_N, reached, 1)
            return distinct(reached[missing_N[reached] == 0])
        found = []
        for node in nodes:
            for at in range(first[node], first[node] + count[node]):
                reader = reader_of[at]
                missing[reader] -= 1
                if not missing[reader]:
                    found.append(reader)
        return found

    return run


def _average(op: _Op) -> float:
    """Return the average weight of an op's remaining nodes."""
    return op.weight / op.count


def _num_calls(graph: Graph, pool_N: np.ndarray) -> int:
    """Return the number of calls in which `one_group_per_op` runs pools."""
    ops, kind_N = graph.kinds
    return len(distinct(pool_N * len(ops) + kind_N))


def last_calls(calls: np.ndarray, kind: np.ndarray, reads: Links) -> np.ndarray:
    """Assign each node to the latest call of its kind that precedes every call that reads it, (N,); -1 if none does.

    Args:
        calls: (K,) kinds.
        kind: (N,).
    """
    # Every call as one number, by kind and then by time; the first entry means no call.
    width = len(calls) + 1
    by_kind = np.concatenate([[-2], np.sort(calls * width + np.arange(len(calls)))])
    call = np.full(len(kind), -1)
    limit = np.full(len(kind), len(calls))  # the first call of any reader
    nodes = roots(reads)
    while len(nodes):
        own = kind[nodes] * width
        latest = by_kind[np.searchsorted(by_kind, own + limit[nodes]) - 1] - own
        call[nodes] = np.maximum(latest, -1)
        below = reads(nodes)
        np.minimum.at(limit, below, np.repeat(call[nodes], reads.count[nodes]))
        nodes = distinct(below)
    return call


def lower_bound(graph: Graph) -> int:
    """Return a lower bound of the calls of any schedule: the sum over ops of the most nodes of the op on any one path.

    In a graph with very many paths, it is the number of ops.
    """
    ops, kind = graph.kinds
    strings = op_strings(kind, graph.reads, 64 * MOST_LETTERS)
    return len(ops) if strings is None else supersequence.lower_bound(strings)


SCHEDULERS: dict[str, Callable[[Graph], Schedule]] = {
    "vanilla": vanilla,
    "standard": standard,
    "improved": improved,
    "height": height,
    "agenda": agenda,
    "lookahead": lookahead,
}


def make_schedule(graph: Graph, name: str, op_groups: Mapping[int, int] | None = None) -> Schedule:
    """Return the schedule that the scheduler called `name` makes for `graph`.

    Args:
        op_groups: by op, the number of its op group. Functions of an op group differ only in their weights, so that one
            call may run several of them: the schedule is then over op groups, and the nodes of a call are sorted by
            function. Ops without an op group are scheduled by themselves.

    Raises:
        ValueError: there is no such scheduler (the message lists all schedulers), the number of an op group is negative
            or that of an op of the graph, or ops of an op group have different numbers of arguments.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"no scheduler is called {name!r}, expected one of {', '.join(SCHEDULERS)}")
    if not op_groups:
        return SCHEDULERS[name](graph)
    ops, kind = graph.kinds
    numbers = set(op_groups.values())
    clashes = numbers & set(ops.tolist())
    if clashes:
        raise ValueError(f"op group {min(clashes)} has the number of an op, expected a number that no op has")
    op_group = np.array([op_groups.get(op, op) for op in ops.tolist()], dtype=np.int64)
    by_op_group = SCHEDULERS[name](replace(graph, op=op_group[kind]))
    return tuple(_by_function(group, graph.op) if group.op in numbers else group for group in by_op_group)


def _by_function(group: Group, op_N: np.ndarray) -> Group:
    """Return the group with its nodes sorted by function, and its segments."""
    nodes = group.nodes[stable_order(op_N[group.nodes])]
    ops, first = np.unique(op_N[nodes], return_index=True)
    rows = pairwise([*first.tolist(), len(nodes)])
    return Group(group.op, nodes, tuple(Segment(op, slice(*each)) for op, each in zip(ops.tolist(), rows, strict=True)))


def one_group_per_op(pool: np.ndarray, op: np.ndarray) -> Schedule:
    """Return one group for each op of each `pool`, (N,), in ascending order of pools; ids ascend within a group."""
    order = stable_order(op)
    order = order[stable_order((pool - pool.min(initial=0))[order])]
    pool, op = pool[order], op[order]
    firsts = np.flatnonzero((pool[1:] != pool[:-1]) | (op[1:] != op[:-1])) + 1
    bounds = [0, *firsts.tolist(), len(order)] if len(order) else []
    return tuple(
        Group(op, order[first:last])
        for op, (first, last) in zip(op[bounds[:-1]].tolist(), pairwise(bounds), strict=True)
    )
