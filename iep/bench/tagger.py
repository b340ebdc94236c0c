"""What `iep-bench tagger` compares: a BiLSTM tagger of words, whose rare words are spelled or not.

By hand, sentences are batched as one packed sequence for `nn.LSTM`, in plain PyTorch; that tagger does not spell.

Shapes: B sentences, W words of all sentences, P rows of the packed sequence, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from iep.bench import networks
from iep.bench.compare import MIN_SAMPLES
from iep.bench.networks import Network, Way, step, summed_cross_entropy
from iep.bench.report import Benchmark
from iep.bench.strategy import Strategy
from iep.workloads.sentences import Sentence, read_wikiner, wikiner_like
from iep.workloads.tagger import Tagger

PACKED = "by hand: packed nn.LSTM"
TAGS, LETTERS = 9, 64
"""Of the sentences made."""
EMBEDDING, LETTER_EMBEDDING, HIDDEN = 128, 64, 32
"""Sizes of vectors of words and letters, and of the layer before the tags (Qiao & Taura 2019, section 4.1)."""


@dataclass(frozen=True, eq=False)
class PackedSentences:
    """Sentences side by side, the longest first, step by step."""

    words: PackedSequence
    """Data (P,), indices."""
    tags: Tensor
    """(P,) in the same order."""


def pack(sentences: Sequence[Sentence]) -> PackedSentences:
    """Return sentences as `nn.LSTM` reads them; the row of every word is found without a loop over sentences."""
    lengths_B = np.array([len(sentence) for sentence in sentences])
    order_B = np.argsort(-lengths_B, kind="stable")
    start_B = np.cumsum(lengths_B) - lengths_B
    step_W = np.arange(lengths_B.sum()) - np.repeat(start_B, lengths_B)
    rank_W = np.repeat(np.argsort(order_B), lengths_B)
    rows_P = np.lexsort((rank_W, step_W))
    words, tags = (np.concatenate([getattr(sentence, name) for sentence in sentences]) for name in ("words", "tags"))
    packed = PackedSequence(torch.from_numpy(words[rows_P]), torch.from_numpy(np.bincount(step_W)))
    return PackedSentences(packed, torch.from_numpy(tags[rows_P]))


class PackedTagger(nn.Module):
    """The tagger with `nn.LSTM`, and the same numbers in its weights (Qiao & Taura 2019, section 4.1)."""

    def __init__(self, model: Tagger, width: int):
        super().__init__()
        self.embedding, self.hidden, self.tags = model.embedding, model.hidden, model.tags
        self.lstm = nn.LSTM(model.embedding.embedding_dim, width, bidirectional=True)
        for end, inputs, recurrent in zip(("", "_reverse"), model.lstm.inputs, model.lstm.recurrent, strict=True):
            given = {"weight_ih": inputs.weight, "weight_hh": recurrent.weight, "bias_ih": inputs.bias}
            for name, weights in {**given, "bias_hh": torch.zeros_like(inputs.bias)}.items():
                i, o, f, u = weights.detach().chunk(4)
                getattr(self.lstm, f"{name}_l0{end}").data.copy_(torch.cat([i, f, u, o]))  # the order of nn.LSTM

    def forward(self, sentences: PackedSentences) -> Tensor:
        """Return (P, tags) scores, in the order of the packed tags."""
        x_P, sizes, *_ = sentences.words
        h_P, _ = self.lstm(PackedSequence(self.embedding(x_P), sizes))
        return self.tags(self.hidden(h_P.data).tanh())


def tagger_network(
    words: int, width: int, strategies: Sequence[Strategy], tags: int = TAGS, letters: int | None = None
) -> Network:
    """Return a tagger of sentences; its cells are those of all LSTMs, also over the `letters` of rare
    words if they are spelled. Its last way is the packed one, unless there are letters."""
    model = Tagger(words, tags, letters, EMBEDDING, width, HIDDEN, LETTER_EMBEDDING)
    hand = PackedTagger(model, width)

    def loss(sentences: Sequence[Sentence], scores: Tensor) -> Tensor:
        tags_W = torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
        return summed_cross_entropy(scores, tags_W)

    def spelled(sentence: Sentence) -> int:
        return 0 if letters is None else sum(map(len, sentence.characters or ()))

    def flop(sentence: Sentence) -> int:
        sizes = ((spelled(sentence), LETTER_EMBEDDING, EMBEDDING // 2), (len(sentence), EMBEDDING, width))
        lstms = sum(16 * items * (inputs + hidden) * hidden for items, inputs, hidden in sizes)
        return lstms + 2 * len(sentence) * HIDDEN * (2 * width + tags)

    compute = step(hand, hand, lambda packed, scores: summed_cross_entropy(scores, packed.tags))
    by_hand = [Way(PACKED, pack, compute)] if letters is None else []
    ways = [*networks.model_ways(model, strategies, loss), *by_hand]
    return Network(hand, ways, lambda sentence: 2 * (len(sentence) + spelled(sentence)), flop)


def tagger_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    characters: bool,
    width: int,
    words: int,
    wikiner: Path | None,
    seed: int,
    **measured: Any,
) -> Benchmark:
    """Return the comparison at every minibatch size, the smallest first; `measured` are phases and threads.

    Raises:
        InputError: the sentences' file cannot be read, or has too few.
    """
    rng, count = np.random.default_rng(seed), max(*batch_sizes, MIN_SAMPLES)
    if wikiner is None:
        tags, letters = TAGS, LETTERS
        sentences = wikiner_like(count, words, tags, rng, letters if characters else None)
        origin = f"{count} sentences made in the lengths of WikiNER's"
    else:
        found, names = read_wikiner(wikiner)
        words, tags, letters = 1 + len(names.words), len(names.tags), len(names.characters)
        sentences = networks.shuffled(found, max(batch_sizes), rng, wikiner, "sentences")
        origin = f"sentences of {wikiner}"
    torch.manual_seed(seed)
    network = tagger_network(words, width, strategies, tags, letters if characters else None)
    sized = (({"batch": size}, networks.minibatches_of(sentences, size)) for size in sorted(batch_sizes))
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    description = f"BiLSTM tagger, width {width}, {words} words, {tags} tags, {spelled}, {origin}"
    return Benchmark(description, networks.network_cases(network, sized, **measured), "batch", "sentence")
