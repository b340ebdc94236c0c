"""Trees: files of the treebank and of SICK are read as they are written, bad ones are one line that says where, and
made trees have the published shapes."""

from pathlib import Path

import numpy as np
import pytest

from iep.errors import InputError
from iep.workloads.tree_files import UNKNOWN, read_sick, read_sst
from iep.workloads.trees import SICK_CHILDREN, Tree, complete_trees, sick_like, sst_like, tree_from_parents, zipf

SST = "(3 (2 It) (4 (2 's) (4 good)))\n\n(1 (2 no) (0 way))\n"
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
def sst(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text(SST)
    return tmp_path / "train.txt"


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    for name, content in SICK.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def heights(tree: Tree) -> list[int]:
    found: list[int] = []
    for children in tree.children:
        found.append(1 + max((found[child] for child in children if child >= 0), default=-1))
    return found


# Files


def test_a_bracketed_tree_is_read_children_first_with_a_label_on_every_vertex(sst: Path):
    (tree, other), word_to_idx = read_sst(sst)
    assert tree.children.tolist() == [[-1, -1], [-1, -1], [-1, -1], [1, 2], [0, 3]]
    assert tree.words[:3].tolist() == [word_to_idx[word] for word in ("It", "'s", "good")]
    assert (tree.label, tree.labels.tolist()) == (3, [2, 2, 4, 4, 3])
    assert (other.label, len(other), other.num_leaves) == (1, 3, 2)


def test_words_that_a_vocabulary_lacks_are_unknown(sst: Path):
    (tree, _), same = read_sst(sst, {UNKNOWN: 0, "good": 1})
    assert tree.words.tolist() == [0, 0, 1, -1, -1]
    assert same == {UNKNOWN: 0, "good": 1}


def test_only_spaces_part_words_and_only_line_feeds_end_lines(tmp_path: Path):
    (tmp_path / "spaces.txt").write_text("(2 (2 8\u00a01/2) (2 x\u2028y))\r\n(1 one)", encoding="utf-8")
    (tree, other), word_to_idx = read_sst(tmp_path / "spaces.txt")
    assert set(word_to_idx) == {UNKNOWN, "8\u00a01/2", "x\u2028y", "one"}
    assert (len(tree), len(other)) == (3, 1)


def test_a_very_deep_tree_is_read(tmp_path: Path):
    deep = 3_000
    (tmp_path / "deep.txt").write_text("(2 (2 a) " * deep + "(2 b)" + ")" * deep)
    (tree,), _ = read_sst(tmp_path / "deep.txt")
    assert len(tree) == 2 * deep + 1
    assert heights(tree)[-1] == deep


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(3 (2 a) (2 b)", ["line 1", "1 brackets open"]),
        ("(3 (2 a) (2 b)))", ["line 1, token 12", "')'", "the end of the line"]),
        ("(3 (2 a) (2 b))\n(7 a)", ["line 2, token 2", "'7'", "label 0 to 4"]),
        ("(3 (2 a) (2 b) (2 c))", ["line 1", "3 parts", "a word or two vertices"]),
        ("(3 (2 a b) (2 c))", ["line 1", "2 parts"]),
        ("(3 (2 a))", ["1 parts"]),
        ("a (2 b)", ["line 1, token 1", "'a'", "expected ("]),
        ("( (2 a) (2 b))", ["line 1, token 2", "'('", "label"]),
        ("()", ["line 1, token 2", "')'", "label"]),
        ("(\u00b2 a)", ["label 0 to 4"]),
        ("(", ["1 brackets open"]),
        ("\n", ["no trees"]),
    ],
)
def test_what_is_no_bracketed_tree_is_named(tmp_path: Path, text: str, words: list[str]):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(InputError) as error:
        read_sst(tmp_path / "bad.txt")
    assert "\n" not in str(error.value)
    assert [word for word in ["bad.txt", *words] if word not in str(error.value)] == []


