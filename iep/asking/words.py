"""A question as a person types it, or a program -> token indices of a vocabulary, and which words it does not know."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from iep.errors import InputError, nearest
from iep.execution_engine.family import Family, misfits
from iep.programs import prefix_to_json, program_tree
from iep.vocab import END, SPECIAL_TOKENS, START, UNK, Vocab, tokenize

Read = TypeVar("Read")
MOST_WORDS = 10
"""Unknown words, ignored tokens and the like that are told or drawn one by one."""


@dataclass(frozen=True)
class Words:
    """A question in a vocabulary's tokens.

    Attributes:
        text: as it was asked.
        indices: `<START>`, its words, `<END>`, as `iep-preprocess` encodes them.
        unknown: words that the vocabulary lacks, each once, with the nearest that it has, or None.
    """

    text: str
    indices: tuple[int, ...]
    unknown: tuple[tuple[str, str | None], ...]


def read_question(text: str, vocab: Vocab) -> Words:
    """Encode a question; words that the vocabulary lacks become `<UNK>`. Spaces around the question do not count, nor
    do further ones between words where the vocabulary has no empty token.

    Raises:
        InputError: the question is empty, has no word, or is not text.
    """
    text = text.strip()
    if not text:
        raise InputError("the question is empty")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise InputError("the question is not UTF-8 text")
    known = {token: index for token, index in vocab.question_index.items() if token not in SPECIAL_TOKENS}
    words = [word for word in tokenize(text) if word or word in known]
    if not any(words):
        raise InputError(f"the question {text!r} has no word")
    unknown = dict.fromkeys(word for word in words if word not in known)
    indices = (known.get(word, UNK) for word in words)
    return Words(text, (START, *indices, END), tuple((word, nearest_word(word, known)) for word in unknown))


def read_each(what: str, texts: Sequence[str], read: Callable[[str], Read]) -> list[Read]:
    """`read` of every text.

    Raises:
        InputError: that of `read`; of one of several it says which, as "question 2" where `what` is "question".
    """
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            found.append(read(text))
        except InputError as error:
            raise InputError(f"{what} {number}: {error}" if len(texts) > 1 else str(error)) from None
    return found


def some(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """The first `most` of the texts, and how many more there are."""
    more = f"{between}and {len(texts) - most} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def nearest_word(word: str, known: Iterable[str]) -> str | None:
    """The most similar of the words `known`, one that differs in case alone before all others; None where none is."""
    by_lower_case: dict[str, list[str]] = {}
    for other in known:
        if other:
            by_lower_case.setdefault(other.lower(), []).append(other)
    found = get_close_matches(word.lower(), list(by_lower_case), n=1)
    if not found:
        return None
    return min(by_lower_case[found[0]], key=lambda other: (other[:1].isupper() != word[:1].isupper(), other))


def read_program(text: str, vocab: Vocab, own: Family) -> tuple[int, ...]:
    """The indices of a well-formed program's prefix tokens, with spaces between them in `text`.

    Args:
        own: the modules that are to run it.

    Raises:
        InputError: a token is special or not in the vocabulary, the tokens are not one complete tree, or a function is
            given a value of a kind that its module does not take.
    """
    tokens = text.split()
    known = {token: index for token, index in vocab.program_index.items() if token not in SPECIAL_TOKENS}
    for place, token in enumerate(tokens):
        if token in SPECIAL_TOKENS:
            raise InputError(f"program token {place} ({token!r}) is a special token, expected a function")
        if token not in known:
            raise InputError(
                f"program token {place} ({token!r}) is not in the checkpoint's vocabulary{nearest(token, known)}"
            )
    prefix_to_json(tokens)
    for misfit in misfits(program_tree(tokens), own):
        made, wanted = misfit.words
        taker = "the classifier" if misfit.taker is None else f"program token {misfit.taker} ({tokens[misfit.taker]})"
        argument = f"program token {misfit.node} ({tokens[misfit.node]})"
        raise InputError(f"{taker} takes {wanted}, but its argument, {argument}, makes {made}")
    return tuple(known[token] for token in tokens)
