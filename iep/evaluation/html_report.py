"""An evaluation's outcome -> one HTML file that opens from disk, with everything that it needs inside.

The template `html/report.html` renders all tables and questions; its script filters and pages the questions. Data
become text and attributes, which Jinja escapes, and a content security policy lets no other script run and no address
be fetched.

Shapes: N questions, R of them listed.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from iep import __version__
from iep.evaluation.json_report import ROWS, TITLES, Report, mean_accuracy, percent, with_baselines
from iep.evaluation.outcome import Outcome, question_text
from iep.evaluation.question_cards import REMARKS, Maps, Pictures, choose, differ, question_cards
from iep.execution_engine.choices import DEFAULT_SALIENCY, SALIENCY
from iep.programs import QUESTION_TYPES
from iep.runtime.files import write_bytes

PAGE = "report.html"
MOST_QUESTIONS = 1000
"""The most questions that are listed, with image and programs."""


@dataclass(frozen=True)
class ReportOptions:
    """The contents of the HTML report besides the evaluation's outcome.

    Attributes:
        directory: where `report.html` is written.
        name: the name of the evaluation.
        others: earlier reports to show beside it, by name.
        pictures: the images of the split; None for a report without pictures.
    """

    directory: Path
    name: str = "model"
    others: tuple[tuple[str, Report], ...] = ()
    pictures: Pictures | None = None


def write_page(
    page: ReportOptions,
    outcome: Outcome,
    report: Report,
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
    maps: Maps | None = None,
) -> None:
    """Write report.html, whole or not at all. It has statistics over all questions, and lists `MOST_QUESTIONS` of them.

    Args:
        settings: the evaluation's settings, to be shown.
        notes: lines to be shown above everything.
        maps: where each function of a question's program looked, by the question's row; None if no engine answers.

    Raises:
        OSError: the file cannot be written.
    """
    others = [each for each in with_baselines([*page.others, (page.name, report)])[:-1] if each[1].accuracy is not None]
    rows_R = choose(outcome, MOST_QUESTIONS)
    text = render(
        title=f"{page.name} on {report.split}",
        tiles=_tiles(outcome, report),
        notes=notes,
        facts=_facts(report),
        settings={name: _plain(value) for name, value in settings.items()},
        outcome=outcome,
        by_type=_by_type(outcome, [other for _, other in others]),
        others=[(name, _note(other, report)) for name, other in others],
        by_family=_by_family(outcome),
        cards=question_cards(outcome.select(rows_R), page.pictures, maps and (lambda row: maps(int(rows_R[row])))),
        pictures=page.pictures,
    )
    # A vocabulary may contain a token that is not UTF-8 text.
    write_bytes(page.directory / PAGE, text.encode(errors="replace"))


def render(**values: Any) -> str:
    """Return the page as text: the template with style sheet, script and `values`."""
    loader = PackageLoader("iep.evaluation", "html")
    environment = Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "whole": "{:,}".format}
    environment.tests["different"] = lambda row: differ(*row)
    style, script = (loader.get_source(environment, name)[0] for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html").render(
        style=Markup(style),
        script=Markup(script),
        script_digest=f"sha256-{digest}",
        remarks=REMARKS,
        maps_show=SALIENCY[DEFAULT_SALIENCY],
        **values,
    )


def _tiles(outcome: Outcome, report: Report) -> list[tuple[str, str, str]]:
    """Return the most important numbers of the page: label, value and a note."""
    tiles = [("Questions", f"{report.questions:,}", "")]
    if report.accuracy is not None and outcome.right is not None:
        known = (f"{TITLES.get(name, name)} {percent(scores.overall)}%" for name, scores in report.baselines.items())
        tiles.append(("Accuracy", f"{percent(report.accuracy.overall)}%", ", ".join(known)))
        tiles.append(("Wrong answers", f"{(~outcome.right).sum():,}", ""))
    else:
        has_answers = outcome.predictions.answers is not None
        tiles.append(("Accuracy", "unknown", "the split has no answers" if has_answers else "no network answers"))
    if report.program_exact_match is not None:
        tiles.append(("Programs exact", f"{percent(report.program_exact_match.overall)}%", ""))
    elif outcome.predictions.programs is not None:
        tiles.append(("Programs exact", "unknown", "the split has no programs"))
    return tiles


def _plain(value: Any) -> str:
    """Return a setting's value as text."""
    if value is None or value == ():
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _facts(report: Report) -> dict[str, str]:
    """Return lines of the page's header by their names: what was evaluated, where and when."""
    speed, memory = report.questions_per_second, report.peak_memory_gb
    facts = {
        "Split": f"{report.split}: {report.selection}" if report.selection else report.split,
        **{f"Checkpoint ({part})": path for part, path in report.checkpoints.items()},
        "Programs": report.programs or "none",
        "Device": report.device or None,
        "Speed": None if speed is None else f"{speed:,.0f} questions/s",
        "Peak memory": None if memory is None else f"{memory:.2f} GB",
        "Made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, iep {__version__}",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _row(outcome: Outcome, chosen_N: np.ndarray, label: object, value: object, **more: Any) -> dict[str, Any]:
    """Return a table's row: numbers of the questions `chosen_N`, and the filter's `value` that lists them."""
    count = int(chosen_N.sum())
    row = {"label": str(label), "value": value, "questions": count}
    for name, good_N in (("right", outcome.right), ("exact", outcome.exact)):
        row[name] = None if good_N is None or not count else int(good_N[chosen_N].sum()) / count
    return row | more


def _by_type(outcome: Outcome, others: Sequence[Report]) -> list[dict[str, Any]]:
    """Return a row for all questions and for each row of the terminal's table that has any."""
    rows = []
    for label, types in ROWS:
        wanted = None if types is None else [QUESTION_TYPES.index(name) for name in types]
        chosen_N = np.ones(len(outcome.types), bool) if wanted is None else np.isin(outcome.types, wanted)
        if chosen_N.any():
            accuracies = [mean_accuracy(other, types) for other in others]
            is_group = types is None or len(types) > 1
            name, value = types[0] if types and not is_group else label, ",".join(types or ())
            rows.append(_row(outcome, chosen_N, name, value, is_group=is_group, others=accuracies))
    return rows


def _note(other: Report, report: Report) -> str:
    """Return how an earlier report's questions differ from those of this one, as far as known."""
    same = all(getattr(other, name) == getattr(report, name) for name in ("split", "questions", "questions_by_type"))
    return "" if same else f"{other.questions:,} questions of {other.split}"


def _by_family(outcome: Outcome) -> list[dict[str, Any]]:
    """Return a row for every family, the worst first, with its first question, which says more than its number."""
    families_N, rows = outcome.questions.families, []
    for family in [] if families_N is None else np.unique(families_N[families_N >= 0]).tolist():
        first = int((families_N == family).argmax())
        example = question_text(outcome.questions.questions[first], outcome.vocab.question)
        of_type = outcome.types[first]
        kind = QUESTION_TYPES[of_type] if of_type >= 0 else "unknown type"
        rows.append(_row(outcome, families_N == family, family, family, example=example, type=kind))
    return sorted(rows, key=lambda row: (row["right"] or 0, row["exact"] or 0))
