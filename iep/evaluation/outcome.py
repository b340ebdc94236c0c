"""A split's questions beside what the networks said of them -> the files of an evaluation's directory.

`Outcome` is what every table and page of an evaluation is made from, too. The files:

report.json: see `json_report.py`.

predictions.jsonl: a line with a JSON object for each question. Keys: `question_index` and `image_index`, as in CLEVR's
files; `question`, its text as far as the tokens tell (CLEVR's vocabulary drops `?` and `.`); `type`; `family`, CLEVR's
`question_family_index`; `program` and `predicted_program`, lists of prefix tokens without `<START>`, `<END>` and
padding; `answer`, `predicted_answer`, `probability` (of the predicted answer), `runners_up`, the next likeliest answers
with their probabilities, and `correct`. What is unknown is left out: without true answers there is neither `answer` nor
`correct`.

answers.txt and answers.json: what CLEVR's evaluation of the test split takes, one answer a line in the order of the
questions, and a list of objects with `question_index` and `answer`. In CLEVR's question files the order is that of
`question_index`, so the lines are in that order whatever order the questions were preprocessed in.

Legend: N questions, T question tokens, L program tokens, K likeliest answers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from iep.data.question_file import Questions
from iep.evaluation.json_report import Report, write_report
from iep.evaluation.metrics import UNKNOWN_TYPE, Scores, exact_match, question_types, score
from iep.evaluation.predict import Predictions
from iep.execution_engine.roles import ModuleSet
from iep.programs import QUESTION_TYPES
from iep.runtime.files import atomic_path
from iep.vocab import END, NULL, START, Vocab

PREDICTIONS, REPORT = "predictions.jsonl", "report.json"
ANSWERS, ANSWERS_JSON = "answers.txt", "answers.json"
OUTPUTS = (PREDICTIONS, REPORT, ANSWERS, ANSWERS_JSON)


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


@dataclass(frozen=True)
class Outcome:
    """The questions that were evaluated, and the predictions for them in the same order."""

    vocab: Vocab
    questions: Questions
    predictions: Predictions
    modules: ModuleSet | None = None
    """The modules that ran programs; None if none did."""

    @property
    def programs(self) -> np.ndarray | None:
        """(N, L) the true programs, or else the predicted ones; they tell a question's type and length."""
        return self.predictions.programs if self.questions.programs is None else self.questions.programs

    @cached_property
    def types(self) -> np.ndarray:
        """(N,) positions in `QUESTION_TYPES`, -1 where unknown."""
        if self.programs is None:
            return np.full(len(self.questions), -1)
        return question_types(self.programs, self.vocab.program)

    @cached_property
    def right(self) -> np.ndarray | None:
        """(N,) whether the answers are right; None where nothing answers, or the true answers are unknown."""
        if self.predictions.answers is None or self.questions.answers is None:
            return None
        return self.predictions.answers == self.questions.answers

    @cached_property
    def exact(self) -> np.ndarray | None:
        """(N,) whether the predicted programs are the true ones; None where either are unknown."""
        if self.predictions.programs is None or self.questions.programs is None:
            return None
        return exact_match(self.predictions.programs, self.questions.programs)

    def scores(self, good_N: np.ndarray | None) -> Scores | None:
        """The scores of `right` or `exact`, None of None."""
        return None if good_N is None else score(good_N, self.types)

    def select(self, rows: np.ndarray) -> "Outcome":
        """The same for the questions at `rows`."""
        values = {f.name: getattr(self.predictions, f.name) for f in fields(self.predictions)}
        chosen = {name: value[rows] for name, value in values.items() if isinstance(value, np.ndarray)}
        return replace(self, questions=self.questions.select(rows), predictions=replace(self.predictions, **chosen))

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects of predictions.jsonl."""
        return prediction_rows(
            self.vocab,
            self.questions.orig_idxs,
            self.questions.image_idxs,
            self.questions.questions,
            types=self.types,
            families=self.questions.families,
            programs=self.questions.programs,
            predicted_programs=self.predictions.programs,
            answers=self.questions.answers,
            ranked_answers=self.predictions.ranked_answers,
            ranked_probabilities=self.predictions.ranked_probabilities,
        )


def write_outputs(out: Path, outcome: Outcome, report: Report) -> None:
    """Write the files, each whole or not at all; a kill at any moment leaves no report beside other predictions.

    Where nothing answers there are no files of answers, and those of an earlier evaluation are removed.
    """
    with ExitStack() as writing:  # renames in reverse order: the report last
        paths = {name: writing.enter_context(atomic_path(out / name)) for name in (REPORT, PREDICTIONS)}
        write_predictions(paths[PREDICTIONS], outcome.rows())
        if outcome.predictions.answers is not None:
            answers = {name: writing.enter_context(atomic_path(out / name)) for name in (ANSWERS, ANSWERS_JSON)}
            _write_answers(answers[ANSWERS], answers[ANSWERS_JSON], outcome)
        write_report(paths[REPORT], report)
        (out / REPORT).unlink(missing_ok=True)
        if outcome.predictions.answers is None:
            for name in (ANSWERS, ANSWERS_JSON):
                (out / name).unlink(missing_ok=True)


def _write_answers(text_path: Path, json_path: Path, outcome: Outcome) -> None:
    order = np.argsort(outcome.questions.orig_idxs, kind="stable")
    indices = outcome.questions.orig_idxs[order].tolist()
    answers = [outcome.vocab.answer[answer] for answer in outcome.predictions.answers[order]]
    text_path.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    rows = [{"question_index": index, "answer": answer} for index, answer in zip(indices, answers, strict=True)]
    json_path.write_text(json.dumps(rows, ensure_ascii=False) + "\n", encoding="utf-8")
