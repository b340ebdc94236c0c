"""Weight gradients of layers that are called many times, computed once for each weight over all of its calls.

If a module runs in twenty calls of a step, autograd computes the gradients of its weights twenty times and sums them.
Here each call of a layer keeps its input and the gradient of its output. When the backward pass has reached all calls,
one product over the concatenation gives the weight's gradient (Qiao & Taura, An Efficient Operation Auto-batching
Strategy, section 3). This covers the layers of `layers.py`; other parameters have their ordinary gradients. The
convolutions of `fused.py` use the same chain of calls.

Shapes: G rows of a call.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from iep.batching.execute import CallContext
from iep.kernels.layers import autocast_dtype, computed_by

ROWS_OF_THEIR_OWN = 256
"""The number of rows from which a call of a linear layer has a product of its own. Concatenating calls of 256 to 2,048
rows was measured to make a training step of layers of 128 to 512 features up to 20% slower on a CPU."""
_numbers = count()


def weight_grad_context(deferred: bool) -> CallContext:
    """Return the `call_context` of one run of `execute`.

    Args:
        deferred: compute the gradient of each weight once, over all calls; see `DeferredWeightGrads`.
    """
    return partial(computed_by, DeferredWeightGrads()) if deferred else nullcontext


class KeptCall(NamedTuple):
    """The tensors of one call of a layer from which the gradients of the layer's parameters are computed."""

    x: Tensor
    """The input."""
    gradient: Tensor
    """The gradient of the output."""
    options: tuple
    """Further arguments of the layer's `compute`."""


class Chains:
    """The layers of a step, whose calls are chains: each reads the token that the previous one returns.

    A layer, such as `_Plain` and `fused.Bank`, has `parameters` and `kept`: what its calls keep for their gradients, by
    the number of the backward pass. One pass may run within another, and a pass may be for the inputs only. A layer
    must not refer to tokens, whose graph refers to it: a cycle of references would keep a step's memory.
    """

    def __init__(self) -> None:
        self._chains: dict[Hashable, tuple[Any, Tensor]] = {}
        """By key, each layer and the token of its last call."""

    def run(self, key: Hashable, make: Callable[[], Any], x: Tensor, *options: Any) -> Tensor:
        """Return the result of the layer that has a key, which `make` returns at its first call."""
        if key in self._chains:
            layer, token = self._chains[key]
        else:
            layer = make()
            token = first_token(layer)
        result, token = _Call.apply(x, token, layer, *options)
        self._chains[key] = layer, token
        return result


def first_token(layer: Any) -> Tensor:
    """Return the token that the first call of a layer reads."""
    return _Begin.apply(layer, *layer.parameters)


def token_of_pass(of_token: Tensor | None) -> Tensor:
    """Return the number of the running backward pass, which is the gradient of a token.

    The calls of a layer are chained by tokens, so that their backward passes run in the reverse order. The first one
    that runs receives no gradient and draws a new number, which the others inherit.
    """
    if of_token is None:
        return torch.tensor(next(_numbers), dtype=torch.float64)
    return of_token


class _Begin(Function):
    """Return the first token of a chain. The backward pass, after that of all calls, returns gradients."""

    @staticmethod
    def forward(ctx: Any, layer: Any, *parameters: Tensor | None) -> Tensor:
        ctx.save_for_backward(*parameters)  # autograd detects changes of the parameters
        ctx.layer = layer
        return torch.zeros((), dtype=torch.float64)  # on the CPU, where its gradient can be read without a wait

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_token: Tensor) -> tuple[Tensor | None, ...]:
        parameters = ctx.saved_tensors
        kept = ctx.layer.kept.pop(of_token.item(), None)
        if kept is None:
            return None, *[None] * len(parameters)
        return None, *ctx.layer.of_parameters(kept)


