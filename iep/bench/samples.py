"""Trees and sentences -> the minibatches of a comparison, with the products that their networks need."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from iep.bench.contest import Samples
from iep.bench.limit import Layer, bilstm_layers, child_sum_layers, tagger_layers, tree_fc_layers, tree_lstm_layers
from iep.bench.tree_levels import heights, levels_of
from iep.errors import InputError
from iep.workloads.sentences import Sentence
from iep.workloads.trees import Tree, TreePair

MIN_SAMPLES = 64
"""Small minibatches say little about trees and sentences that differ so much: so many samples are run in each round."""


def tree_lstm_samples(trees: Sequence[Tree], batch: int, width: int, classes: int) -> Samples:
    """Minibatches of `batch` of the trees, for a binary Tree-LSTM."""

    def layers(minibatch: Sequence[Tree]) -> list[Layer]:
        return tree_lstm_layers(levels_of(minibatch).rows, len(minibatch), width, classes)

    return _samples(trees, batch, {"batch": batch}, layers, cells=len)


def tree_fc_samples(trees: Sequence[Tree], batch: int, width: int) -> Samples:
    """The same for Tree-FC; all trees are of the same size. Leaves are vectors: no cell makes them."""

    def layers(minibatch: Sequence[Tree]) -> list[Layer]:
        return tree_fc_layers(levels_of(minibatch).rows, width)

    setting = {"leaves": trees[0].num_leaves, "batch": batch}
    return _samples(trees, batch, setting, layers, cells=lambda tree: tree.num_leaves - 1)


def child_sum_samples(
    pairs: Sequence[TreePair], batch: int, embedding: int, width: int, hidden: int, ratings: int
) -> Samples:
    """Minibatches of `batch` of the pairs, for a child-sum Tree-LSTM, a cell at every word, and a score of the two."""

    def layers(minibatch: Sequence[TreePair]) -> list[Layer]:
        children = [tree.children for pair in minibatch for tree in (pair.left, pair.right)]
        cells, edges = Counter(), Counter()
        for children_VA in children:
            arity = (children_VA >= 0).sum(axis=1)
            inner = np.flatnonzero(arity)
            for height, count in zip(heights(inner, children_VA[inner], len(arity))[inner], arity[inner], strict=True):
                cells[height] += 1
                edges[height] += int(count)
        by_level = [[counts[level] for level in sorted(counts)] for counts in (cells, edges)]
        rated = (len(minibatch),)
        scores = [*[Layer(width, hidden, rated)] * 2, Layer(hidden, ratings, rated)]
        return child_sum_layers(*by_level, sum(map(len, children)), embedding, width) + scores

    return _samples(pairs, batch, {"batch": batch}, layers, cells=lambda pair: len(pair.left) + len(pair.right))


def tagger_samples(
    sentences: Sequence[Sentence],
    batch: int,
    embedding: int,
    width: int,
    hidden: int,
    tags: int,
    letter_embedding: int | None = None,
) -> Samples:
    """The same of sentences, for a BiLSTM tagger; cells are those of all LSTMs.

    Args:
        letter_embedding: where rare words are spelled, by an LSTM each way of half the words' embedding.
    """

    def layers(minibatch: Sequence[Sentence]) -> list[Layer]:
        spelled = [length for sentence in minibatch for length in letters(sentence)]
        of_letters = bilstm_layers(spelled, letter_embedding or 0, embedding // 2)
        return of_letters + tagger_layers([len(sentence) for sentence in minibatch], embedding, width, hidden, tags)

    def letters(sentence: Sentence) -> list[int]:
        """How many each spelled word has."""
        words = () if letter_embedding is None or sentence.characters is None else sentence.characters
        return [len(word) for word in words if len(word)]

    return _samples(sentences, batch, {"batch": batch}, layers, cells=lambda each: 2 * (len(each) + sum(letters(each))))


def shuffled(found: Sequence[Any], least: int, rng: np.random.Generator, where: Path, what: str) -> list[Any]:
    """What was found in files, in another order.

    Raises:
        InputError: it is less than the largest minibatch.
    """
    if len(found) < least:
        raise InputError(f"{where}: {len(found)} {what}, expected at least {least} for the largest of --batch-sizes")
    return [found[n] for n in rng.permutation(len(found))]


def _samples(
    drawn: Sequence[Any],
    batch: int,
    setting: dict[str, int],
    layers: Callable[[Sequence[Any]], list[Layer]],
    cells: Callable[[Any], int],
) -> Samples:
    count = max(1, min(MIN_SAMPLES, len(drawn)) // batch)
    minibatches = tuple(drawn[number * batch : (number + 1) * batch] for number in range(count))
    return Samples(
        minibatches=minibatches,
        layers=tuple(map(layers, minibatches)),
        cells_of=cells,
        setting=setting,
    )
