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
"""A linear layer's call of so many rows has a product of its own: to concatenate calls of 256 to 2,048 rows was
measured to make a training step of layers of 128 to 512 features up to 20% slower on a CPU."""


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


Kept = dict[int, list[tuple[Tensor, Tensor]]]
"""The inputs and the outputs' gradients of a layer's calls, by backward pass: there may be one within another, or one
for the inputs' gradients alone."""


def _concatenated(calls: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and gradients, those of one shape concatenated."""
    alike: dict[torch.Size | int, list[tuple[Tensor, Tensor]]] = {}
    for number, (input, gradient) in enumerate(calls):
        is_large = input.dim() == 2 and len(input) >= ROWS_OF_THEIR_OWN
        alike.setdefault(number if is_large else input.shape[1:], []).append((input, gradient))
    return [some[0] if len(some) == 1 else tuple(map(torch.cat, zip(*some, strict=True))) for some in alike.values()]


class DeferredWeightGrads(TorchFunctionMode):
    """While it is active, 2-D convolutions and linear layers leave their weights' gradients to the last of their calls
    in the backward pass. Their outputs, and the gradients of their inputs, are computed as usual.

    Use one object for each step. Until the end, the input and the output's gradient of every call are kept, and then
    concatenated: this takes memory. Gradients cannot be differentiated again, and activation checkpointing inside,
    which calls layers again in the backward pass, raises an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[tuple, tuple[Tensor, Tensor | None, Kept]] = {}
        self._originals: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in ARGUMENTS or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        input, weight, bias, options = ARGUMENTS[func](*args, **kwargs)
        # Inside `torch.vmap` weights have their ordinary gradients.
        is_mapped = any(map(torch._C._functorch.is_batchedtensor, (input, weight)))
        if options is None or input.dim() < weight.dim() or not weight.requires_grad or is_mapped:
            return func(*args, **kwargs)
        return self._deferred(_Layer(func, options), input, weight, bias)

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
            kept: Kept = {}
            self._shared[key] = (*_Weights.apply(*cast, layer, kept), kept)
        return _Call.apply(input, *self._shared[key], layer)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple:
    return input, weight, bias, ()


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple = 1,
    padding: int | str | tuple = 0,
    dilation: int | tuple = 1,
    groups: int = 1,
) -> tuple:
    sides = [(each, each) if isinstance(each, int) else (each[0], each[-1]) for each in (stride, padding, dilation)]
    return input, weight, bias, None if isinstance(padding, str) else (*sides, groups)


ARGUMENTS = {functional.linear: _linear, functional.conv2d: _conv2d}
"""By function, what maps its arguments to input, weight, bias and a layer's options, None where these are others."""


class _Weights(Function):
    """Return weight and bias unchanged; the backward pass, which runs after all calls', returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, layer: _Layer, kept: Kept
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
        for input, gradient in _concatenated(ctx.kept.pop(torch._C._current_graph_task_id(), ())):
            found = ctx.layer.backward(gradient, input, weight, (False, True, ctx.has_bias))[1:]
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
        return *sums, None, None


class _Call(Function):
    """Run the layer on one input; the backward pass returns the input's gradient, and keeps what the weight's needs."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, kept: Kept, layer: _Layer) -> Tensor:
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
        ctx.kept.setdefault(torch._C._current_graph_task_id(), []).append((input, gradient))
        is_needed = ctx.needs_input_grad[0]
        of_input = ctx.layer.backward(gradient, input, weight, (True, False, False))[0] if is_needed else None
        return of_input, None, None, None, None
