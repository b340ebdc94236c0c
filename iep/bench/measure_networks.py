"""Measure networks whose structure depends on the sample: `iep-bench tree-lstm`, `tree-fc` and `tagger`.

A `Way` runs a minibatch of samples: batched under a strategy, one sample after the other, or batched by hand in plain
PyTorch with the same weights. The limit is the time of the operations of all matrix products at the speed of the
fastest product of this machine.

Shapes: B samples, L leaves of all trees, G vertices of a level, P words of packed sentences, H width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.flop_counter import FlopCounterMode

from iep.bench.compare import MIN_SAMPLES, Case, Competitor, Fact, arithmetic_limit, seconds
from iep.bench.strategy import PHASES, Strategy
from iep.bench.tables import Benchmark
from iep.dynamic import scope
from iep.dynamic.remembered import nothing_remembered
from iep.errors import InputError
from iep.workloads.binary_trees import BinaryTreeLSTM, TreeFC
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.sentences import Sentence, read_wikiner, wikiner_like
from iep.workloads.tagger import Tagger
from iep.workloads.tree_files import read_sick, read_sst
from iep.workloads.trees import SENTIMENTS, Tree, TreePair, complete_trees, sick_like, sst_like

PER_INSTANCE, LEVELS, PACKED = "per instance", "by hand: levels", "by hand: packed nn.LSTM"
RATINGS, TAGS, LETTERS = 5, 9, 64
Loss = Callable[[Any, Tensor], Tensor]
"""(samples or the output of `Way.construct`, results) -> the loss, summed over samples."""
Minibatches = Sequence[Sequence[Any]]
States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Way:
    """One way to run a minibatch of samples.

    Attributes:
        construct: samples -> the argument of `compute`: graph, schedule and indices; no tensor is computed.
        compute: the forward pass and, if the second argument is true, loss and backward pass; returns the loss.
        calls: the output of `construct` -> the number of calls of the network's cells.
    """

    name: str
    construct: Callable[[Sequence[Any]], Any]
    compute: Callable[[Any, bool], Any]
    calls: Callable[[Any], int] | None = None
    phases: tuple[str, ...] = PHASES


@dataclass(frozen=True)
class Network:
    """A network, and the ways to run it, the one by hand last.

    Attributes:
        one: a sample -> its results; used to count the operations of its matrix products.
        cells: a sample -> the number of cells that run for it.
    """

    model: nn.Module
    ways: Sequence[Way]
    one: Callable[[Any], Tensor]
    cells: Callable[[Any], int]


def step(model: nn.Module, forward: Callable[[Any], Tensor], loss: Loss) -> Callable[[Any, bool], Tensor]:
    """Return a step of `model` for `Way.compute`; gradients replace those of the previous step."""

    def compute(plan: Any, training: bool) -> Tensor:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            value = forward(plan)
            if training:
                value = loss(plan, value)
                value.backward()
            return value.detach()

    return compute


def model_ways(model: nn.Module, strategies: Sequence[Strategy], loss: Loss) -> list[Way]:
    """Return the ways to run a model: sample by sample with `model.one`, and batched under every strategy.

    Sample by sample, each sample has its own backward pass. Plans are not remembered, because every minibatch of an
    epoch is new. Weight gradients are deferred only in training.
    """

    def one_by_one(samples: Sequence[Any], training: bool) -> float:
        model.zero_grad(set_to_none=True)
        total = 0.0
        with torch.inference_mode(not training):
            for sample in samples:
                results = model.one(sample)
                if training:
                    value = loss([sample], results if results.dim() > 1 else results[None])
                    value.backward()
                    total += value.item()
        return total

    def way(strategy: Strategy) -> Way:
        def construct(samples: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            with nothing_remembered():
                return model.plan(samples, scheduler=strategy.batching, sharing=strategy.sharing), samples

        forward, loss_of = (lambda made: model(made[0], strategy.defer)), (lambda made, results: loss(made[1], results))
        phases = PHASES[:1] if strategy.defer else PHASES
        return Way(strategy.name, construct, step(model, forward, loss_of), lambda made: len(made[0].schedule), phases)

    return [Way(PER_INSTANCE, list, one_by_one), *map(way, strategies)]


def minibatches_of(samples: Sequence[Any], sizes: Sequence[int]) -> Iterator[tuple[dict[str, int], Minibatches]]:
    """Yield the first minibatches of each size, with at least `MIN_SAMPLES` samples if there are so many."""
    for size in sorted(sizes):
        count = max(1, min(MIN_SAMPLES, len(samples)) // size)
        yield {"batch": size}, [samples[number * size : (number + 1) * size] for number in range(count)]


def network_cases(
    network: Network, sized: Iterable[tuple[dict[str, int], Minibatches]], phases: Sequence[str]
) -> Iterator[Case]:
    """Yield a case for each phase and for the minibatches of each size; `sized` names the size."""
    for size, minibatches in sized:
        cells = mean(sum(map(network.cells, each)) for each in minibatches)
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            for sample in (sample for minibatch in minibatches for sample in minibatch):
                network.one(sample)
        flop = counter.get_total_flops() / len(minibatches)
        for phase in phases:
            ways = [way for way in network.ways if phase in way.phases]
            competitors = [_competitor(way, cells, minibatches, phase == "train") for way in ways]
            competitors.append(arithmetic_limit(flop * (3 if phase == "train" else 1)))
            facts = {"cells": cells, "minibatches": len(minibatches)}
            yield Case({"phase": phase, **size}, len(minibatches[0]), competitors, PER_INSTANCE, facts)


def _competitor(way: Way, cells: float, minibatches: Minibatches, training: bool) -> Competitor:
    def measure() -> dict[str, float]:
        times = []
        for minibatch in minibatches:
            made: list[Any] = []
            constructing = seconds(lambda: made.append(way.construct(minibatch)))  # noqa: B023
            times.append((constructing, seconds(lambda: way.compute(made[0], training))))  # noqa: B023
        return dict(zip(("construction", "computation"), map(mean, zip(*times, strict=True)), strict=True))

    def facts() -> dict[str, Fact]:
        calls = way.calls and mean(way.calls(way.construct(minibatch)) for minibatch in minibatches)
        return {"calls": calls, "ratio": calls and cells / calls}

    return Competitor(way.name, measure, facts=facts)


@dataclass(frozen=True, eq=False)
class Levels:
    """The vertices of binary trees by depth, the deepest first.

    The children of a level's inner vertices, in order and left before right, are the vertices of the next deeper level.
    """

    words: Tensor
    """(L,) words of the leaves, level by level."""
    leaves: tuple[int, ...]
    """The number of leaves of each level."""
    orders: tuple[Tensor | None, ...]
    """(G,) row of each vertex if a level's inner vertices come before its leaves; None where all are of one kind."""
    labels: Tensor
    """(B,) labels of the trees."""

    def run(self, leaves: States, inner: Callable[..., States]) -> States:
        """Return the roots' states, (B, H) each.

        Args:
            leaves: the states of the leaves, (L, H) each.
            inner: the children's states, (2 G, H) each, left and right in turn -> the states of G vertices.
        """
        states: States = ()
        leaves_of_levels = zip(*(each.split(self.leaves) for each in leaves), strict=True)
        for given, order in zip(leaves_of_levels, self.orders, strict=True):
            states = inner(*states) if states else given
            if order is not None:
                states = tuple(torch.cat(pair).index_select(0, order) for pair in zip(states, given, strict=True))
        return states


