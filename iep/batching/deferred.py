"""Weight gradients of layers that are called many times, computed once for each weight over all of its calls.

If a module runs in twenty calls of a step, autograd computes the gradients of its weights twenty times and sums them.
Here each call of a layer keeps its input and the gradient of its output. When the backward pass has reached all calls,
one product over the concatenation gives the weight's gradient (Qiao & Taura, An Efficient Operation Auto-batching
Strategy, section 3). This covers 2-D convolutions and linear layers in any module; other parameters have their
ordinary gradients.

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
"""The number of rows from which a call of a linear layer has a product of its own. Concatenating calls of 256 to 2,048
rows was measured to make a training step of layers of 128 to 512 features up to 20% slower on a CPU."""


class _Layer(NamedTuple):
    """`torch.nn.functional.linear` without options, or `conv2d` with stride, padding, dilation and groups."""

    function: Callable[..., Tensor]
    options: tuple = ()

    def backward(
        self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of input, weight and bias, None for those that are not `wanted`."""
        if self.function is functional.conv2d:
            stride, padding, dilation, groups = self.options
            more = ([len(weight)], stride, padding, dilation, False, (0, 0), groups, wanted)
            return torch.ops.aten.convolution_backward(gradient, input, weight, *more)
        of_input = gradient @ weight if wanted[0] else None
        if not wanted[1]:
            return of_input, None, None
        gradient, input = gradient.flatten(0, -2), input.flatten(0, -2)
        # The gradient has the memory order of the weight, as autograd would copy a gradient in another order.
        of_weight = (input.T @ gradient).T if weight.stride(0) == 1 else gradient.T @ input
        return of_input, of_weight, gradient.sum(0) if wanted[2] else None


Kept = dict[int, list[tuple[Tensor, Tensor]]]
"""The inputs and the output gradients of a layer's calls, by backward pass. One pass may run within another, and a pass
may be for the gradients of the inputs only."""


def _concatenated(calls: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and gradients, in which those of the same shape are concatenated."""
    alike: dict[torch.Size | int, list[tuple[Tensor, Tensor]]] = {}
    for number, (input, gradient) in enumerate(calls):
        is_large = input.dim() == 2 and len(input) >= ROWS_OF_THEIR_OWN
        alike.setdefault(number if is_large else input.shape[1:], []).append((input, gradient))
    return [some[0] if len(some) == 1 else tuple(map(torch.cat, zip(*some, strict=True))) for some in alike.values()]


class DeferredWeightGrads(TorchFunctionMode):
    """A mode in which 2-D convolutions and linear layers compute each weight's gradient once in the backward pass.

    Use one object for each step. The input and the output gradient of every call are kept until the last call and then
    concatenated, which takes memory. Gradients cannot be differentiated again. Activation checkpointing inside, which
    calls layers again in the backward pass, raises an error.
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
"""By function, a parser of its arguments into input, weight, bias and options; it returns None for other options."""


class _Weights(Function):
    """Return weight and bias unchanged. The backward pass runs after that of all calls and returns their gradients."""

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
    """Run the layer on one input. The backward pass returns the input's gradient and keeps data for the weight's."""

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
