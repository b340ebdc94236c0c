"""Tree-FC: one fully connected layer at every inner vertex of complete binary trees, by vertex functions.

The synthetic benchmark of Looks et al. 2017 (Deep Learning with Dynamic Computation Graphs, section 3.1) and of Cavs
(Xu et al., section 3).

Shapes: B trees, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.dynamic import VertexFunction, VertexNetwork, VertexPlan, Vertices
from iep.workloads.lstm import by_columns
from iep.workloads.tree_lstm import leaves_and_inner
from iep.workloads.trees import Tree


class TreeFC(nn.Module):
    """relu(W [left; right] + b) at every inner vertex, vectors of words at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = nn.Linear(2 * width, width)
        self.inner.weight = by_columns(self.inner.weight)
        functions = [VertexFunction(self._leaf, pulls=("word",)), VertexFunction(self._inner, gathers=("h",))]
        self.network = VertexNetwork(functions, states={"h": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """Return how to run a minibatch of trees; arguments and errors are those of `VertexNetwork.plan`."""
        return self.network.plan(leaves_and_inner(trees), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """Return (B, H), the roots' states of the trees that the plan was made for."""
        words = self.embedding(plan.rows["word"])
        return self.network(plan, {"word": words}, defer_weight_grads).roots["h"]

    def one(self, tree: Tree) -> Tensor:
        """Return (H,), the root's state of one tree, vertex by vertex: the slow reference in plain PyTorch."""
        h: list[Tensor] = []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            of_children = [h[child] for child in children if child >= 0]
            h.append(self.inner(torch.cat(of_children)).relu() if of_children else self.embedding(torch.tensor(word)))
        return h[-1]

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(h=vertices.pull("word"))

    def _inner(self, vertices: Vertices) -> None:
        vertices.scatter(h=self.inner(vertices.gather("h").flatten(1)).relu())
