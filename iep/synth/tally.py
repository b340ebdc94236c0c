"""The accuracy of blind guessing: the share of the most common answer to each question type, and their average.

Johnson et al. 2017 (CLEVR, section 4) call this baseline "Q-type mode"; its accuracy on CLEVR is about 42%.
"""

from collections import Counter
from dataclasses import dataclass, field

from iep.programs import QUESTION_TYPES, call_token, question_type


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


def most_common_shares(answers: Counter) -> dict[str, tuple[str, float, int]]:
    """Return for each question type its most common answer, the share of that answer, and the number of questions."""
    by_type: dict[str, Counter] = {}
    for (kind, answer), count in answers.items():
        by_type.setdefault(kind, Counter())[answer] += count
    shares = {}
    for kind in sorted(by_type, key=lambda kind: (*QUESTION_TYPES, kind).index(kind)):
        answer, most = min(by_type[kind].items(), key=lambda item: (-item[1], item[0]))
        shares[kind] = (answer, most / by_type[kind].total(), by_type[kind].total())
    return shares


def guessing_accuracy(answers: Counter) -> float:
    """Return the accuracy of always giving the most common answer to the question's type; nan without questions."""
    total = answers.total()
    right = sum(share * count for _, share, count in most_common_shares(answers).values())
    return right / total if total else float("nan")


def table(tally: Tally) -> str:
    """Return the tally as a table in text."""
    total = tally.answers.total()
    lines = [f"{'question type':<24}{'questions':>10}  most common answer"]
    for kind, (answer, share, count) in most_common_shares(tally.answers).items():
        lines.append(f"{kind:<24}{count:>10}  {answer} {share:.1%}")
    lines.append(f"{'all':<24}{total:>10}  {guessing_accuracy(tally.answers):.1%} by guessing")
    lines.append(f"{tally.modules / max(total, 1):.2f} modules per question besides scene")
    return "\n".join(lines)