def levels_of(trees: Sequence[Tree]) -> Levels:
    """Return the levels of one or more binary trees; a level reads only the next deeper one."""
    sizes_B = np.array([len(tree) for tree in trees])
    start_B = np.cumsum(sizes_B) - sizes_B
    children_N2 = np.concatenate([tree.children for tree in trees]) + np.repeat(start_B, sizes_B)[:, None]
    is_leaf_N = np.concatenate([tree.children[:, 0] < 0 for tree in trees])
    levels = [start_B + sizes_B - 1]
    while not is_leaf_N[levels[-1]].all():
        levels.append(children_N2[levels[-1][~is_leaf_N[levels[-1]]]].ravel())
    leaves, orders = [], []
    for level_G in reversed(levels):
        is_leaf_G = is_leaf_N[level_G]
        leaves.append(level_G[is_leaf_G])
        row_G = np.argsort(np.argsort(is_leaf_G, kind="stable"))
        orders.append(torch.from_numpy(row_G) if 0 < len(leaves[-1]) < len(level_G) else None)
    words_N = np.concatenate([tree.words for tree in trees])
    words, labels = torch.from_numpy(words_N[np.concatenate(leaves)]), torch.tensor([tree.label for tree in trees])
    return Levels(words, tuple(map(len, leaves)), tuple(orders), labels)


def tree_lstm_by_hand(model: BinaryTreeLSTM, levels: Levels) -> Tensor:
    """Return (B, classes) scores, computed with the model's parameters (Tai et al. 2015, section 3.2)."""

    def state(gates: Tensor, *children: Tensor) -> States:
        """Return h and c from the gates i, o, one forget gate for each child, and u."""
        *_, u = gates.split(model.width, dim=1)
        i, o, *forgets = gates[:, : -model.width].sigmoid().split(model.width, dim=1)
        c_GH = i * u.tanh()
        for forget, c_child in zip(forgets, children, strict=True):
            c_GH = torch.addcmul(c_GH, forget, c_child)
        return o * c_GH.tanh(), c_GH

    def inner(h: Tensor, c: Tensor) -> States:
        return state(model.inner(h.view(-1, 2 * model.width)), c[::2], c[1::2])

    h_BH, _ = levels.run(state(model.leaf(model.embedding(levels.words))), inner)
    return model.classifier(h_BH)


