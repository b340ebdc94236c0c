"""Gates of an LSTM cell with any number of children -> its state: a step forward and one back, few passes over memory.

A sequence's cell has one child, a binary tree's inner vertex two, a leaf none. The affine map that makes the gates is
the caller's. On the CPU C code (`lstm.c`) does it in one pass; elsewhere, and without a compiler, PyTorch does.

Shapes: G cells, A children, H width.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from iep.batching import Cell
from iep.workloads import native


def by_columns(weight: nn.Parameter) -> nn.Parameter:
    """A weight matrix that lies in memory column by column: its products with a few rows take up to a quarter less."""
    return nn.Parameter(weight.detach().T.contiguous().T)


class LSTMCell(Cell):
    """An LSTM's vertices, with a forget gate for each child, as one cell of `iep.batching`.

    Takes what is pulled, (G, K) the layer's factor or, where `gates_pulled`, (G, (3 + A) H) gates to which the product
    is added; then h and c of the children, (G, A, H) each, where there are any. Without pulled gates h of all children
    is the layer's factor, with them as well. Makes h and c, and h once more where it `pushes` it.
    """

    def __init__(self, layer: nn.Linear, gates_pulled: bool = False, pushes: bool = False):
        self.layer, self.gates_pulled, self.pushes = layer, gates_pulled, pushes

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


def lstm_state(gates: Tensor, c_children: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """h and c, (G, H) each, of LSTM cells with a forget gate for each child (Tai et al. 2015, equations 9 to 14).

    Autograd does not see it; `lstm_gradients` is its way back.

    Args:
        gates: (G, (3 + A) H) before their nonlinearities, in the order i, o, f of each child, u.
        c_children: (G, A, H).
        bias: ((3 + A) H,) or (G, (3 + A) H), added to the gates: one pass over memory less than before this.
    """
    kernel = _kernel("state", gates, c_children, bias)
    if kernel is None:
        return state_in_torch(gates, c_children, bias)
    count, num_children, width = c_children.shape
    h, c = gates.new_empty(count, width), gates.new_empty(count, width)
    addresses = [each.data_ptr() for each in (gates, c_children, h, c)]
    native.over_rows(kernel, count, gates.numel(), (num_children, width, bias.data_ptr(), _stride(bias), *addresses))
    return h, c


def lstm_gradients(
    gates: Tensor, c_children: Tensor, bias: Tensor, c: Tensor, dh: Tensor | None, dc: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of gates, which are also those of the bias's rows, and of `c_children`.

    Args:
        c: (G, H) as `lstm_state` gave it.
        dh: (G, H) gradient of h; one of it and `dc` may be None.
        dc: (G, H) that of c.
    """
    kernel = _kernel("state_back", gates, c_children, bias)
    if kernel is None:
        return state_back_in_torch(gates, c_children, bias, c, dh, dc)
    count, num_children, width = c_children.shape
    dh, dc = (gates.new_zeros(width) if d is None else d.contiguous() for d in (dh, dc))
    d_gates, d_children = torch.empty_like(gates), torch.empty_like(c_children)
    arguments = (
        *(num_children, width, bias.data_ptr(), _stride(bias)),
        *(gates.data_ptr(), c_children.data_ptr(), c.data_ptr()),
        *(dh.data_ptr(), _stride(dh), dc.data_ptr(), _stride(dc), d_gates.data_ptr(), d_children.data_ptr()),
    )
    native.over_rows(kernel, count, gates.numel(), arguments)
    return d_gates, d_children


def _stride(rows: Tensor) -> int:
    """From row to row; 0 where one stands for all."""
    return rows.shape[1] if rows.dim() == 2 else 0


def _kernel(name: str, gates: Tensor, c_children: Tensor, bias: Tensor) -> Any:
    """The C function for tensors of this kind; None where PyTorch is to do it."""
    same = gates.dtype == c_children.dtype == bias.dtype
    if same and gates.is_cpu and gates.is_contiguous() and c_children.is_contiguous() and bias.is_contiguous():
        return _function(name, gates.dtype)
    return None


@lru_cache
def _function(name: str, dtype: torch.dtype) -> Any:
    library = native.library("lstm")
    if library is None or dtype not in native.TYPES:
        return None
    function = library[f"{name}_{native.TYPES[dtype]}"]
    size, rows, strided = ctypes.c_long, ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_long)
    if name == "state_back":
        function.argtypes = [size, size, size, size, *strided, rows, rows, rows, *strided, *strided, rows, rows]
    else:
        function.argtypes = [size, size, size, size, *strided, rows, rows, rows, rows]
    function.restype = None
    return function


def state_in_torch(gates: Tensor, c_children: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """h and c by PyTorch's operations.

    tanh is computed as 2 sigmoid(2 x) - 1: on CPUs PyTorch's sigmoid takes an eighth of the time of its tanh.
    """
    num_children, width = c_children.shape[1:]
    sigmoids = gates + bias
    u = sigmoids[:, -width:]
    u.mul_(2)
    sigmoids.sigmoid_()
    i, o = sigmoids[:, :width], sigmoids[:, width : 2 * width]
    # i tanh(u) = 2 i sigmoid(2 u) - i
    if num_children:
        kept = sigmoids[:, 2 * width : -width] * c_children.flatten(1)
        c = (kept if num_children == 1 else kept.view(-1, num_children, width).sum(1)).sub_(i)
    else:
        c = i.neg()
    c.addcmul_(i, u, value=2)
    return o * _tanh(c), c


def state_back_in_torch(
    gates: Tensor, c_children: Tensor, bias: Tensor, c: Tensor, dh: Tensor | None, dc: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of gates and children by PyTorch's operations; one of dh and dc, (G, H) each, may be None."""
    width = c_children.shape[2]
    gates = gates + bias
    sigmoids, tanh_u, tanh_c = gates.sigmoid(), _tanh(gates[:, -width:]), _tanh(c)
    i, o = sigmoids[:, :width], sigmoids[:, width : 2 * width]
    d_gates = torch.zeros_like(gates)
    if dh is not None:
        torch.mul(dh, tanh_c, out=d_gates[:, width : 2 * width])
        through_h = torch.ops.aten.tanh_backward(dh * o, tanh_c)
        dc = through_h if dc is None else through_h.add_(dc)
    forget = sigmoids[:, 2 * width : -width].view(c_children.shape)
    d_forget = d_gates[:, 2 * width : -width].view(c_children.shape)
    torch.mul(dc, tanh_u, out=d_gates[:, :width])
    torch.mul(dc.unsqueeze(1), c_children, out=d_forget)
    # The gradients of the gates after their nonlinearities, then through these.
    d_gates[:, :-width] = torch.ops.aten.sigmoid_backward(d_gates[:, :-width], sigmoids[:, :-width])
    d_gates[:, -width:] = torch.ops.aten.tanh_backward(dc * i, tanh_u)
    return d_gates, dc.unsqueeze(1) * forget


def _tanh(x: Tensor) -> Tensor:
    return (x * 2).sigmoid_().mul_(2).sub_(1)
