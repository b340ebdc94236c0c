"""The questions of a split and the networks' predictions for them -> the files of an evaluation's directory.

The table and the HTML report of an evaluation are made from its `Outcome` as well. These are the files:

report.json: see `json_report.py`.

predictions.jsonl: a line with a JSON object for each question. Its keys are `question_index` and `image_index`, as in
CLEVR's files; `question`, its text, rebuilt from its tokens; `type`; `family`, CLEVR's `question_family_index`;
`program` and `predicted_program`, lists of prefix tokens without `<START>`, `<END>` and padding; `answer`,
`predicted_answer`, `probability` (of the predicted answer), `runners_up`, the next likeliest answers with their
probabilities, and `correct`. Unknown values are left out: without true answers there is neither `answer` nor `correct`.

answers.txt and answers.json: the input of CLEVR's evaluation of the test split. The first holds one answer per line,
the second a list of objects with `question_index` and `answer`. Both are in the order of `question_index`, as CLEVR's
question files are, whatever the order in which the questions were preprocessed.

Shapes: N questions, T question tokens, L program tokens, K likeliest answers.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
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
from iep.vocab import Vocab, content_tokens

PREDICTIONS, REPORT = "predictions.jsonl", "report.json"
ANSWERS, ANSWERS_JSON = "answers.txt", "answers.json"
OUTPUTS = (PREDICTIONS, REPORT, ANSWERS, ANSWERS_JSON)


def question_text(indices: Sequence[int], tokens: Sequence[str]) -> str:
    """Return a question's words joined by spaces, without a space before `;` and `,`, and a question mark at the end.

    Preprocessed questions are tokens without `?` and `.`, and every question of CLEVR ends in `?`.
    """
    text = " ".join(content_tokens(indices, tokens)).replace(" ;", ";").replace(" ,", ",")
    return f"{text}?" if text else ""


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
        """(N, L) the true programs, or else the predicted ones: the source of question types."""
        return self.predictions.programs if self.questions.programs is None else self.questions.programs

    @cached_property
    def types(self) -> np.ndarray:
        """(N,) positions in `QUESTION_TYPES`, -1 where unknown."""
        if self.programs is None:
            return np.full(len(self.questions), -1)
        return question_types(self.programs, self.vocab.program)

    @cached_property
    def right(self) -> np.ndarray | None:
        """(N,) whether the answers are right; None where no network answers, or the true answers are unknown."""
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
        """Return the scores of `right` or `exact`, None for None."""
        return None if good_N is None else score(good_N, self.types)

    def select(self, rows: np.ndarray) -> "Outcome":
        """Return the outcome of the questions at `rows`."""
        values = vars(self.predictions).items()
        chosen = {name: value[rows] for name, value in values if isinstance(value, np.ndarray)}
        return replace(self, questions=self.questions.select(rows), predictions=replace(self.predictions, **chosen))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of predictions.jsonl."""
        questions, predictions, vocab = self.questions, self.predictions, self.vocab
        for n in range(len(questions)):
            row: dict[str, Any] = {
                "question_index": int(questions.orig_idxs[n]),
                "image_index": int(questions.image_idxs[n]),
                "question": question_text(questions.questions[n], vocab.question),
            }
            if self.types[n] != UNKNOWN_TYPE:
                row["type"] = QUESTION_TYPES[self.types[n]]
            if questions.families is not None:
                row["family"] = int(questions.families[n])
            if questions.programs is not None:
                row["program"] = content_tokens(questions.programs[n], vocab.program)
            if predictions.programs is not None:
                row["predicted_program"] = content_tokens(predictions.programs[n], vocab.program)
            if questions.answers is not None:
                row["answer"] = vocab.answer[questions.answers[n]]
            if predictions.answers is not None:
                (answer, share), *others = self.ranked(n)
                row["predicted_answer"] = answer
                if share is not None:
                    row["probability"] = round(share, 6)
                    row["runners_up"] = {name: round(share, 6) for name, share in others}
            if self.right is not None:
                row["correct"] = bool(self.right[n])
            yield row

    def ranked(self, n: int) -> list[tuple[str, Any]]:
        """Return the K likeliest answers to question `n`, the likeliest first, and their probabilities or None."""
        if self.predictions.ranked_answers is None:
            return []
        names = (self.vocab.answer[answer] for answer in self.predictions.ranked_answers[n])
        if self.predictions.ranked_probabilities is None:
            return [(name, None) for name in names]
        return list(zip(names, self.predictions.ranked_probabilities[n].tolist(), strict=True))


def write_outputs(out: Path, outcome: Outcome, report: Report) -> None:
    """Write the files, each whole or not at all.

    A process that is killed at any moment leaves no report beside the predictions of another evaluation. Where no
    network answers, the files of answers of an earlier evaluation are removed.
    """
    with ExitStack() as writing:  # renames in reverse order: the report last
        paths = {name: writing.enter_context(atomic_path(out / name)) for name in (REPORT, PREDICTIONS)}
        with open(paths[PREDICTIONS], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in outcome.rows())
        if outcome.predictions.answers is not None:
            answers = {name: writing.enter_context(atomic_path(out / name)) for name in (ANSWERS, ANSWERS_JSON)}
            _write_answers(answers[ANSWERS], answers[ANSWERS_JSON], outcome)
        write_report(paths[REPORT], report)
        (out / REPORT).unlink(missing_ok=True)
        if outcome.predictions.answers is None:
            for name in (ANSWERS, ANSWERS_JSON):
                (out / name).unlink(missing_ok=True)


def _write_answers(text_path: Path, json_path: Path, outcome: Outcome) -> None:
    """Write answers.txt and answers.json."""
    assert outcome.predictions.answers is not None
    order = np.argsort(outcome.questions.orig_idxs, kind="stable")
    indices = outcome.questions.orig_idxs[order].tolist()
    answers = [outcome.vocab.answer[answer] for answer in outcome.predictions.answers[order]]
    text_path.write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    rows = [{"question_index": index, "answer": answer} for index, answer in zip(indices, answers, strict=True)]
    json_path.write_text(json.dumps(rows, ensure_ascii=False) + "\n", encoding="utf-8")
