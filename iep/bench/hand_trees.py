"""Networks after binary trees as one batches them by hand in plain torch: what `iep.batching` is compared with.

A loop over levels (`tree_levels.py`), one matrix product each; parameters, equations and results are those of
`iep.workloads.tree_lstm` and `tree_fc`.

Shapes: B trees, L leaves, G vertices of a level, H width.
"""

import torch
from torch import Tensor, nn

from iep.bench.tree_levels import TreeLevels


class HandTreeLSTM(nn.Module):
    """Binary Tree-LSTM with words at the leaves and a classifier on the root (Tai et al. 2015, section 3.2).

    Gates are in the order i, o, u at leaves, and i, o, f_left, f_right, u above.
    """

    def __init__(self, words: int, width: int = 256, classes: int = 5):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.leaf = nn.Linear(width, 3 * width)
        self.inner = nn.Linear(2 * width, 5 * width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, levels: TreeLevels) -> Tensor:
        """(B, classes) scores."""
        h_LH, c_LH = self._leaves(levels.words)
        waiting: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(len(levels.pieces) + 1)]
        _hand_on(waiting, 0, levels, h_LH, c_LH)
        for level, rows in enumerate(levels.arguments, start=1):
            h_GH, c_GH = self._inner(*_gather(waiting[level], rows))
            _hand_on(waiting, level, levels, h_GH, c_GH)
        h_BH = torch.cat([h for h, _ in waiting[-1]]).index_select(0, levels.roots)
        return self.classifier(h_BH)

    def _leaves(self, words: Tensor) -> tuple[Tensor, Tensor]:
        gates, u = self.leaf(self.embedding(words)).split([2 * self.width, self.width], dim=1)
        i, o = gates.sigmoid().chunk(2, dim=1)
        c_LH = i * u.tanh()
        return o * c_LH.tanh(), c_LH

    def _inner(self, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """From the children's, (2 G, H) each, left and right in turn."""
        gates, u = self.inner(h.view(-1, 2 * self.width)).split([4 * self.width, self.width], dim=1)
        i, o, f = gates.sigmoid().split([self.width, self.width, 2 * self.width], dim=1)
        left, right = (f * c.view_as(f)).chunk(2, dim=1)
        c_GH = torch.addcmul(left + right, i, u.tanh())
        return o * c_GH.tanh(), c_GH


class HandTreeFC(nn.Module):
    """Tree-FC: relu(W [left; right] + b) at every vertex, vectors of words at the leaves (Looks et al. 2017)."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = nn.Linear(2 * width, width)

    def forward(self, levels: TreeLevels) -> Tensor:
        """(B, H) results of the roots."""
        waiting: list[list[tuple[Tensor, ...]]] = [[] for _ in range(len(levels.pieces) + 1)]
        _hand_on(waiting, 0, levels, self.embedding(levels.words))
        for level, rows in enumerate(levels.arguments, start=1):
            (h,) = _gather(waiting[level], rows)
            _hand_on(waiting, level, levels, self.inner(h.view(-1, 2 * self.width)).relu_())
        return torch.cat([h for (h,) in waiting[-1]]).index_select(0, levels.roots)


def _hand_on(waiting: list[list[tuple[Tensor, ...]]], level: int, levels: TreeLevels, *made: Tensor) -> None:
    """Lay what a level made in pieces before the levels that take them."""
    sizes = levels.pieces[level]
    for later, parts in enumerate(zip(*(each.split(sizes) for each in made), strict=True), start=level + 1):
        if len(parts[0]):
            waiting[later].append(parts)


def _gather(pieces: list[tuple[Tensor, ...]], rows: Tensor) -> list[Tensor]:
    """The arguments of a level."""
    return [
        (torch.cat(parts) if len(parts) > 1 else parts[0]).index_select(0, rows) for parts in zip(*pieces, strict=True)
    ]