def binary_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return a binary Tree-LSTM, which has a cell at every vertex of a tree."""
    model = BinaryTreeLSTM(words, width, SENTIMENTS)

    def loss(trees: Sequence[Tree], scores: Tensor) -> Tensor:
        return cross_entropy(scores, torch.tensor([tree.label for tree in trees]), reduction="sum")

    forward = partial(tree_lstm_by_hand, model)
    compute = step(model, forward, lambda levels, scores: cross_entropy(scores, levels.labels, reduction="sum"))
    by_hand = Way(LEVELS, levels_of, compute, lambda levels: len(levels.orders))
    return Network(model, [*model_ways(model, strategies, loss), by_hand], model.one, len)


def child_sum_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return a child-sum Tree-LSTM, which has a cell at every word, and compares the two sentences of a pair.

    The same code runs one pair after the other and in a lazy scope (Zha et al. 2019, Just-in-Time Dynamic-Batching,
    section 5): by modules under every strategy, and by operators under the last strategy. Planning counts as
    computation.
    """
    model = ChildSumTreeLSTM(words, width=width, ratings=RATINGS)

    def loss(pairs: Sequence[TreePair], scores: Tensor) -> Tensor:
        """Return the cross-entropy with ratings whose mean is the relatedness (Tai et al. 2015, section 4.2)."""
        related = torch.tensor([pair.relatedness for pair in pairs])
        ratings = (1 - (related[:, None] - torch.arange(1, RATINGS + 1)).abs()).clamp(min=0)
        return cross_entropy(scores, ratings, reduction="sum")

    def in_scope(strategy: Strategy, granularity: str) -> Way:
        """Return the way to run pairs in a scope under a strategy."""
        options = {"share": strategy.sharing, "defer_weight_grads": strategy.defer, "scheduler": strategy.batching}

        def run(pairs: Sequence[TreePair]) -> tuple[Tensor, scope]:
            with nothing_remembered(), scope(model.cell, model.similarity, granularity=granularity, **options) as batch:
                scores = [model.one(pair) for pair in pairs]
            return torch.stack([score.value for score in scores]), batch

        def calls(pairs: Sequence[TreePair]) -> int:
            with torch.no_grad():
                return run(pairs)[1].report().calls

        by_modules = granularity == "module"
        name = strategy.name if by_modules else f"{strategy.name}, operators"
        compute = step(model, lambda pairs: run(pairs)[0], loss)
        return Way(name, list, compute, calls, PHASES[:1] if strategy.defer and by_modules else PHASES)

    ways = [*model_ways(model, (), loss), *(in_scope(strategy, "module") for strategy in strategies)]
    ways += [in_scope(strategy, "op") for strategy in strategies[-1:]]
    return Network(model, ways, model.one, lambda pair: len(pair.left) + len(pair.right))