def test_dependency_trees_are_read_with_children_in_the_order_of_the_sentence(sick: Path):
    (first, second), word_to_idx = read_sick(sick)
    names = {index: word for word, index in word_to_idx.items()}
    left = first.left
    words = [names[word] for word in left.words]
    assert sorted(words) == ["a", "dog", "fast", "runs"]  # the full stop is in no tree
    assert words[-1] == "runs"
    assert [words[child] for child in left.children[-1]] == ["dog", "fast"]
    dog = words.index("dog")
    assert [words[child] for child in left.children[dog] if child >= 0] == ["a"]
    assert (first.relatedness, first.left.label, first.right.label) == (4.5, 4.5, 4.5)
    assert (len(second.left), second.left.children.tolist()) == (1, [[-1]])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parents", "2 3 0 3 -1\n", ["a.parents", "1 lines, expected 2"]),
        ("a.parents", "2 3 0 3\n0\n", ["a.parents, line 1", "4 parents, expected 5"]),
        ("a.parents", "2 3 0 x -1\n0\n", ["a.parents, line 1, word 4", "'x'"]),
        ("a.parents", "2 3 0 9 -1\n0\n", ["line 1, word 4", "'9'", "-1 to 5"]),
        ("a.parents", "2 3 0 0 -1\n0\n", ["line 1", "2 roots"]),
        ("a.parents", "2 1 0 3 -1\n0\n", ["line 1", "2 words go round in circles"]),
        ("a.parents", "5 3 0 3 -1\n0\n", ["line 1", "in no tree"]),
        ("a.parents", "2 3 0 \u00b2 -1\n0\n", ["line 1, word 4"]),
        ("sim.txt", "4.5\nnan\n", ["sim.txt, line 2", "'nan'"]),
        ("sim.txt", "4.5\nx\n", ["sim.txt, line 2", "'x'", "a number"]),
    ],
)
def test_what_is_no_dependency_tree_is_named(sick: Path, name: str, content: str, words: list[str]):
    (sick / name).write_text(content)
    with pytest.raises(InputError) as error:
        read_sick(sick)
    assert [word for word in words if word not in str(error.value)] == []


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(InputError, match=r"nothing.txt: no such file"):
        read_sst(tmp_path / "nothing.txt")
    with pytest.raises(InputError, match=r"a.toks: no such file"):
        read_sick(tmp_path)


# Trees as such


@pytest.mark.parametrize("children", [[[-1, -1], [-1, -1]], [[1, -1], [-1, -1]], [[-1, -1], [0, 0]], [[-1], [-1], [1]]])
def test_what_is_no_tree_is_refused(children: list[list[int]]):
    with pytest.raises(ValueError, match="child of one, later vertex"):
        Tree(np.array(children), np.zeros(len(children), dtype=int))


def test_a_tree_of_parents_is_numbered_children_first():
    tree = tree_from_parents(np.array([2, 2, 3, -1]), np.array([10, 11, 12, 13]))
    assert tree.words[-1] == 13
    at = tree.words.tolist().index(12)
    assert [tree.words[child] for child in tree.children[at]] == [10, 11]


# Made ones


def test_sentiment_trees_are_binary_and_as_long_as_the_treebanks_sentences(rng: np.random.Generator):
    trees = sst_like(800, 1_000, rng)
    leaves = np.array([tree.num_leaves for tree in trees])
    assert all(tree.children.shape == (2 * count - 1, 2) for tree, count in zip(trees, leaves, strict=True))
    assert abs(leaves.mean() - 19.1) < 1.5
    assert abs(leaves.std() - 9.3) < 1.5
    assert all(((tree.words >= 0) == (tree.children[:, 0] < 0)).all() for tree in trees)
    assert len({heights(tree)[-1] for tree in trees}) > 5
    assert {tree.label for tree in trees} == set(range(5))


def test_relatedness_trees_have_a_word_on_every_vertex_and_up_to_nine_children(rng: np.random.Generator):
    pairs = sick_like(400, 1_000, rng)
    trees = [tree for pair in pairs for tree in (pair.left, pair.right)]
    arity = np.concatenate([(tree.children >= 0).sum(axis=1) for tree in trees])
    assert abs(np.mean([len(tree) for tree in trees]) - 9.6) < 0.6
    assert (arity.min(), arity.max() <= SICK_CHILDREN, arity.max() >= 5) == (0, True, True)
    assert all((tree.words >= 0).all() for tree in trees)
    assert all(1 <= pair.relatedness <= 5 for pair in pairs)


@pytest.mark.parametrize(("leaves", "height"), [(1, 0), (2, 1), (256, 8), (1024, 10), (5, 3)])
def test_complete_trees_are_as_low_as_can_be(leaves: int, height: int, rng: np.random.Generator):
    tree, other = complete_trees(2, leaves, 50, rng)
    assert (tree.num_leaves, len(tree), heights(tree)[-1]) == (leaves, 2 * leaves - 1, height)
    assert np.array_equal(tree.children, other.children)


def test_what_is_made_depends_on_the_seed_alone():
    first, same, other = (sst_like(3, 100, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a.words, b.words) for a, b in zip(first, same, strict=True))
    assert any(not np.array_equal(a.words, b.words) for a, b in zip(first, other, strict=True))


def test_words_follow_zipfs_law(rng: np.random.Generator):
    counts = np.bincount(zipf(20_000, 100, rng), minlength=100)
    assert len(counts) == 100
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.15)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.25)
