"""Compare ways to run networks whose structure depends on the sample: Tree-LSTM, Tree-FC and a tagger.

A minibatch runs one sample after the other, batched under a strategy, or, for the tagger, by PyTorch's `nn.LSTM` with
the same weights.

Shapes: P words of packed sentences.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from benchmarks.tagger import Sentence, Tagger, wikiner_like
from benchmarks.tree_networks import BinaryTreeLSTM, ChildSumTreeLSTM, TreeFC
from benchmarks.trees import Tree, TreePair, complete_trees, sick_like, sst_like
from iep.bench.compare import MIN_SAMPLES, Benchmark, Case, Competitor, Fact, seconds
from iep.bench.strategy import PHASES, Strategy
from iep.dynamic.plan_cache import clear_plan_cache

PER_INSTANCE, PACKED = "per instance", "packed nn.LSTM"
RATINGS, TAGS, LETTERS = 5, 9, 64
Loss = Callable[[Any, Tensor], Tensor]
"""(samples or the output of `Way.construct`, results) -> the loss, summed over samples."""
Sized = Iterable[tuple[dict[str, int], Sequence[Sequence[Any]]]]
"""The size of minibatches by its name, and the minibatches."""


class Way(NamedTuple):
    """One way to run a minibatch of samples.

    Attributes:
        construct: samples -> the argument of `compute`: graph, schedule and indices; no tensor is computed.
        compute: the forward pass and, if the second argument is true, loss and backward pass; returns the loss.
        calls: the output of `construct` -> the number of calls of the network's cells.
    """

    construct: Callable[[Sequence[Any]], Any]
    compute: Callable[[Any, bool], Any]
    calls: Callable[[Any], int] | None = None
    phases: tuple[str, ...] = PHASES


class Network(NamedTuple):
    """A network, and the ways to run it by name.

    Attributes:
        model: the module that has the parameters.
        cells: a sample -> the number of cells that run for it.
    """

    model: nn.Module
    cells: Callable[[Any], int]
    ways: dict[str, Way]


def step(model: nn.Module, forward: Callable[[Any], Tensor], loss: Loss) -> Callable[[Any, bool], Tensor]:
    """Return a step of `model` for `Way.compute`; gradients replace those of the previous step."""

    def compute(made: Any, training: bool) -> Tensor:
        with torch.inference_mode(not training):
            model.zero_grad(set_to_none=True)
            value = forward(made)
            if training:
                value = loss(made, value)
                value.backward()
            return value.detach()

    return compute


def one_by_one(model: nn.Module, loss: Loss) -> Way:
    """Return the way to run `model.one` for each sample, each of which has its own backward pass."""

    def compute(samples: Sequence[Any], training: bool) -> float:
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

    return Way(list, compute)


def batched(model: nn.Module, strategies: Sequence[Strategy], loss: Loss) -> dict[str, Way]:
    """Return the ways to run a model, one by one and batched under every strategy.

    Plans are not cached, because every minibatch of an epoch is new.
    """

    def way(strategy: Strategy) -> Way:
        def construct(samples: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
            clear_plan_cache()
            return model.plan(samples, strategy.batching, strategy.sharing), samples

        def forward(made: tuple) -> Tensor:
            return model(made[0], strategy.defer)

        compute = step(model, forward, lambda made, results: loss(made[1], results))
        return Way(construct, compute, lambda made: len(made[0].schedule), phases_of(strategy))

    return {PER_INSTANCE: one_by_one(model, loss)} | {each.name: way(each) for each in strategies}


def phases_of(strategy: Strategy) -> tuple[str, ...]:
    """Return the phases in which a strategy is measured; weight gradients are deferred only in training."""
    return PHASES[:1] if strategy.defer else PHASES


def minibatches_of(samples: Sequence[Any], sizes: Sequence[int]) -> Sized:
    """Yield the first minibatches of each size, with at least `MIN_SAMPLES` samples if there are so many."""
    for size in sorted(sizes):
        count = max(1, min(MIN_SAMPLES, len(samples)) // size)
        yield {"batch": size}, [samples[number * size : (number + 1) * size] for number in range(count)]


def network_cases(network: Network, sized: Sized, phases: Sequence[str]) -> Iterator[Case]:
    """Yield a case for each phase and for the minibatches of each size."""
    for size, minibatches in sized:
        cells = mean(sum(map(network.cells, each)) for each in minibatches)
        for phase in phases:
            training = phase == "train"
            competitors = [
                _competitor(name, way, cells, minibatches, training)
                for name, way in network.ways.items()
                if phase in way.phases
            ]
            setting = {"phase": phase, **size, "cells": cells, "minibatches": len(minibatches)}
            yield Case(setting, len(minibatches[0]), competitors, PER_INSTANCE)


def _competitor(name: str, way: Way, cells: float, minibatches: Sequence[Sequence[Any]], training: bool) -> Competitor:
    def measure() -> dict[str, float]:
        times = []
        for minibatch in minibatches:
            made: list[Any] = []
            constructing = seconds(lambda: made.append(way.construct(minibatch)))  # noqa: B023
            times.append((constructing, seconds(lambda: way.compute(made[0], training))))  # noqa: B023
        construction, computation = map(mean, zip(*times, strict=True))
        return {"construction": construction, "computation": computation}

    def facts() -> dict[str, Fact]:
        calls = way.calls and mean(way.calls(way.construct(minibatch)) for minibatch in minibatches)
        return {"calls": calls, "ratio": calls and cells / calls}

    return Competitor(name, measure, facts=facts)


def binary_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return a binary Tree-LSTM, which has a cell at every vertex of a tree."""

    def loss(trees: Sequence[Tree], scores: Tensor) -> Tensor:
        return cross_entropy(scores, torch.tensor([tree.label for tree in trees]), reduction="sum")

    model = BinaryTreeLSTM(words, width)
    return Network(model, len, batched(model, strategies, loss))


