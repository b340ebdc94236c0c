"""Networks over trees: a binary Tree-LSTM and Tree-FC by vertex functions, and a child-sum Tree-LSTM in a lazy scope.

The Tree-LSTMs are those of Tai et al. 2015, for the sentiment of sentences and for the relatedness of pairs. Tree-FC,
one fully connected layer at every inner vertex, is the synthetic benchmark of Looks et al. 2017 (Deep Learning with
Dynamic Computation Graphs, section 3.1) and of Cavs (Xu et al., section 3). `one` is always the slow reference for one
sample, vertex by vertex.

Shapes: B trees, P pairs, V vertices of a tree, G vertices of a call, A children, H width of states, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.trees import SENTIMENTS, Tree, TreePair
from iep.batching.layers import Linear
from iep.dynamic import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices, scope


def lstm_state(gates: Tensor, c_children: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h and c of cells with a forget gate for each child, (G, H) each (Tai et al. 2015, equations 9 to 14).

    Args:
        gates: (G, (3 + A) H) before the nonlinearities, in the order i, o, f of each child, u.
        c_children: (G, A, H); None for cells without children.
    """
    children = () if c_children is None else c_children.unbind(1)
    width = gates.shape[1] // (3 + len(children))
    i, o, *forget = gates[:, :-width].sigmoid().split(width, dim=1)
    c = i * gates[:, -width:].tanh()
    for f, c_child in zip(forget, children, strict=True):
        c = torch.addcmul(c, f, c_child)
    return o * c.tanh(), c


