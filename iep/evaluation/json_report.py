"""The results of an evaluation: a `Report`, its file report.json, and a table of several reports side by side.

Scores are computed in `metrics.py`; single answers are in `outcome.py`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from iep.errors import InputError
from iep.evaluation.metrics import Scores
from iep.programs import QUESTION_TYPES
from iep.runtime.files import write_json
from iep.runtime.reading import reading
from iep.runtime.tables import align_rows

FORMAT = "iep report 1"
SCORES = ("accuracy", "program_exact_match")
MISSING = "-"
TITLES = {"most_common": "most common answer"}
"""The headings of baselines in tables, by their names in report.json."""


@dataclass(frozen=True)
class Report:
    """The results of an evaluation.

    Attributes:
        split: the name of the split, for example `val`.
        questions: the number of questions.
        questions_by_type: the number of questions of each type that has any, by the true programs or else by the
            predicted ones; empty where neither are known.
        accuracy: the shares of right answers; None on a split without answers.
        program_exact_match: the shares of predicted programs that equal the true ones; None where either are unknown.
        questions_per_second: None where not measured.
        peak_memory_gb: the peak memory of the GPU, or else of the process; None where not measured.
        device: the device that ran the networks, for example `cpu`.
        programs: the source of the programs: `ground-truth`, `predicted` or `predicted, beam 4`; "" without programs.
        selection: the part of the split that was evaluated, such as `families short`; "" for all of it.
        checkpoints: paths by part, such as `{"ee": "runs/ee/best.pt"}`.
        baselines: accuracies of other ways to answer the same questions, by name.
    """

    split: str
    questions: int
    questions_by_type: Mapping[str, int]
    accuracy: Scores | None = None
    program_exact_match: Scores | None = None
    questions_per_second: float | None = None
    peak_memory_gb: float | None = None
    device: str = ""
    programs: str = ""
    selection: str = ""
    checkpoints: Mapping[str, str] = field(default_factory=dict)
    baselines: Mapping[str, Scores] = field(default_factory=dict)


def write_report(path: Path, report: Report) -> None:
    """Write report.json, whole or not at all."""
    write_json(path, {"format": FORMAT, **asdict(report)}, indent=2)


def read_report(path: Path) -> Report:
    """Read report.json.

    Raises:
        InputError: the file is missing, not JSON, or not a report.
    """
    with reading(path, "a report that iep-eval --out writes"):
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise InputError(f'not a report, expected a JSON object with "format": "{FORMAT}"')
        scores = {name: None if content[name] is None else Scores(**content[name]) for name in SCORES}
        baselines = {name: Scores(**each) for name, each in content["baselines"].items()}
        return Report(**content | scores | {"baselines": baselines})


def is_report(path: Path) -> bool:
    """Return whether a file is a report.json, valid or not, rather than a file of answers."""
    try:
        content = json.loads(path.read_bytes()) if path.suffix == ".json" else None
    except (OSError, ValueError):
        return path.suffix == ".json"
    return isinstance(content, dict) and "format" in content


def format_table(columns: Sequence[tuple[str, Report]]) -> str:
    """Return a text table of accuracies in percent: one row per question type, one column per report.

    The row of a group of types (`compare integer`, `query`, `compare`) is the mean over all its questions. The
    baselines of the reports come first, each name once. A column of numbers of questions precedes each report whose
    numbers differ from those before it. `-` marks unknown values; rows without any known value are left out.
    """
    reports = with_baselines(columns)
    rows = [row for row in ROWS if any(count_of(report, row[1]) for _, report in reports)]
    table = [["", *(label for label, _ in rows), "programs exact", "questions/s"]]
    counted = None
    for name, report in reports:
        counts = [str(count_of(report, types) or MISSING) for _, types in rows]
        if counts != counted:
            table.append(["questions", *counts, "", ""])
            counted = counts
        accuracies = [percent(mean_accuracy(report, types)) for _, types in rows]
        programs = percent(None if report.program_exact_match is None else report.program_exact_match.overall)
        speed = report.questions_per_second
        table.append([name, *accuracies, programs, MISSING if speed is None else f"{speed:.0f}"])
    return align_rows([row for row in zip(*table, strict=True) if {*row[1:]} - {"", MISSING}])


def with_baselines(columns: Sequence[tuple[str, Report]]) -> list[tuple[str, Report]]:
    """Return the baselines of the reports as columns of their own, each name once, followed by the given columns."""
    baselines = {
        name: (TITLES.get(name, name), Report(report.split, report.questions, report.questions_by_type, scores))
        for _, report in columns
        for name, scores in report.baselines.items()
    }
    return [*baselines.values(), *columns]


def _group_rows(group: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rows of a group of question types: the group and its indented members."""
    members = tuple(name for name in QUESTION_TYPES if name.startswith(f"{group}: "))
    return [(group, members), *((f"  {name.split(': ')[1]}", (name,)) for name in members)]


ROWS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("overall", None),
    ("exist", ("exist",)),
    ("count", ("count",)),
    *_group_rows("compare integer"),
    *_group_rows("query"),
    *_group_rows("compare"),
)
"""The rows of the table: a label, and the question types that the row is the mean of, None for all questions."""


def count_of(report: Report, types: tuple[str, ...] | None) -> int:
    """Return the number of questions of some types, or of all questions for None."""
    if types is None:
        return report.questions
    return sum(report.questions_by_type.get(name, 0) for name in types)


def mean_accuracy(report: Report, types: tuple[str, ...] | None) -> float | None:
    """Return the accuracy over all questions of some types, or over all questions for None; None where unknown."""
    if report.accuracy is None or types is None:
        return None if report.accuracy is None else report.accuracy.overall
    count = count_of(report, types)
    right = (report.questions_by_type.get(name, 0) * report.accuracy.by_type.get(name, 0.0) for name in types)
    return round(sum(right), 6) / count if count else None  # rounded: 49 * (1 / 49) is a little less than 1


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent with one digit, `-` where it is unknown."""
    return MISSING if share is None else f"{100 * share:.1f}"
