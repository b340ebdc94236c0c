"""Graph -> a smaller graph in which equal nodes are merged, so that common parts of examples are computed once.

This is hash-consing (Ershov 1958, On programming of arithmetic operations) by array code: a Python loop runs over the
heights in the graph, and none over its nodes. It is exact if the result of an op depends only on its arguments. An op
that draws random numbers, or depends on its whole group as batch norm in training does, would give another result.

Shapes: N nodes, M remaining nodes.
"""

import numpy as np

from iep.batching.graph import Graph, stable_order

LARGEST = 2**62
"""A key beyond this would not be a 64-bit integer."""


def share(graph: Graph) -> Graph:
    """Return `graph` with equal nodes merged, that is nodes of the same op with equal arguments in the same order.

    The remaining nodes keep their order, and each belongs to the first example that has it. The roots of `graph` and
    of the shared graph have the same results.
    """
    # The slot that replaces each slot; the last entry maps -1, which is no argument, to itself.
    same = np.append(np.arange(graph.num_inputs + graph.num_nodes), -1)
    order = stable_order(graph.height)
    for nodes in np.split(order, np.flatnonzero(np.diff(graph.height[order])) + 1):
        first = _first_equal(graph.op[nodes], same[graph.args[nodes]])
        same[graph.num_inputs + nodes] = graph.num_inputs + nodes[first]

    kept = same[graph.num_inputs : -1] == graph.num_inputs + np.arange(graph.num_nodes)
    renumbered = np.append(np.arange(graph.num_inputs), graph.num_inputs + np.cumsum(kept) - 1)
    slot = np.append(renumbered[same[:-1]], -1)
    return Graph(
        num_inputs=graph.num_inputs,
        op=graph.op[kept],
        args=slot[graph.args[kept]],
        example=graph.example[kept],
        roots=slot[graph.roots],
    )


def _first_equal(op: np.ndarray, args: np.ndarray) -> np.ndarray:
    """Return for each row the first row with the same op and arguments."""
    key, bound = op, int(op.max(initial=0)) + 1
    for column in args.T:
        choices = int(column.max(initial=0)) + 2
        if bound * choices > LARGEST:
            key, bound = np.unique(key, return_inverse=True)[1], len(key)
        key, bound = key * choices + column + 1, bound * choices
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    return first[kind]
