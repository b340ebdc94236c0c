"""Sentences with a tag for every word: files of WikiNER, or synthetic ones with the lengths of its English part.

Words that occur fewer than five times have no embedding of their own. For a tagger without characters, they are all
the same unknown word; a tagger with characters spells them (Neubig et al. 2017, On-the-fly Operation Batching in
Dynamic Computation Graphs, section 5; Qiao & Taura 2019, section 4.1).

Shapes: T words of a sentence, L letters of a word.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from iep.errors import InputError
from iep.workloads.tree_files import read_lines
from iep.workloads.trees import lengths, zipf

UNKNOWN_WORD = 0
MIN_COUNT = 5
"""A word that occurs less often is rare."""
WORDS, LETTERS = (24.5, 11.0), (8.0, 2.5)
"""The mean and standard deviation of the lengths of sentences in WikiNER's English part, and of rare words."""
RARE_SHARE = 0.08
"""The share of rare words in a text of 3.5 million words that follow Zipf's law."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """One sentence of T > 0 words."""

    words: np.ndarray
    """The index of each word, (T,); `UNKNOWN_WORD` for rare words."""
    tags: np.ndarray
    """The index of the tag of each word, (T,)."""
    characters: tuple[np.ndarray, ...] | None = None
    """The indices of the letters of each rare word, (L,), empty for other words; None if no word is spelled."""

    def __len__(self) -> int:
        """Return the number of words, T."""
        return len(self.words)


@dataclass(frozen=True)
class Vocabularies:
    """The indices of the words, letters and tags of sentences."""

    words: dict[str, int]
    """The index of each word, from 1; 0 is `UNKNOWN_WORD`."""
    characters: dict[str, int]
    tags: dict[str, int]


def read_wikiner(path: Path) -> tuple[list[Sentence], Vocabularies]:
    """Return the sentences of a file of lines such as `Paris|NNP|I-LOC is|VBZ|O`; empty lines are skipped.

    The word is the text before the first `|` and the tag the text after the last; rare words are spelled.

    Raises:
        InputError: the file cannot be read or has no sentence, or a token is not of that form; names line and token.
    """
    tagged = [_tokens(line, f"{path}, line {n}") for n, line in enumerate(read_lines(path), start=1) if line.strip()]
    if not tagged:
        raise InputError(f"{path}: no sentences, expected one a line, such as Paris|NNP|I-LOC is|VBZ|O")
    count = Counter(word for tokens in tagged for word, _ in tokens)
    vocabularies = Vocabularies(
        words={word: n for n, word in enumerate(sorted(w for w in count if count[w] >= MIN_COUNT), start=1)},
        characters={letter: n for n, letter in enumerate(sorted(set("".join(count))))},
        tags={tag: n for n, tag in enumerate(sorted({tag for tokens in tagged for _, tag in tokens}))},
    )
    return [_sentence(tokens, vocabularies) for tokens in tagged], vocabularies


def _tokens(line: str, where: str) -> list[tuple[str, str]]:
    found = []
    for n, token in enumerate((part for part in line.split(" ") if part), start=1):
        parts = token.split("|")
        if len(parts) < 2 or not parts[0] or not parts[-1]:
            raise InputError(f"{where}, token {n}: {token!r}, expected word|part of speech|tag")
        found.append((parts[0], parts[-1]))
    return found


def _sentence(tokens: Sequence[tuple[str, str]], vocabularies: Vocabularies) -> Sentence:
    words = np.array([vocabularies.words.get(word, UNKNOWN_WORD) for word, _ in tokens])
    spelled = [() if word in vocabularies.words else word for word, _ in tokens]
    characters = tuple(np.array([vocabularies.characters[letter] for letter in word], dtype=int) for word in spelled)
    return Sentence(words, np.array([vocabularies.tags[tag] for _, tag in tokens]), characters)


def wikiner_like(
    count: int, words: int, tags: int, rng: np.random.Generator, characters: int | None = None
) -> list[Sentence]:
    """Return sentences of 1 to 120 words, drawn by Zipf's law from indices 1 to `words` - 1; one in twelve is rare.

    Args:
        tags: the number of tags, which are drawn uniformly.
        characters: the number of letters with which rare words are spelled; None to spell none.
    """
    made = []
    for length in lengths(count, *WORDS, 1, 120, rng).tolist():
        drawn = 1 + zipf(length, words - 1, rng)
        rare = rng.random(length) < RARE_SHARE
        letters = np.where(rare, lengths(length, *LETTERS, 1, 25, rng), 0)
        spelled = None if characters is None else tuple(rng.integers(0, characters, size) for size in letters)
        made.append(Sentence(np.where(rare, UNKNOWN_WORD, drawn), rng.integers(0, tags, length), spelled))
    return made
