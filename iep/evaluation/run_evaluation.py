"""The answers to the questions of a split -> report.json, predictions.jsonl, the answers and the HTML report.

Notes in the terminal and in the HTML report warn of results that are easily misread: types of predicted programs, a
missing column of most common answers, pictures of other images than those of the features, and incomplete answers.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from iep.baselines import most_common
from iep.data.features import Features
from iep.data.question_file import load_vocab, read_questions, split_files, training_split
from iep.evaluation.answerers import Answered, answer_by_networks, answer_from_file, answer_symbolically
from iep.evaluation.html_report import PAGE, ReportOptions, write_page
from iep.evaluation.json_report import TITLES, Report
from iep.evaluation.metrics import Scores, count_types, question_types, score
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, OUTPUTS, Outcome, write_outputs
from iep.evaluation.question_cards import Pictures
from iep.evaluation.settings import AnswerSettings, NetworkSettings, SymbolicSettings, shown
from iep.programs import QUESTION_TYPES
from iep.runtime.files import check_writable


def evaluate(
    settings: NetworkSettings | SymbolicSettings | AnswerSettings,
    out: Path | None = None,
    page: ReportOptions | None = None,
    show: Callable[[Report], None] | None = None,
) -> Report | None:
    """Answer questions as the settings say, and write files into `out` and the HTML report of `page`.

    Args:
        out: a directory; None to write none of its files.
        page: the HTML report's location and options; None for no HTML report.
        show: a function that receives the report at the end, even if a file cannot be written: it may have taken hours
            to compute.

    Returns:
        the report; None in all processes but the first, which alone writes.

    Raises:
        InputError: a checkpoint does not fit the data, or the split lacks what the settings need.
    """
    targets = [] if out is None else [out / name for name in OUTPUTS]
    check_writable(targets if page is None else [*targets, page.directory / PAGE])
    answered = _answerer(settings)()
    if answered is None:
        return None
    baselines, is_missing = _baselines(answered.data, answered.outcome)
    report = make_report(answered, baselines)
    pictures = None if page is None else page.pictures
    notes = [*answered.notes, *_notes(answered, is_missing, pictures)]
    for note in notes:
        tqdm.write(note)
    try:
        if out is not None:
            write_outputs(out, answered.outcome, report)
            for note in _answers_notes(out, answered.outcome, answered.total):
                tqdm.write(note)
        if page is not None:
            write_page(page, answered.outcome, report, shown(settings), notes, answered.maps)
    finally:
        if show is not None:
            show(report)
    return report


def _answerer(settings: NetworkSettings | SymbolicSettings | AnswerSettings) -> Callable[[], Answered | None]:
    """Return the function that answers as the settings say."""
    if isinstance(settings, AnswerSettings):
        return partial(answer_from_file, settings)
    if isinstance(settings, SymbolicSettings):
        return partial(answer_symbolically, settings)
    return partial(answer_by_networks, settings)


def make_report(answered: Answered, baselines: dict[str, Scores]) -> Report:
    """Return the report on answers; `baselines` are the scores of other models, by name."""
    outcome = answered.outcome
    questions, seconds = len(outcome.questions), outcome.predictions.seconds
    return Report(
        split=answered.split,
        selection=answered.selection,
        questions=questions,
        questions_by_type=count_types(outcome.types),
        accuracy=outcome.scores(outcome.right),
        program_exact_match=outcome.scores(outcome.exact),
        questions_per_second=None if seconds is None else questions / seconds,
        peak_memory_gb=answered.peak_memory_gb,
        device=answered.device,
        programs=answered.programs,
        checkpoints={option: str(path) for option, path in answered.checkpoints.items()},
        baselines=baselines,
    )


def _baselines(data: Path | None, outcome: Outcome) -> tuple[dict[str, Scores], bool]:
    """Return the scores of the most common answer to each question type, counted on the training split.

    Returns:
        the scores by name; and whether they are missing although the split has answers.
    """
    questions, types = outcome.questions, outcome.types
    if questions.answers is None or data is None:
        return {}, False
    train = training_split(data)
    if train is None or questions.programs is None:
        return {}, True
    # The outcome's vocabulary may have further answers, those of a file, after the data's own.
    counted = read_questions(split_files(data, train)[0], load_vocab(data))
    if counted.answers is None or counted.programs is None or not len(counted):
        return {}, True
    counted_types = question_types(counted.programs, outcome.vocab.program)
    answers = most_common.count_most_common(counted.answers, counted_types, len(QUESTION_TYPES))
    return {"most_common": score(most_common.predict(answers, types) == questions.answers, types)}, False


def _notes(answered: Answered, is_missing: bool, pictures: Pictures | None) -> list[str]:
    """Return a line for each property of the results that a reader could misunderstand.

    Args:
        is_missing: whether there should be a column of the most common answers.

    Raises:
        InputError: the split has a features file that cannot be read.
    """
    split, outcome, notes = answered.split, answered.outcome, []
    if outcome.questions.programs is None and outcome.predictions.programs is not None:
        notes.append(f"Question types are those of the predicted programs: the {split} split has no programs.")
    if is_missing:
        what = f"programs and answers of the {split} split and of a train split"
        notes.append(f"There is no column “{TITLES['most_common']}”, which needs {what}.")
    if pictures is None or answered.data is None:
        return notes
    path = split_files(answered.data, split)[1]
    images = Features(path).images if path.exists() else None
    if images is not None and not pictures.is_of(*images):
        notes.append(
            f"{pictures.directory}: not the images that {path} was made of (names or sizes differ); the pictures in "
            "the report may be wrong."
        )
    return notes


def _answers_notes(out: Path, outcome: Outcome, total: int) -> list[str]:
    """Return a line if `out` lacks answers to some of the split's `total` questions, and one if several questions have
    the same `question_index`."""
    questions, notes = outcome.questions, list[str]()
    if outcome.predictions.answers is None:
        return notes
    if len(questions) < total:
        notes.append(f"{out / ANSWERS} is not complete: it holds the answers to {len(questions)} of {total} questions.")
    indices, counts = np.unique(questions.orig_idxs, return_counts=True)
    if (counts > 1).any():
        first = counts.argmax()
        where = f"{counts[first]} questions have the question_index {indices[first]}"
        notes.append(f"{questions.path}: {where}; {out / ANSWERS_JSON} cannot distinguish their answers.")
    return notes
