"""The nodes of a graph -> the distinct strings of ops along its paths, by array code.

Paths that lead from the roots through the same ops are followed together, as many programs of a minibatch begin alike.
A Python loop runs over the distances from the roots, and none over nodes or paths.

Shapes: N nodes, A greatest number of arguments, P strings, L length of the longest.
"""

import numpy as np

MOST_PATHS = 1 << 14
"""The greatest number of pairs of a prefix and its last node that are followed from one distance. Only graphs with
repeatedly shared nodes have more. The strings together have at most four times this number of ops."""


def op_strings(op_N: np.ndarray, reads_NA: np.ndarray, among_N: np.ndarray) -> np.ndarray:
    """Return the ops of the paths from a leaf to a root in the order in which they run, (P, L), filled up with -1.

    No string is the end of another, and none occurs twice. They cover all paths, except in graphs with very many
    paths, of which they cover some.

    Args:
        op_N: (N,) ops, 0 or greater.
        reads_NA: (N, A) ids of the nodes whose results each node reads, less than its own; -1 elsewhere.
        among_N: (N,) bool, the nodes to consider; every node that one of them reads is among them too.
    """
    above, letter, length = _prefix_tree(op_N, reads_NA, among_N)
    has_below = np.zeros(len(above) + 1, dtype=bool)
    has_below[above] = True
    end = np.flatnonzero(~has_below[:-1])
    end = _some(end, 4 * MOST_PATHS * len(end) // max(1, length[end].sum()))
    above, letter = np.append(above, -1), np.append(letter, -1)
    columns = []
    while (end >= 0).any():
        columns.append(letter[end])
        end = above[end]
    return np.stack(columns, axis=1) if columns else np.zeros((0, 0), dtype=np.int64)


def _prefix_tree(
    op_N: np.ndarray, reads_NA: np.ndarray, among_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return parent (-1 at a root), last op and length of every prefix from the roots on, shorter ones first."""
    count, width = len(op_N), int(op_N.max(initial=0)) + 1
    node = roots(reads_NA, among_N)
    entry = np.full(len(node), -1)
    entries, steps = 0, [np.empty(0, dtype=np.int64)]
    while len(node):
        # An entry, the op that follows it, and the node that runs it; sorting puts the nodes of a new entry together.
        key = np.sort(((entry + 1) * width + op_N[node]) * count + node)
        key = _some(key[_differs(key)], MOST_PATHS)
        step, node = np.divmod(key, count)
        is_new = _differs(step)
        entry = np.cumsum(is_new) + (entries - 1)
        steps.append(step[is_new])
        entries += len(steps[-1])
        below = reads_NA[node]
        row, column = np.nonzero(below >= 0)
        entry, node = entry[row], below[row, column]
    above, letter = np.divmod(np.concatenate(steps), width)
    length = np.repeat(np.arange(len(steps)), [len(step) for step in steps])
    return above - 1, letter, length


def roots(reads_NA: np.ndarray, among_N: np.ndarray) -> np.ndarray:
    """Return the ids of the nodes of `among_N` that no other node reads; the arguments are those of `op_strings`."""
    is_read = np.zeros(len(reads_NA) + 1, dtype=bool)
    is_read[reads_NA[among_N]] = True
    return np.flatnonzero(among_N & ~is_read[:-1])


def _differs(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the previous one; the first value counts as different."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _some(values: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the values, evenly spread, but at least one if there are any."""
    most = max(1, most)
    return values if len(values) <= most else values[np.arange(most) * len(values) // most]
