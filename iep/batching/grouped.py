"""Rows sorted by function -> the product of each row with the weight of its function, in one call for a family.

The functions of a family have the same architecture and differ only in their weights. Once rows are sorted by function,
a linear layer of the whole family is either PyTorch's grouped matrix product or a loop with one product for each
function that has rows. This file computes the products; it does not choose which rows belong to which function.

Shapes: E functions, R rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from iep.batching.schedulers import Segment

LINEAR_EXECUTIONS = ("auto", "grouped", "loop")


def run_segments(
    modules: Mapping[int, Callable[..., Tensor | tuple[Tensor, ...]]], segments: Sequence[Segment], *arguments: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """Run the module of each segment on its rows, and return their results, concatenated.

    Args:
        modules: by op, a callable that maps (G, ...) rows of the arguments to one or several tensors (G, ...).
        segments: consecutive segments that cover all rows.
        arguments: (R, ...) each, sorted by function.
    """
    sizes = [segment.rows.stop - segment.rows.start for segment in segments]
    parts = zip(*(argument.split(sizes) for argument in arguments), strict=True)
    results = [modules[segment.op](*part) for segment, part in zip(segments, parts, strict=True)]
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(map(torch.cat, zip(*results, strict=True)))


def grouped_linear(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor, execution: str = "auto") -> Tensor:
    """Return the products of each row of `x_RI` and the (I, O) weight of its function, (R, O).

    The gradient of `weight_EIO` is zero for functions without rows.

    Args:
        x_RI: rows sorted by function; function 0 has the first rows.
        ends_E: int32, the end of the rows of each function, on the device of the rows.
        execution: `grouped` for PyTorch's grouped matrix product, `loop` for one product for each function that has
            rows, or `auto` for `grouped` if `grouped_refusal` returns None, and `loop` otherwise.

    Raises:
        ValueError: `execution` has another value, or it is `grouped` and PyTorch has no such product here.
    """
    if execution not in LINEAR_EXECUTIONS:
        raise ValueError(f"execution {execution!r}, expected one of {', '.join(LINEAR_EXECUTIONS)}")
    refusal = None
    if execution != "loop":
        refusal = grouped_refusal(x_RI.device, x_RI.dtype, weight_EIO.shape[1:])
    if execution == "grouped" and refusal is not None:
        raise ValueError(f"execution 'grouped' is not available: {refusal}")
    if execution != "loop" and refusal is None and len(x_RI):
        return (_Grouped.apply if torch.is_grad_enabled() else product)(x_RI, weight_EIO, ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(x_RI.split(sizes), weight_EIO.unbind(0), sizes, strict=True)
    return torch.cat([x_GI @ weight_IO for x_GI, weight_IO, size in parts if size] or [x_RI @ weight_EIO[0]])


@cache
def grouped_refusal(device: torch.device, dtype: torch.dtype, widths: Sequence[int] = ()) -> str | None:
    """Return the reason why PyTorch has no grouped matrix product for this device, dtype and row widths, or None.

    On a CPU, where the grouped product is a loop in C++, it was measured to be 1.0 to 1.6 times as fast as the loop
    here. It needs rows whose size is a multiple of 16 bytes. The answer is cached, so that it comes from a trial with
    real tensors even if modes such as `FakeTensorMode` are active later.

    Raises:
        torch.OutOfMemoryError: there is not enough memory for the trial.
    """
    for width in widths:
        if width * dtype.itemsize % 16:
            return f"rows of {width} numbers ({dtype}) are {width * dtype.itemsize} bytes, expected a multiple of 16"
    wide = 16 // dtype.itemsize
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            rows = torch.zeros(3, wide, dtype=dtype, device=device)
            weights = torch.zeros(2, wide, wide, dtype=dtype, device=device)
            ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
            # The products of a layer, of its input gradient and of its weight gradient.
            for left, right in ((rows, weights), (rows, weights.mT), (rows.T, rows)):
                product(left, right, ends)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, RuntimeError) as error:
        return f"torch {torch.__version__} on {device}, {dtype}: {str(error).splitlines()[0][:200]}"
    return None


def product(left: Tensor, right: Tensor, ends_E: Tensor) -> Tensor:
    """Call PyTorch's grouped matrix product by the name that it has in this release."""
    public = getattr(functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(left, right, offs=ends_E)


def weight_product(x_RI: Tensor, gradient_RO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the sum of outer products of each function's rows, (E, I, O), which is zero for functions without rows."""
    found_EIO = product(x_RI.T, gradient_RO, ends_E)
    if not x_RI.is_cpu:  # some GPUs' kernels leave them unwritten
        is_empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        found_EIO.masked_fill_(is_empty_E[:, None, None], 0)
    return found_EIO


def is_one_kernel(x: Tensor, widths: Sequence[int]) -> bool:
    """Return whether PyTorch's grouped product of rows like those of `x` exists and does not wait for the GPU.

    On a GPU, PyTorch 2.9 to 2.15 compute it in one kernel for bfloat16 on compute capability 9.0 and 10.0. Otherwise
    they copy the ends of the functions' rows to the CPU and run a product for each function.
    """
    fast = x.is_cpu or (x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10))
    return fast and grouped_refusal(x.device, x.dtype, tuple(widths)) is None


class _Grouped(Function):
    """The grouped matrix product with its gradients."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EIO, ends_E)
        return product(x_RI, weight_EIO, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, weight_EIO, ends_E = ctx.saved_tensors
        gradient_RO = gradient_RO.contiguous()
        of_x = product(gradient_RO, weight_EIO.mT, ends_E) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_x, None, None
        of_weight = weight_product(x_RI, gradient_RO, ends_E)
        return of_x, of_weight, None
