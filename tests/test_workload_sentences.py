"""Sentences: WikiNER's lines are read, rare words are spelled, bad tokens are named; made ones have its lengths."""

from pathlib import Path

import numpy as np
import pytest

from iep.errors import InputError
from iep.workloads.sentences import MIN_COUNT, UNKNOWN_WORD, read_wikiner, wikiner_like


def test_lines_become_words_and_tags_and_rare_words_are_spelled(tmp_path: Path):
    line = "the|DT|O cat|NN|O\n"
    (tmp_path / "wiki").write_text(line * (MIN_COUNT - 1) + "\nthe|DT|O Seine|NNP|I-LOC\n", encoding="utf-8")
    sentences, names = read_wikiner(tmp_path / "wiki")
    assert names.words == {"the": 1}
    assert names.tags == {"I-LOC": 0, "O": 1}
    last = sentences[-1]
    assert (len(sentences), last.words.tolist(), last.tags.tolist()) == (MIN_COUNT, [1, UNKNOWN_WORD], [1, 0])
    letters = {index: letter for letter, index in names.characters.items()}
    assert ["".join(letters[n] for n in word) for word in last.characters] == ["", "Seine"]
    assert ["".join(letters[n] for n in word) for word in sentences[0].characters] == ["", "cat"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("a|O\nthe\n", ["line 2, token 1", "'the'"]), ("a|O |x|O", ["line 1, token 2"]), ("\n", ["no sentences"])],
)
def test_what_is_no_tagged_sentence_is_named(tmp_path: Path, text: str, words: list[str]):
    (tmp_path / "wiki").write_text(text)
    with pytest.raises(InputError) as error:
        read_wikiner(tmp_path / "wiki")
    assert [word for word in words if word not in str(error.value)] == []


def test_made_sentences_are_as_long_as_wikiners_and_spell_the_rare_words_alone():
    sentences = wikiner_like(500, 1_000, 9, np.random.default_rng(0), characters=60)
    lengths = np.array([len(sentence) for sentence in sentences])
    assert abs(lengths.mean() - 24.5) < 1.5
    assert lengths.min() >= 1
    words = np.concatenate([sentence.words for sentence in sentences])
    spelled = np.array([len(letters) > 0 for sentence in sentences for letters in sentence.characters])
    assert np.array_equal(spelled, words == UNKNOWN_WORD)
    assert 0.06 < spelled.mean() < 0.1
    assert words.max() < 1_000
    assert max(letters.max(initial=0) for sentence in sentences for letters in sentence.characters) < 60


def test_made_sentences_need_not_be_spelled():
    sentences = wikiner_like(3, 100, 9, np.random.default_rng(0))
    assert [sentence.characters for sentence in sentences] == [None] * 3
    assert all(len(sentence.tags) == len(sentence) for sentence in sentences)
