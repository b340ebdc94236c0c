"""Trees and sentences -> the minibatches of a comparison, with the products that their networks need."""

from collections.abc import Callable, Sequence
from typing import Any

from iep.bench.contest import Samples
from iep.bench.limit import Layer, tagger_layers, tree_fc_layers, tree_lstm_layers
from iep.bench.tree_levels import levels_of
from iep.workloads.sentences import Sentence
from iep.workloads.trees import Tree

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


def tagger_samples(
    sentences: Sequence[Sentence], batch: int, embedding: int, width: int, hidden: int, tags: int
) -> Samples:
    """The same of sentences, for a BiLSTM tagger; cells are those of both LSTMs."""

    def layers(minibatch: Sequence[Sentence]) -> list[Layer]:
        return tagger_layers([len(sentence) for sentence in minibatch], embedding, width, hidden, tags)

    return _samples(sentences, batch, {"batch": batch}, layers, cells=lambda sentence: 2 * len(sentence))


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
