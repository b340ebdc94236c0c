"""Predicted and true tokens -> scores: accuracy per question type, exact match of programs, and counts of any kind.

Kinds are question types, CLEVR's question families and lengths of programs; answers are counted by which are taken for
which. Plain functions on NumPy arrays; tensors on the CPU serve too. Covers no model and no file.

Legend: N questions, L program tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from iep.programs import QUESTION_TYPES, question_type
from iep.synth.world import ATTRIBUTES, VALUES
from iep.vocab import END, NULL

UNKNOWN_TYPE = -1


@dataclass(frozen=True)
class Scores:
    """Shares from 0 to 1 of questions that are right: of all, and of each type that has questions."""

    overall: float
    by_type: Mapping[str, float]


def question_types(programs_NL: np.ndarray, program_tokens: Sequence[str]) -> np.ndarray:
    """(N,) positions in `QUESTION_TYPES` of the types that the programs' roots tell, -1 where they tell none.

    The root is the token after `<START>`.

    Args:
        programs_NL: (N, L) program tokens that begin with `<START>`.
        program_tokens: the program vocabulary, a token's position being its index.
    """
    position = {name: index for index, name in enumerate(QUESTION_TYPES)}
    types_V = np.array([position.get(question_type(token), UNKNOWN_TYPE) for token in program_tokens])
    return types_V[np.asarray(programs_NL)[:, 1]]


def count_types(types_N: np.ndarray) -> dict[str, int]:
    """Number of questions of each type that has any, in the order of `QUESTION_TYPES`."""
    types_N = np.asarray(types_N)
    counts = np.bincount(types_N[types_N != UNKNOWN_TYPE], minlength=len(QUESTION_TYPES))
    return {name: int(count) for name, count in zip(QUESTION_TYPES, counts, strict=True) if count}


def score(correct_N: np.ndarray, types_N: np.ndarray) -> Scores:
    """Share of right questions, overall and per type; questions of unknown type count overall alone.

    Raises:
        ValueError: there is no question, or the two arrays differ in length.
    """
    correct_N, types_N = np.asarray(correct_N, dtype=bool), np.asarray(types_N)
    if len(correct_N) == 0 or len(correct_N) != len(types_N):
        raise ValueError(f"{len(correct_N)} results and {len(types_N)} types, expected as many, at least one")
    right, total = count_types(types_N[correct_N]), count_types(types_N)
    return Scores(float(correct_N.mean()), {name: right.get(name, 0) / count for name, count in total.items()})


def exact_match(predicted_NL: np.ndarray, programs_NL: np.ndarray) -> np.ndarray:
    """(N,) booleans: the programs agree up to and including `<END>`.

    What follows `<END>` and how far the matrices are padded do not count. A predicted program that was cut
    off before its `<END>` never matches one that has it.
    """
    width = max(np.shape(predicted_NL)[1], np.shape(programs_NL)[1])
    return (_until_end(predicted_NL, width) == _until_end(programs_NL, width)).all(1)


def _until_end(programs_NL: np.ndarray, width: int) -> np.ndarray:
    """(N, width) programs with everything after the first `<END>` made `<NULL>`."""
    programs_NL = np.asarray(programs_NL)
    ends_NL = programs_NL == END
    kept_NL = np.where(np.cumsum(ends_NL, axis=1) > ends_NL, NULL, programs_NL)
    return np.pad(kept_NL, ((0, 0), (0, width - kept_NL.shape[1])), constant_values=NULL)


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
