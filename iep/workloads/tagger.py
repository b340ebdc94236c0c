"""Taggers of words: a bidirectional LSTM over each sentence, by vertex functions; rare words may be spelled.

Words have vectors of their own, and rare ones, where the tagger spells, that of a smaller bidirectional LSTM over their
letters (Neubig et al. 2017, On-the-fly Operation Batching in Dynamic Computation Graphs, section 5; Qiao & Taura 2019,
section 4.1). A direction is a chain of vertices; all sentences run side by side.

Shapes: W words of a minibatch, T of a sentence, R rows of vectors, G vertices of a call, H width, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from iep.batching import Edges, Outcome, Schedule, VertexFunction, VertexNetwork, VertexPlan
from iep.workloads.lstm import LSTMCell, by_columns
from iep.workloads.sentences import Sentence

WAYS = FORWARD, BACKWARD = range(2)


class BiLSTM(nn.Module):
    """An LSTM each way over sequences of vectors. Gates are in the order i, o, f, u.

    Every item's product with the input weights is made at once, for all sequences; what remains at each step is the
    recurrent one.
    """

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.width = width
        self.inputs = nn.ModuleList(nn.Linear(inputs, 4 * width) for _ in range(2))
        self.recurrent = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        for layer in (*self.inputs, *self.recurrent):
            layer.weight = by_columns(layer.weight)
        functions = [
            VertexFunction(
                LSTMCell(self.recurrent, str(way), gates_pulled=True, pushes=True),
                gathers=("h", "c"),
                pulls=(f"gates{way}",),
                pushes=(f"h{way}",),
            )
            for way in WAYS
        ]
        self.network = VertexNetwork(functions, states={"h": (width,), "c": (width,)})

    def plan(self, sequences: Sequence[np.ndarray], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """How to run sequences, each the (T,) rows of its items among all; errors as of `VertexNetwork.plan`."""
        return self.network.plan([_chains(rows) for rows in sequences], scheduler, sharing)

    def forward(self, plan: VertexPlan, x_RE: Tensor, defer_weight_grads: bool = True) -> Outcome:
        """Of all items' vectors x: pushed `h0` (W, H), the states forward, sequence by sequence, and `h1`, those
        backward, each sequence's from its last item to the first; the roots are the last of these."""
        items = {name: x_RE.index_select(0, rows) for name, rows in plan.rows.items()}
        gates = {f"gates{way}": self.inputs[way](items[f"gates{way}"]) for way in WAYS}
        return self.network(plan, gates, defer_weight_grads)

    def one(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """(T, H) states forward and backward of one sequence, both in its order: slow, to test `forward` against."""
        return self._run(FORWARD, x_TE), self._run(BACKWARD, x_TE.flip(0)).flip(0)

    def _run(self, way: int, x_TE: Tensor) -> Tensor:
        h = c = x_TE.new_zeros(self.width)
        states = []
        for x_E in x_TE:
            i, o, f, u = (self.inputs[way](x_E) + self.recurrent[way](h)).split(self.width)
            c = f.sigmoid() * c + i.sigmoid() * u.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return torch.stack(states)


def _chains(rows_T: np.ndarray) -> Edges:
    """One chain forward over rows, and one backward."""
    children, function = _links(len(rows_T))
    there_and_back = np.concatenate([rows_T, rows_T[::-1]])
    return Edges(children, function, {f"gates{way}": there_and_back for way in WAYS})


@lru_cache(maxsize=1024)
def _links(length: int) -> tuple[np.ndarray, np.ndarray]:
    """(2 T, 1) children and (2 T,) functions of two chains."""
    children = np.arange(-1, 2 * length - 1)[:, None]
    children[length] = -1
    return children, np.repeat(WAYS, length)


@dataclass(frozen=True, eq=False)
class TaggerPlan:
    """How to tag a minibatch: integers only."""

    words: VertexPlan
    vocabulary: Tensor
    """Indices of the words whose vectors are rows of x, the first ones."""
    forward: Tensor
    """(W,) where each word's state forward is among those that the sentences' chains push."""
    backward: Tensor
    """(W,) the same of states backward."""
    letters: Tensor | None
    """Of all words that are spelled, whose vectors are the last rows of x; None without any."""
    spelling: VertexPlan | None
    last: Tensor | None
    """Where the last letter's state forward of each spelled word is among those pushed."""

    @property
    def schedule(self) -> Schedule:
        """All calls, those of the letters first."""
        return (self.spelling.schedule if self.spelling else ()) + self.words.schedule

    def to(self, device: torch.device | str) -> "TaggerPlan":
        """The same with its tensors on `device`."""
        return replace(self, **{name: each.to(device) for name, each in vars(self).items() if each is not None})


class Tagger(nn.Module):
    """Word vectors, a BiLSTM, a hidden layer with tanh, a score for every tag."""

    def __init__(
        self,
        words: int,
        tags: int,
        characters: int | None = None,
        embedding: int = 128,
        width: int = 256,
        hidden: int = 32,
        character_embedding: int = 64,
    ):
        """
        Args:
            characters: how many letters there are; None for a tagger that does not spell.
        """
        super().__init__()
        self.characters = characters
        self.embedding = nn.Embedding(words, embedding, sparse=True)
        self.lstm = BiLSTM(embedding, width)
        self.hidden = nn.Linear(2 * width, hidden)
        self.tags = nn.Linear(hidden, tags)
        if characters is not None:
            self.letters = nn.Embedding(characters, character_embedding, sparse=True)
            self.spelling = BiLSTM(character_embedding, embedding // 2)

    def plan(self, sentences: Sequence[Sentence], scheduler: str = "lookahead", sharing: bool = False) -> TaggerPlan:
        """How to tag a minibatch of sentences.

        Args:
            sharing: a word's product with the input weights is made once, and so are the states after equal beginnings
                and ends.

        Raises:
            ValueError: there is no sentence, one has no words, or there is no scheduler of this name.
        """
        empty = next((place for place, sentence in enumerate(sentences) if not len(sentence)), None)
        if empty is not None or not sentences:
            which = "there is no sentence" if empty is None else f"sentence {empty} has no words"
            raise ValueError(f"{which}, expected one word or more")
        words_W = np.concatenate([np.empty(0, dtype=np.int64), *(sentence.words for sentence in sentences)])
        spelled = self._spelled(sentences)
        vocabulary, row_W = _rows(words_W, [place for place, _ in spelled], sharing)
        lengths = np.array([len(sentence) for sentence in sentences], dtype=np.int64)
        sequences = np.split(row_W, np.cumsum(lengths)[:-1])
        # The longest first: what goes on at each step then lies side by side.
        order = np.argsort(-lengths, kind="stable")
        starts = np.empty_like(lengths)
        starts[order] = np.cumsum(lengths[order]) - lengths[order]
        place_W = np.arange(len(words_W)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        forward = np.repeat(starts, lengths) + place_W
        backward = np.repeat(starts + lengths - 1, lengths) - place_W
        letters = spelling = last = None
        if spelled:
            last = np.cumsum([len(word) for _, word in spelled]) - 1
            letters = np.concatenate([word for _, word in spelled])
            pieces = np.split(np.arange(len(letters)), last[:-1] + 1)
            spelling = self.spelling.plan(pieces, scheduler)
        return TaggerPlan(
            words=self.lstm.plan([sequences[place] for place in order], scheduler, sharing),
            vocabulary=torch.from_numpy(vocabulary),
            forward=torch.from_numpy(forward),
            backward=torch.from_numpy(backward),
            letters=None if letters is None else torch.from_numpy(letters),
            spelling=spelling,
            last=None if last is None else torch.from_numpy(last),
        )

    def forward(self, plan: TaggerPlan, defer_weight_grads: bool = True) -> Tensor:
        """(W, tags) scores of each word, sentence by sentence."""
        x_RE = self.embedding(plan.vocabulary)
        if plan.spelling is not None:
            states = self.spelling(plan.spelling, self.letters(plan.letters), defer_weight_grads)
            spelled = torch.cat([states.pushed["h0"].index_select(0, plan.last), states.roots["h"]], dim=1)
            x_RE = torch.cat([x_RE, spelled])
        pushed = self.lstm(plan.words, x_RE, defer_weight_grads).pushed
        forward_WH = pushed["h0"].index_select(0, plan.forward)
        return self._scores(forward_WH, pushed["h1"].index_select(0, plan.backward))

    def one(self, sentence: Sentence) -> Tensor:
        """(T, tags) scores of one sentence, word by word: slow, to test `forward` against."""
        x_TE = self.embedding(torch.from_numpy(sentence.words))
        vectors = list(x_TE)
        for place, word in self._spelled([sentence]):
            forward, backward = self.spelling.one(self.letters(torch.from_numpy(word)))
            vectors[place] = torch.cat([forward[-1], backward[0]])
        return self._scores(*self.lstm.one(torch.stack(vectors)))

    def _scores(self, forward_WH: Tensor, backward_WH: Tensor) -> Tensor:
        return self.tags(self.hidden(torch.cat([forward_WH, backward_WH], dim=1)).tanh())

    def _spelled(self, sentences: Sequence[Sentence]) -> list[tuple[int, np.ndarray]]:
        """The words to spell: where each is among all words, and its letters."""
        if self.characters is None:
            return []
        words = (word for sentence in sentences for word in sentence.characters or [()] * len(sentence))
        return [(place, word) for place, word in enumerate(words) if len(word)]


def _rows(words_W: np.ndarray, spelled: list[int], sharing: bool) -> tuple[np.ndarray, np.ndarray]:
    """The words whose vectors are looked up, and the row of each word's vector; those of spelled ones are the last."""
    is_spelled_W = np.zeros(len(words_W), dtype=bool)
    is_spelled_W[spelled] = True
    found = words_W[~is_spelled_W]
    vocabulary, row = np.unique(found, return_inverse=True) if sharing else (found, np.arange(len(found)))
    row_W = np.empty(len(words_W), dtype=np.int64)
    row_W[~is_spelled_W] = row
    row_W[is_spelled_W] = len(vocabulary) + np.arange(len(spelled))
    return vocabulary, row_W
