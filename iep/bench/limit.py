"""Sizes of matrix products -> how long they take by themselves: what no way to batch a network can go below.

Two limits. The products of a minibatch's levels in their order, each written into memory made ready, weight gradients
of all levels of a layer in one product at the end; nothing gathered, nothing added, no other function. And the number
of operations of these products over the fastest product that this machine was seen to do.

Shapes: G rows of a product, K its columns in, M its columns out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from iep.bench.measure import seconds

SIDES, GPU_SIDES = (256, 512, 1024), (1024, 4096, 8192)
"""Of the square products whose fastest counts as the machine's speed."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """A weight and the products that it takes part in."""

    inputs: int
    """K."""
    outputs: int
    """M."""
    rows: tuple[int, ...]
    """G of every product, in the order in which they depend on each other."""
    input_gradients: bool = True
    """Whether training needs its input's gradient."""

    @property
    def flop(self) -> int:
        """Operations of the way forward; a multiplication and an addition are two."""
        return 2 * self.inputs * self.outputs * sum(self.rows)


def flop(layers: Sequence[Layer], training: bool) -> int:
    """Operations of all products of a minibatch."""
    return sum(layer.flop * (1 + training * (1 + layer.input_gradients)) for layer in layers)


def products(layers: Sequence[Layer], training: bool) -> Callable[[], None]:
    """What runs the products of a minibatch, layer after layer; in training the way back too, the last layer first.

    Each product takes and makes rows of its own, as it does in a network.
    """
    ready = [_Ready(layer) for layer in layers]

    def run() -> None:
        for layer in ready:
            layer.forward()
        if training:
            for layer in reversed(ready):
                layer.backward()

    return run


class _Ready:
    def __init__(self, layer: Layer):
        total = sum(layer.rows)
        self.input_gradients = layer.input_gradients
        self.weight_KM = torch.randn(layer.inputs, layer.outputs)
        self.weight_MK = torch.randn(layer.outputs, layer.inputs)
        self.x, self.dx = torch.randn(total, layer.inputs), torch.empty(total, layer.inputs)
        self.y, self.dy = torch.empty(total, layer.outputs), torch.randn(total, layer.outputs)
        self.dw = torch.empty(layer.outputs, layer.inputs)
        self.rows = list(zip(*(each.split(layer.rows) for each in (self.x, self.y, self.dx, self.dy)), strict=True))

    def forward(self) -> None:
        for x, y, _, _ in self.rows:
            torch.mm(x, self.weight_KM, out=y)

    def backward(self) -> None:
        if self.input_gradients:
            for _, _, dx, dy in reversed(self.rows):
                torch.mm(dy, self.weight_MK, out=dx)
        torch.mm(self.dy.T, self.x, out=self.dw)


def fastest_product(repeats: int = 3, device: torch.device = CPU) -> float:
    """Operations a second of the fastest square float32 product, on a CPU with the threads that PyTorch now uses."""
    return max(_square(side, repeats, device) for side in (SIDES if device.type == "cpu" else GPU_SIDES))


def _square(side: int, repeats: int, device: torch.device) -> float:
    left, right, out = (torch.randn(side, side, device=device) for _ in range(3))

    def product() -> None:
        torch.mm(left, right, out=out)

    product()
    return 2 * side**3 / min(seconds(product, (device,)) for _ in range(repeats))


def tree_lstm_layers(rows: Sequence[int], trees: int, width: int, classes: int) -> list[Layer]:
    """Of a binary Tree-LSTM: `rows` vertices of each level, leaves first."""
    inner = [Layer(2 * width, 5 * width, tuple(rows[1:]))] if rows[1:] else []
    return [Layer(width, 3 * width, (rows[0],)), *inner, Layer(width, classes, (trees,))]


def tree_fc_layers(rows: Sequence[int], width: int) -> list[Layer]:
    """Of Tree-FC: `rows` vertices of each level, leaves, which compute nothing, first."""
    return [Layer(2 * width, width, tuple(rows[1:]))]


def child_sum_layers(cells: Sequence[int], edges: Sequence[int], words: int, embedding: int, width: int) -> list[Layer]:
    """Of a child-sum Tree-LSTM: `cells` with children of each level above the leaves, `edges` to these children, and
    `words`, one a vertex, which are not trained and whose products are all done at once."""
    above = [Layer(width, 3 * width, tuple(cells)), Layer(width, width, tuple(edges))] if cells else []
    return [Layer(embedding, 4 * width, (words,), input_gradients=False), *above]


def bilstm_layers(lengths: Sequence[int], inputs: int, width: int) -> list[Layer]:
    """Of an LSTM each way over sequences of `lengths`: all items' input products at once, then one product a step."""
    steps = tuple(sum(length > step for length in lengths) for step in range(max(lengths, default=0)))
    return 2 * [Layer(inputs, 4 * width, (sum(lengths),)), Layer(width, 4 * width, steps)] if steps else []


def tagger_layers(lengths: Sequence[int], embedding: int, width: int, hidden: int, tags: int) -> list[Layer]:
    """Of a BiLSTM tagger of sentences of `lengths`."""
    words = sum(lengths)
    scores = [Layer(2 * width, hidden, (words,)), Layer(hidden, tags, (words,))]
    return [*bilstm_layers(lengths, embedding, width), *scores]
