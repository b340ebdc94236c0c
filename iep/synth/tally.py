"""How far blind guessing gets: for each question type, the share of its commonest answer, and the whole file's average.

Johnson et al. 2017 (CLEVR, section 4) call this baseline "Q-type mode"; it reaches about 42% there.
`python -m iep.cli.balance QUESTIONS.json ...` prints the table of questions files with answers and programs.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from iep.errors import InputError
from iep.programs import QUESTION_TYPES, call_token, question_type
from iep.runtime.files import read_json
from iep.synth.executor import spelled


@dataclass
class Tally:
    """Counts over questions: answers per question type, `(type, answer)`, and modules besides `scene`."""

    answers: Counter = field(default_factory=Counter)
    modules: int = 0

    def add(self, program: list[dict] | tuple[dict, ...], answer: str) -> None:
        tokens = [call_token(call) for call in program]
        self.answers[question_type(tokens[-1]), answer] += 1
        self.modules += sum(token != "scene" for token in tokens)

    def update(self, other: "Tally") -> None:
        self.answers.update(other.answers)
        self.modules += other.modules


def commonest_shares(answers: Counter) -> dict[str, tuple[str, float, int]]:
    """For each question type that occurs: its commonest answer, that answer's share, and the number of questions."""
    by_type: dict[str, Counter] = {}
    for (kind, answer), count in answers.items():
        by_type.setdefault(kind, Counter())[answer] += count
    shares = {}
    for kind in sorted(by_type, key=lambda kind: (*QUESTION_TYPES, kind).index(kind)):
        answer, most = min(by_type[kind].items(), key=lambda item: (-item[1], item[0]))
        shares[kind] = (answer, most / by_type[kind].total(), by_type[kind].total())
    return shares


def guessing_accuracy(answers: Counter) -> float:
    """Accuracy of always giving the commonest answer of the question's type; nan without questions."""
    total = answers.total()
    return (
        sum(share * count for _, share, count in commonest_shares(answers).values()) / total if total else float("nan")
    )


def table(tally: Tally) -> str:
    """The figures as lines of text."""
    total = tally.answers.total()
    lines = [f"{'question type':<24}{'questions':>10}  commonest answer"]
    for kind, (answer, share, count) in commonest_shares(tally.answers).items():
        lines.append(f"{kind:<24}{count:>10}  {answer} {share:.1%}")
    lines.append(f"{'all':<24}{total:>10}  {guessing_accuracy(tally.answers):.1%} by guessing")
    lines.append(f"{tally.modules / max(total, 1):.2f} modules per question besides scene")
    return "\n".join(lines)


def tally_file(path: Path) -> Tally:
    """The tally of a CLEVR questions file.

    Raises:
        InputError: the file is not one, or a question has no program or answer (as in the test split).
    """
    content = read_json(path)
    questions: Iterable = content.get("questions") if isinstance(content, dict) else None
    if not isinstance(questions, list):
        raise InputError(f"{path}: not a CLEVR questions file, 'questions' is missing")
    tally = Tally()
    for position, question in enumerate(questions):
        if not isinstance(question, dict) or "answer" not in question or not question.get("program"):
            raise InputError(f"{path}: question {position} has no answer or no program, nothing to weigh")
        tally.add(question["program"], spelled(question["answer"]))
    return tally
