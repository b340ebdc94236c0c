"""Gates of an LSTM cell with any number of children -> its state: a step forward and one back, few passes over memory.

A sequence's cell has one child, a binary tree's inner vertex two, a leaf none. The affine map that makes the gates is
the caller's. On the CPU C code (`lstm.c`) does it in one pass; elsewhere, and without a compiler, PyTorch does.

Shapes: G cells, A children, H width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from iep.batching import Cell
from iep.workloads import native

ARGUMENTS = {"state": "llllplpppp", "state_back": "llllplpppplplpp"}
"""Of the C functions, as `native.function` takes them."""


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

    Raises:
        ValueError: the shapes are others.
    """
    _check(gates, c_children, bias)
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

    Raises:
        ValueError: the shapes are others.
    """
    _check(gates, c_children, bias)
    count, num_children, width = c_children.shape
    if any(each is not None and each.shape != (count, width) for each in (c, dh, dc)):
        shapes = [None if each is None else tuple(each.shape) for each in (c, dh, dc)]
        raise ValueError(f"c and the gradients of h and c are {shapes}, expected ({count}, {width}) each")
    kernel = _kernel("state_back", gates, c_children, bias, c)
    if kernel is None:
        return state_back_in_torch(gates, c_children, bias, c, dh, dc)
    dh, dc = (gates.new_zeros(width) if d is None else d.to(gates.dtype).contiguous() for d in (dh, dc))
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


def _check(gates: Tensor, c_children: Tensor, bias: Tensor) -> None:
    if c_children.dim() == 3:
        count, num_children, width = c_children.shape
        row = (3 + num_children) * width
        if gates.shape == (count, row) and bias.shape in ((row,), (count, row)):
            return
    raise ValueError(
        f"gates {tuple(gates.shape)}, children's c {tuple(c_children.shape)} and bias {tuple(bias.shape)}, "
        "expected (G, (3 + A) H), (G, A, H), and one or G rows as wide as the gates"
    )


def _kernel(name: str, gates: Tensor, *others: Tensor) -> Callable[..., None] | None:
    """The C function for tensors of this kind; None where PyTorch is to do it."""
    for tensor in (gates, *others):
        # Of a subclass, such as a tensor without memory that shapes are found with, there may be no address.
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu and tensor.is_contiguous()
        if not plain or tensor.dtype != gates.dtype:
            return None
    return native.function("lstm", name, gates.dtype, ARGUMENTS[name])


def state_in_torch(gates: Tensor, c_children: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """h and c by PyTorch's operations.

    tanh is computed as 2 sigmoid(2 x) - 1: on CPUs PyTorch's sigmoid takes an eighth of the time of its tanh.
    """
    width = c_children.shape[2]
    gates = gates + bias
    sigmoids = gates[:, :-width].sigmoid()
    i, o, forget = sigmoids[:, :width], sigmoids[:, width : 2 * width], sigmoids[:, 2 * width :]
    kept = (forget * c_children.flatten(1)).view(c_children.shape)
    c = torch.addcmul(kept.sum(1), i, _tanh(gates[:, -width:]))
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
    if x.dtype in (torch.bfloat16, torch.float16):  # the difference would lose what is near zero
        return x.tanh()
    return (x * 2).sigmoid_().mul_(2).sub_(1)
