"""Graph -> schedule: which nodes run together, in which order. Pure functions of integers; no tensor is touched.

A schedule is a tuple of groups, each one module call. `vanilla`, `standard` and `improved` are those of Suarez & Zhu
(Effective Approaches to Batch Parallelization for Dynamic Neural Network Architectures, section 2). All of them take
any directed acyclic graph whose nodes are numbered children first.

Shapes: N nodes.
"""

import difflib
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph


class Group(NamedTuple):
    """One module call: `op` on all of `nodes`, (G,) node ids in the order of the call's rows."""

    op: int
    nodes: np.ndarray


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
}


def make_schedule(graph: Graph, name: str) -> Schedule:
    """The schedule that the scheduler called `name` makes of `graph`.

    Raises:
        ValueError: there is no such scheduler; the message lists those there are.
    """
    if name not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"no scheduler is called {name!r}, expected one of {', '.join(SCHEDULERS)}{hint}")
    return SCHEDULERS[name](graph)


def _pool(pool: np.ndarray, op: np.ndarray) -> Schedule:
    """Nodes in rising order of `pool`, (N,), each pool split by `op`; ids rise within a group."""
    order = np.lexsort((op, pool))
    changes = (np.diff(pool[order]) != 0) | (np.diff(op[order]) != 0)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(order)]
    return tuple(Group(int(op[order[first]]), order[first:last]) for first, last in pairwise(bounds) if last)


def _latest_argument(graph: Graph, step: np.ndarray) -> np.ndarray:
    """(N,) greatest `step` among each node's arguments, -1 where all of them are inputs."""
    step_of_slot = np.concatenate([np.full(graph.num_inputs, -1), step, [-1]])
    return step_of_slot[graph.args].max(axis=1, initial=-1)