class _Call(Function):
    """Run a layer on one input. The backward pass returns the input's gradient and keeps data for the parameters'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, layer: Any, *options: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, layer.parameters[0])  # autograd detects changes of the weight
        ctx.layer = layer
        ctx.options = options
        ctx.set_materialize_grads(False)
        return layer.compute(x, *options), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_token: Tensor | None) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        layer, options = ctx.layer, ctx.options
        of_token = token_of_pass(of_token)
        of_x = None
        if gradient is not None and layer.is_trained:
            of_pass = layer.kept.setdefault(of_token.item(), [])
            of_pass.append(KeptCall(x, gradient, options))
        if gradient is not None and ctx.needs_input_grad[0]:
            of_x = layer.of_input(gradient, x, *options)
        return of_x, of_token, None, *[None] * len(options)


class DeferredWeightGrads:
    """A function for `layers.computed_by`, with which each weight's gradient is computed once in the backward pass.

    Use one object for each step. The input and the output gradient of every call are kept until the last call and then
    concatenated, which takes memory. Gradients cannot be differentiated again. Activation checkpointing inside, which
    calls layers again in the backward pass, raises an error, and so does `torch.vmap` around a layer, unless it is in a
    block `computed_by(None)`.
    """

    def __init__(self) -> None:
        self._chains = Chains()

    def __call__(
        self,
        function: Callable[..., Tensor],
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *options: Any,
    ) -> Tensor:
        """Return the result of a layer."""
        has_rows = input.dim() >= weight.dim()
        if not (torch.is_grad_enabled() and weight.requires_grad and has_rows):
            return function(input, weight, bias, *options)
        dtype = autocast_dtype(input)
        key = (weight, bias, options, dtype or input.dtype)

        def cast(tensor: Any) -> Any:
            return tensor if tensor is None or dtype is None else tensor.to(dtype)

        def make() -> _Plain:
            return _Plain(function, cast(weight), cast(bias), options)

        return self._chains.run(key, make, cast(input))


class _Plain:
    """A convolution or linear layer of PyTorch, for one step."""

    is_trained = True

    def __init__(
        self,
        function: Callable[..., Tensor],
        weight: Tensor,
        bias: Tensor | None,
        options: tuple,
    ):
        self._function = function
        self._options = options
        self.parameters = (weight, bias)
        self.kept: dict[float, list[KeptCall]] = {}

    def compute(self, x: Tensor) -> Tensor:
        """Return the result of a call."""
        return self._function(x, *self.parameters, *self._options)

    def of_input(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the input of a call."""
        weight, _ = self.parameters
        if self._function is functional.conv2d:
            of_x, _, _ = self._backward_of_conv(x, gradient, (True, False, False))
            return of_x
        return gradient @ weight

    def of_parameters(self, kept: Sequence[KeptCall]) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias."""
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        for x, gradient in _concatenated(kept):
            more_of_weight, more_of_bias = self._of_parameters(x, gradient)
            of_weight = _sum(of_weight, more_of_weight)
            of_bias = _sum(of_bias, more_of_bias)
        return of_weight, of_bias

    def _of_parameters(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.parameters
        has_bias = bias is not None
        if self._function is functional.conv2d:
            _, of_weight, of_bias = self._backward_of_conv(x, gradient, (False, True, has_bias))
            return of_weight, of_bias
        x = x.flatten(0, -2)
        gradient = gradient.flatten(0, -2)
        # The gradient has the memory order of the weight, as autograd would copy a gradient in another order.
        of_weight = (x.T @ gradient).T if weight.stride(0) == 1 else gradient.T @ x
        return of_weight, gradient.sum(0) if has_bias else None

    def _backward_of_conv(self, x: Tensor, gradient: Tensor, wanted: tuple[bool, bool, bool]) -> Sequence[Any]:
        """Return the gradients of input, weight and bias, None for each that is not `wanted`."""
        weight, _ = self.parameters
        stride, padding, dilation, groups = self._options
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            bias_sizes=[len(weight)],
            stride=stride,
            padding=padding,
            dilation=dilation,
            transposed=False,
            output_padding=(0, 0),
            groups=groups,
            output_mask=wanted,
        )


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Return `total` with `more` added in place. None stands for zeros."""
    if total is None:
        return more
    return total if more is None else total.add_(more)


def _concatenated(calls: Sequence[KeptCall]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and gradients, in which the calls of the same shape are concatenated."""
    alike: dict[torch.Size | int, list[KeptCall]] = {}
    for number, call in enumerate(calls):
        is_large = call.x.dim() == 2 and len(call.x) >= ROWS_OF_THEIR_OWN
        shape = number if is_large else call.x.shape[1:]
        alike.setdefault(shape, []).append(call)
    for some in alike.values():
        inputs = [each.x for each in some]
        gradients = [each.gradient for each in some]
        yield _cat(inputs), _cat(gradients)


def _cat(tensors: list[Tensor]) -> Tensor:
    """Return tensors, concatenated, without a copy if there is only one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
