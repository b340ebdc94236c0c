"""An evaluation's outcome -> one HTML file that opens from disk, with everything that it needs inside.

The page is `html/report.html` with its style sheets and scripts, which draw what the data in it say; here those data
are put together and laid in. Nothing of the data is ever read as HTML: they are JSON with every `<` escaped, which the
scripts show as text, and a content security policy lets no other script run and no address be fetched. The training
curves are what the runs of the checkpoints recorded, short enough to be drawn.

Shapes: N questions, R of them listed.
"""

import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from iep import __version__
from iep.config import REPORT_QUESTIONS
from iep.evaluation.json_report import ROWS, Report, mean_accuracy, with_baselines
from iep.evaluation.metrics import Group, answer_groups, confusion, groups
from iep.evaluation.outcome import Outcome, question_text
from iep.evaluation.page_questions import Pictures, choose, question_objects
from iep.programs import QUESTION_TYPES, program_lengths
from iep.runtime.files import write_bytes
from iep.runtime.records import METRICS, read_rows

PAGE = "report.html"
STYLES = ("page.css", "statistics.css", "questions.css", "curves.css", "narrow.css")
SCRIPTS = ("page.js", "statistics.js", "confusion.js", "programs.js", "questions.js", "curves.js", "start.js")


MOST_POINTS = 500
"""Of one curve; of a longer one, neighbouring points are averaged."""
CHARTS = {
    "Loss": ("loss",),
    "Accuracy": ("accuracy", "validation_accuracy", "reward", "reward_baseline"),
    "Loss of the generator (REINFORCE)": ("generator_loss",),
}
"""What is drawn together: a chart's title, and the names in metrics.jsonl."""

Curve = list[tuple[float, float]]
"""Points (step, value)."""


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


@dataclass(frozen=True)
class TrainingRun:
    """What one run recorded.

    Attributes:
        parts: what the evaluation took from it, such as `("pg", "ee")`.
        path: the run directory.
        charts: title -> name -> curve; charts and curves without points are left out.
        averaged: how many recorded points one point stands for at most.
    """

    parts: tuple[str, ...]
    path: Path
    charts: Mapping[str, Mapping[str, Curve]]
    averaged: int


def training_runs(checkpoints: Mapping[str, str]) -> list[TrainingRun]:
    """The runs that checkpoints (files in a run directory, or run directories) belong to, each once.

    A run without metrics.jsonl has no charts.

    Args:
        checkpoints: paths by part, as in a report.

    Raises:
        OSError: a metrics.jsonl cannot be read.
    """
    runs: dict[Path, tuple[Path, list[str]]] = {}
    for part, path in checkpoints.items():
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        runs.setdefault(directory.resolve(), (directory, []))[1].append(part)
    return [_read_run(tuple(parts), directory) for directory, parts in runs.values()]


def _read_run(parts: tuple[str, ...], directory: Path) -> TrainingRun:
    path = directory / METRICS
    rows = read_rows(path) if path.is_file() else []
    charts, averaged = {}, 1
    for title, names in CHARTS.items():
        curves = {name: _points(rows, name) for name in names}
        longest = max(map(len, curves.values()))
        averaged = max(averaged, -(-longest // MOST_POINTS))
        if longest:
            charts[title] = {name: thinned(curve) for name, curve in curves.items() if curve}
    return TrainingRun(parts, directory, charts, averaged)


def _points(rows: list[dict[str, float]], name: str) -> Curve:
    """The finite values of one name; a row may hold anything, for the file may have been edited."""
    return [(row["step"], float(row[name])) for row in rows if _is_finite(row["step"]) and _is_finite(row.get(name))]


def _is_finite(value: object) -> bool:
    """A number that a float holds; Python reads whole ones from JSON that none does."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most `most` points: as many neighbours as that takes become one, their mean in step and value."""
    size = -(-len(curve) // most)
    if size <= 1:
        return curve
    parts = [curve[start : start + size] for start in range(0, len(curve), size)]
    return [(sum(step for step, _ in part) / len(part), sum(value for _, value in part) / len(part)) for part in parts]
