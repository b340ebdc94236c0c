"""The vertices of LSTMs, over sequences as over trees, as a cell of `iep.batching`.

What follows the product is `lstm_state.py`'s; on the CPU consecutive calls run as `lstm_in_place.py` says.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from iep.batching import Cell
from iep.batching.call_in_place import LayerInPlace
from iep.batching.layout import Call
from iep.workloads.lstm_in_place import LSTMCallInPlace
from iep.workloads.lstm_state import kernel, lstm_gradients, lstm_state


def by_columns(weight: nn.Parameter) -> nn.Parameter:
    """A weight matrix that lies in memory column by column: its products with a few rows take up to a quarter less."""
    return nn.Parameter(weight.detach().T.contiguous().T)


class LSTMCell(Cell):
    """An LSTM's vertices, with a forget gate for each child, as one cell of `iep.batching`.

    Takes what is pulled, (G, K) the layer's factor or, where `gates_pulled`, (G, (3 + A) H) gates to which the product
    is added; then h and c of the children, (G, A, H) each, where there are any. Without pulled gates h of all children
    is the layer's factor, with them as well. Makes h and c, and h once more where it `pushes` it.
    """

    def __init__(self, owner: nn.Module, name: str, gates_pulled: bool = False, pushes: bool = False):
        """
        Args:
            owner: the module whose attribute `name` is the layer, at the time of each call. Its hooks are not called.

        Raises:
            ValueError: gates are pulled, and the layer has a bias: the pulled gates have it already.
        """
        self.owner, self.name, self.gates_pulled, self.pushes = owner, name, gates_pulled, pushes
        if gates_pulled and self.layer.bias is not None:
            raise ValueError("a cell whose gates are pulled has a layer without bias")

    @property
    def layer(self) -> nn.Linear:
        return getattr(self.owner, self.name)

    def in_place(self, call: Call, layer: LayerInPlace) -> LSTMCallInPlace | None:
        # What a class of its own computes instead, the C code does not know.
        if type(self) is not LSTMCell or not layer.weight.is_cpu or kernel("state", layer.weight.dtype) is None:
            return None
        shapes = [len(taken.shape) for taken in call.arguments]
        leaf, inner = [1], [1] * self.gates_pulled + [2, 2]
        fits = shapes == leaf or (shapes == inner and call.arguments[-1].shape == call.arguments[-2].shape)
        fits = fits and len(call.results) == 2 + self.pushes
        return LSTMCallInPlace(call, layer, self.gates_pulled) if fits else None

    def factor(self, arguments: Sequence[Tensor]) -> Tensor | None:
        if len(arguments) > 1:
            return arguments[-2].flatten(1)
        return None if self.gates_pulled else arguments[0]

    def results(self, product: Tensor | None, bias: Tensor | None, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        h, c = lstm_state(*self._gates(product, bias, arguments))
        return (h, c, h) if self.pushes else (h, c)

    def gradients(
        self,
        product: Tensor | None,
        bias: Tensor | None,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        given: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor | None]]:
        dh, dc, *pushed = given
        if pushed and pushed[0] is not None:
            dh = pushed[0] if dh is None else dh + pushed[0]
        d_gates, d_children = lstm_gradients(*self._gates(product, bias, arguments), results[1], dh, dc)
        gradients: list[Tensor | None] = [d_gates] if self.gates_pulled else [None] * (len(arguments) == 1)
        return d_gates, [*gradients, *([None, d_children] if len(arguments) > 1 else ())]

    def through_factor(self, gradient: Tensor, gradients: list[Tensor | None], arguments: Sequence[Tensor]) -> None:
        at = -2 if len(arguments) > 1 else 0
        gradients[at] = gradient.view(arguments[at].shape)

    def _gates(
        self, product: Tensor | None, bias: Tensor | None, arguments: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gates, c of the children, and what is added to the gates."""
        if product is None:
            gates = arguments[0]
            width = gates.shape[1] // 4
            return gates, gates.new_zeros(len(gates), 1, width), gates.new_zeros(4 * width)
        added = arguments[0] if self.gates_pulled else bias
        if added is None:
            added = product.new_zeros(product.shape[1])
        if len(arguments) > 1:
            return product, arguments[-1], added
        return product, product.new_empty(len(product), 0, product.shape[1] // 3), added
