"""Trees and sentences: published files are read as they are written, errors say where, and synthetic data have the
published shapes."""

import numpy as np
import pytest

from iep.errors import InputError
from iep.workloads.sentences import MIN_COUNT, UNKNOWN_WORD, read_wikiner, wikiner_like
from iep.workloads.tree_files import UNKNOWN, read_sick, read_sst
from iep.workloads.trees import SICK_CHILDREN, Tree, complete_trees, sick_like, sst_like, zipf

SICK = {
    "a.toks": "a dog runs fast .\nno\n",
    "a.parents": "2 3 0 3 -1\n0\n",
    "b.toks": "dogs run\na man runs\n",
    "b.parents": "2 0\n2 3 0\n",
    "sim.txt": "4.5\n1\n",
}


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def sick(tmp_path):
    for name, content in SICK.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def heights(tree):
    found = []
    for children in tree.children:
        found.append(1 + max((found[child] for child in children if child >= 0), default=-1))
    return found


def test_bracketed_trees_are_read_children_first_with_a_label_on_every_vertex(tmp_path):
    path = written(tmp_path / "train.txt", "(3 (2 It) (4 (2 's) (4 good)))\n\n(1 (2 no) (0 way))\n")
    (tree, other), word_to_idx = read_sst(path)
    assert tree.children.tolist() == [[-1, -1], [-1, -1], [-1, -1], [1, 2], [0, 3]]
    assert tree.words[:3].tolist() == [word_to_idx[word] for word in ("It", "'s", "good")]
    assert (tree.label, tree.labels.tolist()) == (3, [2, 2, 4, 4, 3])
    assert (other.label, len(other), other.num_leaves) == (1, 3, 2)
    (tree, _), same = read_sst(path, {UNKNOWN: 0, "good": 1})
    assert tree.words.tolist() == [0, 0, 1, -1, -1]
    assert same == {UNKNOWN: 0, "good": 1}


def test_only_spaces_separate_words_and_only_line_feeds_end_lines(tmp_path):
    (tree, other), word_to_idx = read_sst(
        written(tmp_path / "spaces.txt", "(2 (2 8\u00a01/2) (2 x\u2028y))\r\n(1 one)")
    )
    assert set(word_to_idx) == {UNKNOWN, "8\u00a01/2", "x\u2028y", "one"}
    assert (len(tree), len(other)) == (3, 1)


def test_a_very_deep_tree_is_read(tmp_path):
    (tree,), _ = read_sst(written(tmp_path / "deep.txt", "(2 (2 a) " * 3_000 + "(2 b)" + ")" * 3_000))
    assert (len(tree), heights(tree)[-1]) == (6_001, 3_000)


def test_dependency_trees_are_read_with_children_in_the_order_of_the_sentence(sick):
    (first, second), word_to_idx = read_sick(sick)
    names = {index: word for word, index in word_to_idx.items()}
    left = first.left
    words = [names[word] for word in left.words]
    assert sorted(words) == ["a", "dog", "fast", "runs"]  # the full stop is in no tree
    assert words[-1] == "runs"
    assert [words[child] for child in left.children[-1]] == ["dog", "fast"]
    assert [words[child] for child in left.children[words.index("dog")] if child >= 0] == ["a"]
    assert (first.relatedness, first.left.label, first.right.label) == (4.5, 4.5, 4.5)
    assert (len(second.left), second.left.children.tolist()) == (1, [[-1]])


