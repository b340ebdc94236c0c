"""The nodes of a graph -> the distinct strings of ops along its paths, by array code.

Paths that lead from the roots through the same ops are followed together, as many programs of a minibatch begin alike.
A Python loop runs over the distances from the roots, and none over nodes or paths.

Shapes: N nodes, A greatest number of arguments, P strings, L length of the longest.
"""

import math

import numpy as np

from iep.batching.graph import Links, distinct


def op_strings(op_N: np.ndarray, reads: Links, most: float = math.inf) -> np.ndarray | None:
    """Return the ops of the paths from a leaf to a root in the order in which they run, (P, L), filled up with -1.

    No string is the end of another, and none occurs twice. Return None for a graph of more than `most` ops on all
    paths, or pairs of a string's end and a node that runs its first op.

    Args:
        op_N: (N,) ops, 0 or greater.
        reads: the nodes whose results each node reads, less than its own.
    """
    count, width = len(op_N), int(op_N.max(initial=0)) + 1
    node = roots(reads)
    entry = np.full(len(node), -1)
    entries, pairs, steps = 0, 0, [np.empty(0, dtype=np.int64)]
    while len(node):
        # An entry, the op that follows it, and the node that runs it; sorting puts the nodes of a new entry together.
        key = distinct(((entry + 1) * width + op_N[node]) * count + node)
        pairs += len(key)
        if pairs > most:
            return None
        step, node = np.divmod(key, count)
        is_new = np.diff(step, prepend=-1) != 0
        entry = np.cumsum(is_new) + (entries - 1)
        steps.append(step[is_new])
        entries += len(steps[-1])
        entry, node = np.repeat(entry, reads.count[node]), reads(node)
    # The entry before each entry, -1 at a root, and its last op; the last of each is for -1, no entry.
    above, letter = np.divmod(np.append(np.concatenate(steps), 0), width)
    above, letter[-1] = above - 1, -1
    has_below = np.zeros(entries + 1, dtype=bool)
    has_below[above[:-1]] = True
    end = np.flatnonzero(~has_below[:-1])
    columns: list[np.ndarray] = []
    letters = 0
    while (end >= 0).any():
        columns.append(letter[end])
        letters += int((end >= 0).sum())
        if letters > most:
            return None
        end = above[end]
    return np.stack(columns, axis=1) if columns else np.zeros((0, 0), dtype=np.int64)


def roots(reads: Links) -> np.ndarray:
    """Return the ids of the nodes that no other node reads."""
    return np.flatnonzero(np.bincount(reads.nodes, minlength=len(reads.count)) == 0)
