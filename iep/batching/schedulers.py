"""Graph -> schedule: which nodes run together, in which order. Pure functions of integers; no tensor is touched.

A schedule is a tuple of groups, each one module call. `vanilla`, `standard` and `improved` are those of Suarez & Zhu
(Effective Approaches to Batch Parallelization for Dynamic Neural Network Architectures, section 2); `height` and
`agenda` those of dynamic neural network frameworks (Neubig et al. 2017, On-the-fly operation batching in dynamic
computation graphs); `lookahead` is this package's own and needs the fewest calls. All of them take any directed acyclic
graph whose nodes are numbered children first.

Shapes: N nodes, A greatest number of arguments, K calls.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph, levels, stable_order
from iep.batching.paths import op_strings, roots
from iep.batching.supersequence import short_supersequence


class Segment(NamedTuple):
    """The nodes of one function in a call of its family."""

    op: int
    rows: slice
    """Of the call's rows."""


class Group(NamedTuple):
    """One module call: `op` on all of `nodes`, (G,) node ids in the order of the call's rows."""

    op: int
    nodes: np.ndarray
    segments: tuple[Segment, ...] | None = None
    """Of a family's call: its functions, to which adjacent nodes belong; `op` is then the family's number."""


Schedule = tuple[Group, ...]


def vanilla(graph: Graph) -> Schedule:
    """Every node by itself, in the order of the ids: example by example (Johnson et al. 2017). N calls."""
    nodes = np.arange(graph.num_nodes)
    return tuple(Group(op, nodes[node : node + 1]) for node, op in enumerate(graph.op.tolist()))


def standard(graph: Graph) -> Schedule:
    """Step by step through every example's nodes in depth-first order, one call per op of a step.

    For ops p and longest program s, O(p * s) calls (Suarez & Zhu, section 2, "standard topological sort"). Where
    examples share nodes, a node waits until the step after its arguments.
    """
    by_example = np.argsort(graph.example, kind="stable")
    sorted_example = graph.example[by_example]
    step = np.empty(graph.num_nodes, dtype=np.int64)
    step[by_example] = np.arange(graph.num_nodes) - np.searchsorted(sorted_example, sorted_example)
    while True:
        ready = _latest_argument(graph, step) + 1
        if (ready <= step).all():
            return _pool(step, graph.op)
        step = np.maximum(step, ready)


def improved(graph: Graph) -> Schedule:
    """Nodes pooled by their greatest distance from the root, the farthest pool first, one call per op of a pool.

    For ops p and greatest tree depth d, O(p * d) calls (Suarez & Zhu, section 2, "improved topological sort").
    """
    return _pool(-distance_from_root(graph), graph.op)


def height(graph: Graph) -> Schedule:
    """Nodes pooled by their greatest distance from the leaves, the leaves first, one call per op of a pool.

    The twin of `improved`; O(p * d) calls too. Depth-based batching (Looks et al. 2017, Deep learning with dynamic
    computation graphs, section 2; Neubig et al. 2017, section 3.2).
    """
    return _pool(graph.height, graph.op)


def agenda(graph: Graph) -> Schedule:
    """All ready nodes of one op at a time: of the op whose remaining nodes have the lowest average depth.

    Agenda-based batching, DyNet's choice (Neubig et al. 2017, section 3.2; told in short by Qiao & Taura, An Efficient
    Operation Auto-batching Strategy for Neural Networks Having Dynamic Computation Graphs, section 2.2). A node is
    ready when its arguments have run; its depth is its greatest distance from the leaves. The lower op comes first
    among equals.
    """
    node, depth = np.arange(graph.num_nodes), graph.height
    ops, kind = graph.kinds
    args = graph.args.T.copy()
    # The last entry is that of -1, no argument.
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
    """The fewest calls that a quick search finds: one for each op of a short common supersequence of the paths' ops.

    A path's nodes run one after another, so that the calls' ops contain the ops of every path, in order. Any sequence
    of ops that does so is a schedule: every node runs in the last call of its op that comes before all its takers'. The
    search needs hardly more calls than there must be on small graphs, and on CLEVR's programs about 1.25 times the
    `lower_bound`.
    """
    by_height = height(graph)
    if len(by_height) == int(graph.height.max(initial=-1)) + 1:  # no more calls than the longest path has nodes
        return by_height
    _, kind = graph.kinds
    takes = _takes(graph)
    left = np.ones(graph.num_nodes, dtype=bool)
    schedule: Schedule = ()
    # Once round, but for graphs of so many paths that the strings are not all of them: what finds no call before its
    # takers then goes first, with all that it takes.
    while left.any():
        calls = np.array(short_supersequence(op_strings(kind, takes, left)))
        call = _last_calls(calls, kind, takes, left)
        nodes = np.flatnonzero(left & (call >= 0))
        assert len(nodes), "the calls run every string, so that at least one path finds its calls"
        first = [Group(op, nodes[members]) for op, members, _ in _pool(call[nodes], graph.op[nodes])]
        schedule = (*first, *schedule)
        left[nodes] = False
    return schedule


