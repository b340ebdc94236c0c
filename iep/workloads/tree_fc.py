"""Tree-FC: one fully connected layer at every vertex of complete binary trees, by vertex functions.

The synthetic benchmark of Looks et al. 2017 (Deep Learning with Dynamic Computation Graphs, section 3.1) and of Cavs
(Xu et al., section 3).

Shapes: B trees, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.batching import Edges, VertexFunction, VertexNetwork, VertexPlan, Vertices
from iep.workloads.lstm import by_columns
from iep.workloads.trees import Tree


class TreeFC(nn.Module):
    """relu(W [left; right] + b) at every inner vertex, vectors of words at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = nn.Linear(2 * width, width)
        self.inner.weight = by_columns(self.inner.weight)
        leaf = VertexFunction(self._leaf, pulls=("word",))
        inner = VertexFunction(self._inner, gathers=("h",))
        self.network = VertexNetwork([leaf, inner], states={"h": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """How to run a minibatch of trees; arguments and errors as of `VertexNetwork.plan`."""
        edges = [Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words}) for tree in trees]
        return self.network.plan(edges, scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """(B, H) results of the roots of the trees that the plan was made for."""
        words = self.embedding(plan.rows["word"])
        return self.network(plan, {"word": words}, defer_weight_grads).roots["h"]

    def one(self, tree: Tree) -> Tensor:
        """(H,) the root's result, vertex by vertex: slow, to test `forward` against."""
        made: list[Tensor] = []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            taken = [made[child] for child in children if child >= 0]
            made.append(self.inner(torch.cat(taken)).relu() if taken else self.embedding(torch.tensor(word)))
        return made[-1]

    def _leaf(self, vertices: Vertices) -> None:
        vertices.scatter(h=vertices.pull("word"))

    def _inner(self, vertices: Vertices) -> None:
        vertices.scatter(h=self.inner(vertices.gather("h").flatten(1)).relu_())