class BinaryTreeLSTM(nn.Module):
    """A Tree-LSTM with words at the leaves, a cell at every inner vertex, and a classifier of the root."""

    def __init__(self, words: int, width: int = 256, classes: int = SENTIMENTS):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.leaf, self.inner = Linear(width, 3 * width), Linear(2 * width, 5 * width)
        self.classifier = nn.Linear(width, classes)
        leaf = VertexFunction(self._leaf, pulls=("word",))
        inner = VertexFunction(self._inner, gathers=("h", "c"))
        self.network = VertexNetwork([leaf, inner], states={"h": (width,), "c": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        return self.network.plan(list(map(leaves_and_inner, trees)), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the scores of the trees for which the plan was made, (B, C)."""
        words = self.embedding(plan.rows["word"])
        return self.classifier(self.network(plan, {"word": words}, defer_weight_grads).roots["h"])

    def one(self, tree: Tree) -> Tensor:
        """Return the scores of one tree, (C,)."""
        h, c = [], []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            if children[0] < 0:
                state = lstm_state(self.leaf(self.embedding(torch.tensor([word]))))
            else:
                gates = self.inner(torch.cat([h[child] for child in children], dim=1))
                state = lstm_state(gates, torch.stack([c[child] for child in children], dim=1))
            for states, each in zip((h, c), state, strict=True):
                states.append(each)
        return self.classifier(h[-1])[0]

    def _leaf(self, vertices: Vertices) -> None:
        h, c = lstm_state(self.leaf(vertices.pull("word")))
        vertices.scatter(h=h, c=c)

    def _inner(self, vertices: Vertices) -> None:
        h, c = lstm_state(self.inner(vertices.gather("h").flatten(1)), vertices.gather("c"))
        vertices.scatter(h=h, c=c)


class TreeFC(nn.Module):
    """Tree-FC: relu(W [left; right] + b) at every inner vertex, and word vectors at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = Linear(2 * width, width)
        functions = [VertexFunction(self._leaf, pulls=("word",)), VertexFunction(self._inner, gathers=("h",))]
        self.network = VertexNetwork(functions, states={"h": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        return self.network.plan(list(map(leaves_and_inner, trees)), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the states of the roots of the trees for which the plan was made, (B, H)."""
        words = self.embedding(plan.rows["word"])
        return self.network(plan, {"word": words}, defer_weight_grads).roots["h"]

    def one(self, tree: Tree) -> Tensor:
        """Return the state of the root of one tree, (H,)."""
        h: list[Tensor] = []
        for (left, right), word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            if left < 0:
                h.append(self.embedding(torch.tensor(word)))
            else:
                h.append(self.inner(torch.cat([h[left], h[right]])).relu())
        return h[-1]

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(h=vertices.pull("word"))

    def _inner(self, vertices: Vertices) -> None:
        vertices.scatter(h=self.inner(vertices.gather("h").flatten(1)).relu())


def leaves_and_inner(tree: Tree) -> Edges:
    """Return a tree whose leaves run function 0 and pull their `word`, and whose inner vertices run function 1."""
    return Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words})


class ChildSumCell(nn.Module):
    """A cell: a vertex's word and its children's states -> its state h and c (Tai et al. 2015, equations 2 to 8)."""

    def __init__(self, word_width: int, width: int):
        super().__init__()
        self.word_gates, self.word_forget = nn.Linear(word_width, 3 * width), nn.Linear(word_width, width)
        self.child_gates = nn.Linear(width, 3 * width, bias=False)
        self.child_forget = nn.Linear(width, width, bias=False)

    def forward(self, word_D: Tensor, children: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return h and c of a vertex, (H,) each, given those of its children."""
        gates = self.word_gates(word_D)
        if children:
            h_AH, c_AH = map(torch.stack, zip(*children, strict=True))
            gates = gates + self.child_gates(h_AH.sum(0))
        i, o, u = gates.chunk(3)
        c = i.sigmoid() * u.tanh()
        if children:
            forget_AH = torch.sigmoid(self.word_forget(word_D) + self.child_forget(h_AH))
            c = c + (forget_AH * c_AH).sum(0)
        return o.sigmoid() * c.tanh(), c


class Similarity(nn.Module):
    """A layer from h of two sentences to the scores of ratings 1 to C (Tai et al. 2015, equation 15)."""

    def __init__(self, width: int, ratings: int, hidden: int = 50):
        super().__init__()
        self.product, self.distance = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.scores = nn.Linear(hidden, ratings)

    def forward(self, left_H: Tensor, right_H: Tensor) -> Tensor:
        """Return the scores, (C,)."""
        hidden = torch.sigmoid(self.product(left_H * right_H) + self.distance((left_H - right_H).abs()))
        return self.scores(hidden)


class ChildSumTreeLSTM(nn.Module):
    """A network for the relatedness of two sentences, with fixed word vectors as in Tai et al. 2015, section 5.3.

    The code is written for one pair of trees, and `forward` runs it for a minibatch within a lazy scope. Every vertex
    has a word and any number of children.
    """

    def __init__(self, words: int, word_width: int = 300, width: int = 150, ratings: int = 5):
        super().__init__()
        self.embedding = nn.Embedding(words, word_width).requires_grad_(False)
        self.cell, self.similarity = ChildSumCell(word_width, width), Similarity(width, ratings)

    def one(self, pair: TreePair) -> Tensor:
        """Return the scores of one pair, (C,)."""
        return self.similarity(self._sentence(pair.left), self._sentence(pair.right))

    def forward(self, pairs: Sequence[TreePair], **options: object) -> tuple[Tensor, scope]:
        """Return the scores of a minibatch, (P, C), and the scope, whose options are `options`."""
        with scope(self.cell, self.similarity, **options) as batch:
            scores = [self.one(pair) for pair in pairs]
        return torch.stack([score.value for score in scores]), batch

    def _sentence(self, tree: Tree) -> Tensor:
        words_VD = self.embedding(torch.from_numpy(tree.words)).unbind()
        states: list[tuple[Tensor, Tensor]] = []
        for word_D, children in zip(words_VD, tree.children.tolist(), strict=True):
            states.append(self.cell(word_D, [states[child] for child in children if child >= 0]))
        return states[-1][0]
