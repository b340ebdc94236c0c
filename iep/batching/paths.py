"""The nodes of a graph -> the distinct strings of ops along its paths, by array code.

Paths that lead from the roots through the same ops are followed together, as many programs of a minibatch begin alike.
A Python loop runs over the distances from the roots, and none over nodes or paths.

Shapes: N nodes, A greatest number of arguments, P strings, L length of the longest.
"""

import numpy as np

MOST_PATHS = 1 << 16
"""The greatest number of pairs of a prefix and its last node that are followed from one distance. Only graphs with
repeatedly shared nodes have more."""


def op_strings(op_N: np.ndarray, reads_NA: np.ndarray) -> np.ndarray | None:
    """Return the ops of the paths from a leaf to a root in the order in which they run, (P, L), filled up with -1.

    No string is the end of another, and none occurs twice. Return None for a graph with very many paths.

    Args:
        op_N: (N,) ops, 0 or greater.
        reads_NA: (N, A) ids of the nodes whose results each node reads, less than its own; -1 elsewhere.
    """
    count, width = len(op_N), int(op_N.max(initial=0)) + 1
    node = roots(reads_NA)
    entry = np.full(len(node), -1)
    entries, steps = 0, [np.empty(0, dtype=np.int64)]
    while len(node):
        # An entry, the op that follows it, and the node that runs it; sorting puts the nodes of a new entry together.
        key = np.sort(((entry + 1) * width + op_N[node]) * count + node)
        key = key[_differs(key)]
        if len(key) > MOST_PATHS:
            return None
        step, node = np.divmod(key, count)
        is_new = _differs(step)
        entry = np.cumsum(is_new) + (entries - 1)
        steps.append(step[is_new])
        entries += len(steps[-1])
        below = reads_NA[node]
        row, column = np.nonzero(below >= 0)
        entry, node = entry[row], below[row, column]
    # The entry before each entry, -1 at a root, and its last op; the last of each is for -1, no entry.
    above, letter = np.divmod(np.append(np.concatenate(steps), 0), width)
    above, letter[-1] = above - 1, -1
    has_below = np.zeros(entries + 1, dtype=bool)
    has_below[above[:-1]] = True
    end = np.flatnonzero(~has_below[:-1])
    columns = []
    while (end >= 0).any():
        columns.append(letter[end])
        end = above[end]
    return np.stack(columns, axis=1) if columns else np.zeros((0, 0), dtype=np.int64)


def roots(reads_NA: np.ndarray) -> np.ndarray:
    """Return the ids of the nodes that no other node reads; the argument is that of `op_strings`."""
    is_read = np.zeros(len(reads_NA) + 1, dtype=bool)
    is_read[reads_NA] = True
    return np.flatnonzero(~is_read[:-1])


def _differs(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the previous one; the first value counts as different."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs
