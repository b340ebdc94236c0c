"""Weight gradients of layers that are called many times, computed once for each weight over all of its calls.

If a module runs in twenty calls of a step, autograd computes the gradients of its weights twenty times and sums them.
Here each call of a layer keeps its input and the gradient of its output. When the backward pass has reached all calls,
one product over the concatenation gives the weight's gradient (Qiao & Taura, An Efficient Operation Auto-batching
Strategy, section 3). This covers the layers of `layers.py`; other parameters have their ordinary gradients.

Shapes: G rows of a call.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from iep.batching.layers import autocast_dtype

ROWS_OF_THEIR_OWN = 256
"""The number of rows from which a call of a linear layer has a product of its own. Concatenating calls of 256 to 2,048
rows was measured to make a training step of layers of 128 to 512 features up to 20% slower on a CPU."""
Kept = dict[float, list[tuple[Tensor, Tensor]]]
"""The inputs and the output gradients of a layer's calls, by the number of the backward pass. One pass may run within
another, and a pass may be for the gradients of the inputs only."""
_numbers = count()


class DeferredWeightGrads:
    """A function for `layers.computed_by`, with which each weight's gradient is computed once in the backward pass.

    Use one object for each step. The input and the output gradient of every call are kept until the last call and then
    concatenated, which takes memory. Gradients cannot be differentiated again. Activation checkpointing inside, which
    calls layers again in the backward pass, raises an error. Inside `torch.vmap` weights have their ordinary gradients.
    """

    def __init__(self) -> None:
        self._shared: dict[tuple, tuple[Kept, Tensor, Tensor | None, Tensor]] = {}
        """By weight, bias, options and dtype: what is kept of the calls, the weight and bias that all of them use, and
        the token of the last one."""

    def __call__(
        self, function: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
    ) -> Tensor:
        """Return the result of a layer."""
        is_trained = torch.is_grad_enabled() and weight.requires_grad and input.dim() >= weight.dim()
        if not is_trained or any(map(torch._C._functorch.is_batchedtensor, (input, weight))):
            return function(input, weight, bias, *options)
        dtype = autocast_dtype(input)
        input = input if dtype is None else input.to(dtype)
        key = weight, bias, options, input.dtype
        if key not in self._shared:
            cast = [each if each is None or dtype is None else each.to(dtype) for each in (weight, bias)]
            kept: Kept = {}
            self._shared[key] = kept, *_Weights.apply(*cast, function, options, kept)
        kept, weight, bias, token = self._shared[key]
        result, token = _Call.apply(input, weight, bias, token, function, options, kept)
        self._shared[key] = kept, weight, bias, token
        return result


def token_of_pass(of_token: Tensor | None) -> Tensor:
    """Return the gradient of a token, which is the number of the backward pass.

    Each function of a chain reads the token that the previous one returns, so that their backward passes run in the
    reverse order. The first that runs, which gets no gradient of its token, chooses the number.
    """
    return torch.tensor(next(_numbers), dtype=torch.float64) if of_token is None else of_token


def new_token() -> Tensor:
    """Return the first token of a chain. It is on the CPU, where its gradient can be read without a wait."""
    return torch.zeros((), dtype=torch.float64)


def _backward(
    function: Callable[..., Tensor],
    gradient: Tensor,
    input: Tensor,
    weight: Tensor,
    options: tuple,
    wanted: tuple[bool, bool, bool],
) -> Sequence[Tensor | None]:
    """Return the gradients of input, weight and bias of a layer, None for those that are not `wanted`."""
    if function is functional.conv2d:
        stride, padding, dilation, groups = options
        more = ([len(weight)], stride, padding, dilation, False, (0, 0), groups, wanted)
        return torch.ops.aten.convolution_backward(gradient, input, weight, *more)
    of_input = gradient @ weight if wanted[0] else None
    if not wanted[1]:
        return of_input, None, None
    gradient, input = gradient.flatten(0, -2), input.flatten(0, -2)
    # The gradient has the memory order of the weight, as autograd would copy a gradient in another order.
    of_weight = (input.T @ gradient).T if weight.stride(0) == 1 else gradient.T @ input
    return of_input, of_weight, gradient.sum(0) if wanted[2] else None


def _concatenated(calls: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return inputs and gradients, in which those of the same shape are concatenated."""
    alike: dict[torch.Size | int, list[tuple[Tensor, Tensor]]] = {}
    for number, (input, gradient) in enumerate(calls):
        is_large = input.dim() == 2 and len(input) >= ROWS_OF_THEIR_OWN
        alike.setdefault(number if is_large else input.shape[1:], []).append((input, gradient))
    return [
        some[0] if len(some) == 1 else (torch.cat([one for one, _ in some]), torch.cat([other for _, other in some]))
        for some in alike.values()
    ]


class _Weights(Function):
    """Return weight and bias unchanged, and a token. The backward pass, after that of all calls, returns gradients."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, bias: Tensor | None, function: Callable[..., Tensor], options: tuple, kept: Kept
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ctx.save_for_backward(weight)
        ctx.layer, ctx.kept, ctx.has_bias = (function, options), kept, bias is not None
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias), new_token()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, __: None, of_token: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (function, options) = ctx.saved_tensors, ctx.layer
        sums: list[Tensor | None] = [None, None]
        for input, gradient in _concatenated(ctx.kept.pop(of_token.item(), ())):
            found = _backward(function, gradient, input, weight, options, (False, True, ctx.has_bias))[1:]
            sums = [new if old is None else old.add_(new) for old, new in zip(sums, found, strict=True)]
        return *sums, None, None, None


class _Call(Function):
    """Run the layer on one input. The backward pass returns the input's gradient and keeps data for the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        function: Callable[..., Tensor],
        options: tuple,
        kept: Kept,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(input, weight)
        ctx.layer, ctx.kept = (function, options), kept
        ctx.set_materialize_grads(False)
        return function(input, weight, bias, *options), token.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, of_token: Tensor | None) -> tuple[Tensor | None, ...]:
        of_token, of_input = token_of_pass(of_token), None
        if gradient is not None:
            (input, weight), (function, options) = ctx.saved_tensors, ctx.layer
            ctx.kept.setdefault(of_token.item(), []).append((input, gradient))
            if ctx.needs_input_grad[0]:
                of_input = _backward(function, gradient, input, weight, options, (True, False, False))[0]
        return of_input, None, None, of_token, None, None, None
