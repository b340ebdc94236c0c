"""Gates of LSTM cells with any number of children -> their states h and c.

A cell of a sequence has one child, an inner vertex of a binary tree two, a leaf none. The linear layer that computes
the gates is the caller's; what follows it is one step of autograd with few passes over memory.

Shapes: G cells, A children, H width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lstm_state(gates: Tensor, c_children: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h and c, (G, H) each, of cells with a forget gate for each child (Tai et al. 2015, equations 9 to 14).

    Gradients cannot be differentiated again.

    Args:
        gates: (G, (3 + A) H) before their nonlinearities, in the order i, o, f of each child, u. They are overwritten.
        c_children: (G, A, H); None for cells without children.

    Raises:
        ValueError: the shapes do not fit.
    """
    if c_children is None:
        c_children = gates.new_empty(len(gates), 0, gates.shape[1] // 3)
    count, children, width = c_children.shape
    if gates.shape != (count, (3 + children) * width):
        found = f"gates {tuple(gates.shape)} and children's c {tuple(c_children.shape)}"
        raise ValueError(f"{found}, expected (G, (3 + A) H) and (G, A, H)")
    return _State.apply(gates, c_children.to(gates.dtype))


def by_columns(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight matrix stored column by column, which makes products with few rows faster."""
    return nn.Parameter(weight.detach().T.contiguous().T)


class _State(Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, c_children: Tensor) -> tuple[Tensor, Tensor]:
        width = c_children.shape[2]
        u = _tanh(gates[:, -width:])
        sigmoids = gates[:, :-width].sigmoid_()
        i, o, *forget = sigmoids.split(width, dim=1)
        c = i * u
        for f, c_child in zip(forget, c_children.unbind(1), strict=True):
            c.addcmul_(f, c_child)
        tanh_c = _tanh(c)
        ctx.save_for_backward(sigmoids, u, tanh_c, c_children)
        ctx.set_materialize_grads(False)
        return o * tanh_c, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_h: Tensor | None, of_c: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        sigmoids, u, tanh_c, c_children = ctx.saved_tensors
        width = u.shape[1]
        i, o, forget = sigmoids.tensor_split((width, 2 * width), dim=1)
        of_gates = sigmoids.new_empty(len(u), sigmoids.shape[1] + width)
        of_i, of_o, of_forget, of_u = of_gates.tensor_split((width, 2 * width, of_gates.shape[1] - width), dim=1)
        if of_h is None:
            of_o.zero_()
        else:
            torch.mul(of_h, tanh_c, out=of_o)
            through_h = torch.ops.aten.tanh_backward(of_h * o, tanh_c)
            of_c = through_h if of_c is None else through_h.add_(of_c)
        torch.mul(of_c, u, out=of_i)
        torch.mul(of_c[:, None], c_children, out=of_forget.view(c_children.shape))
        torch.mul(of_c, i, out=of_u)
        of_sigmoids = of_gates[:, :-width]
        torch.ops.aten.sigmoid_backward.grad_input(of_sigmoids, sigmoids, grad_input=of_sigmoids)
        torch.ops.aten.tanh_backward.grad_input(of_u, u, grad_input=of_u)
        return of_gates, of_c[:, None] * forget.view(c_children.shape)


def _tanh(x: Tensor) -> Tensor:
    """tanh x; on CPUs 2 sigmoid(2 x) - 1, because PyTorch's sigmoid takes an eighth of the time of its tanh there."""
    if x.is_cpu and x.dtype in (torch.float32, torch.float64):
        return (x * 2).sigmoid_().mul_(2).sub_(1)
    return x.tanh()
