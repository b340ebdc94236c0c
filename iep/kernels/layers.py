"""Layers that a run of a plan may compute in its own way: the seam for deferred weight gradients and for kernels.

`Conv2d` and `Linear` are those of `torch.nn`, with the same parameters and results, but they ask the function of the
innermost `computed_by` block for the result, if there is one. `deferred.py` and `fused.py` provide such functions.
Other layers always compute in PyTorch's way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

Compute = Callable[..., Tensor]
"""A function that is called as `compute(function, input, weight, bias, *options)` and returns what
`function(input, weight, bias, *options)` returns, where `function` is `torch.nn.functional.conv2d` with the options
stride, padding, dilation and groups, or `linear` without options."""
_compute: ContextVar[Compute | None] = ContextVar("compute", default=None)


@contextmanager
def computed_by(compute: Compute | None) -> Iterator[None]:
    """Let a function compute the results of this file's layers in the block and thread.

    None uses PyTorch's own functions.
    """
    before = _compute.set(compute)
    try:
        yield
    finally:
        _compute.reset(before)


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the input and weights of a layer, or None if it converts nothing."""
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `torch.nn.functional.linear` returns."""
    compute = _compute.get()
    if compute is None:
        return functional.linear(input, weight, bias)
    return compute(functional.linear, input, weight, bias)


class Linear(nn.Linear):
    """A linear layer of a module that is called with the rows of many nodes."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (*, out_features), given (*, in_features)."""
        return linear(input, self.weight, self.bias)


class Conv2d(nn.Conv2d):
    """A convolution of a module that is called with the rows of many nodes."""

    bias: Any
    """A parameter, or None for a convolution without bias."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (G, out_channels, H, W), given (G, in_channels, H, W)."""
        compute = _compute.get()
        is_plain = self.padding_mode == "zeros" and not isinstance(self.padding, str)
        if compute is None or not is_plain:
            return super().forward(input)
        options = self.stride, self.padding, self.dilation, self.groups
        return compute(functional.conv2d, input, self.weight, self.bias, *options)


class ConvStep(NamedTuple):
    """A convolution and a ReLU, one of several that compute the result of a module.

    Values are numbered: first the module's arguments, then the results of its steps.
    """

    conv: str
    """The name of the convolution in the module."""
    reads: tuple[int, ...]
    """The value that is read, or the two that are concatenated."""
    residual: int | None = None
    """The value that is added before the ReLU."""
