"""What `iep-bench tagger` compares: a BiLSTM tagger of words, whose rare words are spelled or not.

By hand, sentences are batched as one packed sequence for `nn.LSTM`, in plain PyTorch; that tagger does not spell.

Shapes: B sentences, W words of all sentences, P rows of the packed sequence, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from iep.bench import networks
from iep.bench.compare import MIN_SAMPLES
from iep.bench.networks import Samples, Way, step, summed_cross_entropy
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
    """Word vectors, an LSTM each way, a hidden layer with tanh, a score for every tag (Qiao & Taura, section 4.1)."""

    def __init__(self, words: int, tags: int, embedding: int = EMBEDDING, width: int = 256, hidden: int = HIDDEN):
        super().__init__()
        self.embedding = nn.Embedding(words, embedding, sparse=True)
        self.lstm = nn.LSTM(embedding, width, bidirectional=True)
        self.hidden = nn.Linear(2 * width, hidden)
        self.tags = nn.Linear(hidden, tags)

    def forward(self, sentences: PackedSentences) -> Tensor:
        """Return (P, tags) scores, in the order of the packed tags."""
        x_P, sizes, *_ = sentences.words
        h_P, _ = self.lstm(PackedSequence(self.embedding(x_P), sizes))
        return self.tags(self.hidden(h_P.data).tanh())


def tagger_samples(
    sentences: Sequence[Sentence], batch: int, width: int, tags: int = TAGS, spelled: bool = False
) -> Samples:
    """Return minibatches of sentences; cells are those of all LSTMs, the letters' among them if rare words are
    `spelled`, by an LSTM each way of half the width of the word vectors."""

    def letters(sentence: Sentence) -> int:
        return sum(map(len, sentence.characters or ())) if spelled else 0

    def lstm(items: int, inputs: int, hidden: int) -> int:
        return 2 * 2 * 4 * items * (inputs + hidden) * hidden

    def flop(sentence: Sentence) -> int:
        of_letters = lstm(letters(sentence), LETTER_EMBEDDING, EMBEDDING // 2)
        of_words = lstm(len(sentence), EMBEDDING, width)
        return of_letters + of_words + 2 * len(sentence) * HIDDEN * (2 * width + tags)

    return networks.samples_of(sentences, batch, lambda each: 2 * (len(each) + letters(each)), flop)


def tagger_ways(
    words: int, width: int, strategies: Sequence[Strategy], tags: int = TAGS, letters: int | None = None
) -> tuple[PackedTagger, list[Way]]:
    """Return the network by hand, and the ways to run the same weights, the one by hand last if no word is spelled."""
    model = Tagger(words, tags, letters, EMBEDDING, width, HIDDEN, LETTER_EMBEDDING)
    hand = PackedTagger(words, tags, EMBEDDING, width, HIDDEN)
    for name in ("embedding", "hidden", "tags"):
        getattr(hand, name).load_state_dict(getattr(model, name).state_dict())
    for way, end in enumerate(("", "_reverse")):
        inputs, recurrent = model.lstm.inputs[way], model.lstm.recurrent[way]
        given = {"weight_ih": inputs.weight, "weight_hh": recurrent.weight, "bias_ih": inputs.bias}
        for name, weights in {**given, "bias_hh": torch.zeros_like(inputs.bias)}.items():
            i, o, f, u = weights.detach().chunk(4)
            getattr(hand.lstm, f"{name}_l0{end}").data.copy_(torch.cat([i, f, u, o]))  # the order of nn.LSTM

    def loss(sentences: Sequence[Sentence], scores: Tensor) -> Tensor:
        tags_W = torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
        return summed_cross_entropy(scores, tags_W)

    compute = step(hand, hand, lambda packed, scores: summed_cross_entropy(scores, packed.tags))
    packed = [Way(PACKED, pack, compute)] if letters is None else []
    return hand, [*networks.model_ways(model, strategies, loss), *packed]


def tagger_benchmark(
    strategies: Sequence[Strategy],
    batch_sizes: Sequence[int],
    phases: Sequence[str],
    threads: Sequence[int],
    characters: bool,
    width: int,
    words: int,
    wikiner: Path | None,
    seed: int,
) -> Benchmark:
    """Return the comparison at every minibatch size, the smallest first.

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
    ways = tagger_ways(words, width, strategies, tags, letters if characters else None)[1]
    samples = (tagger_samples(sentences, size, width, tags, characters) for size in sorted(batch_sizes))
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    description = f"BiLSTM tagger, width {width}, {words} words, {tags} tags, {spelled}, {origin}"
    return Benchmark(description, networks.network_cases(samples, ways, phases, threads), "batch", "sentence")