def _last_calls(calls: np.ndarray, kind: np.ndarray, takes: np.ndarray, among: np.ndarray) -> np.ndarray:
    """(N,) the last call of every node's kind that comes before all its takers' calls; -1 where there is none.

    Args:
        calls: (K,) kinds.
        kind: (N,).
        takes: (N, A) nodes whose results each node takes, -1 elsewhere.
        among: (N,) bool, the nodes that count, and with each all that it takes.
    """
    # Every call as one number, by kind and then by time; the first stands for none.
    width = len(calls) + 1
    by_kind = np.concatenate([[-2], np.sort(calls * width + np.arange(len(calls)))])
    call = np.full(len(kind), -1)
    limit = np.full(len(kind) + 1, len(calls))  # the first of the takers' calls; the last entry is that of -1, no node
    nodes = roots(takes, among)
    while len(nodes):
        own = kind[nodes] * width
        latest = by_kind[np.searchsorted(by_kind, own + limit[nodes]) - 1] - own
        call[nodes] = np.maximum(latest, -1)
        reached = np.zeros(len(kind) + 1, dtype=bool)
        below = takes[nodes]
        np.minimum.at(limit, below.ravel(), np.repeat(call[nodes], below.shape[1]))
        reached[below] = True
        nodes = np.flatnonzero(reached[:-1])
    return call


def lower_bound(graph: Graph) -> int:
    """Calls that no schedule of `graph` can do without: for each op the most nodes on any one path, summed over ops."""
    ops, kind = graph.kinds
    # By node and op, the most nodes on a path to it; the last row is that of inputs and of -1, no argument.
    count = np.zeros((graph.num_nodes + 1, len(ops)), dtype=np.int32)
    takes = _takes(graph)
    for nodes in levels(graph.height):
        count[nodes] = count[takes[nodes]].max(axis=1)
        count[nodes, kind[nodes]] += 1
    return int(count.max(axis=0, initial=0).sum())


def distance_from_root(graph: Graph) -> np.ndarray:
    """(N,) length of the longest path from each node to one that is no other's argument."""
    distance = np.zeros(graph.num_nodes, dtype=np.int64)
    frontier = np.arange(graph.num_nodes)
    while len(frontier):
        slots = graph.args[frontier]
        reached = np.zeros(graph.num_nodes, dtype=bool)
        reached[slots[slots >= graph.num_inputs] - graph.num_inputs] = True
        frontier = np.flatnonzero(reached)
        distance[frontier] += 1
    return distance


SCHEDULERS: dict[str, Callable[[Graph], Schedule]] = {
    "vanilla": vanilla,
    "standard": standard,
    "improved": improved,
    "height": height,
    "agenda": agenda,
    "lookahead": lookahead,
}


def make_schedule(graph: Graph, name: str, families: Mapping[int, int] | None = None) -> Schedule:
    """Return the schedule that the scheduler called `name` makes of `graph`.

    Args:
        families: by op, the number of its family. Functions of a family have the same architecture and differ only in
            their weights, so that one call may run several of them: the schedule is then over families, and the nodes
            of a call are sorted by function. Ops that are missing are scheduled by themselves.

    Raises:
        ValueError: there is no such scheduler (the message lists those there are), the number of a family is that of
            an op of the graph, or ops of a family take different numbers of arguments.
    """
    if name not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no scheduler is called {name!r}, expected one of {', '.join(SCHEDULERS)}{hint}")
    if not families:
        return SCHEDULERS[name](graph)
    clashes = set(families.values()) & set(graph.op.tolist())
    if clashes:
        raise ValueError(f"family {min(clashes)} has the number of an op, expected another")
    op_N = np.array([families.get(op, op) for op in graph.op.tolist()], dtype=np.int64)
    by_family = SCHEDULERS[name](replace(graph, op=op_N))
    numbers = set(families.values())
    return tuple(_by_function(group, graph.op) if group.op in numbers else group for group in by_family)


def _by_function(group: Group, op_N: np.ndarray) -> Group:
    """Return the group with its nodes sorted by function, and its segments."""
    nodes = group.nodes[op_N[group.nodes].argsort(kind="stable")]
    op_G = op_N[nodes]
    bounds = [0, *(np.flatnonzero(op_G[1:] != op_G[:-1]) + 1).tolist(), len(nodes)]
    segments = tuple(Segment(int(op_G[start]), slice(start, stop)) for start, stop in pairwise(bounds))
    return Group(group.op, nodes, segments)


def _pool(pool: np.ndarray, op: np.ndarray) -> Schedule:
    """Nodes in rising order of `pool`, (N,), each pool split by `op`; ids rise within a group."""
    order = stable_order(op)
    order = order[stable_order((pool - pool.min(initial=0))[order])]
    pool, op = pool[order], op[order]
    firsts = np.flatnonzero((pool[1:] != pool[:-1]) | (op[1:] != op[:-1])) + 1
    bounds = [0, *firsts.tolist(), len(order)] if len(order) else []
    return tuple(
        Group(op, order[first:last])
        for op, (first, last) in zip(op[bounds[:-1]].tolist(), pairwise(bounds), strict=True)
    )


def _takes(graph: Graph) -> np.ndarray:
    """(N, A) ids of the nodes whose results each node takes, in the order of its arguments; -1 elsewhere."""
    return np.where(graph.args >= graph.num_inputs, graph.args - graph.num_inputs, -1)


def _latest_argument(graph: Graph, step: np.ndarray) -> np.ndarray:
    """(N,) greatest `step` among each node's arguments, -1 where all of them are inputs."""
    step_of_slot = np.concatenate([np.full(graph.num_inputs, -1), step, [-1]])
    return step_of_slot[graph.args].max(axis=1, initial=-1)
