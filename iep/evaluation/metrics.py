"""Predicted and true tokens -> scores: accuracy per question type, and exact match of programs.

The functions take NumPy arrays or tensors on the CPU.

Shapes: N questions, L program tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from iep.programs import QUESTION_TYPES, question_type
from iep.vocab import END, NULL

UNKNOWN_TYPE = -1


@dataclass(frozen=True)
class Scores:
    """Shares of correct answers or programs from 0 to 1: of all questions, and of each type that has questions."""

    overall: float
    by_type: Mapping[str, float]


def question_types(programs_NL: np.ndarray, program_tokens: Sequence[str]) -> np.ndarray:
    """Return the positions (N,) in `QUESTION_TYPES` of the programs' types, -1 for a root that stands for no type.

    Args:
        programs_NL: (N, L) program tokens; the first is `<START>`, and the second is the root.
        program_tokens: the tokens of the program vocabulary by index.
    """
    position = {name: index for index, name in enumerate(QUESTION_TYPES)}
    types_V = np.array([position.get(question_type(token), UNKNOWN_TYPE) for token in program_tokens])
    return types_V[np.asarray(programs_NL)[:, 1]]


def count_types(types_N: np.ndarray) -> dict[str, int]:
    """Return the number of questions of each type that has any, in the order of `QUESTION_TYPES`."""
    types_N = np.asarray(types_N)
    counts = np.bincount(types_N[types_N != UNKNOWN_TYPE], minlength=len(QUESTION_TYPES))
    return {name: int(count) for name, count in zip(QUESTION_TYPES, counts, strict=True) if count}


def score(correct_N: np.ndarray, types_N: np.ndarray) -> Scores:
    """Return the share of correct results, overall and per type; questions of unknown type count only overall.

    Raises:
        ValueError: there are no questions, or the two arrays differ in length.
    """
    correct_N, types_N = np.asarray(correct_N, dtype=bool), np.asarray(types_N)
    if len(correct_N) == 0 or len(correct_N) != len(types_N):
        raise ValueError(f"{len(correct_N)} results and {len(types_N)} types, expected as many, at least one")
    right, total = count_types(types_N[correct_N]), count_types(types_N)
    return Scores(float(correct_N.mean()), {name: right.get(name, 0) / count for name, count in total.items()})


def exact_match(predicted_NL: np.ndarray, programs_NL: np.ndarray) -> np.ndarray:
    """Return whether the programs agree up to and including `<END>`, (N,) booleans.

    Tokens after `<END>` do not count. A predicted program without `<END>` never matches one that has it.
    """
    width = max(np.shape(predicted_NL)[1], np.shape(programs_NL)[1])
    return (_until_end(predicted_NL, width) == _until_end(programs_NL, width)).all(1)


def _until_end(programs_NL: np.ndarray, width: int) -> np.ndarray:
    """Return the programs, (N, width), with everything after the first `<END>` replaced by `<NULL>`."""
    programs_NL = np.asarray(programs_NL)
    ends_NL = programs_NL == END
    kept_NL = np.where(np.cumsum(ends_NL, axis=1) > ends_NL, NULL, programs_NL)
    return np.pad(kept_NL, ((0, 0), (0, width - kept_NL.shape[1])), constant_values=NULL)
