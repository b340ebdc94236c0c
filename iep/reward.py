"""The answer in a model's response, and its reward: for scoring, and for reinforcement learning of language models.

This file needs nothing but the standard library and the vocabulary of CLEVR, so that trainers such as TRL and verl can
import it.
"""

import re
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
    re.compile(r"<answer>((?:(?!</?answer>).)*+)</answer>", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"\A.*\banswer(?:\s+is|\s*:)\s*([^\n]+)", re.DOTALL | re.IGNORECASE),
)
"""How responses mark their answer; the first that occurs counts, and its last occurrence. Each takes linear time."""


def read_answer(response: str) -> str | None:
    """Return the answer of a response as CLEVR writes it, such as "yes", "3" or "cyan".

    The answer is the content of the last `<answer>...</answer>` or `\\boxed{...}`, what follows the last "answer is" or
    "answer:", or else the whole response. Case, punctuation and articles do not count, number words and the synonyms of
    CLEVR's questions are replaced. Of several words, the first counts if it is yes or no, and otherwise the only one
    that is an answer of CLEVR.

    Returns:
        the answer, which may be a single word that is no answer of CLEVR; None if none can be read.
    """
    text = next((found[-1] for marked in MARKED if (found := marked.findall(response))), response)
    text = re.sub(r"\\text\w*\{([^{}]*)\}", r"\1", text).lower()
    words = [SYNONYMS.get(word, word) for word in re.findall(r"\d+(?:\.\d+)?|[^\W\d]+", text) if word not in ARTICLES]
    words = [re.sub(r"^0+(?=\d)|\.0+$", "", word) for word in words]
    if len(words) <= 1 or words[0] in ("yes", "no"):
        return words[0] if words else None
    found = {*words} & _answers()
    return found.pop() if len(found) == 1 else None


@cache
def _answers() -> frozenset[str]:
    return frozenset(Vocab.clevr().answer) - {*SPECIAL_TOKENS}


def clevr_reward(response: str, solution: str) -> float:
    """Return 1.0 if the answer of a response is that of the solution, otherwise 0.0.

    Args:
        response: what a model wrote.
        solution: the true answer, plain or marked, such as "3" or "<answer>3</answer>".
    """
    expected = read_answer(solution)
    return float(expected is not None and read_answer(response) == expected)
