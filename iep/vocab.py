"""Vocabularies: question, program and answer tokens to indices and back, in the original toolkit's vocab.json.

This file also splits questions into tokens, spells answers and pads rows of tokens. `preprocess/encode_questions.py`
builds vocabularies from question files; the vocabulary of CLEVR v1.0 comes with the package.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from iep.errors import InputError
from iep.runtime.files import write_json
from iep.runtime.reading import read_json

NULL, START, END, UNK = 0, 1, 2, 3
SPECIAL_TOKENS = ("<NULL>", "<START>", "<END>", "<UNK>")
CLEVR = Path(__file__).with_name("clevr_vocab.json")
"""The file with the vocabulary of the train split of CLEVR v1.0, as `iep-preprocess` makes it."""


def tokenize(text: str) -> list[str]:
    """Return the words of a question as the original toolkit splits them.

    The text is split at every single space, so that two spaces give an empty token. Case is kept, `;` and `,` are
    tokens of their own, and `?` and `.` are dropped.
    """
    for kept in ";,":
        text = text.replace(kept, f" {kept}")
    for dropped in "?.":
        text = text.replace(dropped, "")
    return text.split(" ")


def answer_token(answer: object) -> str:
    """Return an answer as CLEVR v1.0 has it: the public generator's true, false and 3 become yes, no and "3".

    Raises:
        InputError: the answer is not a string, a boolean or an integer.
    """
    if isinstance(answer, bool):
        return "yes" if answer else "no"
    if isinstance(answer, str | int):
        return str(answer)
    raise InputError(f"'answer' is {answer!r:.60}, expected a string, a boolean or an integer")


def index_tokens(tokens: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct tokens in the order of their indices: the special ones, then the others sorted."""
    return SPECIAL_TOKENS + tuple(sorted(set(tokens) - set(SPECIAL_TOKENS)))


def pad_tokens(indices: np.ndarray, lengths_N: np.ndarray) -> np.ndarray:
    """Return N rows of tokens as (N, longest + 2) int32 indices: `<START>`, the row, `<END>`, then `<NULL>`.

    Args:
        indices: the indices of all rows, one row after the other.
        lengths_N: the number of tokens in each row.
    """
    columns = np.arange(lengths_N.max() + 2)
    padded = np.full((len(lengths_N), len(columns)), NULL, dtype=np.int32)
    padded[:, 0] = START
    padded[(columns > 0) & (columns <= lengths_N[:, None])] = indices  # a boolean mask is filled row by row
    padded[np.arange(len(padded)), lengths_N + 1] = END
    return padded


def content_tokens(indices: Sequence[int] | np.ndarray, tokens: Sequence[str]) -> list[str]:
    """Return the tokens between `<START>` and `<END>`, or up to the padding where there is no `<END>`."""
    content = np.asarray(indices).tolist()
    if END in content:
        content = content[: content.index(END)]
    while content and content[-1] == NULL:
        content.pop()
    if content[:1] == [START]:
        content = content[1:]
    return [tokens[index] for index in content]


@dataclass(frozen=True)
class Vocab:
    """Three lists of tokens, each beginning with `SPECIAL_TOKENS`. The index of a token is its position."""

    question: tuple[str, ...]
    program: tuple[str, ...]
    answer: tuple[str, ...]

    @cached_property
    def question_index(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.question)}

    @cached_property
    def program_index(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.program)}

    @cached_property
    def answer_index(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.answer)}

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that identify the vocabulary; files that are encoded with it record them."""
        return hashlib.sha256(json.dumps(self.to_json()).encode()).hexdigest()[:16]

    def with_answers(self, answers: Iterable[str]) -> "Vocab":
        """Return the vocabulary with the answers that it does not have yet after its own."""
        return replace(self, answer=(*self.answer, *dict.fromkeys(each for each in answers if each not in self.answer)))

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the content of vocab.json."""
        return {
            "question_token_to_idx": self.question_index,
            "program_token_to_idx": self.program_index,
            "answer_token_to_idx": self.answer_index,
        }

    @classmethod
    def from_json(cls, content: object, source: str) -> "Vocab":
        """Return the vocabulary in the content of a vocab.json; errors call it `source`.

        Raises:
            InputError: a key is missing, the indices are not 0, 1, 2, ..., or the special tokens are not the first.
        """
        if not isinstance(content, dict):
            raise InputError(f"{source}: not a vocabulary, expected a JSON object with question_token_to_idx")
        return cls(
            *(_tokens_in_order(content, f"{kind}_token_to_idx", source) for kind in ("question", "program", "answer"))
        )

    @classmethod
    def clevr(cls) -> "Vocab":
        """Return the vocabulary of CLEVR v1.0."""
        return cls.load(CLEVR)

    def save(self, path: Path) -> None:
        """Write a vocab.json, completely or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> "Vocab":
        """Return the vocabulary in a vocab.json.

        Raises:
            InputError: the file is missing, not JSON or not a vocabulary.
        """
        return cls.from_json(read_json(path, "a vocabulary"), str(path))


def _tokens_in_order(content: dict, key: str, source: str) -> tuple[str, ...]:
    table = content.get(key)
    if not isinstance(table, dict):
        raise InputError(f"{source}: not a vocabulary, {key!r} is missing")
    if {repr(index) for index in table.values()} != {repr(index) for index in range(len(table))}:
        raise InputError(f"{source}: {key}: indices are not 0 to {len(table) - 1}, each once")
    tokens = tuple(sorted(table, key=table.__getitem__))
    if tokens[: len(SPECIAL_TOKENS)] != SPECIAL_TOKENS:
        raise InputError(f"{source}: {key}: expected {', '.join(SPECIAL_TOKENS)} at indices 0 to 3")
    return tokens


def count_new_words(trained: Vocab, given: Vocab) -> int:
    """Return the number of question words that `given` adds to `trained`; 0 unless it begins with all words of it."""
    known = len(trained.question)
    return len(given.question) - known if given.question[:known] == trained.question else 0
