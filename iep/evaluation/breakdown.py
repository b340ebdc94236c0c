"""Right and wrong answers -> how many of each kind of question are right, and which answers are taken for which.

Kinds are question types, CLEVR's question families and lengths of programs. Shares per type are also in `metrics.py`,
for report.json; here are counts of anything, for the HTML report.

Shapes: N questions, L program tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from iep.batching.graph import graph_from_prefix
from iep.programs import SCENE, arities
from iep.synth.world import ATTRIBUTES, VALUES
from iep.vocab import NULL, SPECIAL_TOKENS, START


@dataclass(frozen=True)
class Group:
    """Questions of one kind.

    Attributes:
        key: what they have in common: a family, a length, a position in a list.
        questions: how many.
        right: how many of them are answered right; None where unknown.
        exact: how many have the true program predicted; None where unknown.
        first: the row of the first of them.
    """

    key: int
    questions: int
    right: int | None
    exact: int | None
    first: int


def groups(keys_N: np.ndarray, right_N: np.ndarray | None, exact_N: np.ndarray | None) -> list[Group]:
    """The questions by their key, ascending; those with a negative key are of no kind and left out.

    Raises:
        ValueError: the arrays differ in length.
    """
    for good_N in (right_N, exact_N):
        if good_N is not None and len(good_N) != len(keys_N):
            raise ValueError(f"{len(good_N)} results of {len(keys_N)} questions, expected as many")
    rows = np.flatnonzero(np.asarray(keys_N) >= 0)
    keys, first, kind, counts = np.unique(keys_N[rows], return_index=True, return_inverse=True, return_counts=True)

    def good(good_N: np.ndarray | None) -> list[int | None]:
        if good_N is None:
            return [None] * len(keys)
        return np.bincount(kind[good_N[rows]], minlength=len(keys)).tolist()

    columns = (keys.tolist(), counts.tolist(), good(right_N), good(exact_N), rows[first].tolist())
    return [Group(*values) for values in zip(*columns, strict=True)]


def program_lengths(programs_NL: np.ndarray, program_tokens: Sequence[str]) -> np.ndarray:
    """(N,) number of functions besides `scene` in each program's tree, as the engine runs it: ill-formed programs too.

    Special tokens inside a tree are no functions, what follows a complete tree is none of it.

    Args:
        programs_NL: prefix tokens, between `<START>` and `<END>`.
        program_tokens: the program vocabulary. One without `scene` gives no trees: all lengths are -1, unknown.
    """
    if SCENE not in program_tokens:
        return np.full(len(programs_NL), -1)
    scene = list(program_tokens).index(SCENE)
    graph = graph_from_prefix(programs_NL, arities(program_tokens), scene, skip=START, pad=NULL, leaf_is_input=True)
    functions = graph.op >= len(SPECIAL_TOKENS)
    return np.bincount(graph.example[functions], minlength=len(programs_NL))


def confusion(answers_N: np.ndarray, predicted_N: np.ndarray) -> dict[tuple[int, int], int]:
    """How often each true answer was answered with what: (true, predicted) -> count, without what never happened."""
    pairs, counts = np.unique(np.stack([answers_N, predicted_N], axis=1), axis=0, return_counts=True)
    return {(true, predicted): count for (true, predicted), count in zip(pairs.tolist(), counts.tolist(), strict=True)}


NUMBERS = 1
KINDS_OF_ANSWERS = (("no", "yes"), (), *(VALUES[attribute] for attribute in ATTRIBUTES))
"""Groups of answers in the order of CLEVR's question types; at `NUMBERS` are all whole ones, which need no list."""


def answer_groups(answers: Iterable[int], answer_tokens: Sequence[str]) -> dict[int, int]:
    """The answers -> the group of each, in the order in which to list them: no and yes, numbers by their value, then
    CLEVR's values attribute by attribute and what else there is, each by the alphabet."""

    def place(answer: int) -> tuple[int, int, str]:
        token = answer_tokens[answer]
        if token.isascii() and token.isdigit():
            return NUMBERS, int(token), token
        kind = next((at for at, tokens in enumerate(KINDS_OF_ANSWERS) if token in tokens), len(KINDS_OF_ANSWERS))
        return kind, 0, token

    return {answer: place(answer)[0] for answer in sorted(set(answers), key=place)}