def tree_fc_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return Tree-FC: relu(W [left; right] + b) at every inner vertex (Looks et al. 2017); leaves have no cell."""
    model = TreeFC(words, width)

    def loss(_: Any, roots: Tensor) -> Tensor:
        return roots.sum()

    def forward(levels: Levels) -> Tensor:
        leaves = (model.embedding(levels.words),)
        return levels.run(leaves, lambda h: (model.inner(h.view(-1, 2 * width)).relu(),))[0]

    by_hand = Way(LEVELS, levels_of, step(model, forward, loss), lambda levels: len(levels.orders) - 1)
    ways = [*model_ways(model, strategies, loss), by_hand]
    return Network(model, ways, model.one, lambda tree: tree.num_leaves - 1)


def pack(sentences: Sequence[Sentence]) -> tuple[PackedSequence, PackedSequence]:
    """Return words and tags of sentences in the packed form that `nn.LSTM` reads, (P,) indices each."""
    return tuple(
        pack_sequence([torch.from_numpy(getattr(sentence, name)) for sentence in sentences], enforce_sorted=False)
        for name in ("words", "tags")
    )


class PackedTagger(nn.Module):
    """The tagger with `nn.LSTM` and equal weights (Qiao & Taura 2019, section 4.1)."""

    def __init__(self, model: Tagger, width: int):
        super().__init__()
        self.embedding, self.hidden, self.tags = model.embedding, model.hidden, model.tags
        self.lstm = nn.LSTM(model.embedding.embedding_dim, width, bidirectional=True)
        for end, inputs, recurrent in zip(("", "_reverse"), model.lstm.inputs, model.lstm.recurrent, strict=True):
            given = {"weight_ih": inputs.weight, "weight_hh": recurrent.weight, "bias_ih": inputs.bias}
            for name, weights in {**given, "bias_hh": torch.zeros_like(inputs.bias)}.items():
                i, o, f, u = weights.detach().chunk(4)
                getattr(self.lstm, f"{name}_l0{end}").data.copy_(torch.cat([i, f, u, o]))  # the order of nn.LSTM

    def forward(self, packed: tuple[PackedSequence, PackedSequence]) -> Tensor:
        """Return (P, tags) scores, in the order of the packed tags."""
        x_P, sizes, *_ = packed[0]
        h_P, _ = self.lstm(PackedSequence(self.embedding(x_P), sizes))
        return self.tags(self.hidden(h_P.data).tanh())


def tagger_network(
    words: int, width: int, strategies: Sequence[Strategy], letters: int | None = None, tags: int = TAGS
) -> Network:
    """Return a tagger of sentences, which has a cell at every word in each direction.

    If there are `letters`, rare words are spelled, by a cell at every letter in each direction. There is then no packed
    `nn.LSTM` to compare with.
    """
    model = Tagger(words, tags, letters, width=width)
    hand = PackedTagger(model, width)

    def loss(sentences: Sequence[Sentence], scores: Tensor) -> Tensor:
        tags_W = torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
        return cross_entropy(scores, tags_W, reduction="sum")

    def cells(sentence: Sentence) -> int:
        return 2 * (len(sentence) + (0 if letters is None else sum(map(len, sentence.characters or ()))))

    compute = step(hand, hand, lambda packed, scores: cross_entropy(scores, packed[1].data, reduction="sum"))
    by_hand = [Way(PACKED, pack, compute)] if letters is None else []
    return Network(hand, [*model_ways(model, strategies, loss), *by_hand], model.one, cells)


def _read(data: Path, read: Callable[[Path], tuple[list[Any], Any]], largest: int, seed: int) -> tuple[list[Any], Any]:
    """Return the samples of a file in random order, and its vocabulary.

    Raises:
        InputError: the file cannot be read, or has fewer samples than the largest minibatch.
    """
    found, more = read(data)
    if len(found) < largest:
        raise InputError(f"{data}: {len(found)} samples, expected at least {largest} for the largest of --batch-sizes")
    return [found[n] for n in np.random.default_rng(seed).permutation(len(found))], more


def tree_lstm_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    cell: str,
    width: int,
    words: int,
    phases: Sequence[str],
    seed: int,
    data: Path | None = None,
) -> Benchmark:
    """Return the comparisons at every minibatch size, on trees like those of SST or pairs of trees like those of SICK.

    Args:
        data: a file of SST, or a directory of SICK; None to generate trees.
    """
    binary, count = cell == "binary", max(*batch_sizes, MIN_SAMPLES)
    if data is None:
        samples = (sst_like if binary else sick_like)(count, words, np.random.default_rng(seed))
    else:
        samples, vocabulary = _read(data, read_sst if binary else read_sick, max(batch_sizes), seed)
        words = len(vocabulary)
    network = (binary_network if binary else child_sum_network)(words, width, strategies)
    cases = network_cases(network, minibatches_of(samples, batch_sizes), phases)
    return Benchmark(f"{cell} Tree-LSTM, width {width}, {words} words", cases, "batch", "tree" if binary else "pair")


def tree_fc_benchmark(
    strategies: Sequence[Strategy],
    leaves: Sequence[int],
    batch_size: int,
    width: int,
    words: int,
    phases: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the comparisons at every size of tree, the smallest first."""
    rng = np.random.default_rng(seed)
    network = tree_fc_network(words, width, strategies)
    sized = (({"leaves": size}, [complete_trees(batch_size, size, words, rng)]) for size in sorted(leaves))
    cases = network_cases(network, sized, phases)
    return Benchmark(f"Tree-FC, width {width}, {words} words, complete binary trees", cases, "leaves", "tree")


def tagger_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    characters: bool,
    width: int,
    words: int,
    phases: Sequence[str],
    seed: int,
    data: Path | None = None,
) -> Benchmark:
    """Return the comparisons at every minibatch size, on sentences like those of WikiNER, or on the file `data`."""
    letters, tags, count = LETTERS if characters else None, TAGS, max(*batch_sizes, MIN_SAMPLES)
    if data is None:
        samples = wikiner_like(count, words, tags, np.random.default_rng(seed), letters)
    else:
        samples, known = _read(data, read_wikiner, max(batch_sizes), seed)
        words, tags = len(known.words) + 1, len(known.tags)
        letters = len(known.characters) if characters else None
    network = tagger_network(words, width, strategies, letters, tags)
    cases = network_cases(network, minibatches_of(samples, batch_sizes), phases)
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    return Benchmark(f"BiLSTM tagger, width {width}, {words} words, {spelled}", cases, "batch", "sentence")
