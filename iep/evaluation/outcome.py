"""A split's questions beside what the networks said of them: what every file and table of an evaluation is made from.

Shapes: N questions, L program tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from iep.data.question_file import Questions
from iep.evaluation.metrics import Scores, exact_match, question_types, score
from iep.evaluation.predict import Predictions
from iep.evaluation.prediction_file import prediction_rows
from iep.vocab import Vocab


@dataclass(frozen=True)
class Outcome:
    """The questions that were evaluated, and the predictions for them in the same order."""

    vocab: Vocab
    questions: Questions
    predictions: Predictions
    modules: str | None = None
    """The family of the modules that ran programs; None where none did."""

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
