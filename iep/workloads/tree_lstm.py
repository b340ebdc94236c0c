"""Binary Tree-LSTM over constituency trees, as for the sentiment of sentences, by vertex functions (Tai et al. 2015).

Leaves hold words. The child-sum kind, over dependency trees, is `child_sum.py`.

Shapes: B trees, V vertices of one, G vertices of a call, H width, C classes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.batching import Edges, VertexFunction, VertexNetwork, VertexPlan
from iep.workloads.lstm import LSTMCell, by_columns
from iep.workloads.trees import Tree


class BinaryTreeLSTM(nn.Module):
    """Words at the leaves, a cell at every inner vertex, a classifier of the root.

    Gates are in the order i, o, u at leaves, and i, o, f_left, f_right, u above.
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
        leaf = VertexFunction(LSTMCell(self, "leaf"), pulls=("word",))
        inner = VertexFunction(LSTMCell(self, "inner"), gathers=("h", "c"))
        self.network = VertexNetwork([leaf, inner], states={"h": (width,), "c": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """How to run a minibatch of trees; arguments and errors as of `VertexNetwork.plan`."""
        return self.network.plan(leaves_and_inner(trees), scheduler, sharing)

    def forward(self, plan: VertexPlan, defer_weight_grads: bool = True) -> Tensor:
        """(B, C) scores of the trees that the plan was made for."""
        words = self.embedding(plan.rows["word"])
        return self.classifier(self.network(plan, {"word": words}, defer_weight_grads).roots["h"])

    def one(self, tree: Tree) -> Tensor:
        """(C,) scores of one tree, vertex by vertex: slow, to test `forward` against."""
        h, c = [], []
        for children, word in zip(tree.children.tolist(), tree.words.tolist(), strict=True):
            taken = [child for child in children if child >= 0]
            if taken:
                gates = self.inner(torch.cat([h[n] for n in taken]))
            else:
                gates = self.leaf(self.embedding(torch.tensor(word)))
            i, o, *forget, u = gates.split(self.width)
            kept = [f.sigmoid() * c[n] for f, n in zip(forget, taken, strict=True)]
            c.append(sum(kept, i.sigmoid() * u.tanh()))
            h.append(o.sigmoid() * c[-1].tanh())
        return self.classifier(h[-1])


def leaves_and_inner(trees: Sequence[Tree]) -> list[Edges]:
    """Trees whose leaves run the first function, and pull their `word`, and whose inner vertices run the second.

    Raises:
        ValueError: an inner vertex has a word.
    """
    for place, tree in enumerate(trees):
        if tree.inner_with_word is not None:
            vertex = tree.inner_with_word
            raise ValueError(f"tree {place}, vertex {vertex} has children and a word, expected words at leaves alone")
    return [Edges(tree.children, (tree.words < 0).astype(int), {"word": tree.words}) for tree in trees]
