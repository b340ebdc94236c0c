"""A tree -> where its nodes lie so that none overlap: a tidy drawing (Reingold & Tilford 1981).

Nodes of a depth are in one row, the root's above. Arguments stand side by side in their order, as close as what is
below them allows, and a node in the middle of its arguments. How large a column and a row are is the caller's matter.
"""

from collections.abc import Sequence
from itertools import zip_longest

Outline = list[tuple[float, float]]
"""Of a subtree, row by row from its root: the leftmost and the rightmost node's column, the root's being 0."""


def tidy_columns(arguments: Sequence[Sequence[int]]) -> list[float]:
    """The column of each node, the leftmost 0; two nodes in a row are 1 apart or more.

    Args:
        arguments: of every node, in order; a node comes before its arguments, the root first.
    """
    shifts = [0.0] * len(arguments)  # of each node, from the one that takes its result
    outlines: list[Outline] = [[] for _ in arguments]
    for node in reversed(range(len(arguments))):
        below: Outline = []
        for argument in arguments[node]:
            shifts[argument] = _room(below, outlines[argument])
            below = _beside(below, outlines[argument], shifts[argument])
        middle = below[0][1] / 2 if below else 0.0  # of the first argument, at 0, and the last
        for argument in arguments[node]:
            shifts[argument] -= middle
        outlines[node] = [(0.0, 0.0), *((left - middle, right - middle) for left, right in below)]
    columns = [-min(left for left, _ in outlines[0])] * len(arguments)
    for node, taken in enumerate(arguments):
        for argument in taken:
            columns[argument] = columns[node] + shifts[argument]
    return columns


def _room(left: Outline, right: Outline) -> float:
    """How far a subtree must be shifted to stand to the right of others."""
    return max((edge[1] - other[0] + 1.0 for edge, other in zip(left, right, strict=False)), default=0.0)


def _beside(left: Outline, right: Outline, shift: float) -> Outline:
    """The outline of subtrees together with one more, shifted."""
    rows = []
    for first, second in zip_longest(left, right):
        moved = None if second is None else (second[0] + shift, second[1] + shift)
        rows.append((first or moved)[:1] + (moved or first)[1:])
    return rows
