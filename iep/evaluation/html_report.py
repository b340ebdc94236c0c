"""An evaluation's outcome -> one HTML file that opens from disk, with everything that it needs inside.

The page is `html/report.html` with its style sheets and scripts, which draw what the data in it say; here those data
are put together and laid in. Nothing of the data is ever read as HTML: they are JSON with every `<` escaped, which the
scripts show as text, and a content security policy lets no other script run and no address be fetched.

Shapes: N questions, R of them listed.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from iep import __version__
from iep.config import REPORT_QUESTIONS
from iep.evaluation.breakdown import Group, answer_groups, confusion, groups, program_lengths
from iep.evaluation.curves import training_runs
from iep.evaluation.outcome import Outcome
from iep.evaluation.page_images import Pictures
from iep.evaluation.page_questions import choose, question_objects
from iep.evaluation.prediction_file import question_text
from iep.evaluation.report import ROWS, Report, mean_accuracy, with_baselines
from iep.programs import QUESTION_TYPES
from iep.runtime.files import write_bytes

PAGE = "report.html"
STYLES = ("page.css", "statistics.css", "questions.css", "curves.css", "narrow.css")
SCRIPTS = ("page.js", "statistics.js", "confusion.js", "programs.js", "questions.js", "curves.js", "start.js")


@dataclass(frozen=True)
class Page:
    """What the HTML report is to hold besides the evaluation's outcome.

    Attributes:
        directory: where `report.html` is written.
        images: a directory in CLEVR's layout with the questions' images; None for a report without.
        most_questions: how many questions are listed at most, with image and programs.
        name: what the evaluation is called.
        others: earlier reports to show beside it, by name.
    """

    directory: Path
    images: Path | None = None
    most_questions: int = REPORT_QUESTIONS
    name: str = "model"
    others: tuple[tuple[str, Report], ...] = ()

    def pictures(self, split: str) -> Pictures | None:
        """The images of `split`, None without a directory of images.

        Raises:
            InputError: the directory has no images of the split.
        """
        return None if self.images is None else Pictures(self.images, split)


def write_page(
    page: Page,
    outcome: Outcome,
    report: Report,
    settings: Mapping[str, Any],
    pictures: Pictures | None,
    notes: Sequence[str] = (),
) -> None:
    """Write report.html, whole or not at all.

    Args:
        settings: of the evaluation, to be shown.
        pictures: of `page.pictures`.
        notes: lines to be shown above everything.

    Raises:
        OSError: the file cannot be written, or a run's metrics.jsonl not be read.
    """
    data = page_data(page, outcome, report, settings, pictures) | {"notes": notes}
    write_bytes(page.directory / PAGE, render(f"{page.name} on {report.split}", data).encode())


def render(title: str, data: Mapping[str, Any]) -> str:
    """The page as text: template, style sheets and scripts with `data` laid in.

    Raises:
        ValueError: `data` holds a number that is not finite.
    """
    folder = files("iep.evaluation") / "html"
    style, script = (
        "\n".join((folder / name).read_text(encoding="utf-8") for name in names) for names in (STYLES, SCRIPTS)
    )
    text = (folder / "report.html").read_text(encoding="utf-8")
    policy = f"default-src 'none'; img-src data:; style-src {_digest(style)}; script-src {_digest(script)}"
    content = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        content = content.replace(mark, f"\\u{ord(mark):04x}")
    parts = {"POLICY": policy, "TITLE": html.escape(title), "STYLE": style, "SCRIPT": script, "DATA": content}
    # All at once: what stands in the parts is no placeholder.
    return re.sub("@([A-Z]+)@", lambda place: parts[place[1]], text)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def page_data(
    page: Page, outcome: Outcome, report: Report, settings: Mapping[str, Any], pictures: Pictures | None
) -> dict[str, Any]:
    """All that the page shows, as JSON values; statistics are over all questions, listed are R of them."""
    programs = outcome.programs
    lengths_N = None if programs is None else program_lengths(programs, outcome.vocab.program)
    rows_R = choose(outcome, page.most_questions)
    listed = outcome.select(rows_R)
    questions = question_objects(listed, None if lengths_N is None else lengths_N[rows_R], pictures)
    return {
        "name": page.name,
        "facts": _facts(page, report),
        "settings": {key: _plain(value) for key, value in settings.items()},
        "types": QUESTION_TYPES,
        "functions": outcome.vocab.program,
        "answers": outcome.vocab.answer,
        "summary": _summary(outcome, report),
        "byType": _by_type(page, outcome, report),
        "byFamily": _by_family(outcome),
        "lengthsOf": "true" if outcome.questions.programs is not None else "predicted",
        "byLength": [] if lengths_N is None else _groups(outcome, lengths_N),
        "confusion": _confusion(outcome),
        "questions": questions,
        "images": _images(page, pictures),
        "training": [asdict(run) | {"path": str(run.path)} for run in training_runs(report.checkpoints)],
    }


def _plain(value: Any) -> str:
    if value is None or value == ():
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _facts(page: Page, report: Report) -> list[tuple[str, str]]:
    speed, memory = report.questions_per_second, report.peak_memory_gb
    return [
        ("Split", f"{report.split}: {report.selection}" if report.selection else report.split),
        ("Questions", f"{report.questions:,}"),
        *((f"Checkpoint ({part})", path) for part, path in report.checkpoints.items()),
        ("Programs", report.programs or "none"),
        ("Images", "none given" if page.images is None else str(page.images)),
        ("Device", report.device),
        *([] if speed is None else [("Speed", f"{speed:,.0f} questions/s")]),
        *([] if memory is None else [("Peak memory", f"{memory:.2f} GB")]),
        ("Made", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, iep {__version__}"),
    ]


def _summary(outcome: Outcome, report: Report) -> dict[str, Any]:
    """Of all questions: how many, right, exact; the baselines' accuracies."""
    right, exact = (None if good is None else int(good.sum()) for good in (outcome.right, outcome.exact))
    baselines = {name: scores.overall for name, scores in report.baselines.items()}
    return {
        "questions": report.questions,
        "right": right,
        "exact": exact,
        "baselines": baselines,
        "answered": outcome.predictions.answers is not None,
        "predicted": outcome.predictions.programs is not None,
    }


