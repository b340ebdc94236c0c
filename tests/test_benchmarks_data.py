"""Generated trees and sentences have the shapes of published data."""

import numpy as np
import pytest

from benchmarks.tagger import UNKNOWN_WORD, wikiner_like
from benchmarks.trees import sst_like, tree_from_parents


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_vertices_of_dependency_trees_are_numbered_children_first():
    tree = tree_from_parents(np.array([1, -1, 1, 2]), np.array([5, 6, 7, 8]))
    assert tree.children.tolist() == [[-1, -1], [-1, -1], [1, -1], [0, 2]]
    assert tree.words.tolist() == [5, 8, 7, 6]


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
