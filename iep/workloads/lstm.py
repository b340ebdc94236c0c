"""Gates of LSTM cells with any number of children -> their states h and c.

A cell of a sequence has one child, an inner vertex of a binary tree has two, and a leaf has none. The caller computes
the gates by a linear layer. The rest is one autograd function with few passes over memory.

Shapes: G cells, A children, H width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def lstm_state(gates: Tensor, bias: Tensor | None, c_children: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return h and c of cells with a forget gate for each child, (G, H) each (Tai et al. 2015, equations 9 to 14).

    Gradients cannot be differentiated again.

    Args:
        gates: (G, (3 + A) H) before the nonlinearities, in the order i, o, f of each child, u. They are overwritten.
        bias: ((3 + A) H,) or (G, (3 + A) H), added to the gates, which is faster than a linear layer's bias; or None.
        c_children: (G, A, H); None for cells without children.

    Raises:
        ValueError: the shapes do not match.
    """
    if c_children is None:
        c_children = gates.new_empty(len(gates), 0, gates.shape[1] // 3)
    count, children, width = c_children.shape
    if gates.shape != (count, (3 + children) * width):
        found = f"gates {tuple(gates.shape)} and children's c {tuple(c_children.shape)}"
        raise ValueError(f"{found}, expected (G, (3 + A) H) and (G, A, H)")
    c_children = c_children.to(gates.dtype)
    if torch.is_grad_enabled():
        return _State.apply(gates, bias, c_children)
    return _states(gates, bias, c_children)[:2]


def by_columns(weight: nn.Parameter) -> nn.Parameter:
    """Return the weight matrix stored column by column, which makes products with few rows faster."""
    return nn.Parameter(weight.detach().T.contiguous().T)


class _State(Function):
    @staticmethod
    def forward(ctx: Any, gates: Tensor, bias: Tensor | None, c_children: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c."""
        gates = gates.detach()  # autograd need not track that views of the gates are overwritten
        h, c, tanh_c = _states(gates, bias, c_children)
        ctx.save_for_backward(gates, tanh_c, c_children)
        ctx.bias_dims = 0 if bias is None else bias.dim()
        ctx.set_materialize_grads(False)
        return h, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_h: Tensor | None, of_c: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the gradients of gates, bias and the children's c."""
        gates, tanh_c, c_children = ctx.saved_tensors
        of_gates, of_children = torch.empty_like(gates), torch.empty_like(c_children)
        i, o, *forget, u = _by_gate(gates, c_children)
        of_i, of_o, *of_forget, of_u = _by_gate(of_gates, c_children)
        if of_h is None:
            of_o.zero_()
        else:
            torch.mul(of_h, tanh_c, out=of_o)
            through_h = torch.ops.aten.tanh_backward(of_h * o, tanh_c)
            of_c = through_h if of_c is None else through_h.add_(of_c)
        torch.mul(of_c, u, out=of_i)
        for f, c, of_f, of_child in zip(forget, c_children.unbind(1), of_forget, of_children.unbind(1), strict=True):
            torch.mul(of_c, c, out=of_f)
            torch.mul(of_c, f, out=of_child)
        # Through the nonlinearities, first as if all gates were sigmoids, then for u.
        torch.ops.aten.sigmoid_backward.grad_input(of_gates, gates, grad_input=of_gates)
        torch.ops.aten.tanh_backward.grad_input(of_c * i, u, grad_input=of_u)
        of_bias = None if not ctx.bias_dims else of_gates if ctx.bias_dims == 2 else of_gates.sum(0)
        return of_gates, of_bias, of_children


def _states(gates: Tensor, bias: Tensor | None, c_children: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return h, c and tanh c; the gates are overwritten with the results of their nonlinearities."""
    if bias is not None:
        gates.add_(bias)
    i, o, *forget, u = _by_gate(gates, c_children)
    tanh_u = _tanh(u)
    gates.sigmoid_()
    u.copy_(tanh_u)
    c = i * u
    for f, child in zip(forget, c_children.unbind(1), strict=True):
        c.addcmul_(f, child)
    tanh_c = _tanh(c)
    return o * tanh_c, c, tanh_c


def _by_gate(gates: Tensor, c_children: Tensor) -> tuple[Tensor, ...]:
    """Return a view of each gate, (G, H)."""
    count, children, width = c_children.shape
    return gates.view(count, 3 + children, width).unbind(1)


def _tanh(x: Tensor) -> Tensor:
    """Return tanh x, computed as 2 sigmoid(2 x) - 1 if this is faster and as precise.

    On CPUs, PyTorch's sigmoid takes an eighth of the time of its tanh, which outweighs the additional calls for more
    than 4096 elements. In low precision, the difference would lose values near zero.
    """
    if x.is_cpu and x.numel() > 4096 and x.dtype in (torch.float32, torch.float64):
        return (x * 2).sigmoid_().mul_(2).sub_(1)
    return x.tanh()
