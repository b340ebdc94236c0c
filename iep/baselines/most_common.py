"""The baseline without training: question types -> the most common answer to each type in the training split.

It is called Q-type mode in Johnson et al. 2017 (CLEVR, section 4.1). The type of a question is that of its program's
root (`question_types` of `evaluation/metrics.py`).

Shapes: N questions, Q question types.
"""

import numpy as np


def count_most_common(answers_N: np.ndarray, types_N: np.ndarray, num_types: int) -> np.ndarray:
    """Return the most common answer of each type, and at the end, at index -1, that of all questions, (Q + 1,).

    A type without questions has the most common answer of all. Of equally common answers, the smallest index is used.

    Args:
        answers_N: (N,) answer indices of the training split.
        types_N: (N,) types from 0 to `num_types` - 1, or -1 if the type is unknown.
        num_types: Q.

    Raises:
        ValueError: there are no questions, or the arrays have different lengths.
    """
    answers_N, types_N = np.asarray(answers_N), np.asarray(types_N)
    if len(answers_N) == 0 or len(answers_N) != len(types_N):
        raise ValueError(f"{len(answers_N)} answers and {len(types_N)} types, expected the same number, at least one")
    counts_QA = np.zeros((num_types + 1, answers_N.max() + 1), dtype=np.int64)
    np.add.at(counts_QA, (types_N, answers_N), 1)
    overall_A = counts_QA.sum(0)
    counts_QA[counts_QA.sum(1) == 0] = overall_A
    counts_QA[-1] = overall_A
    return counts_QA.argmax(1)


def predict(most_common: np.ndarray, types_N: np.ndarray) -> np.ndarray:
    """Return the answers to questions of the given types, (N,). Type -1, unknown, has the most common one of all."""
    return most_common[np.asarray(types_N)]
