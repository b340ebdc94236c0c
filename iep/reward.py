"""The answer in a model's response, and its reward: for scoring, and for reinforcement learning of language models.

Importing this file loads NumPy and PyYAML but not PyTorch, so that trainers such as TRL and verl can import it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache

from iep.vocab import SPECIAL_TOKENS, Vocab

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SYNONYMS = {
    **{word: str(number) for number, word in enumerate(NUMBERS)},
    **{"true": "yes", "false": "no", "none": "0", "grey": "gray", "big": "large", "tiny": "small"},
    **{"ball": "sphere", "block": "cube", "metallic": "metal", "shiny": "metal", "matte": "rubber"},
    **{"spherical": "sphere", "cubic": "cube", "cubical": "cube", "cylindrical": "cylinder"},
}
"""Words for CLEVR's answers, among them the synonyms of its questions."""
ARTICLES = ("a", "an", "the")
ALTERNATIVES = {"or", "nor", "neither", "not", "no"}
"""Words in a sentence that may take back an answer that it contains."""
MARKED = (
    re.compile(r"<answer>((?:(?!</?answer>).)*+)(?:</answer>|\Z)", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"\A.*\banswer(?:\s+is|\W*:)\s*([^\n]+)", re.DOTALL | re.IGNORECASE),
)
"""How responses mark their answer; the first that occurs counts, and its last occurrence. Each takes linear time."""
IN_BRACKETS = re.compile(r"\[([^\[\]\n]{1,40})\]\W{0,5}\Z")
FORMAT = re.compile(
    r"\s*<think>((?!</?think>|</?answer>).)+</think>\s*<answer>((?!</?answer>).)+</answer>\s*", re.DOTALL
)


def read_answer(response: object, solution: str | None = None, answers: Iterable[str] = ()) -> str | None:
    """Return the answer of a response as CLEVR writes it, such as "yes", "3" or "cyan".

    The answer is in what follows the last `</think>`: the content of the last `<answer>...</answer>` (which may be cut
    off) or `\\boxed{...}`, what follows the last "answer is" or "answer:", brackets at the end such as "[2]", or else
    the whole text. A text that equals the solution is the solution. Otherwise case, punctuation and articles do not
    count; number words and the synonyms of CLEVR's questions are replaced. Of several words, the only one counts that
    is an answer of the solution's kind, in the text or in its last sentence: "3" in "There are 3 red cubes." if the
    solution is a number. A "yes" or "no" that may be the answer counts if it is the first word. If the solution is no
    answer of CLEVR, such as "mountain bike", the only one of `answers` counts that the text or its last sentence
    contains; without `answers`, the solution counts unless the sentence says "not", "or" or the like.

    Args:
        response: what a model wrote; a number or a boolean is read as text, and None is no answer.
        solution: the true answer, whose kind the question asks for (yes or no, number, size, color, material or shape,
            or another); None: words of all kinds count.
        answers: all answers of a data set.

    Returns:
        the answer, which may be a single word that is no known answer; None if none can be read.
    """
    text = _marked(response)
    if solution is not None and text.casefold() == solution.casefold():
        return solution or None
    words = _words(text)
    parts = words, _words(re.split(r"[.!?\n](?:\s|\Z)", text.strip(" \n.!?"))[-1])
    may_be_number = solution is None or solution.isdecimal()
    kind = frozenset(_kinds()) if solution is None else _kinds().get(solution, frozenset())
    if not kind and not may_be_number:
        is_sure = bool(answers) or not ALTERNATIVES & {*words}
        found = (_phrases(part, [str(solution), *answers]) for part in parts if is_sure)
        only = next((phrases.pop() for phrases in found if len(phrases) == 1), None)
        return only or (words[0] if len(words) == 1 else None)
    if len(words) <= 1 or (words[0] in ("yes", "no") and words[0] in kind):
        return words[0] if words else None
    for part in parts:
        known = {word for word in part if word in kind or (may_be_number and word.isdecimal())}
        known = known or {_singular(word) for word in part} & kind  # "cubes" counts where no other word does
        if not known and may_be_number and "yes" not in kind and "no" in part:
            return "0"  # "there are no red cubes"
        if len(known) == 1:
            return known.pop()
    return None


def _marked(response: object) -> str:
    """Return the part of a response that is marked as its answer, or else its whole text without thoughts."""
    if response is None:
        return ""
    text = str(response).rpartition("</think>")[2].partition("<think>")[0].strip()  # without a thought that is cut off
    return next((found[-1] for pattern in (*MARKED, IN_BRACKETS) if (found := pattern.findall(text))), text).strip()


def _words(text: str) -> list[str]:
    """Return the words of a text in the words of CLEVR's answers."""
    text = re.sub(r"\\text\w*\{([^{}]*)\}", r"\1", text).lower().replace("\N{MINUS SIGN}", "-")
    found = re.findall(r"(?<![\w.])-\d+(?:\.\d+)?|\d+(?:\.\d+)?|[^\W\d]+", text)
    words = [SYNONYMS.get(word, word) for word in found if word not in ARTICLES]
    return [re.sub(r"^0+(?=\d)|\.0+$", "", word) for word in words]


def _singular(word: str) -> str:
    return SYNONYMS.get(word.removesuffix("s"), word.removesuffix("s"))


def _phrases(words: list[str], answers: Iterable[str]) -> set[str]:
    """Return the answers that occur among some words, each as long as possible: not "bike" in "mountain bike"."""
    by_words = {tuple(phrase): answer for answer in answers if (phrase := _words(answer))}
    found, start, longest = set[str](), 0, max(map(len, by_words), default=0)
    while start < len(words):
        lengths = (n for n in range(longest, 0, -1) if tuple(words[start : start + n]) in by_words)
        length = next(lengths, 0)
        if length:
            found.add(by_words[tuple(words[start : start + length])])
        start += length or 1
    return found


@cache
def _kinds() -> dict[str, frozenset[str]]:
    """Return the answers of CLEVR, each with all answers of its kind."""
    vocab, kinds = Vocab.clevr(), defaultdict(set)
    for function, _, value in (token.rstrip("]").partition("[") for token in vocab.program):
        if function.startswith("filter_"):
            kinds[function].add(value)
    for answer in {*vocab.answer} - {*SPECIAL_TOKENS} - set().union(*kinds.values()):
        kinds["number" if answer.isdecimal() else "truth"].add(answer)
    return {answer: frozenset(kind) for kind in kinds.values() for answer in kind}


def clevr_reward(response: object, solution: object) -> float:
    """Return 1.0 if the answer of a response is that of the solution, otherwise 0.0.

    Args:
        response: what a model wrote.
        solution: the true answer of CLEVR or another data set, plain or marked, such as "3", 3, "mountain bike" or
            "<answer>3</answer>".
    """
    expected = _marked(solution)
    words = _words(expected)
    if len(words) == 1 and (words[0] in _kinds() or words[0].isdecimal()):
        expected = words[0]
    return float(bool(expected) and read_answer(response, expected) == expected)


def format_reward(response: object) -> float:
    """Return 1.0 if a response is `<think>...</think>` and then `<answer>...</answer>`, each once, otherwise 0.0."""
    return float(FORMAT.fullmatch(str(response)) is not None)
