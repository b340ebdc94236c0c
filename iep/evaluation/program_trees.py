"""Prefix tokens, well-formed or not -> the lines of an indented tree, and two such trees side by side.

A tree is shown as the engine runs it (`batching/graph.py`), with what it makes up for or leaves out marked.
"""

from collections.abc import Sequence
from difflib import SequenceMatcher
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from iep.programs import SCENE, arity
from iep.vocab import END, NULL, START, Vocab


class Kind(IntEnum):
    """What a line of a tree is."""

    FUNCTION = 0
    """A token of the program."""
    IMPLIED = 1
    """A `scene` that the program lacks: the end of the program or `<NULL>` stands for it."""
    IGNORED = 2
    """A token after the tree is complete, which does not run."""


class Line(NamedTuple):
    """One line: how deep in the tree, which token, and of what kind."""

    depth: int
    token: int
    kind: Kind


def tree_lines(program_L: np.ndarray, vocab: Vocab) -> list[Line]:
    """The lines of a program's tree from its root, by depth-first search.

    Args:
        program_L: program tokens; `<START>` is skipped wherever it stands, `<NULL>` and the end stand for `scene`.
        vocab: what they are indices of.
    """
    tokens = [token for token in np.asarray(program_L).tolist() if token != START]
    implied = vocab.program_index.get(SCENE, NULL)
    lines, open_depths, position = [], [0], 0
    while open_depths:
        depth = open_depths.pop()
        token = tokens[position] if position < len(tokens) else NULL
        position += 1
        if token == NULL:
            lines.append(Line(depth, implied, Kind.IMPLIED))
            continue
        lines.append(Line(depth, token, Kind.FUNCTION))
        open_depths += [depth + 1] * arity(vocab.program[token])
    ignored = tokens[position:]
    ignored = ignored[: ignored.index(END)] if END in ignored else ignored
    return lines + [Line(0, token, Kind.IGNORED) for token in ignored if token != NULL]


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
