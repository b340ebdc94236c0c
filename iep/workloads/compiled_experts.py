"""Tokens, their experts and gates -> the layer's result and its gradients in C (`experts.c`), chunk by chunk of an
expert's rows: between a token's row and the row of its result nothing goes over memory. On the CPU alone.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, A active experts, D inputs, H hidden, O outputs.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from iep.batching import native
from iep.workloads.expert_products import Gradients, Routing
from iep.workloads.reused_memory import ReusedMemory

ALIGNED = 128
"""The C code wants rows of a multiple of so many bytes."""
PADDING = 64
"""Bytes after each row that it keeps."""
CHUNK = 240
"""Rows: they, what they become and their expert's weight lie in a processor's second cache together."""


class _Layer(ctypes.Structure):
    """As in `experts.c`, which says what each is; addresses that are None are not wanted."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("experts", "k", "inputs", "hidden", "outputs", "chunk", "room")),
        *((name, ctypes.c_void_p) for name in ("lasts", "order", "hidden_weights", "output_weights", "x", "gates")),
        *((name, ctypes.c_void_p) for name in ("hidden_rows", "result", "of_result", "of_hidden", "of_gates", "of_x")),
        *((name, ctypes.c_void_p) for name in ("of_hidden_weights", "of_output_weights")),
    ]


def can_compile(x_TD: Tensor, sizes: tuple[int, int, int], weights: Sequence[Tensor]) -> bool:
    """Whether the C code is there and takes such a layer."""
    if any(size * x_TD.element_size() % ALIGNED for size in sizes):
        return False
    if not all(weight.dtype == x_TD.dtype and weight.is_contiguous() for weight in weights):
        return False
    # A tensor of a subclass, such as one that only shapes are found with, may have no address.
    if not all(type(each) in (Tensor, nn.Parameter) and each.is_cpu for each in (x_TD, *weights)):
        return False
    return native.function("experts", "forward", x_TD.dtype, "llpp") is not None


@dataclass(frozen=True, eq=False)
class CompiledExperts:
    """The layer in C, for one minibatch."""

    routing: Routing
    layers: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Of each layer, A times (I, O)."""
    memory: ReusedMemory

    def forward(self, x_TD: Tensor, gates_TK: Tensor, keep: bool) -> tuple[Tensor, ...]:
        """(T, O) the layer's result; and what the way back needs, if it is to be kept."""
        x_TD, gates_TK = x_TD.contiguous(), gates_TK.contiguous()
        hidden_RH = self._padded_rows(x_TD) if keep else None
        result_TKO = self.memory.empty((*gates_TK.shape, self._sizes[2]), like=x_TD)
        self._run("forward", x_TD, x=x_TD, gates=gates_TK, hidden_rows=hidden_RH, result=result_TKO)
        return self._sum(result_TKO), *((x_TD, hidden_RH, gates_TK) if keep else ())

    def backward(self, gradient_TO: Tensor, kept: Sequence[Tensor], of_x: bool, of_weights: bool) -> Gradients:
        """The gradients of x if `of_x`, of gates, and of the weights if `of_weights`."""
        x_TD, hidden_RH, gates_TK = kept
        gradient_TO, of_hidden_RH = gradient_TO.contiguous(), self._padded_rows(x_TD)
        of_gates_TK = torch.empty_like(gates_TK)
        x_TKD = self.memory.empty((*gates_TK.shape, x_TD.shape[1]), like=x_TD) if of_x else None
        given = {"gates": gates_TK, "hidden_rows": hidden_RH, "of_result": gradient_TO, "of_hidden": of_hidden_RH}
        self._run("backward", x_TD, **given, of_gates=of_gates_TK, of_x=x_TKD)
        x_gradient_TD = self._sum(x_TKD) if of_x else None
        if not of_weights:
            return x_gradient_TD, of_gates_TK, None
        inputs, hidden, outputs = self._sizes
        number = len(self.routing.active)
        made = [self.memory.empty((number, *shape), like=x_TD) for shape in ((inputs, hidden), (hidden, outputs))]
        tables = [_addresses(weights_AIO) for weights_AIO in made]
        self._run("weights", x_TD, **given, x=x_TD, of_hidden_weights=tables[0], of_output_weights=tables[1])
        return x_gradient_TD, of_gates_TK, [weight for weights_AIO in made for weight in weights_AIO.unbind(0)]

    def _tables(self) -> dict[str, Tensor]:
        """What every C function is told, anew each time: weights may have moved since the last."""
        addresses = [[weight.data_ptr() for weight in weights] for weights in self.layers]
        hidden, output = (torch.tensor(each, device="cpu") for each in addresses)
        lasts = torch.tensor(list(accumulate(self.routing.counts)), device="cpu")
        return {"lasts": lasts, "order": self.routing.order_R, "hidden_weights": hidden, "output_weights": output}

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return *self.layers[0][0].shape, self.layers[1][0].shape[1]

    def _padded_rows(self, like: Tensor) -> Tensor:
        """(R, H and padding)"""
        return self.memory.empty((len(self.routing.order_R), self._sizes[1] + PADDING // like.element_size()), like)

    def _run(self, name: str, like: Tensor, **tensors: Tensor | None) -> None:
        """One of the C functions, by as many threads as PyTorch uses, each with memory of its own to work in."""
        inputs, hidden, outputs = self._sizes
        widest, rows = max(self._sizes), len(self.routing.order_R)
        chunk = min(CHUNK, max(self.routing.counts))
        room = chunk * (widest + PADDING // like.element_size())
        named = {**tensors, **self._tables()}
        layer = _Layer(
            experts=len(self.routing.counts),
            k=rows // len(like),
            inputs=inputs,
            hidden=hidden,
            outputs=outputs,
            chunk=chunk,
            room=room,
            **{name: each.data_ptr() for name, each in named.items() if each is not None},
        )
        function = native.function("experts", name, like.dtype, "llpp")

        def run(start: int, end: int) -> None:
            scratch = like.new_empty(2 * room + widest * ALIGNED // like.element_size())
            function(start, end, ctypes.addressof(layer), scratch.data_ptr())

        numbers = len(self.layers[0]) * hidden * (inputs + outputs)
        native.over_rows(run, rows, max(numbers, rows * widest), ())

    def _sum(self, values_TKX: Tensor) -> Tensor:
        """(T, X) over every token's experts."""
        tokens, k, width = values_TKX.shape
        if k == 1:
            return values_TKX.view(tokens, width)
        return torch.sum(values_TKX, dim=1, out=self.memory.empty((tokens, width), like=values_TKX))


def _addresses(weights_AIO: Tensor) -> Tensor:
    size = weights_AIO[0].numel() * weights_AIO.element_size()
    return torch.arange(len(weights_AIO), device="cpu") * size + weights_AIO.data_ptr()
