"""What a reader of an evaluation might take otherwise than it is meant -> lines, for the terminal and the HTML report.

Covers where question types are from, why there is no column *commonest*, pictures of other images than the
features are of, and answers to a part of the questions or several under one number.
"""

from pathlib import Path

import numpy as np

from iep.data.features import Features
from iep.data.question_file import Questions, split_files
from iep.evaluation.outcome import Outcome
from iep.evaluation.outputs import ANSWERS, ANSWERS_JSON
from iep.evaluation.page_images import Pictures


def types_note(outcome: Outcome, split: str) -> str | None:
    """A line where questions are sorted into types by programs that may be wrong."""
    if outcome.questions.programs is not None or outcome.predictions.programs is None:
        return None
    return f"Question types are those of the predicted programs: the {split} split has none of its own."


def commonest_note(data: Path, split: str, questions: Questions, train: str | None) -> str | None:
    """A line where answers are known, but the commonest ones to compare with are not.

    Args:
        train: the split that they are counted on, None where the data have none.
    """
    if questions.answers is None:
        return None
    if train is None:
        return f"No column commonest: {data} has no train split to count answers on."
    lacking = split if questions.programs is None else train
    return f"No column commonest: the {lacking} split has no programs, or no answers, to tell types and count by."


def pictures_note(pictures: Pictures, data: Path, split: str) -> str | None:
    """A line where the images to be shown are not those that the split's features were made of, as far as recorded.

    Raises:
        InputError: the split has a features file that cannot be read.
    """
    path = split_files(data, split)[1]
    made_of = Features(path).images if path.exists() else None
    if made_of is None or pictures.is_of(*made_of):
        return None
    return (
        f"{pictures.directory}: not the images that {path} was made of (names or sizes differ); the report's pictures "
        "may be wrong."
    )


def answers_notes(out: Path, outcome: Outcome, total: int) -> list[str]:
    """Lines where the files of answers in `out` do not hold one to each of the split's `total` questions, or several
    under one `question_index`."""
    questions, notes = outcome.questions, []
    if outcome.predictions.answers is None:
        return notes
    if len(questions) < total:
        notes.append(f"{out / ANSWERS} is not complete: it holds {len(questions)} of {total} questions.")
    indices, counts = np.unique(questions.orig_idxs, return_counts=True)
    if (counts > 1).any():
        first = counts.argmax()
        where = f"{counts[first]} questions have the question_index {indices[first]}"
        notes.append(f"{questions.path}: {where}; {out / ANSWERS_JSON} does not tell their answers apart.")
    return notes
