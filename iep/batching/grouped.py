"""Rows sorted by function -> each row times the weight of its function: one call for many functions of a family.

The functions of a family have the same architecture and differ only in their weights. Once rows are sorted by function,
a linear layer of the whole family is either PyTorch's grouped matrix product or a loop with one product for each
function that has rows. This file computes the products; it does not choose which rows belong to which function.

Shapes: E functions, R rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from iep.batching.schedulers import Segment

EXECUTIONS = ("auto", "grouped", "loop")


def run_segments(
    modules: Mapping[int, Callable[..., Tensor | tuple[Tensor, ...]]], segments: Sequence[Segment], *arguments: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """Run the module of each segment on its rows, and return their results side by side.

    Args:
        modules: by op, what maps the (G, ...) rows of the arguments to one tensor (G, ...) or several.
        segments: segments that follow each other, of all rows.
        arguments: (R, ...) each, sorted by function.
    """
    sizes = [segment.rows.stop - segment.rows.start for segment in segments]
    parts = zip(*(argument.split(sizes) for argument in arguments), strict=True)
    results = [modules[segment.op](*part) for segment, part in zip(segments, parts, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(map(torch.cat, zip(*results, strict=True)))


class Segments:
    """The segments of R rows that are sorted by function: function 0 has the first rows, and so on.

    Attributes:
        ends_E: int32 (E,), where the rows of each function end, on the device of the rows.
    """

    def __init__(self, ends_E: Tensor):
        self.ends_E = ends_E

    @classmethod
    def of(cls, segments: Sequence[Segment], ops: Sequence[int]) -> "Segments":
        """Return those of a family's call, on the CPU.

        Args:
            segments: in the order of `ops`.
            ops: the op of each of the E functions.
        """
        sizes = dict.fromkeys(ops, 0) | {segment.op: segment.rows.stop - segment.rows.start for segment in segments}
        return cls(torch.tensor(list(sizes.values())).cumsum(0).to(torch.int32))

    @cached_property
    def sizes(self) -> list[int]:
        """The number of rows of each function. Reading it waits for the device of `ends_E`."""
        ends = self.ends_E.tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def grouped_linear(x_RI: Tensor, weight_EIO: Tensor, segments: Segments, execution: str = "auto") -> Tensor:
    """Return (R, O): each row of `x_RI` times the (I, O) weight of its function.

    The gradient of `weight_EIO` is zero for functions without rows. Gradients cannot be differentiated again.

    Args:
        segments: the rows of each function, on the device of `x_RI`.
        execution: `grouped` for PyTorch's grouped matrix product, `loop` for one product for each function that has
            rows, or `auto` for `grouped` where `grouped_refusal` returns None, else `loop`.

    Raises:
        ValueError: `execution` has another value, or it is `grouped` and PyTorch has no such product here.
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution {execution!r}, expected one of {', '.join(EXECUTIONS)}")
    refusal = None
    if execution != "loop":
        refusal = grouped_refusal(x_RI.device, x_RI.dtype, weight_EIO.shape[1:])
    if execution == "grouped" and refusal is not None:
        raise ValueError(f"execution 'grouped' is not available: {refusal}")
    product = _Loop if execution == "loop" or refusal is not None else _Grouped
    if torch.is_grad_enabled():
        return product.apply(x_RI, weight_EIO, segments)
    return product.rows(x_RI, weight_EIO, segments)


@cache
def grouped_refusal(device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
    """Return why PyTorch has no grouped matrix product for this device, dtype and these widths of rows, or None.

    On a CPU, where the grouped product is a loop in C++, it was measured to be 1.0 to 1.6 times as fast as the loop
    here. It needs rows whose size is a multiple of 16 bytes.
    """
    for width in widths:
        if width * dtype.itemsize % 16:
            return f"rows of {width} numbers ({dtype}) are {width * dtype.itemsize} bytes, expected a multiple of 16"
    wide = 16 // dtype.itemsize
    rows = torch.zeros(3, wide, dtype=dtype, device=device)
    weights = torch.zeros(2, wide, wide, dtype=dtype, device=device)
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    try:  # the three products that a layer and its gradients need
        for left, right in ((rows, weights), (rows, weights.mT), (rows.T, rows)):
            _grouped_mm(left, right, ends)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} on {device}, {dtype}: {str(error).splitlines()[0]}"
    return None


def _grouped_mm(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Call PyTorch's grouped matrix product by the name that it has in this release."""
    public = getattr(functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(left, right, offs=ends_E)


class _Grouped(Function):
    """The grouped matrix product, for gradients that are not contiguous and functions without rows, too."""

    @staticmethod
    def rows(x_RI: Tensor, weight_EIO: Tensor, segments: Segments) -> Tensor:
        return _grouped_mm(x_RI.contiguous(), weight_EIO, segments.ends_E)

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO)
        ctx.segments = segments
        return _Grouped.rows(x_RI, weight_EIO, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_EIO = ctx.saved_tensors
        segments, gradient_RO = ctx.segments, gradient_RO.contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _grouped_mm(gradient_RO, weight_EIO.mT, segments.ends_E)
        if ctx.needs_input_grad[1]:
            of_weight = _grouped_mm(x_RI.contiguous().T, gradient_RO, segments.ends_E)
            if not x_RI.is_cpu:  # Some GPUs' kernels do not write the gradients of functions without rows.
                ends_E = segments.ends_E
                of_weight.masked_fill_((ends_E.diff(prepend=ends_E.new_zeros(1)) == 0)[:, None, None], 0)
        return of_x, of_weight, None


class _Loop(Function):
    """One product for each function that has rows, written into a slice of the result."""

    @staticmethod
    def rows(x_RI: Tensor, weight_EIO: Tensor, segments: Segments) -> Tensor:
        result_RO = x_RI.new_empty(len(x_RI), weight_EIO.shape[2])
        for x_GI, weight_IO, result_GO in _parts(segments, x_RI, weight_EIO, result_RO):
            torch.mm(x_GI, weight_IO, out=result_GO)
        return result_RO

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, segments: Segments) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO)
        ctx.segments = segments
        return _Loop.rows(x_RI, weight_EIO, segments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_EIO = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x_RI)
            for gradient_GO, weight_IO, of_x_GI in _parts(ctx.segments, gradient_RO, weight_EIO, of_x):
                torch.mm(gradient_GO, weight_IO.T, out=of_x_GI)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty_like(weight_EIO)
            for function, size in enumerate(ctx.segments.sizes):
                if not size:
                    of_weight[function].zero_()
            for x_GI, of_weight_IO, gradient_GO in _parts(ctx.segments, x_RI, of_weight, gradient_RO):
                torch.mm(x_GI.T, gradient_GO, out=of_weight_IO)
        return of_x, of_weight, None


def _parts(segments: Segments, left_RX: Tensor, weight_EIO: Tensor, right_RY: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the rows of both tensors, and between them the weight, of each function that has rows."""
    sizes = segments.sizes
    parts = zip(sizes, left_RX.split(sizes), weight_EIO.unbind(0), right_RY.split(sizes), strict=True)
    return [part for size, *part in parts if size]
