"""Taggers of words: a bidirectional LSTM over each sentence, by vertex functions; rare words may be spelled.

Sentences are generated with the lengths of those of WikiNER's English part. A rare word has no vector of its own. A
tagger without letters has one vector for all such words; a tagger with letters represents each by the states of a
smaller bidirectional LSTM over its letters (Neubig et al. 2017, On-the-fly Operation Batching in Dynamic Computation
Graphs, section 5; Qiao & Taura 2019, section 4.1). Each direction is a chain of vertices, and all sentences run side by
side.

Shapes: W words of a minibatch (or items of all sequences), T of a sentence, R rows of vectors, L letters and S spelled
words of a minibatch, H width, E embedding.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.tree_networks import lstm_state
from benchmarks.trees import lengths, zipf
from iep.batching.layers import Linear
from iep.batching.schedulers import Schedule
from iep.dynamic import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices

UNKNOWN_WORD = 0
"""The index of all rare words."""
WORDS, LETTERS = (24.5, 11.0), (8.0, 2.5)
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
    for length in lengths(count, *WORDS, 1, 120, rng).tolist():
        drawn = 1 + zipf(length, words - 1, rng)
        rare = rng.random(length) < RARE_SHARE
        spelled = [rng.integers(0, letters, size) for size in lengths(rare.sum(), *LETTERS, 1, 25, rng)]
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

    def _scores(self, h_W2H: Tensor) -> Tensor:
        return self.tags(self.hidden(h_W2H.flatten(1)).tanh())
