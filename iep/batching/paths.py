"""A graph's nodes -> the strings of ops along its paths, each different one once, by array code.

The paths that lead from the roots through the same ops are followed as one: many programs of a minibatch begin alike.
A Python loop runs over the distances from the roots, none over nodes or paths.

Shapes: N nodes, A greatest number of arguments, P strings, L length of the longest.
"""

import numpy as np

MOST_PATHS = 1 << 14
"""Prefixes with the nodes that end them that are followed from any distance on. Only a graph whose nodes are shared
over and over, so that its paths multiply, has more."""
MOST_PLACES = 1 << 16
"""Ops of all strings together."""


def op_strings(op_N: np.ndarray, takes_NA: np.ndarray, among_N: np.ndarray) -> np.ndarray:
    """(P, L) the ops of paths from a leaf to a root in the order in which they run, -1 after the last of each.

    No string is the end of another, and none comes twice. They are those of all paths, but for graphs with very many
    of them: then of the first to be found, the longest of those first, and of at least one.

    Args:
        op_N: (N,) ops, 0 or greater.
        takes_NA: (N, A) ids of the nodes that each node takes results of, less than its own; -1 elsewhere.
        among_N: (N,) bool, the nodes that count, and with each all that it takes.
    """
    above, letter, length = _prefix_tree(op_N, takes_NA, among_N)
    has_below = np.zeros(len(above) + 1, dtype=bool)
    has_below[above] = True
    end = np.flatnonzero(~has_below[:-1])[::-1]  # the last entries are the deepest
    end = end[: max(1, np.searchsorted(np.cumsum(length[end]), MOST_PLACES, side="right"))]
    above, letter = np.append(above, -1), np.append(letter, -1)
    columns = []
    while (end >= 0).any():
        columns.append(letter[end])
        end = above[end]
    return np.stack(columns, axis=1) if columns else np.zeros((0, 0), dtype=np.int64)


def _prefix_tree(
    op_N: np.ndarray, takes_NA: np.ndarray, among_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tree of the strings as they are read from the roots, shorter ones first: of every entry the one above it
    (-1 at a root), its op, and its distance from the root, counted from one."""
    count, width = len(op_N), int(op_N.max(initial=0)) + 1
    taken = np.zeros(count + 1, dtype=bool)
    taken[takes_NA[among_N]] = True
    node = np.flatnonzero(among_N & ~taken[:-1])
    entry = np.full(len(node), -1)
    entries, aboves, letters, sizes = 0, [], [], []
    while len(node):
        # An entry, the op that follows it, and a node where that leads; sorted, those of one new entry lie together.
        key = np.sort(((entry + 1) * width + op_N[node]) * count + node)
        key = key[np.concatenate([[True], key[1:] != key[:-1]])][:MOST_PATHS]
        step, node = np.divmod(key, count)
        is_new = np.concatenate([[True], step[1:] != step[:-1]])
        entry = entries + np.cumsum(is_new) - 1
        above, letter = np.divmod(step[is_new], width)
        aboves.append(above - 1)
        letters.append(letter)
        sizes.append(len(above))
        entries += len(above)
        below = takes_NA[node]
        row, column = np.nonzero(below >= 0)
        entry, node = entry[row], below[row, column]
    empty = np.empty(0, dtype=np.int64)
    length = np.repeat(np.arange(1, len(sizes) + 1), sizes)
    return np.concatenate([empty, *aboves]), np.concatenate([empty, *letters]), length
