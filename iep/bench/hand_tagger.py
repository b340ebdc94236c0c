"""A BiLSTM tagger on packed sequences, as one batches it in plain torch: what `iep.batching` is compared with.

Shapes: B sentences, W words of all sentences, P of the packed sequence's rows, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from iep.workloads.sentences import Sentence


@dataclass(frozen=True, eq=False)
class PackedSentences:
    """Sentences side by side, the longest first, step by step."""

    words: PackedSequence
    """Data (P,), indices."""
    tags: Tensor
    """(P,) likewise."""


def pack(sentences: Sequence[Sentence]) -> PackedSentences:
    """Sentences as `nn.LSTM` takes them; the row of every word is found without a loop over sentences."""
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

    def __init__(self, words: int, tags: int, embedding: int = 128, width: int = 256, hidden: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(words, embedding, sparse=True)
        self.lstm = nn.LSTM(embedding, width, bidirectional=True)
        self.hidden = nn.Linear(2 * width, hidden)
        self.tags = nn.Linear(hidden, tags)

    def forward(self, sentences: PackedSentences) -> Tensor:
        """(P, tags) scores, in the order of the packed tags."""
        x_P, sizes, *_ = sentences.words
        h_P, _ = self.lstm(PackedSequence(self.embedding(x_P), sizes))
        return self.tags(self.hidden(h_P.data).tanh())