def test_tagged_lines_become_words_and_tags_and_rare_words_are_spelled(tmp_path):
    text = "the|DT|O cat|NN|O\n" * (MIN_COUNT - 1) + "\nthe|DT|O Seine|NNP|I-LOC\n"
    sentences, names = read_wikiner(written(tmp_path / "wiki", text))
    assert (names.words, names.tags) == ({"the": 1}, {"I-LOC": 0, "O": 1})
    last = sentences[-1]
    assert (len(sentences), last.words.tolist(), last.tags.tolist()) == (MIN_COUNT, [1, UNKNOWN_WORD], [1, 0])
    letters = {index: letter for letter, index in names.characters.items()}
    assert ["".join(letters[n] for n in word) for word in last.characters] == ["", "Seine"]
    assert ["".join(letters[n] for n in word) for word in sentences[0].characters] == ["", "cat"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("sst", "(3 (2 a) (2 b)", ["line 1", "1 brackets open"]),
        ("sst", "(3 (2 a) (2 b)))", ["line 1, token 12", "')'", "the end of the line"]),
        ("sst", "(3 (2 a) (2 b))\n(7 a)", ["line 2, token 2", "'7'", "label 0 to 4"]),
        ("sst", "(3 (2 a) (2 b) (2 c))", ["line 1", "3 parts", "a word or two vertices"]),
        ("sst", "(3 (2 a b) (2 c))", ["line 1", "2 parts"]),
        ("sst", "(3 (2 a))", ["1 parts"]),
        ("sst", "a (2 b)", ["line 1, token 1", "'a'", "expected ("]),
        ("sst", "( (2 a) (2 b))", ["line 1, token 2", "'('", "label"]),
        ("sst", "()", ["line 1, token 2", "')'", "label"]),
        ("sst", "(\u00b2 a)", ["label 0 to 4"]),
        ("sst", "(", ["1 brackets open"]),
        ("sst", "\n", ["no trees"]),
        ("sst", None, ["no such file"]),
        ("a.parents", "2 3 0 3 -1\n", ["1 lines, expected 2"]),
        ("a.parents", "2 3 0 3\n0\n", ["line 1", "4 parents, expected 5"]),
        ("a.parents", "2 3 0 x -1\n0\n", ["line 1, word 4", "'x'"]),
        ("a.parents", "2 3 0 9 -1\n0\n", ["line 1, word 4", "'9'", "-1 to 5"]),
        ("a.parents", "2 3 0 0 -1\n0\n", ["line 1", "2 roots"]),
        ("a.parents", "2 1 0 3 -1\n0\n", ["line 1", "2 words are in cycles"]),
        ("a.parents", "5 3 0 3 -1\n0\n", ["line 1", "in no tree"]),
        ("a.parents", "2 3 0 \u00b2 -1\n0\n", ["line 1, word 4"]),
        ("a.toks", None, ["no such file"]),
        ("sim.txt", "4.5\nnan\n", ["line 2", "'nan'"]),
        ("sim.txt", "4.5\nx\n", ["line 2", "'x'", "a number"]),
        ("wiki", "a|O\nthe\n", ["line 2, token 1", "'the'"]),
        ("wiki", "a|O |x|O", ["line 1, token 2"]),
        ("wiki", "\n", ["no sentences"]),
        ("wiki", b"\xff|O", ["not UTF-8 text", "position 0"]),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line_with_its_place(sick, name, content, words):
    path = sick / name
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    read = {"sst": read_sst, "wiki": read_wikiner}.get(name, lambda path: read_sick(path.parent))
    with pytest.raises(InputError) as error:
        read(path)
    assert "\n" not in str(error.value)
    assert [word for word in [name, *words] if word not in str(error.value)] == []


@pytest.mark.parametrize("children", [[[-1, -1], [-1, -1]], [[1, -1], [-1, -1]], [[-1, -1], [0, 0]], [[-1], [-1], [1]]])
def test_children_that_do_not_form_a_tree_are_an_error(children):
    with pytest.raises(ValueError, match="child of one, later vertex"):
        Tree(np.array(children), np.zeros(len(children), dtype=int))


def test_synthetic_sentiment_trees_are_binary_and_as_long_as_the_treebanks_sentences(rng):
    trees = sst_like(800, 1_000, rng)
    leaves = np.array([tree.num_leaves for tree in trees])
    assert all(tree.children.shape == (2 * count - 1, 2) for tree, count in zip(trees, leaves, strict=True))
    assert abs(leaves.mean() - 19.1) < 1.5
    assert abs(leaves.std() - 9.3) < 1.5
    assert all(((tree.words >= 0) == (tree.children[:, 0] < 0)).all() for tree in trees)
    assert len({heights(tree)[-1] for tree in trees}) > 5
    assert {tree.label for tree in trees} == set(range(5))


def test_synthetic_relatedness_trees_have_a_word_on_every_vertex_and_up_to_nine_children(rng):
    pairs = sick_like(400, 1_000, rng)
    trees = [tree for pair in pairs for tree in (pair.left, pair.right)]
    arity = np.concatenate([(tree.children >= 0).sum(axis=1) for tree in trees])
    assert abs(np.mean([len(tree) for tree in trees]) - 9.6) < 0.6
    assert (arity.min(), arity.max() <= SICK_CHILDREN, arity.max() >= 5) == (0, True, True)
    assert all((tree.words >= 0).all() for tree in trees)
    assert all(1 <= pair.relatedness <= 5 for pair in pairs)


@pytest.mark.parametrize(("leaves", "height"), [(1, 0), (2, 1), (256, 8), (1024, 10), (5, 3)])
def test_complete_trees_are_as_low_as_possible(leaves, height, rng):
    tree, other = complete_trees(2, leaves, 50, rng)
    assert (tree.num_leaves, len(tree), heights(tree)[-1]) == (leaves, 2 * leaves - 1, height)
    assert np.array_equal(tree.children, other.children)


def test_synthetic_sentences_are_as_long_as_wikiners_and_spell_the_rare_words_alone(rng):
    sentences = wikiner_like(500, 1_000, 9, rng, characters=60)
    lengths = np.array([len(sentence) for sentence in sentences])
    assert abs(lengths.mean() - 24.5) < 1.5
    assert lengths.min() >= 1
    words = np.concatenate([sentence.words for sentence in sentences])
    spelled = np.array([len(letters) > 0 for sentence in sentences for letters in sentence.characters])
    assert np.array_equal(spelled, words == UNKNOWN_WORD)
    assert 0.06 < spelled.mean() < 0.1
    assert words.max() < 1_000
    assert max(letters.max(initial=0) for sentence in sentences for letters in sentence.characters) < 60
    assert [sentence.characters for sentence in wikiner_like(3, 100, 9, rng)] == [None] * 3


def test_synthetic_data_depend_on_the_seed_alone_and_words_follow_zipfs_law(rng):
    first, same, other = (sst_like(3, 100, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(a.words, b.words) for a, b in zip(first, same, strict=True))
    assert any(not np.array_equal(a.words, b.words) for a, b in zip(first, other, strict=True))
    counts = np.bincount(zipf(20_000, 100, rng), minlength=100)
    assert len(counts) == 100
    assert counts[0] / counts[1] == pytest.approx(2, rel=0.15)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.25)
