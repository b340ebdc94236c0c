"""An evaluation's outcome -> the files of its directory: report.json, predictions.jsonl and the answers by themselves.

The answers are what CLEVR's evaluation of the test split takes: answers.txt, one answer a line in the order of the
questions, and answers.json, a list of objects with `question_index` and `answer`. In CLEVR's question files the order
is that of `question_index`, so the lines are in that order whatever order the questions were preprocessed in.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from iep.evaluation.outcome import Outcome
from iep.evaluation.prediction_file import write_predictions
from iep.evaluation.report import Report, write_report
from iep.runtime.files import atomic_path

PREDICTIONS, REPORT = "predictions.jsonl", "report.json"
ANSWERS, ANSWERS_JSON = "answers.txt", "answers.json"
OUTPUTS = (PREDICTIONS, REPORT, ANSWERS, ANSWERS_JSON)


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
