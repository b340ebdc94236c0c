"""A program's tree, well-formed or not -> lines to show it by, and those of two trees side by side."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from iep.execution_engine.family import Family, tree_run
from iep.programs import Node, program_tree
from iep.vocab import Vocab


class Kind(IntEnum):
    """What a line of a tree is."""

    FUNCTION = 0
    """A token of the program."""
    FILLED_IN = 1
    """A `scene` that the program lacks: it has `<NULL>` there, or had ended."""
    IGNORED = 2
    """A token after the tree is complete, which does not run."""
    NOT_USED = 3
    """A function whose value is of another kind than what is to take it, or one below it."""


class Line(NamedTuple):
    """One line: how deep in the tree, which token, and of what kind."""

    depth: int
    token: str
    kind: Kind


def program_lines(program_L: np.ndarray, vocab: Vocab, own: Family | None = None) -> list[Line]:
    """The lines of the tree that a program stands for, from its root by depth-first search, and of what is ignored.

    Args:
        program_L: program tokens with `<START>`, `<END>` and padding.
        vocab: what they are indices of.
        own: the modules that run it; None where nothing does.
    """
    tokens = [vocab.program[token] for token in np.asarray(program_L).tolist()]
    tree = program_tree(tokens) if own is None else tree_run(tokens, own)
    lines = [Line(node.depth, node.token, _kind(node)) for node in tree.nodes]
    return lines + [Line(0, token, Kind.IGNORED) for token in tree.ignored]


def _kind(node: Node) -> Kind:
    if node.unused:
        return Kind.NOT_USED
    return Kind.FILLED_IN if node.is_filled_in else Kind.FUNCTION


def side_by_side(left: Sequence[Line], right: Sequence[Line]) -> list[tuple[int | None, int | None]]:
    """Rows of two columns: the lines of both trees by number, in order, equal ones in one row as far as possible.

    Lines are equal that have the same token and are of the same kind, however deep: below a function that only one
    tree has, the rest is the same but for its depth.
    """
    matcher = SequenceMatcher(None, *([line[1:] for line in lines] for lines in (left, right)), autojunk=False)
    rows: list[tuple[int | None, int | None]] = []
    for _, left_start, left_end, right_start, right_end in matcher.get_opcodes():
        for offset in range(max(left_end - left_start, right_end - right_start)):
            at_left, at_right = left_start + offset, right_start + offset
            rows.append((at_left if at_left < left_end else None, at_right if at_right < right_end else None))
    return rows
