"""Trees and sentences: published files are read, errors say where, and generated data have the published shapes."""

from pathlib import Path

import numpy as np
import pytest
from tiny_data import refused

from benchmarks.tagger import MIN_COUNT, UNKNOWN_WORD, read_wikiner, wikiner_like
from benchmarks.trees import read_sick, read_sst, sst_like

SICK = {
    "a.toks": "a dog runs fast .\nno\n",
    "a.parents": "2 3 0 3 -1\n0\n",
    "b.toks": "dogs run\na man runs\n",
    "b.parents": "2 0\n2 3 0\n",
    "sim.txt": "4.5\n1\n",
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    for name, content in SICK.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_bracketed_trees_are_read_children_first_with_a_label_on_every_vertex(tmp_path: Path):
    """Only spaces separate words, and only line feeds end lines."""
    path = tmp_path / "train.txt"
    path.write_text("(3 (2 It) (4 (2 's) (4 good)))\n\n(1 (2 8\u00a01/2) (0 x\u2028y))\n", encoding="utf-8")
    (tree, other), words = read_sst(path)
    assert tree.children.tolist() == [[-1, -1], [-1, -1], [-1, -1], [1, 2], [0, 3]]
    assert sorted([*tree.words[:3].tolist(), *other.words[:2].tolist()]) == list(range(words))
    assert (tree.label, tree.labels.tolist()) == (3, [2, 2, 4, 4, 3])
    assert (other.label, len(other), other.num_leaves) == (1, 3, 2)


def test_dependency_trees_are_read_with_children_in_the_order_of_the_sentence(sick: Path):
    (first, second), words = read_sick(sick)
    assert words == len({"a", "dog", "runs", "fast", ".", "no", "dogs", "run", "man"})
    assert first.left.children.tolist() == [[-1, -1], [0, -1], [-1, -1], [1, 2]]  # the full stop is in no tree
    assert first.relatedness == 4.5
    assert (len(second.left), second.left.children.tolist()) == (1, [[-1]])


def test_tagged_lines_become_words_and_tags_and_rare_words_are_spelled(tmp_path: Path):
    path = tmp_path / "wiki"
    path.write_text("the|DT|O cat|NN|O\n" * (MIN_COUNT - 1) + "\nthe|DT|O Seine|NNP|I-LOC\n")
    sentences, sizes = read_wikiner(path)
    assert sizes == (2, 2, len(set("thecatSeine")))
    last = sentences[-1]
    assert (len(sentences), last.words.tolist(), last.tags.tolist()) == (MIN_COUNT, [1, UNKNOWN_WORD], [1, 0])
    assert [len(word) for word in last.spelled] == [len("Seine")]
    assert [len(word) for word in sentences[0].spelled] == [len("cat")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sst", "(3 (2 a) (2 b)", ["line 1", "expected one tree"]),
        ("sst", "(3 (2 a) (2 b)))", ["line 1, token 12", "')'"]),
        ("sst", "(3 (2 a) (2 b))\n(7 a)", ["line 2, token 4", "label 0 to 4"]),
        ("a.parents", "2 3 0 3 -1\n", ["1 in a.parents"]),
        ("a.parents", "2 3 0 0 -1\n0\n", ["line 1", "several roots"]),
        ("a.parents", "2 1 0 3 -1\n0\n", ["line 1", "cycles"]),
        ("sim.txt", "4.5\nx\n", ["line 2", "'x'"]),
        ("wiki", "a|O\nthe\n", ["line 2", "'the'", "word|part of speech|tag"]),
        ("wiki", b"\xff|O", ["not UTF-8 text"]),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line_with_its_place(
    sick: Path, name: str, content: str | bytes, words: list[str]
):
    path = sick / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read = {"sst": read_sst, "wiki": read_wikiner}.get(name, lambda path: read_sick(path.parent))
    with refused("", *words):
        read(path)


def test_generated_sentiment_trees_are_binary_and_as_long_as_the_treebanks_sentences(rng: np.random.Generator):
    trees = sst_like(800, 1_000, rng)
    leaves = np.array([tree.num_leaves for tree in trees])
    assert all(tree.children.shape == (2 * count - 1, 2) for tree, count in zip(trees, leaves, strict=True))
    assert (leaves.mean(), leaves.std()) == pytest.approx((19.1, 9.3), abs=1.5)
    assert all(((tree.words >= 0) == (tree.children[:, 0] < 0)).all() for tree in trees)


def test_generated_sentences_are_as_long_as_wikiners_and_spell_the_rare_words_alone(rng: np.random.Generator):
    sentences = wikiner_like(500, 1_000, 9, 60, rng)
    assert abs(np.mean([len(sentence.words) for sentence in sentences]) - 24.5) < 1.5
    words = np.concatenate([sentence.words for sentence in sentences])
    assert sum(len(sentence.spelled) for sentence in sentences) == (words == UNKNOWN_WORD).sum()
    assert 0.06 < (words == UNKNOWN_WORD).mean() < 0.1
    assert words.max() < 1_000
