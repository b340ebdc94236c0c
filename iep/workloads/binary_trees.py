"""Networks over binary trees with words at the leaves, by vertex functions: Tree-LSTM and Tree-FC.

The Tree-LSTM is that of Tai et al. 2015 for the sentiment of sentences; `child_sum.py` has the one for dependency
trees. Tree-FC, one fully connected layer at every inner vertex, is the synthetic benchmark of Looks et al. 2017 (Deep
Learning with Dynamic Computation Graphs, section 3.1) and of Cavs (Xu et al., section 3).

Shapes: B trees, V vertices of one, G vertices of a call, H width, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.batching.layers import Linear, linear
from iep.dynamic import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices
from iep.workloads.lstm import by_columns, lstm_state
from iep.workloads.trees import Tree


class BinaryTreeLSTM(nn.Module):
    """A Tree-LSTM with words at the leaves, a cell at every inner vertex, and a classifier of the root.

    Gates are in the order i, o, u at leaves, and i, o, f_left, f_right, u at inner vertices.
    """

    def __init__(self, words: int, width: int = 256, classes: int = 5):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.leaf = nn.Linear(width, 3 * width)
        self.inner = nn.Linear(2 * width, 5 * width)
        for layer in (self.leaf, self.inner):
            layer.weight = by_columns(layer.weight)
        self.classifier = nn.Linear(width, classes)
        leaf = VertexFunction(self._leaf, pulls=("word",))
        inner = VertexFunction(self._inner, gathers=("h", "c"))
        self.network = VertexNetwork([leaf, inner], states={"h": (width,), "c": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        return self.network.plan(leaves_and_inner(trees), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the scores of the trees for which the plan was made, (B, C)."""
        words = self.embedding(plan.rows["word"])
        return self.classifier(self.network(plan, {"word": words}, defer_weight_grads).roots["h"])

    def one(self, tree: Tree) -> Tensor:
        """Return the scores of one tree, (C,), vertex by vertex: the slow reference in plain PyTorch."""
        h, c = [], []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            children = [child for child in children if child >= 0]
            if children:
                gates = self.inner(torch.cat([h[child] for child in children]))
            else:
                gates = self.leaf(self.embedding(torch.tensor(word)))
            i, o, *forget, u = gates.split(self.width)
            kept = [f.sigmoid() * c[child] for f, child in zip(forget, children, strict=True)]
            c.append(sum(kept, i.sigmoid() * u.tanh()))
            h.append(o.sigmoid() * c[-1].tanh())
        return self.classifier(h[-1])

    def _leaf(self, vertices: Vertices) -> None:
        h, c = lstm_state(linear(vertices.pull("word"), self.leaf.weight), self.leaf.bias)
        vertices.scatter(h=h, c=c)

    def _inner(self, vertices: Vertices) -> None:
        gates = linear(vertices.gather("h").flatten(1), self.inner.weight)
        h, c = lstm_state(gates, self.inner.bias, vertices.gather("c"))
        vertices.scatter(h=h, c=c)


class TreeFC(nn.Module):
    """Tree-FC: relu(W [left; right] + b) at every inner vertex, and word vectors at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = Linear(2 * width, width)
        self.inner.weight = by_columns(self.inner.weight)
        functions = [VertexFunction(self._leaf, pulls=("word",)), VertexFunction(self._inner, gathers=("h",))]
        self.network = VertexNetwork(functions, states={"h": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return the plan of a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        return self.network.plan(leaves_and_inner(trees), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return the states of the roots of the trees for which the plan was made, (B, H)."""
        words = self.embedding(plan.rows["word"])
        return self.network(plan, {"word": words}, defer_weight_grads).roots["h"]

    def one(self, tree: Tree) -> Tensor:
        """Return the state of the root of one tree, (H,), vertex by vertex: the slow reference in plain PyTorch."""
        h: list[Tensor] = []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            of_children = [h[child] for child in children if child >= 0]
            h.append(self.inner(torch.cat(of_children)).relu() if of_children else self.embedding(torch.tensor(word)))
        return h[-1]

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(h=vertices.pull("word"))

    def _inner(self, vertices: Vertices) -> None:
        vertices.scatter(h=self.inner(vertices.gather("h").flatten(1)).relu())


def leaves_and_inner(trees: Sequence[Tree]) -> list[Edges]:
    """Return trees whose leaves run function 0 and pull their `word`, and whose inner vertices run function 1.

    Raises:
        ValueError: an inner vertex has a word.
    """
    for index, tree in enumerate(trees):
        vertex = tree.inner_with_word
        if vertex is not None:
            raise ValueError(f"tree {index}, vertex {vertex} has children and a word, expected words at leaves alone")
    return [Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words}) for tree in trees]