def _by_type(page: Page, outcome: Outcome, report: Report) -> dict[str, Any]:
    """A row for every type and family of types that has questions, as in the printed table, and the other columns."""
    columns = with_baselines([*page.others, (page.name, report)])[:-1]
    by_position = {group.key: group for group in groups(outcome.types, outcome.right, outcome.exact)}
    rows = []
    for label, types in ROWS[1:]:
        positions = [QUESTION_TYPES.index(name) for name in types]
        members = [by_position[position] for position in positions if position in by_position]
        if members:
            counts = {name: _total(members, name) for name in ("questions", "right", "exact")}
            shares = [mean_accuracy(other, types) for _, other in columns]
            row = {"label": label.strip(), "inner": label.startswith(" "), "types": positions, "others": shares}
            rows.append(row | counts)
    return {
        "rows": rows,
        "others": [
            {"name": name, "overall": mean_accuracy(other, None), "note": _note(other, report)}
            for name, other in columns
        ],
    }


def _groups(outcome: Outcome, keys_N: np.ndarray) -> list[dict[str, Any]]:
    return [asdict(group) for group in groups(keys_N, outcome.right, outcome.exact)]


def _total(members: Sequence[Group], name: str) -> int | None:
    values = [getattr(member, name) for member in members]
    return None if None in values else sum(values)


def _note(other: Report, report: Report) -> str:
    """What tells an earlier report's questions from those of this one, as far as known."""
    same = all(getattr(other, name) == getattr(report, name) for name in ("split", "questions", "questions_by_type"))
    return "" if same else f"{other.questions:,} questions of {other.split}"


def _by_family(outcome: Outcome) -> list[dict[str, Any]]:
    """Families with the first question of each, which tells what the number does not."""
    families = outcome.questions.families
    if families is None:
        return []
    return [
        asdict(group)
        | {
            "example": question_text(outcome.questions.questions[group.first], outcome.vocab.question),
            "type": int(outcome.types[group.first]) if outcome.types[group.first] >= 0 else None,
        }
        for group in groups(families, outcome.right, outcome.exact)
    ]


def _confusion(outcome: Outcome) -> dict[str, Any] | None:
    answers, predicted = outcome.questions.answers, outcome.predictions.answers
    if outcome.right is None:
        return None
    order = answer_groups([*answers.tolist(), *predicted.tolist()], outcome.vocab.answer)
    counts = confusion(answers, predicted)
    return {"order": list(order.items()), "cells": [(*pair, count) for pair, count in counts.items()]}


def _images(page: Page, pictures: Pictures | None) -> dict[str, Any]:
    if pictures is None:
        return {"given": False, "pictures": {}, "problems": []}
    return {"given": True, "pictures": pictures.by_key, "problems": list(pictures.problems.values())}
