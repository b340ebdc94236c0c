"""Answers to single questions as a file: predictions.jsonl, a line with a JSON object for each question.

Keys: `question_index` and `image_index`, as in CLEVR's files; `question`, its text as far as the tokens tell
(CLEVR's vocabulary drops `?` and `.`); `type`; `family`, CLEVR's `question_family_index`; `program` and
`predicted_program`, lists of prefix tokens without `<START>`, `<END>` and padding; `answer`, `predicted_answer`,
`probability` (of the predicted answer), `runners_up`, the next likeliest answers with their probabilities, and
`correct`. What is unknown is left out: without true answers there is neither `answer` nor `correct`.

Legend: N questions, T question tokens, L program tokens, K likeliest answers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iep.evaluation.metrics import UNKNOWN_TYPE
from iep.programs import QUESTION_TYPES
from iep.runtime.files import atomic_path
from iep.vocab import END, NULL, START, Vocab


def write_predictions(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write predictions.jsonl, whole or not at all."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def prediction_rows(
    vocab: Vocab,
    question_indices: np.ndarray,
    image_indices: np.ndarray,
    questions: np.ndarray,
    types: np.ndarray | None = None,
    families: np.ndarray | None = None,
    programs: np.ndarray | None = None,
    predicted_programs: np.ndarray | None = None,
    answers: np.ndarray | None = None,
    ranked_answers: np.ndarray | None = None,
    ranked_probabilities: np.ndarray | None = None,
) -> Iterator[dict[str, Any]]:
    """The objects of predictions.jsonl; an argument that is None is unknown.

    Args:
        vocab: what the tokens are indices of.
        question_indices: (N,) CLEVR's `question_index`.
        image_indices: (N,) CLEVR's `image_index`.
        questions: (N, T) question tokens.
        types: (N,) positions in `QUESTION_TYPES`, -1 where unknown.
        families: (N,) CLEVR's `question_family_index`.
        programs: (N, L) true programs.
        predicted_programs: (N, L') predicted programs.
        answers: (N,) true answers.
        ranked_answers: (N, K) predicted answers, the likeliest first.
        ranked_probabilities: (N, K) their probabilities from 0 to 1.
    """
    for n in range(len(questions)):
        row: dict[str, Any] = {
            "question_index": int(question_indices[n]),
            "image_index": int(image_indices[n]),
            "question": question_text(questions[n], vocab.question),
        }
        if types is not None and types[n] != UNKNOWN_TYPE:
            row["type"] = QUESTION_TYPES[types[n]]
        if families is not None:
            row["family"] = int(families[n])
        if programs is not None:
            row["program"] = words(programs[n], vocab.program)
        if predicted_programs is not None:
            row["predicted_program"] = words(predicted_programs[n], vocab.program)
        if answers is not None:
            row["answer"] = vocab.answer[answers[n]]
        if ranked_answers is not None:
            names = [vocab.answer[answer] for answer in ranked_answers[n]]
            shares = [round(float(share), 6) for share in ranked_probabilities[n]]
            row |= {"predicted_answer": names[0], "probability": shares[0]}
            row["runners_up"] = dict(zip(names[1:], shares[1:], strict=True))
            if answers is not None:
                row["correct"] = bool(answers[n] == ranked_answers[n][0])
        yield row


def words(indices: Sequence[int], tokens: Sequence[str]) -> list[str]:
    """The tokens between `<START>` and `<END>`, or the padding where there is no `<END>`."""
    indices = np.asarray(indices).tolist()
    if END in indices:
        indices = indices[: indices.index(END)]
    while indices and indices[-1] == NULL:
        indices.pop()
    if indices[:1] == [START]:
        indices = indices[1:]
    return [tokens[index] for index in indices]


def question_text(indices: Sequence[int], tokens: Sequence[str]) -> str:
    """A question's words joined by spaces, `;` and `,` set close to the word before."""
    text = " ".join(words(indices, tokens))
    return text.replace(" ;", ";").replace(" ,", ",")
