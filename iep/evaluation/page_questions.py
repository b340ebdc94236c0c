"""An evaluation's outcome -> the questions that the HTML report lists, as plain data for its script.

Which ones: all where they are few. Otherwise those worth a look, of several sorts in turn, until there are enough.

Shapes: N questions, R of them listed.
"""

from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any

import numpy as np

from iep.evaluation.compared_programs import Line, program_lines, side_by_side
from iep.evaluation.outcome import Outcome
from iep.evaluation.page_images import Pictures
from iep.evaluation.prediction_file import question_text
from iep.execution_engine.families import family
from iep.vocab import NULL, Vocab


def choose(outcome: Outcome, most: int) -> np.ndarray:
    """(R,) rows of at most `most` questions to list, ascending.

    Of more, in turn: the wrong answers, most confident first; the wrong programs, likewise; one after the other of
    every pair of a true and a predicted answer; one after the other of every question family.
    """
    count = len(outcome.questions)
    if count <= most:
        return np.arange(count)
    confidence_N = _confidence(outcome)
    order_N = np.argsort(-confidence_N, kind="stable")
    sorts = [order_N[~good_N[order_N]] for good_N in (outcome.right, outcome.exact) if good_N is not None]
    answers, predicted = outcome.questions.answers, outcome.predictions.answers
    if predicted is not None:
        pairs_N = predicted if answers is None else answers * len(outcome.vocab.answer) + predicted
        sorts.append(_round_robin(pairs_N[order_N], order_N))
    kinds_N = outcome.types if outcome.questions.families is None else outcome.questions.families
    sorts.append(_round_robin(kinds_N, np.arange(count)))
    chosen = islice(dict.fromkeys(_in_turn([candidates.tolist() for candidates in sorts])), most)
    return np.array(sorted(chosen), dtype=np.int64)


def _confidence(outcome: Outcome) -> np.ndarray:
    probabilities = outcome.predictions.ranked_probabilities
    return np.zeros(len(outcome.questions)) if probabilities is None else probabilities[:, 0]


def _round_robin(keys_N: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    """`rows_N` reordered: the first of every key, then the second of every key, and so on."""
    by_key = np.argsort(keys_N, kind="stable")
    _, first, counts = np.unique(keys_N[by_key], return_index=True, return_counts=True)
    turn = np.arange(len(keys_N)) - np.repeat(first, counts)
    return rows_N[by_key[np.argsort(turn, kind="stable")]]


def _in_turn(lists: list[list[int]]) -> Iterator[int]:
    rounds = chain.from_iterable(zip_longest(*lists))
    return (row for row in rounds if row is not None)


def question_objects(outcome: Outcome, lengths_N: np.ndarray | None, pictures: Pictures | None) -> list[dict[str, Any]]:
    """The questions as objects: numbers are positions in the vocabulary's tokens and in `QUESTION_TYPES`.

    Keys: `index` (`question_index`), `image`, `picture` (the key of its picture, where there is one), `text`, `type`,
    `family`, `length`; `answer`; `ranked`, pairs of answer and probability; `right`, `exact`; `program` and
    `predicted`, the lines of the trees, the latter only where it differs from the true one, with the rows of both
    side by side in `rows`.
    What is unknown is None.
    """
    questions, predictions = outcome.questions, outcome.predictions
    objects = []
    for n in range(len(questions)):
        image = int(questions.image_idxs[n])
        ranked = predictions.ranked_answers is not None and zip(
            predictions.ranked_answers[n].tolist(),
            predictions.ranked_probabilities[n].tolist(),
            strict=True,
        )
        objects.append(
            {
                "index": int(questions.orig_idxs[n]),
                "image": image,
                "picture": None if pictures is None else pictures.key(image),
                "text": question_text(questions.questions[n], outcome.vocab.question),
                "type": int(outcome.types[n]) if outcome.types[n] >= 0 else None,
                "family": None if questions.families is None else int(questions.families[n]),
                "length": None if lengths_N is None or lengths_N[n] < 0 else int(lengths_N[n]),
                "answer": None if questions.answers is None else int(questions.answers[n]),
                "ranked": list(ranked) if ranked else None,
                "right": None if outcome.right is None else bool(outcome.right[n]),
                "exact": None if outcome.exact is None else bool(outcome.exact[n]),
                **_programs(outcome, n),
            }
        )
    return objects


def _programs(outcome: Outcome, n: int) -> dict[str, Any]:
    vocab = outcome.vocab
    own = None if outcome.modules is None else family(outcome.modules)
    true, predicted = (
        None if programs is None else program_lines(programs[n], vocab, own)
        for programs in (outcome.questions.programs, outcome.predictions.programs)
    )
    is_exact = outcome.exact is not None and outcome.exact[n]
    return {
        "program": _indexed(true, vocab),
        "predicted": None if is_exact else _indexed(predicted, vocab),
        "rows": side_by_side(true, predicted) if outcome.exact is not None and not is_exact else None,
    }


def _indexed(lines: list[Line] | None, vocab: Vocab) -> list[tuple[int, int, int]] | None:
    if lines is None:
        return None
    return [(line.depth, vocab.program_index.get(line.token, NULL), line.kind) for line in lines]
