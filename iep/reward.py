"""The answer in a model's response, and its reward: for scoring, and for reinforcement learning of language models.

This file needs nothing but the standard library and the vocabulary of CLEVR, so that trainers such as TRL and verl can
import it.
"""

import re
from collections import defaultdict
from functools import cache

from iep.vocab import SPECIAL_TOKENS, Vocab

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
SYNONYMS = {
    **{word: str(number) for number, word in enumerate(NUMBERS)},
    **{"true": "yes", "false": "no", "none": "0", "grey": "gray", "big": "large", "tiny": "small"},
    **{"ball": "sphere", "block": "cube", "metallic": "metal", "shiny": "metal", "matte": "rubber"},
}
"""Words for CLEVR's answers, among them the synonyms of its questions."""
ARTICLES = ("a", "an", "the")
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


def read_answer(response: object, solution: str | None = None) -> str | None:
    """Return the answer of a response as CLEVR writes it, such as "yes", "3" or "cyan".

    The answer is in what follows the last `</think>`: the content of the last `<answer>...</answer>` (which may be cut
    off) or `\\boxed{...}`, what follows the last "answer is" or "answer:", brackets at the end such as "[2]", or else
    the whole text. Case, punctuation and articles do not count; number words and the synonyms of CLEVR's questions are
    replaced. Of several words, the only one counts that is an answer of the solution's kind, in the text or in its last
    sentence: "3" in "There are 3 red cubes." if the solution is a number. A "yes" or "no" that may be the answer counts
    if it is the first word.

    Args:
        response: what a model wrote; a number or a boolean is read as text.
        solution: an answer of CLEVR of the kind that the question asks for (yes or no, number, size, color, material or
            shape); None: words of all kinds count.

    Returns:
        the answer, which may be a single word that is no answer of CLEVR; None if none can be read.
    """
    text = str(response).rpartition("</think>")[2].partition("<think>")[0].strip()  # without a thought that is cut off
    marked = (found[-1] for pattern in (*MARKED, IN_BRACKETS) if (found := pattern.findall(text)))
    text = next(marked, text)
    words, answers = _words(text), _kinds().get(solution or "") or frozenset(_kinds())
    if len(words) <= 1 or (words[0] in ("yes", "no") and words[0] in answers):
        return words[0] if words else None
    for part in (words, _words(re.split(r"[.!?\n](?:\s|\Z)", text.strip(" \n.!?"))[-1])):
        known = {*part} & answers
        if not known and "0" in answers and "yes" not in answers and "no" in part:
            return "0"  # "there are no red cubes"
        if len(known) == 1:
            return known.pop()
    return None


def _words(text: str) -> list[str]:
    """Return the words of a text in the words of CLEVR's answers."""
    text = re.sub(r"\\text\w*\{([^{}]*)\}", r"\1", text).lower()
    words = [SYNONYMS.get(word, word) for word in re.findall(r"\d+(?:\.\d+)?|[^\W\d]+", text) if word not in ARTICLES]
    return [re.sub(r"^0+(?=\d)|\.0+$", "", word) for word in words]


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
        solution: the true answer, plain or marked, such as "3", 3 or "<answer>3</answer>".
    """
    expected = read_answer(solution)
    return float(expected is not None and read_answer(response, expected) == expected)


def format_reward(response: object) -> float:
    """Return 1.0 if a response is `<think>...</think>` and then `<answer>...</answer>`, each once, otherwise 0.0."""
    return float(FORMAT.fullmatch(str(response)) is not None)
