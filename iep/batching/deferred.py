"""Weight gradients of layers that are called many times -> computed once per weight, over all calls together.

A module that runs in twenty groups of a step would have its weights' gradients computed twenty times and added up;
here each call keeps its input and the gradient of its output, and the last to come back computes them all at once
(Qiao & Taura, An Efficient Operation Auto-batching Strategy, section 3). Covers convolutions and linear layers, in
whatever module they are; other parameters have their ordinary gradients.

Shapes: G rows of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

functorch = torch._C._functorch
is_batched = functorch.is_batchedtensor


def on_rows(function: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """Inside `torch.vmap`, call `function`, which maps (G, ...) rows to rows, on the rows of a batched tensor."""
    level, axis = functorch.maybe_get_level(input), functorch.maybe_get_bdim(input)
    with temporarily_pop_interpreter_stack():
        rows = function(functorch.get_unwrapped(input).movedim(axis, 0))
    return functorch._add_batch_dim(rows, 0, level)


class DeferredWeightGrads(TorchFunctionMode):
    """While it is on, 2-D convolutions and linear layers leave their weights' gradients to be computed once, by the
    last of their calls on the way back. Their values, and the gradients of their inputs, are computed as ever.

    Use one for each step: the gradients of the calls of one object are computed together. Until then every call's input
    and its output's gradient are kept, and then they are copied side by side: it costs memory. Gradients cannot be
    differentiated again, and activation checkpointing within, which calls layers anew on the way back, fails.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[tuple, _Shared] = {}
        self._named: list[tuple[Tensor, Tensor | None]] = []

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is functional.conv2d:
            return self._conv2d(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if is_batched(input) and not is_batched(weight) and not (bias is not None and is_batched(bias)):
            return on_rows(lambda rows: self._linear(rows, weight, bias), input)
        if not (torch.is_grad_enabled() and weight.requires_grad) or input.dim() < 2 or is_batched(weight):
            return functional.linear(input, weight, bias)
        return self._deferred(_Linear(), input, weight, bias)

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
        needed = torch.is_grad_enabled() and weight.requires_grad
        if not needed or isinstance(padding, str) or input.dim() != 4 or is_batched(input):
            return functional.conv2d(input, weight, bias, stride, padding, dilation, groups)
        return self._deferred(_Conv2d(_pair(stride), _pair(padding), _pair(dilation), groups), input, weight, bias)

    def _deferred(self, layer: "_Linear | _Conv2d", input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(device))
        key = (id(weight), id(bias), layer, input.dtype)
        if key not in self._weights:
            self._named.append((weight, bias))  # so that no other tensor gets the id of one that is gone
            self._weights[key] = _share(layer, weight.to(input.dtype), None if bias is None else bias.to(input.dtype))
        weight, bias, calls = self._weights[key]
        return _Call.apply(input, weight, bias, layer, calls)


class _Linear(NamedTuple):
    """y = x W^T + b over the last axis."""

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(input, weight, bias)

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradients(
        self, gradient: Tensor, input: Tensor, weight: Tensor, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        gradient, input = gradient.flatten(0, -2), input.flatten(0, -2)
        # As the weight lies in memory: autograd would copy a gradient that lies otherwise.
        found = (input.T @ gradient).T if weight.stride(0) == 1 else gradient.T @ input
        return found, gradient.sum(0) if has_bias else None


class _Conv2d(NamedTuple):
    """2-D convolution; pairs as in `torch.nn.functional.conv2d`."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.conv2d(input, weight, bias, *self)

    def input_gradient(self, gradient: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return self._backward(gradient, input, weight, (True, False, False))[0]

    def weight_gradients(
        self, gradient: Tensor, input: Tensor, weight: Tensor, has_bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        return self._backward(gradient, input, weight, (False, True, has_bias))[1:]

    def _backward(self, gradient: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Any:
        return torch.ops.aten.convolution_backward(
            gradient,
            input,
            weight,
            [len(weight)],
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            self.groups,
            wanted,
        )


ROWS_OF_THEIR_OWN = 256
"""A call of a linear layer with so many rows has a product of its own."""

Calls = list[tuple[int, Tensor, Tensor]]
"""What the calls of a layer leave on the way back: which way back it was, their input and their output's gradient."""


class _Shared(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    calls: Calls


def _share(layer: _Linear | _Conv2d, weight: Tensor, bias: Tensor | None) -> _Shared:
    """What all calls take in the weight's and bias's place: its gradient is asked for when all of them are back."""
    calls: Calls = []
    return _Shared(*_Weights.apply(weight, bias, layer, calls), calls)


class _Weights(Function):
    """Weight and bias as they are; on the way back, their gradients over all calls."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, layer: _Linear | _Conv2d, calls: Calls
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(weight)
        ctx.layer, ctx.calls = layer, calls
        ctx.has_bias = bias is not None
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if not ctx.calls:
            return None, None, None, None
        sums: list[Tensor | None] = [None, None]
        for inputs, gradients in _put_together(ctx.calls):
            found = ctx.layer.weight_gradients(gradients, inputs, weight, ctx.has_bias)
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
        return *sums, None, None


def _put_together(calls: Calls) -> list[tuple[Tensor, Tensor]]:
    """Inputs and gradients of the calls, those of one shape side by side; large ones by themselves, as what one product
    for all would save would be spent on the copy. `calls` is empty then: what is not needed any more is gone."""
    together: list[tuple[Tensor, Tensor]] = []
    by_shape: dict[torch.Size, Calls] = {}
    for call in calls:
        _, input, gradient = call
        if input.shape[:-1].numel() >= ROWS_OF_THEIR_OWN and input.dim() == 2:
            together.append((input, gradient))
        else:
            by_shape.setdefault(input.shape[1:], []).append(call)
    calls.clear()
    for alike in by_shape.values():
        _, inputs, gradients = zip(*alike, strict=True)
        together.append((torch.cat(inputs), torch.cat(gradients)) if len(alike) > 1 else (inputs[0], gradients[0]))
    return together


class _Call(Function):
    """The layer on one input; on the way back, its input's gradient, and what its weight's needs put aside."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: _Linear | _Conv2d, calls: Calls
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.calls = layer, calls
        ctx.set_materialize_grads(False)
        return layer.forward(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return None, None, None, None, None
        input, weight = ctx.saved_tensors
        put_aside(ctx.calls, input, gradient)
        needed = ctx.needs_input_grad[0]
        return ctx.layer.input_gradient(gradient, input, weight) if needed else None, None, None, None, None


def put_aside(calls: Calls, input: Tensor, gradient: Tensor) -> None:
    """On the way back: keep a call's input and its output's gradient until its weight's is computed."""
    way_back = torch._C._current_graph_task_id()
    if calls and calls[-1][0] != way_back:
        calls.clear()  # left by one that was for the inputs' gradients alone and never reached the weights
    calls.append((way_back, input, gradient))


def linear_gradients(gradient: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple:
    """A linear layer's gradients of weight and bias, None without a bias, from one call's."""
    return _Linear().weight_gradients(gradient, input, weight, bias is not None)


def share_linear(weight: Tensor, bias: Tensor | None) -> "_Shared":
    """What the calls of a linear layer take in place of its weight and bias, and where each puts its own aside."""
    return _share(_Linear(), weight, bias)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