def tree_fc_network(words: int, width: int, strategies: Sequence[Strategy]) -> Network:
    """Return Tree-FC: relu(W [left; right] + b) at every inner vertex (Looks et al. 2017); leaves have no cell."""

    def cells(tree: Tree) -> int:
        return tree.num_leaves - 1

    model = TreeFC(words, width)
    return Network(model, cells, batched(model, strategies, lambda _, roots: roots.sum()))


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
        options = {"share": strategy.sharing, "defer_weight_grads": strategy.defer, "scheduler": strategy.batching}

        def run(pairs: Sequence[TreePair]) -> tuple[Tensor, Any]:
            clear_plan_cache()
            return model(pairs, granularity=granularity, **options)

        def calls(pairs: Sequence[TreePair]) -> int:
            with torch.no_grad():
                return run(pairs)[1].report().calls

        phases = PHASES if granularity == "op" else phases_of(strategy)
        return Way(list, step(model, lambda pairs: run(pairs)[0], loss), calls, phases)

    ways = {PER_INSTANCE: one_by_one(model, loss)} | {each.name: in_scope(each, "module") for each in strategies}
    ways |= {f"{each.name}, operators": in_scope(each, "op") for each in strategies[-1:]}
    return Network(model, lambda pair: len(pair.left) + len(pair.right), ways)


def pack(sentences: Sequence[Sentence]) -> tuple[PackedSequence, PackedSequence]:
    """Return words and tags of sentences in the packed form that `nn.LSTM` reads, (P,) indices each."""
    words, tags, _ = zip(*sentences, strict=True)
    return tuple(pack_sequence(list(map(torch.from_numpy, each)), enforce_sorted=False) for each in (words, tags))


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


def tagger_network(words: int, width: int, strategies: Sequence[Strategy], letters: int | None = None) -> Network:
    """Return a tagger of sentences, which has a cell at every word in each direction.

    If there are `letters`, rare words are spelled, by a cell at every letter in each direction. There is then no packed
    `nn.LSTM` to compare with.
    """
    model = Tagger(words, TAGS, letters, width=width)
    packed = PackedTagger(model, width)

    def loss(sentences: Sequence[Sentence], scores: Tensor) -> Tensor:
        tags_W = torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
        return cross_entropy(scores, tags_W, reduction="sum")

    def cells(sentence: Sentence) -> int:
        return 2 * (len(sentence.words) + (0 if letters is None else sum(map(len, sentence.spelled))))

    compute = step(packed, packed, lambda made, scores: cross_entropy(scores, made[1].data, reduction="sum"))
    own = {PACKED: Way(pack, compute)} if letters is None else {}
    return Network(packed, cells, batched(model, strategies, loss) | own)


def tree_lstm(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    cell: str,
    width: int | None,
    words: int,
    phases: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the comparisons at every minibatch size, on trees like those of SST or pairs of trees like those of SICK.

    Args:
        cell: `binary` or `child-sum`.
    """
    binary, count = cell == "binary", max(*batch_sizes, MIN_SAMPLES)
    make, like = (binary_network, sst_like) if binary else (child_sum_network, sick_like)
    width = width or (256 if binary else 150)
    samples = like(count, words, np.random.default_rng(seed))
    cases = network_cases(make(words, width, strategies), minibatches_of(samples, batch_sizes), phases)
    return Benchmark(f"{cell} Tree-LSTM, width {width}, {words} words", cases, "tree" if binary else "pair")


def tree_fc(
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
    sized = (({"leaves": size}, [complete_trees(batch_size, size, words, rng)]) for size in sorted(leaves))
    cases = network_cases(tree_fc_network(words, width, strategies), sized, phases)
    return Benchmark(f"Tree-FC, width {width}, {words} words, complete binary trees", cases, "tree")


def tagger(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    characters: bool,
    width: int,
    words: int,
    phases: Sequence[str],
    seed: int,
) -> Benchmark:
    """Return the comparisons at every minibatch size, on sentences like those of WikiNER."""
    samples = wikiner_like(max(*batch_sizes, MIN_SAMPLES), words, TAGS, LETTERS, np.random.default_rng(seed))
    network = tagger_network(words, width, strategies, LETTERS if characters else None)
    cases = network_cases(network, minibatches_of(samples, batch_sizes), phases)
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    return Benchmark(f"BiLSTM tagger, width {width}, {words} words, {spelled}", cases, "sentence")
