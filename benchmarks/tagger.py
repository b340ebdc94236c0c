"""Compare ways to run taggers of words, bidirectional LSTMs over sentences, in which rare words may be spelled.

Sentences are generated with the lengths of those of WikiNER's English part. A rare word has no vector of its own. A
tagger without letters has one vector for all such words; a tagger with letters represents each by the states of a
smaller bidirectional LSTM over its letters (Neubig et al. 2017, On-the-fly Operation Batching in Dynamic Computation
Graphs, section 5; Qiao & Taura 2019, section 4.1). Each direction is a chain of vertices, and all sentences run side by
side, by vertex functions or, for a tagger without letters, by PyTorch's own LSTM.

Shapes: W words of a minibatch (or items of all sequences), T of a sentence, R rows of vectors, L letters and S spelled
words of a minibatch, P words of packed sentences, H width, E embedding.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from benchmarks.networks import Way, minibatches_of, network_cases, step, ways_of
from benchmarks.trees import lengths, lstm_state, zipf
from iep.batching.schedulers import Schedule
from iep.bench.compare import MIN_SAMPLES, Benchmark
from iep.bench.strategy import Strategy
from iep.dynamic import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices
from iep.kernels.layers import Linear

PACKED = "packed nn.LSTM"
TAGS, LETTERS = 9, 64
"""The numbers of tags and of letters."""
UNKNOWN_WORD = 0
"""The index of all rare words."""
SENTENCE_LENGTHS, WORD_LENGTHS = (24.5, 11.0), (8.0, 2.5)
"""The mean and standard deviation of the lengths of sentences in WikiNER's English part, and of rare words."""
RARE_SHARE = 0.08
"""The share of rare words in a text of 3.5 million words that follow Zipf's law."""
DIRECTIONS = FORWARD, BACKWARD = range(2)


class Sentence(NamedTuple):
    """One sentence of T > 0 words."""

    words: np.ndarray
    """The index of each word, (T,); `UNKNOWN_WORD` for rare words."""
    tags: np.ndarray
    """The index of the tag of each word, (T,)."""
    spelled: list[np.ndarray]
    """The indices of the letters of each rare word, in order."""


def wikiner_like(count: int, words: int, tags: int, letters: int, rng: np.random.Generator) -> list[Sentence]:
    """Return sentences of 1 to 120 words, drawn by Zipf's law from indices 1 to `words` - 1; one in twelve is rare.

    Tags and the letters of rare words are drawn uniformly.
    """
    made = []
    for length in lengths(count, *SENTENCE_LENGTHS, 1, 120, rng).tolist():
        drawn = 1 + zipf(length, words - 1, rng)
        rare = rng.random(length) < RARE_SHARE
        spelled = [rng.integers(0, letters, size) for size in lengths(rare.sum(), *WORD_LENGTHS, 1, 25, rng)]
        made.append(Sentence(np.where(rare, UNKNOWN_WORD, drawn), rng.integers(0, tags, length), spelled))
    return made


class BiLSTMPlan(NamedTuple):
    """The plan by which a bidirectional LSTM runs on a minibatch, which consists of integers."""

    chains: VertexPlan
    states: Tensor
    """The rows of the forward and the backward state of each item among those that the chains push, (2 W,)."""


