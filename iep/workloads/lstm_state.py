"""Gates of LSTM cells with any number of children -> their states, and the gradients back, in few passes over memory.

A sequence's cell has one child, a binary tree's inner vertex two, a leaf none. The affine map that makes the gates is
the caller's. On the CPU C code (`lstm.c`) does it in one pass; elsewhere, and without a compiler, PyTorch does.

Shapes: G cells, A children, H width.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor, nn

from iep.batching import native


class Step(ctypes.Structure):
    """A call as the C code takes it: `struct step` in lstm.c, which says what each field is. An address is 0 where
    there is nothing."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("cells", "forgets", "children", "width")),
        ("gates", ctypes.c_void_p),
        ("gates_stride", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("bias", "bias_index")),
        ("bias_stride", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("c_children", "children_index", "h", "c", "pushed")),
        *((name, ctypes.c_void_p) for name in ("dh", "dc", "dpushed", "dh_index", "dc_index", "dpushed_index")),
        *((name, ctypes.c_long) for name in ("dh_stride", "dc_stride", "dpushed_stride")),
        *((name, ctypes.c_void_p) for name in ("d_gates", "d_children")),
    ]


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
    function = _kernel("state", gates, c_children, bias)
    if function is None:
        return state_in_torch(gates, c_children, bias)
    count, _, width = c_children.shape
    h, c = gates.new_empty(count, width), gates.new_empty(count, width)
    step = _step(gates, c_children, bias, c)
    step.h = h.data_ptr()
    over_cells(function, step)
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
    count, _, width = c_children.shape
    if any(each is not None and each.shape != (count, width) for each in (c, dh, dc)):
        shapes = [None if each is None else tuple(each.shape) for each in (c, dh, dc)]
        raise ValueError(f"c and the gradients of h and c are {shapes}, expected ({count}, {width}) each")
    function = _kernel("state_back", gates, c_children, bias, c)
    if function is None:
        return state_back_in_torch(gates, c_children, bias, c, dh, dc)
    dh, dc = (gates.new_zeros(width) if d is None else d.to(gates.dtype).contiguous() for d in (dh, dc))
    d_gates, d_children = torch.empty_like(gates), torch.empty_like(c_children)
    step = _step(gates, c_children, bias, c)
    step.dh, step.dh_stride, step.dc, step.dc_stride = dh.data_ptr(), _stride(dh), dc.data_ptr(), _stride(dc)
    step.d_gates, step.d_children = d_gates.data_ptr(), d_children.data_ptr()
    over_cells(function, step)
    return d_gates, d_children


def kernel(name: str, dtype: torch.dtype) -> Callable[..., None] | None:
    """The C function `state` or `state_back` for numbers of that dtype; None where PyTorch is to do it."""
    return native.function("lstm", name, dtype, "llp")


def over_cells(function: Callable[..., None], step: Step) -> None:
    """Run a C function over all cells of a step, by several threads if it pays."""
    numbers = step.cells * (3 + step.forgets) * step.width
    native.over_rows(function, step.cells, numbers, (ctypes.addressof(step),))


def _step(gates: Tensor, c_children: Tensor, bias: Tensor, c: Tensor) -> Step:
    count, num_children, width = c_children.shape
    return Step(
        cells=count,
        forgets=num_children,
        children=num_children,
        width=width,
        gates=gates.data_ptr(),
        gates_stride=gates.shape[1],
        bias=bias.data_ptr(),
        bias_stride=_stride(bias),
        c_children=c_children.data_ptr(),
        c=c.data_ptr(),
    )


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
    return kernel(name, gates.dtype)


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
