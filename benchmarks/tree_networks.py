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


class BinaryTreeNetwork(nn.Module):
    """A network with a cell at every vertex of binary trees, whose leaves have words; the first state is read out.

    Subclasses have three methods: `leaf_state`, from the vectors of words, (G, H), to the states of leaves, (G, H)
    each; `inner_state`, from the children's states, (G, 2, H) each, to those of inner vertices; and `head`, from the
    first states of the roots to the results.
    """

    def __init__(self, words: int, width: int, states: tuple[str, ...]):
        super().__init__()
        self.states, self.embedding = states, nn.Embedding(words, width, sparse=True)
        functions = [VertexFunction(self._leaf, pulls=("word",)), VertexFunction(self._inner, gathers=states)]
        self.network = VertexNetwork(functions, states=dict.fromkeys(states, (width,)))

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        edges = [Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words}) for tree in trees]
        return self.network.plan(edges, scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the results of the trees for which the plan was made, (B, C)."""
        words = self.embedding(plan.rows["word"])
        return self.head(self.network(plan, {"word": words}, defer_weight_grads).roots[self.states[0]])

    def one(self, tree: Tree) -> Tensor:
        """Return the result of one tree, (C,)."""
        made: list[tuple[Tensor, ...]] = []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            if children[0] < 0:
                made.append(self.leaf_state(self.embedding(torch.tensor([word]))))
            else:
                pairs = zip(*(made[child] for child in children), strict=True)
                made.append(self.inner_state(*(torch.stack(pair, dim=1) for pair in pairs)))
        return self.head(made[-1][0])[0]

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(**dict(zip(self.states, self.leaf_state(vertices.pull("word")), strict=True)))

    def _inner(self, vertices: Vertices) -> None:
        states = self.inner_state(*map(vertices.gather, self.states))
        vertices.scatter(**dict(zip(self.states, states, strict=True)))


class BinaryTreeLSTM(BinaryTreeNetwork):
    """A Tree-LSTM with a classifier of the root."""

    def __init__(self, words: int, width: int = 256, classes: int = SENTIMENTS):
        super().__init__(words, width, ("h", "c"))
        self.leaf, self.inner = Linear(width, 3 * width), Linear(2 * width, 5 * width)
        self.head = nn.Linear(width, classes)

    def leaf_state(self, x_GH: Tensor) -> tuple[Tensor, ...]:
        return lstm_state(self.leaf(x_GH))

    def inner_state(self, h_G2H: Tensor, c_G2H: Tensor) -> tuple[Tensor, ...]:
        return lstm_state(self.inner(h_G2H.flatten(1)), c_G2H)


class TreeFC(BinaryTreeNetwork):
    """Tree-FC: relu(W [left; right] + b) at every inner vertex, and word vectors at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__(words, width, ("h",))
        self.inner, self.head = Linear(2 * width, width), nn.Identity()

    def leaf_state(self, x_GH: Tensor) -> tuple[Tensor, ...]:
        return (x_GH,)

    def inner_state(self, h_G2H: Tensor) -> tuple[Tensor, ...]:
        return (self.inner(h_G2H.flatten(1)).relu(),)


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
