"""Gates of an LSTM cell with any number of children -> its state: one step forward and one back, few passes over memory.

A sequence's cell has one child, a binary tree's inner vertex two, a leaf none. The affine map that makes the gates is
the caller's. tanh is computed as 2 sigmoid(2 x) - 1: on CPUs PyTorch's sigmoid takes an eighth of the time of its tanh.

Shapes: G cells, A children, H width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lstm_state(gates: Tensor, c_children: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h and c, (G, H) each, of LSTM cells with a forget gate for each child (Tai et al. 2015, equations 9 to 14).

    Args:
        gates: (G, (3 + A) H) before their nonlinearities, in the order i, o, f of each child, u.
        c_children: (G, A, H); None for cells without children.
    """
    if c_children is None:
        c_children = gates.new_empty(len(gates), 0, gates.shape[1] // 3)
    if torch.is_grad_enabled():
        return _State.apply(gates, c_children)
    return _state(gates, c_children)[:2]


def _state(gates: Tensor, c_children: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h, c, the sigmoids of the gates, that of 2 u in place of u's tanh, and tanh(c)."""
    width, num_children = c_children.shape[2], c_children.shape[1]
    sigmoids = gates.clone()
    u = sigmoids[:, -width:]
    u.mul_(2)
    sigmoids.sigmoid_()
    i, o = sigmoids[:, :width], sigmoids[:, width : 2 * width]
    # i tanh(u) = 2 i sigmoid(2 u) - i
    if num_children:
        kept = sigmoids[:, 2 * width : -width] * c_children.flatten(1)
        c = kept if num_children == 1 else kept.view(-1, num_children, width).sum(1)
        c.sub_(i)
    else:
        c = i.neg()
    c.addcmul_(i, u, value=2)
    tanh_c = (c * 2).sigmoid_().mul_(2).sub_(1)
    return o * tanh_c, c, sigmoids, tanh_c


class _State(Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, c_children: Tensor) -> tuple[Tensor, Tensor]:
        h, c, sigmoids, tanh_c = _state(gates, c_children)
        ctx.save_for_backward(sigmoids, c_children, tanh_c)
        ctx.set_materialize_grads(False)
        return h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if dh is None and dc is None:
            return None, None
        sigmoids, c_children, tanh_c = ctx.saved_tensors
        width, num_children = c_children.shape[2], c_children.shape[1]
        i, o, u = sigmoids[:, :width], sigmoids[:, width : 2 * width], sigmoids[:, -width:]
        d_gates = torch.empty_like(sigmoids)
        if dh is None:
            d_gates[:, width : 2 * width].zero_()
        else:
            torch.mul(dh, tanh_c, out=d_gates[:, width : 2 * width])
            through_h = torch.ops.aten.tanh_backward(dh * o, tanh_c)
            dc = through_h if dc is None else through_h.add_(dc)
        # The gradients of the gates after their nonlinearities, then through all of them at once.
        torch.mul(dc, u, out=d_gates[:, :width])
        d_gates[:, :width].mul_(2).sub_(dc)
        torch.mul(dc, i, out=d_gates[:, -width:])
        d_gates[:, -width:].mul_(4)  # d tanh(u) / du = 4 s (1 - s) where s = sigmoid(2 u)
        d_children = None
        if num_children:
            forget = sigmoids[:, 2 * width : -width].view(-1, num_children, width)
            spread = dc.unsqueeze(1)
            torch.mul(spread, c_children, out=d_gates[:, 2 * width : -width].view(-1, num_children, width))
            d_children = spread * forget
        torch.ops.aten.sigmoid_backward.grad_input(d_gates, sigmoids, grad_input=d_gates)
        return d_gates, d_children
