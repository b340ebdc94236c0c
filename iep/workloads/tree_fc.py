"""Tree-FC: one fully connected layer at every vertex of complete binary trees, by vertex functions.

The synthetic benchmark of Looks et al. 2017 (Deep Learning with Dynamic Computation Graphs, section 3.1) and of Cavs
(Xu et al., section 3).

Shapes: B trees, H width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from iep.batching import Cell, VertexFunction, VertexNetwork, VertexPlan, Vertices
from iep.batching.call_in_place import CallInPlace, GradientTables, LayerInPlace, Rows, ValueTables
from iep.batching.layout import Call
from iep.workloads.lstm import by_columns
from iep.workloads.tree_lstm import leaves_and_inner
from iep.workloads.trees import Tree


class ReLUCell(Cell):
    """A layer on all children's h side by side, (G, A, H), then ReLU."""

    def __init__(self, owner: nn.Module, name: str):
        """The layer is the attribute `name` of `owner` at the time of each call."""
        self.owner, self.name = owner, name

    @property
    def layer(self) -> nn.Linear:
        return getattr(self.owner, self.name)

    def factor(self, arguments: Sequence[Tensor]) -> Tensor:
        return arguments[0].flatten(1)

    def results(self, product: Tensor, bias: Tensor | None, arguments: Sequence[Tensor]) -> tuple[Tensor]:
        return ((product if bias is None else product.add_(bias)).relu_(),)

    def gradients(
        self,
        product: Tensor,
        bias: Tensor | None,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        given: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor | None]]:
        return torch.ops.aten.threshold_backward(given[0], results[0], 0), [None]

    def through_factor(self, gradient: Tensor, gradients: list[Tensor | None], arguments: Sequence[Tensor]) -> None:
        gradients[0] = gradient.view(arguments[0].shape)

    def in_place(self, call: Call, layer: LayerInPlace) -> "_ReLUInPlace | None":
        fits = type(self) is ReLUCell and len(call.arguments) == len(call.results) == 1
        return _ReLUInPlace(call, layer, call.arguments[0]) if fits else None


class _ReLUInPlace(CallInPlace):
    """A call whose product is computed where its results are to be."""

    def forward(self, tables: ValueTables) -> None:
        (made,), layer = self.of.results, self.layer
        self.table, _ = tables.column(made.column, layer.outputs, layer.weight.dtype)
        rows = tables.kept[self.table][made.places]
        torch.addmm(layer.bias, self.gather(tables), layer.transposed, out=rows).relu_()

    def backward(self, tables: GradientTables, kept: Sequence[Tensor], room: Tensor) -> Rows:
        (made,) = self.of.results
        gradient = Rows(room, self.first, self.first + self.of.rows)
        given, rows = tables.run.result_gradient(made), kept[self.table][made.places]
        torch.ops.aten.threshold_backward.grad_input(given, rows, 0, grad_input=gradient.tensor())
        return gradient


class TreeFC(nn.Module):
    """relu(W [left; right] + b) at every inner vertex, vectors of words at the leaves."""

    def __init__(self, words: int, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(words, width, sparse=True)
        self.inner = nn.Linear(2 * width, width)
        self.inner.weight = by_columns(self.inner.weight)
        leaf = VertexFunction(self._leaf, pulls=("word",))
        inner = VertexFunction(ReLUCell(self, "inner"), gathers=("h",))
        self.network = VertexNetwork([leaf, inner], states={"h": (width,)})

    def plan(self, trees: Sequence[Tree], scheduler: str = "lookahead", sharing: bool = False) -> VertexPlan:
        """How to run a minibatch of trees; arguments and errors as of `VertexNetwork.plan`."""
        return self.network.plan(leaves_and_inner(trees), scheduler, sharing)

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
