"""Weight gradients of layers that are called many times -> computed once for each weight, over all its calls.

A module that runs in twenty calls of a step would have its weights' gradients computed twenty times and summed. Here
each call of a layer keeps its input and the gradient of its output; when the backward pass has reached all of them,
one product over the concatenation gives the weight's gradient (Qiao & Taura, An Efficient Operation Auto-batching
Strategy, section 3). Covers 2-D convolutions and linear layers, in whatever module they are; other parameters have
their ordinary gradients.

Shapes: G rows of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROWS_OF_THEIR_OWN = 256
"""A linear layer's call of so many rows has a product of its own: what one product for all calls would save would be
spent on concatenating."""


class _Layer(NamedTuple):
    """`torch.nn.functional.linear` without options, or `conv2d` with stride, padding, dilation and groups."""

    function: Callable[..., Tensor]
    options: tuple = ()

    def backward(
        self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return those of the gradients of input, weight and bias that are `wanted`."""
        if self.function is functional.conv2d:
            stride, padding, dilation, groups = self.options
            more = ([len(weight)], stride, padding, dilation, False, (0, 0), groups, wanted)
            return torch.ops.aten.convolution_backward(gradient, input, weight, *more)
        of_input = gradient @ weight if wanted[0] else None
        if not wanted[1]:
            return of_input, None, None
        gradient, input = gradient.flatten(0, -2), input.flatten(0, -2)
        # In the order of the weight's memory: autograd would copy a gradient that is in another.
        of_weight = (input.T @ gradient).T if weight.stride(0) == 1 else gradient.T @ input
        return of_input, of_weight, gradient.sum(0) if wanted[2] else None


class _Kept:
    """What the calls of a layer leave in the backward pass: their inputs and their outputs' gradients."""

    def __init__(self) -> None:
        self.calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """Of each backward pass: there may be one within another, or one for the inputs' gradients alone."""

    def add(self, input: Tensor, gradient: Tensor) -> None:
        """Keep a call of this backward pass."""
        self.calls.setdefault(torch._C._current_graph_task_id(), []).append((input, gradient))

    def concatenated(self) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and gradients of this backward pass, those of one shape concatenated, and forget its calls."""
        found: list[tuple[Tensor, Tensor]] = []
        by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for input, gradient in self.calls.pop(torch._C._current_graph_task_id(), ()):
            if input.dim() == 2 and len(input) >= ROWS_OF_THEIR_OWN:
                found.append((input, gradient))
            else:
                by_shape.setdefault(input.shape[1:], []).append((input, gradient))
        for calls in by_shape.values():
            inputs, gradients = zip(*calls, strict=True)
            found.append((torch.cat(inputs), torch.cat(gradients)) if len(calls) > 1 else calls[0])
        return found


class DeferredWeightGrads(TorchFunctionMode):
    """While it is active, 2-D convolutions and linear layers leave their weights' gradients to the last of their calls
    in the backward pass. Their outputs, and the gradients of their inputs, are computed as usual.

    Use one object for each step. Until the end, the input and the output's gradient of every call are kept, and then
    concatenated: this takes memory. Gradients cannot be differentiated again, and activation checkpointing inside,
    which calls layers again in the backward pass, raises an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[tuple, tuple[Tensor, Tensor | None, _Kept]] = {}
        self._originals: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is functional.conv2d:
            return self._conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.dim() < 2 or not self._defers(input, weight):
            return functional.linear(input, weight, bias)
        return self._deferred(_Layer(functional.linear), input, weight, bias)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: int | tuple = 1,
        padding: int | str | tuple = 0,
        dilation: int | tuple = 1,
        groups: int = 1,
    ) -> Tensor:
        if isinstance(padding, str) or input.dim() != 4 or not self._defers(input, weight):
            return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
        layer = _Layer(functional.conv2d, (_pair(stride), _pair(padding), _pair(dilation), groups))
        return self._deferred(layer, input, weight, bias)

    def _defers(self, input: Tensor, weight: Tensor) -> bool:
        """Return whether there is a gradient to defer; inside `torch.vmap` weights have their ordinary gradients."""
        is_batched = torch._C._functorch.is_batchedtensor
        return torch.is_grad_enabled() and weight.requires_grad and not (is_batched(input) or is_batched(weight))

    def _deferred(self, layer: _Layer, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(device))
        key = (id(weight), id(bias), layer, input.dtype)
        if key not in self._shared:
            self._originals.append((weight, bias))  # kept alive, so that no other tensor gets the same id
            cast = weight, bias
            if torch.is_autocast_enabled(device):
                cast = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
            kept = _Kept()
            self._shared[key] = (*_Weights.apply(*cast, layer, kept), kept)
        return _Call.apply(input, *self._shared[key], layer)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class _Weights(Function):
    """Weight and bias unchanged; in the backward pass, which comes here after all calls, their gradients."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, layer: _Layer, kept: _Kept
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(weight)
        ctx.layer, ctx.kept, ctx.has_bias = layer, kept, bias is not None
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        sums: list[Tensor | None] = [None, None]
        for input, gradient in ctx.kept.concatenated():
            found = ctx.layer.backward(gradient, input, weight, (False, True, ctx.has_bias))[1:]
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
        return *sums, None, None


class _Call(Function):
    """The layer on one input; in the backward pass its input's gradient, and what its weight's needs is kept."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, kept: _Kept, layer: _Layer) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.kept = layer, kept
        ctx.set_materialize_grads(False)
        return layer.function(input, weight, bias, *layer.options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        input, weight = ctx.saved_tensors
        ctx.kept.add(input, gradient)
        is_needed = ctx.needs_input_grad[0]
        of_input = ctx.layer.backward(gradient, input, weight, (True, False, False))[0] if is_needed else None
        return of_input, None, None, None, None
