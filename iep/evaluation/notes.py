"""What a reader of an evaluation might take otherwise than it is meant -> lines, for the terminal and the HTML report.

Covers where question types are from, why there is no column *commonest*, and pictures of other images than the
features are of.
"""

from pathlib import Path

from iep.data_files import Questions, split_files
from iep.evaluation.outcome import Outcome
from iep.evaluation.page_images import Pictures
from iep.features import Features


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
