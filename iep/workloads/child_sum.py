"""The child-sum Tree-LSTM over dependency trees, and the similarity of two sentences (Tai et al. 2015, 3.1 and 4.2).

The code is written for one pair of trees; `forward` runs it for a minibatch within a lazy scope. Every vertex has a
word and any number of children.

Shapes: P pairs, V vertices of a tree, D width of words, H width of states, K ratings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.dynamic import scope
from iep.workloads.trees import Tree, TreePair


class ChildSumCell(nn.Module):
    """A cell, a vertex's word and its children's states -> its state h and c (Tai et al. 2015, equations 2 to 8)."""

    def __init__(self, word_width: int = 300, width: int = 150):
        super().__init__()
        self.word_gates = nn.Linear(word_width, 3 * width)
        self.word_forget = nn.Linear(word_width, width)
        self.child_gates = nn.Linear(width, 3 * width, bias=False)
        self.child_forget = nn.Linear(width, width, bias=False)

    def forward(self, word_D: Tensor, children: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return h and c of a vertex, (H,) each, given those of its children."""
        gates = self.word_gates(word_D)
        if children:
            h_NH, c_NH = map(torch.stack, zip(*children, strict=True))
            gates = gates + self.child_gates(h_NH.sum(0))
        i, o, u = gates.chunk(3)
        c = i.sigmoid() * u.tanh()
        if children:
            forget_NH = torch.sigmoid(self.word_forget(word_D) + self.child_forget(h_NH))
            c = c + (forget_NH * c_NH).sum(0)
        return o.sigmoid() * c.tanh(), c


class Similarity(nn.Module):
    """A layer from h of two sentences to the scores of ratings 1 to K (Tai et al. 2015, equation 15)."""

    def __init__(self, width: int = 150, hidden: int = 50, ratings: int = 5):
        super().__init__()
        self.product, self.distance = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.scores = nn.Linear(hidden, ratings)

    def forward(self, left_H: Tensor, right_H: Tensor) -> Tensor:
        """Return the scores, (K,)."""
        hidden = torch.sigmoid(self.product(left_H * right_H) + self.distance((left_H - right_H).abs()))
        return self.scores(hidden)


class ChildSumTreeLSTM(nn.Module):
    """A network for the relatedness of two sentences, with fixed word vectors as in Tai et al. 2015, section 5.3."""

    def __init__(self, words: int, word_width: int = 300, width: int = 150, ratings: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(words, word_width).requires_grad_(False)
        self.cell = ChildSumCell(word_width, width)
        self.similarity = Similarity(width, ratings=ratings)

    def sentence(self, tree: Tree) -> Tensor:
        """Return h of the root of one tree, (H,)."""
        words_VD = self.embedding(torch.from_numpy(tree.words)).unbind()
        states: list[tuple[Tensor, Tensor]] = []
        for word_D, children in zip(words_VD, tree.children.tolist(), strict=True):
            states.append(self.cell(word_D, [states[child] for child in children if child >= 0]))
        return states[-1][0]

    def one(self, pair: TreePair) -> Tensor:
        """Return the scores of one pair, (K,), one vertex at a time."""
        return self.similarity(self.sentence(pair.left), self.sentence(pair.right))

    def forward(self, pairs: Sequence[TreePair], **options: object) -> Tensor:
        """Return the scores of a minibatch, (P, K), by running `one` within a scope.

        Args:
            options: the options of `iep.dynamic.scope`.
        """
        if not pairs:
            return self.similarity.scores.weight.new_empty(0, self.similarity.scores.out_features)
        with scope(self.cell, self.similarity, **options):
            scores = [self.one(pair) for pair in pairs]
        return torch.stack([score.value for score in scores])
