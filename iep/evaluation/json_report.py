"""An evaluation's outcome: a `Report`, its file report.json, and a table of several reports side by side.

Covers neither the computing of scores (`metrics.py`) nor single answers (`outcome.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from iep.config import LARGEST
from iep.errors import InputError
from iep.evaluation.metrics import Scores
from iep.programs import QUESTION_TYPES
from iep.runtime.files import write_json
from iep.runtime.reading import read_json

FORMAT = "iep report 1"
MISSING = "-"


@dataclass(frozen=True)
class Report:
    """What an evaluation found.

    Attributes:
        split: name of the split, such as `val`.
        questions: number of questions.
        questions_by_type: number of each type that has any, by the true programs or else by the predicted ones;
            empty where neither are known.
        accuracy: of the answers; None on a split without answers.
        program_exact_match: of the predicted programs; None where there are none, or none to compare with.
        questions_per_second: None where not measured.
        peak_memory_gb: most memory held at one time, of a GPU's or else the process's; None where not measured.
        device: what it ran on, such as `cpu`.
        programs: where they came from: `ground-truth`, `predicted` or `predicted, beam 4`; "" without programs.
        selection: which of the split's questions, such as `families short`; "" for all.
        checkpoints: paths by part, such as `{"ee": "runs/ee/best.pt"}`.
        baselines: accuracies of other ways of answering the same questions, by name.
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
        InputError: the file is missing, not JSON, or not a report; names the field that is not as expected.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InputError(f'{path}: not a report, expected a JSON object with "format": "{FORMAT}"')
    names = {entry.name for entry in fields(Report)}
    for name in sorted(names ^ content.keys()):
        raise InputError(f"{path}: {name!r} is {'missing' if name in names else 'not a field of a report'}")

    def expect(name: str, good: bool, expected: str) -> None:
        if not good:
            raise InputError(f"{path}: {name} is {content[name]!r}, expected {expected}")

    for name in ("split", "selection", "device", "programs"):
        expect(name, isinstance(content[name], str), "text")
    expect("questions", _is_count(content["questions"]), "a whole number")
    for name in ("questions_per_second", "peak_memory_gb"):
        expect(name, _is_number(content[name], or_none=True), "a number or null")
    expect("questions_by_type", _is_table(content["questions_by_type"], _is_count), "whole numbers by question type")
    expect("checkpoints", _is_table(content["checkpoints"], lambda path: isinstance(path, str)), "file names by part")
    expect("baselines", _is_table(content["baselines"], _is_scores), "scores by name")
    for name in ("accuracy", "program_exact_match"):
        expect(name, content[name] is None or _is_scores(content[name]), "scores or null")
        content[name] = content[name] and Scores(**content[name])
    content["baselines"] = {name: Scores(**scores) for name, scores in content["baselines"].items()}
    return Report(**content)


def _is_number(value: object, or_none: bool = False) -> bool:
    """A finite one: JSON as Python reads it has NaN and Infinity too, and whole numbers beyond every float."""
    return (isinstance(value, (int, float)) and abs(value) <= LARGEST) or (or_none and value is None)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= LARGEST


def _is_table(value: object, is_entry: Callable[[object], bool]) -> bool:
    return isinstance(value, dict) and all(map(is_entry, value.values()))


def _is_scores(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"overall", "by_type"}
        and _is_number(value["overall"])
        and _is_table(value["by_type"], _is_number)
    )


def format_table(columns: Sequence[tuple[str, Report]]) -> str:
    """A text table of accuracies in percent: one row per question type, one column per report.

    The row of a family (`compare integer`, `query`, `compare`) is the mean over all its questions. The
    baselines of the reports come first, each name once. A column with numbers of questions stands left of the
    first column that they hold for. `-` marks what is unknown; types without questions in any report are left
    out.
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
        accuracies = [_percent(mean_accuracy(report, types)) for _, types in rows]
        programs = _percent(report.program_exact_match and report.program_exact_match.overall)
        speed = report.questions_per_second
        table.append([name, *accuracies, programs, MISSING if speed is None else f"{speed:.0f}"])
    widths = [max(map(len, column)) for column in table]
    lines = []
    for label, *cells in zip(*table, strict=True):
        aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *aligned]).rstrip())
    return "\n".join(lines)


def with_baselines(columns: Sequence[tuple[str, Report]]) -> list[tuple[str, Report]]:
    """The reports' baselines as columns of their own, each name once, and after them the columns."""
    baselines = {
        name: (name, Report(report.split, report.questions, report.questions_by_type, scores))
        for _, report in columns
        for name, scores in report.baselines.items()
    }
    return [*baselines.values(), *columns]


def _members(family: str) -> tuple[str, ...]:
    return tuple(name for name in QUESTION_TYPES if name.startswith(f"{family}: "))


def _family_rows(family: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(family, _members(family)), *((f"  {name.split(': ')[1]}", (name,)) for name in _members(family))]


# A row of the table: its label, and the question types that it is the mean of; None for all questions.
ROWS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    ("overall", None),
    ("exist", ("exist",)),
    ("count", ("count",)),
    *_family_rows("compare integer"),
    *_family_rows("query"),
    *_family_rows("compare"),
)


def count_of(report: Report, types: tuple[str, ...] | None) -> int:
    """Number of questions of some types, None for all questions."""
    if types is None:
        return report.questions
    return sum(report.questions_by_type.get(name, 0) for name in types)


def mean_accuracy(report: Report, types: tuple[str, ...] | None) -> float | None:
    """Accuracy over all questions of some types, from the types' accuracies and numbers of questions."""
    if report.accuracy is None or types is None or not count_of(report, types):
        return report.accuracy.overall if report.accuracy and types is None else None
    right = (report.questions_by_type.get(name, 0) * report.accuracy.by_type.get(name, 0.0) for name in types)
    return round(sum(right), 6) / count_of(report, types)  # rounded: 49 * (1 / 49) is a little less than 1


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"
