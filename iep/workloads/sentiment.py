"""The sentiment of every phrase of generated sentences, by a Tree-LSTM whose cells are ops (Tai et al. 2015).

The experiment is that of Gaunt et al. 2017 (AMPNet, section 6) on the Stanford Sentiment Treebank, in which the cell of
leaves and that of inner vertices have weights of their own. Words have values from -2 to 2 or negate. The value of a
phrase is the sum of its parts' values within these bounds, or if a part is a word that negates, the negative value of
the other part. The label of a vertex is its value plus 2.

Shapes: V vertices of a tree, N of all trees, G vertices of a call, H width, C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.batching.execute import execute
from iep.batching.placement import OpPlacement, balanced_placement
from iep.batching.plan import Plan, Read
from iep.dynamic.messages import Apply, Bcast, Cond, Group, MessageGraph, Phi, Result, Split, Ungroup
from iep.workloads.lstm import lstm_state
from iep.workloads.trees import SENTIMENTS, Tree, sst_like

VALUES = (0, 1, -1, None, 2, -2)
"""The value of word n, at position n modulo 6; None negates."""
WORDS = 600
"""The number of words, whose frequencies follow Zipf's law; some unseen sentences have words that no seen one has."""
STATES, WORD, SCORES = range(3)
"""The columns: states h and c (H,), words (), and scores (C,)."""
EMBEDDING, LEAF, INNER, HEAD = range(4)
"""The ops."""


def sentiment_trees(number: int, rng: np.random.Generator) -> list[Tree]:
    """Return random binary trees with a label at every vertex, the smallest first."""
    trees = [replace(each, labels=labels_of(each)) for each in sst_like(number, WORDS, rng)]
    return sorted((replace(each, label=int(each.labels[-1])) for each in trees), key=len)


def labels_of(tree: Tree) -> np.ndarray:
    """Return the label of each vertex, (V,)."""
    values: list[int | None] = []
    for word, (left, right) in zip(tree.words.tolist(), tree.children.tolist(), strict=True):
        if left < 0:
            values.append(VALUES[word % len(VALUES)])
        elif values[left] is None or values[right] is None:
            values.append(-(values[right if values[left] is None else left] or 0))
        else:
            values.append(max(-2, min(2, values[left] + values[right])))
    return np.array([2 + (value or 0) for value in values])


class Leaf(nn.Module):
    """The cell of leaves, with gates in the order i, o, u."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 3 * width)

    def forward(self, x_GH: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c, (G, H) each."""
        return lstm_state(self.linear(x_GH), None)


class Inner(nn.Module):
    """The cell of inner vertices, with gates in the order i, o, f_left, f_right, u."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(2 * width, 5 * width)

    def forward(self, h_G2H: Tensor, c_G2H: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c, (G, H) each."""
        return lstm_state(self.linear(h_G2H.flatten(1)), None, c_G2H)


class At(NamedTuple):
    """The state of a message: a tree and one of its vertices."""

    tree: Tree
    vertex: int


MESSAGES = MessageGraph(
    words=Ungroup("embedding", lambda at: [At(at.tree, leaf) for leaf in np.flatnonzero(at.tree.words >= 0).tolist()]),
    embedding=Apply("leaf", EMBEDDING),
    leaf=Apply("state", LEAF, makes=(STATES, STATES)),
    state=Phi("bcast"),
    bcast=Bcast(("h", "has_parent")),
    h=Split(("head", None)),
    head=Apply("scores", HEAD, makes=(SCORES,)),
    scores=Result(order=lambda at: at.vertex),
    has_parent=Cond(lambda at: at.vertex < len(at.tree) - 1, {True: "children", False: None}),
    children=Group(
        "inner",
        size=lambda at: 2,
        key=lambda at: At(at.tree, at.tree.places[at.vertex][0]),
        order=lambda at: at.tree.places[at.vertex][1],
    ),
    inner=Apply("state", INNER, (Read(0, 2), Read(2, 2)), (STATES, STATES)),
)
"""The network of messages, a loop from the leaves to the root (AMPNet, section 4)."""


class SentimentTreeLSTM(nn.Module):
    """A Tree-LSTM with words at the leaves and a linear classifier of every vertex."""

    def __init__(self, width: int = 128):
        super().__init__()
        ops = [nn.Embedding(WORDS, width), Leaf(width), Inner(width), nn.Linear(width, SENTIMENTS)]
        self.ops = nn.ModuleList(ops)

    def placement(self, workers: int) -> OpPlacement:
        """Return a placement on workers of the CPU, with the most expensive ops on workers of their own."""
        return balanced_placement({EMBEDDING: 0, LEAF: 3, INNER: 10, HEAD: 1}, workers, EMBEDDING, HEAD)

    def plan(self, trees: Sequence[Tree], placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch, whose inputs are the words of the trees' leaves."""
        ends = np.cumsum([each.num_leaves for each in trees]).tolist()
        starts = [0, *ends[:-1]]
        instances = [[("words", range(*each), At(tree, 0))] for *each, tree in zip(starts, ends, trees, strict=True)]
        return MESSAGES.plan(instances, np.full(ends[-1], WORD), placement)

    def inputs(self, trees: Sequence[Tree]) -> dict[int, Tensor]:
        """Return the inputs of a plan of the same trees."""
        return {WORD: torch.from_numpy(np.concatenate([each.words[each.words >= 0] for each in trees]))}

    def loss(self, trees: Sequence[Tree]) -> Callable[..., Tensor]:
        """Return the function that maps the scores of these trees' vertices, (N, C), to their mean cross-entropy."""
        return partial(cross_entropy, target=_labels(trees))

    @torch.no_grad()
    def score(self, trees: Sequence[Tree]) -> float:
        """Return the accuracy over all vertices."""
        return (self(trees).argmax(dim=1) == _labels(trees)).double().mean().item()

    def forward(self, trees: Sequence[Tree]) -> Tensor:
        """Return the scores of all vertices, (N, C), by trees."""
        return execute(self.plan(trees), dict(enumerate(self.ops)), self.inputs(trees))[0]

    def one(self, tree: Tree) -> Tensor:
        """Return the scores of one tree's vertices, (V, C), vertex by vertex: the slow reference in plain PyTorch."""
        embedding, leaf, inner, head = self.ops
        h, c = [], []
        for word, children in zip(tree.words.tolist(), tree.children.tolist(), strict=True):
            if word >= 0:
                gates = leaf.linear(embedding.weight[word])
            else:
                gates = inner.linear(torch.cat([h[child] for child in children]))
            i, o, *forget, u = gates.split(len(gates) // (5 if word < 0 else 3))
            kept = [f.sigmoid() * c[child] for f, child in zip(forget, children, strict=False)]
            c.append(sum(kept, i.sigmoid() * u.tanh()))
            h.append(o.sigmoid() * c[-1].tanh())
        return head(torch.stack(h))


def _labels(trees: Sequence[Tree]) -> Tensor:
    return torch.from_numpy(np.concatenate([each.labels for each in trees]))
