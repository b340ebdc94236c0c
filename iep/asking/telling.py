"""An answer -> lines for a person, or an object for a program."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from iep.asking.answers import Answer
from iep.asking.words import MOST_WORDS
from iep.evaluation.prediction_file import words
from iep.programs import named, tokens_run, tree_lines


def describe(answer: Answer, top: int, picture: Path | None = None, with_question: bool = True) -> str:
    """The question, its unknown words, the `top` likeliest answers, the program as a tree."""
    lines = [answer.question.text] if answer.question and with_question else []
    unknown = answer.question.unknown if answer.question else ()
    for word, near in unknown[:MOST_WORDS]:
        hint = f"; the nearest known word is {near!r}" if near else ""
        lines.append(f"  the vocabulary lacks {word!r}, taken as <UNK>{hint}")
    if len(unknown) > MOST_WORDS:
        lines.append(f"  and {len(unknown) - MOST_WORDS} more words, taken as <UNK>")
    best, *others = (f"{name} {100 * probability:.1f}%" for name, probability in answer.ranked[:top])
    lines.append(f"  {best}  (then {', '.join(others)})" if others else f"  {best}")
    if answer.tree is not None:
        lines += [f"  {line}" for line in tree_lines(answer.tree, named)]
        if answer.tree.ignored:
            lines.append(f"  ignored, after the tree was complete: {' '.join(answer.tree.ignored)}")
    if picture is not None:
        lines.append(f"  Wrote {picture}")
    return "\n".join(lines)


def to_json(answer: Answer, top: int, program_tokens: Sequence[str], picture: Path | None = None) -> dict[str, Any]:
    """The same; `program` as predicted, in the form of predictions.jsonl, and `run`, the functions that were run, with
    `scene` for what was not used, both in prefix order. What there is not is left out."""
    told: dict[str, Any] = {}
    if answer.question is not None:
        told |= {"question": answer.question.text, "unknown_words": [word for word, _ in answer.question.unknown]}
    told["answers"] = [{"answer": name, "probability": round(value, 6)} for name, value in answer.ranked[:top]]
    if answer.tree is not None:
        told |= {"program": words(answer.program, program_tokens), "run": tokens_run(answer.tree)}
    if picture is not None:
        told["picture"] = str(picture)
    return told