class BiLSTM(nn.Module):
    """A bidirectional LSTM over sequences of vectors. Gates are in the order i, o, f, u.

    The products of all items and the input weights are computed at once; each step adds the recurrent product.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.width = width
        self.inputs = nn.ModuleList(nn.Linear(inputs, 4 * width) for _ in DIRECTIONS)
        self.recurrent = nn.ModuleList(Linear(width, 4 * width, bias=False) for _ in DIRECTIONS)
        functions = [
            VertexFunction(partial(self._step, way), ("h", "c"), pulls=(f"gates{way}",), pushes=("h",))
            for way in DIRECTIONS
        ]
        self.network = VertexNetwork(functions, states={"h": (width,), "c": (width,)})

    def plan(self, sequences: Sequence[np.ndarray], scheduler: str = "lookahead", sharing: bool = False) -> BiLSTMPlan:
        """Return the plan of sequences of at least one item; see `VertexNetwork.plan` for the other arguments.

        Args:
            sequences: the rows of the items of each sequence among all vectors, (T,) each.
        """
        lengths = np.array([len(rows) for rows in sequences], dtype=np.int64)
        # The longest sequences are first, so that those with an item at a step are adjacent.
        order = np.argsort(-lengths, kind="stable")
        first = np.empty_like(lengths)
        first[order] = np.cumsum(lengths[order]) - lengths[order]
        step_W = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        # The forward states of a sequence are first, then its backward states, from its last item to the first.
        states = [np.repeat(2 * first, lengths) + step_W, np.repeat(2 * (first + lengths) - 1, lengths) - step_W]
        chains = self.network.plan([_chains(sequences[index]) for index in order], scheduler, sharing)
        return BiLSTMPlan(chains, torch.from_numpy(np.stack(states, axis=1).ravel()))

    def forward(self, plan: BiLSTMPlan, x_RE: Tensor, defer_weight_grads: bool = True) -> Tensor:
        """Return the forward and backward states of all items, (W, 2, H), sequence by sequence."""
        items = {name: x_RE.index_select(0, rows) for name, rows in plan.chains.rows.items()}
        gates = {f"gates{way}": self.inputs[way](items[f"gates{way}"]) for way in DIRECTIONS}
        h = self.network(plan.chains, gates, defer_weight_grads).pushed["h"]
        return h.index_select(0, plan.states).view(-1, 2, self.width)

    def one(self, x_TE: Tensor) -> Tensor:
        """Return the states of one sequence, (T, 2, H), item by item: the slow reference."""
        return torch.stack([self._run(FORWARD, x_TE), self._run(BACKWARD, x_TE.flip(0)).flip(0)], dim=1)

    def _run(self, way: int, x_TE: Tensor) -> Tensor:
        h = c = x_TE.new_zeros(1, self.width)
        states = []
        for gates in self.inputs[way](x_TE):
            h, c = lstm_state(gates + self.recurrent[way](h), c[:, None])
            states.append(h[0])
        return torch.stack(states)

    def _step(self, way: int, vertices: Vertices) -> None:
        gates = vertices.pull(f"gates{way}")
        if vertices.num_children:
            gates = gates + self.recurrent[way](vertices.gather("h").flatten(1))
            h, c = lstm_state(gates, vertices.gather("c"))
        else:  # the forget gate has nothing to forget
            i, o, _, u = gates.split(self.width, dim=1)
            h, c = lstm_state(torch.cat([i, o, u], dim=1))
        vertices.scatter(h=h, c=c)


def _chains(rows_T: np.ndarray) -> Edges:
    """Return a forward and a backward chain over the items of a sequence."""
    children = np.arange(-1, 2 * len(rows_T) - 1)[:, None]
    children[len(rows_T)] = -1
    rows = np.concatenate([rows_T, rows_T[::-1]])
    return Edges(children, np.repeat(DIRECTIONS, len(rows_T)), {f"gates{way}": rows for way in DIRECTIONS})


class TaggerPlan(NamedTuple):
    """The plan by which a minibatch is tagged, which consists of integers."""

    words: BiLSTMPlan
    vocabulary: Tensor
    """The words whose vectors are the first rows of x."""
    letters: Tensor | None = None
    """The letters of all spelled words, whose vectors are the last rows of x; None if no word is spelled."""
    spelling: BiLSTMPlan | None = None
    ends: Tensor | None = None
    """The rows of the last letter's forward and the first letter's backward state of each spelled word, (2 S,)."""

    @property
    def schedule(self) -> Schedule:
        """The schedule of all calls, of which those of the letters are first."""
        return (self.spelling.chains.schedule if self.spelling else ()) + self.words.chains.schedule


class Tagger(nn.Module):
    """A tagger of word vectors, a BiLSTM, a tanh layer and tag scores. Default sizes: Qiao & Taura 2019, section 4.1.

    Args:
        letters: the number of letters; None for a tagger that does not spell.
    """

    def __init__(
        self, words: int, tags: int, letters: int | None, embedding: int = 128, width: int = 256, hidden: int = 32
    ):
        super().__init__()
        self.spells = letters is not None
        self.embedding = nn.Embedding(words, embedding, sparse=True)
        self.lstm = BiLSTM(embedding, width)
        self.hidden = nn.Linear(2 * width, hidden)
        self.tags = nn.Linear(hidden, tags)
        if self.spells:
            self.letters = nn.Embedding(letters, embedding // 2, sparse=True)
            self.spelling = BiLSTM(embedding // 2, embedding // 2)

    def plan(self, sentences: Sequence[Sentence], scheduler: str = "lookahead", sharing: bool = False) -> TaggerPlan:
        """Return the plan of a minibatch of sentences of at least one word.

        Args:
            sharing: compute a word's product with the input weights once, and the states after equal beginnings and
                before equal ends.
        """
        words_W = np.concatenate([sentence.words for sentence in sentences])
        is_spelled_W = (words_W == UNKNOWN_WORD) & self.spells
        spelled = [word for sentence in sentences for word in sentence.spelled] if self.spells else []
        vocabulary, row = words_W[~is_spelled_W], np.arange((~is_spelled_W).sum())
        if sharing:
            vocabulary, row = np.unique(vocabulary, return_inverse=True)
        row_W = np.empty(len(words_W), dtype=np.int64)
        row_W[~is_spelled_W], row_W[is_spelled_W] = row, len(vocabulary) + np.arange(len(spelled))
        sequences = np.split(row_W, np.cumsum([len(sentence.words) for sentence in sentences])[:-1])
        words = self.lstm.plan(sequences, scheduler, sharing), torch.from_numpy(vocabulary)
        if not spelled:
            return TaggerPlan(*words)
        lengths = np.array(list(map(len, spelled)))
        first = np.cumsum(lengths) - lengths
        spelling = self.spelling.plan(np.split(np.arange(lengths.sum()), first[1:]), scheduler)
        ends = np.stack([2 * (first + lengths - 1) + FORWARD, 2 * first + BACKWARD], axis=1).ravel()
        return TaggerPlan(*words, torch.from_numpy(np.concatenate(spelled)), spelling, torch.from_numpy(ends))

    def forward(self, plan: TaggerPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the scores of each word, (W, tags), sentence by sentence."""
        x_RE = self.embedding(plan.vocabulary)
        if plan.spelling is not None:
            h_L2H = self.spelling(plan.spelling, self.letters(plan.letters), defer_weight_grads)
            x_RE = torch.cat([x_RE, h_L2H.flatten(0, 1).index_select(0, plan.ends).view(-1, x_RE.shape[1])])
        return self._scores(self.lstm(plan.words, x_RE, defer_weight_grads))

    def one(self, sentence: Sentence) -> Tensor:
        """Return the scores of one sentence, (T, tags), word by word: the slow reference."""
        vectors = list(self.embedding(torch.from_numpy(sentence.words)))
        rare = np.flatnonzero(sentence.words == UNKNOWN_WORD).tolist() if self.spells else []
        for index, word in zip(rare, sentence.spelled if rare else [], strict=True):
            h = self.spelling.one(self.letters(torch.from_numpy(word)))
            vectors[index] = torch.cat([h[-1, FORWARD], h[0, BACKWARD]])
        return self._scores(self.lstm.one(torch.stack(vectors)))

    def cells(self, sentence: Sentence) -> int:
        """Return the number of cells, one for each word and each spelled letter in each direction."""
        return 2 * (len(sentence.words) + (sum(map(len, sentence.spelled)) if self.spells else 0))

    def loss(self, sentences: Sequence[Sentence], scores: Tensor) -> Tensor:
        """Return the cross-entropy of the words' tags, summed over words."""
        tags_W = torch.from_numpy(np.concatenate([sentence.tags for sentence in sentences]))
        return cross_entropy(scores, tags_W, reduction="sum")

    def _scores(self, h_W2H: Tensor) -> Tensor:
        return self.tags(self.hidden(h_W2H.flatten(1)).tanh())


