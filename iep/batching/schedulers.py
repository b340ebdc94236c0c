"""Graph -> schedule: the nodes that run together, and their order. Schedulers are pure functions of integers.

A schedule is a tuple of groups, each of which is one module call. `vanilla`, `standard` and `improved` are from Suarez
& Zhu (Effective Approaches to Batch Parallelization for Dynamic Neural Network Architectures, section 2). `height` and
`agenda` are from frameworks for dynamic neural networks (Neubig et al. 2017, On-the-fly operation batching in dynamic
computation graphs). `lookahead` is this package's own and needs the fewest calls. All of them accept any directed
acyclic graph whose nodes are numbered children first.

Shapes: N nodes, A greatest number of arguments, K calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from iep.batching import supersequence
from iep.batching.graph import Graph, stable_order
from iep.batching.paths import op_strings, roots


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
    while True:
        step_of_slot = np.concatenate([np.full(graph.num_inputs, -1), step, [-1]])
        ready = step_of_slot[graph.args].max(axis=1, initial=-1) + 1
        if (ready <= step).all():
            return pooled(step, graph.op)
        step = np.maximum(step, ready)


def improved(graph: Graph) -> Schedule:
    """Pool nodes by their greatest distance from the root, the farthest pool first, with one call per op of a pool.

    With p ops and tree depth d, there are O(p * d) calls (Suarez & Zhu, section 2, "improved topological sort").
    """
    distance, frontier = np.zeros(graph.num_nodes, dtype=np.int64), np.arange(graph.num_nodes)
    while len(frontier):
        slots = graph.args[frontier]
        reached = np.zeros(graph.num_nodes, dtype=bool)
        reached[slots[slots >= graph.num_inputs] - graph.num_inputs] = True
        frontier = np.flatnonzero(reached)
        distance[frontier] += 1
    return pooled(-distance, graph.op)


def height(graph: Graph) -> Schedule:
    """Pool nodes by their greatest distance from the leaves, the leaves first, with one call per op of a pool.

    With p ops and tree depth d, there are O(p * d) calls, as for `improved`. This is depth-based batching (Looks et al.
    2017, Deep learning with dynamic computation graphs, section 2; Neubig et al. 2017, section 3.2).
    """
    return pooled(graph.height, graph.op)


def agenda(graph: Graph) -> Schedule:
    """Run all ready nodes of one op at a time, always of the op whose remaining nodes have the lowest average depth.

    This is agenda-based batching, the default of DyNet (Neubig et al. 2017, section 3.2; summarised by Qiao & Taura, An
    Efficient Operation Auto-batching Strategy for Neural Networks Having Dynamic Computation Graphs, section 2.2). A
    node is ready when its arguments have run. Its depth is its greatest distance from the leaves. Of equal ops, the
    lowest is chosen.
    """
    node, depth = np.arange(graph.num_nodes), graph.height
    ops, kind = graph.kinds
    args = graph.args.T.copy()
    # The last entry is for -1, which is no argument.
    has_run = np.arange(graph.num_inputs + graph.num_nodes + 1) < graph.num_inputs
    has_run[-1] = True
    schedule = []
    while len(node):
        ready = has_run[args].all(axis=0)
        average = np.bincount(kind, depth, len(ops)) / np.maximum(np.bincount(kind, minlength=len(ops)), 1)
        is_ready = np.bincount(kind[ready], minlength=len(ops)) > 0
        chosen = int(np.argmin(np.where(is_ready, average, np.inf)))
        runs = ready & (kind == chosen)
        schedule.append(Group(int(ops[chosen]), node[runs]))
        has_run[graph.num_inputs + node[runs]] = True
        node, kind, depth, args = node[~runs], kind[~runs], depth[~runs], args[:, ~runs]
    return tuple(schedule)


def lookahead(graph: Graph) -> Schedule:
    """Run the fewest calls that a quick search finds: a short common supersequence of the ops along all paths.

    The nodes of a path run one after another, so that the ops of the calls contain those of every path, in order.
    Conversely, any such sequence of ops is a schedule: every node runs in the last call of its op that is before the
    calls of all its readers. The search finds nearly the fewest possible calls on small graphs, and about 1.25 times
    the `lower_bound` on CLEVR's programs.
    """
    by_height = height(graph)
    if len(by_height) == int(graph.height.max(initial=-1)) + 1:  # no more calls than the longest path has nodes
        return by_height
    _, kind = graph.kinds
    reads = reads_of(graph)
    strings = op_strings(kind, reads)
    if strings is None:  # the graph has too many paths
        return min(improved(graph), agenda(graph), key=len)
    calls = np.array(supersequence.short_supersequence(strings))
    return pooled(last_calls(calls, kind, reads), graph.op)


def last_calls(calls: np.ndarray, kind: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Return the last call of every node's kind before the calls of all its readers, (N,); -1 if there is none.

    Args:
        calls: (K,) kinds.
        kind: (N,).
        reads: (N, A) nodes whose results each node reads, -1 elsewhere.
    """
    # Every call as one number, by kind and then by time; the first entry means no call.
    width = len(calls) + 1
    by_kind = np.concatenate([[-2], np.sort(calls * width + np.arange(len(calls)))])
    call = np.full(len(kind), -1)
    limit = np.full(len(kind) + 1, len(calls))  # the first call of any reader; the last entry is for -1, no node
    nodes = roots(reads)
    while len(nodes):
        own = kind[nodes] * width
        latest = by_kind[np.searchsorted(by_kind, own + limit[nodes]) - 1] - own
        call[nodes] = np.maximum(latest, -1)
        reached = np.zeros(len(kind) + 1, dtype=bool)
        below = reads[nodes]
        np.minimum.at(limit, below.ravel(), np.repeat(call[nodes], below.shape[1]))
        reached[below] = True
        nodes = np.flatnonzero(reached[:-1])
    return call


def lower_bound(graph: Graph) -> int:
    """Return a lower bound of the calls of any schedule: the sum over ops of the most nodes of the op on any one path.

    In a graph with very many paths, it is the number of ops.
    """
    ops, kind = graph.kinds
    strings = op_strings(kind, reads_of(graph))
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


def pooled(pool: np.ndarray, op: np.ndarray) -> Schedule:
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


def reads_of(graph: Graph) -> np.ndarray:
    """Return the nodes whose results each node reads, (N, A), in the order of its arguments; -1 elsewhere."""
    return np.where(graph.args >= graph.num_inputs, graph.args - graph.num_inputs, -1)