def pack(sentences: Sequence[Sentence]) -> tuple[PackedSequence, PackedSequence]:
    """Return words and tags of sentences in the packed form that `nn.LSTM` reads, (P,) indices each."""
    words, tags, _ = zip(*sentences, strict=True)
    return tuple(pack_sequence(list(map(torch.from_numpy, each)), enforce_sorted=False) for each in (words, tags))


class PackedTagger(nn.Module):
    """The tagger with `nn.LSTM` and equal weights (Qiao & Taura 2019, section 4.1)."""

    def __init__(self, model: Tagger):
        super().__init__()
        self.embedding, self.hidden, self.tags = model.embedding, model.hidden, model.tags
        self.lstm = nn.LSTM(model.embedding.embedding_dim, model.lstm.width, bidirectional=True)
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


def tagger_ways(model: Tagger, strategies: Sequence[Strategy]) -> dict[str, Way]:
    """Return the ways to run a tagger; only one that does not spell can be run by `nn.LSTM`."""
    ways = ways_of(model, strategies)
    if not model.spells:
        packed = PackedTagger(model)
        loss = partial(cross_entropy, reduction="sum")
        ways[PACKED] = Way(pack, step(packed, packed, lambda made, scores: loss(scores, made[1].data)))
    return ways


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
    model = Tagger(words, TAGS, LETTERS if characters else None, width=width)
    cases = network_cases(model, tagger_ways(model, strategies), minibatches_of(samples, batch_sizes), phases)
    spelled = "rare words spelled" if characters else "one vector for all rare words"
    return Benchmark(f"BiLSTM tagger, width {width}, {words} words, {spelled}", cases, "sentence")
