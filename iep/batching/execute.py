"""Layout, modules and inputs -> results: one module call per group of the schedule.

Arguments are gathered by place, so nothing depends on the order in which results arrive. What the modules compute is
theirs, and so is how; every result has the shape of an input, and a call's row g is the result of its node g.

Shapes: G rows of a call, B examples, F numbers of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.deferred import DeferredWeightGrads
from iep.batching.layout import Call, Layout

Module = Callable[..., Tensor]


def execute(
    layout: Layout,
    modules: Sequence[Module] | Mapping[int, Module],
    inputs: Tensor,
    defer_weight_grads: bool = False,
) -> Tensor:
    """Run the schedule that `layout` was made for; returns the roots' values, (B, ...) in the order of the examples.

    Args:
        layout: where everything lies, its indices on the device of `inputs`.
        modules: by op, what maps a call's arguments, (G, ...) each in their order, to its results (G, ...).
        inputs: (num_inputs, ...), one row per input slot; their dtype and memory format are those of all values.
        defer_weight_grads: compute each weight's gradient once, over all calls (`deferred.py`).

    Raises:
        ValueError: there are not as many inputs as the graph has, it has no roots, or a module returns another shape
            than its arguments have.
    """
    arrival, *calls, departure = layout.calls
    if len(inputs) != arrival.rows or not departure.rows:
        raise ValueError(
            f"{len(inputs)} inputs for a graph of {arrival.rows} inputs and {departure.rows} roots, "
            "expected as many inputs as the graph has, and at least one root"
        )
    values = _Values(layout, inputs)
    context = DeferredWeightGrads() if defer_weight_grads and torch.is_grad_enabled() else nullcontext()
    token = _Put.apply(inputs.new_empty(0), inputs, values, arrival)
    for call in calls:
        token, *arguments = _Take.apply(token, values, call)
        with context:
            results = modules[call.op](*arguments)
        if results.shape != (call.rows, *inputs.shape[1:]):
            raise ValueError(
                f"op {call.op} returned {tuple(results.shape)} for a group of {call.rows}, "
                f"expected {(call.rows, *inputs.shape[1:])}"
            )
        token = _Put.apply(token, results, values, call)
    _, roots = _Take.apply(token, values, departure)
    values.buffer = None  # arguments are copies, so that nothing reads it on the way back
    return roots


class _Values:
    """The buffer of values, by place, and on the way back that of gradients, by use."""

    def __init__(self, layout: Layout, inputs: Tensor):
        self.layout = layout
        self.shape, self.options = inputs.shape[1:], {"dtype": inputs.dtype, "device": inputs.device}
        if inputs.dim() == 4 and not inputs.is_contiguous():
            self.options["memory_format"] = torch.channels_last
        self.buffer: Tensor | None = self._new(layout.num_places)
        self.gradients: Tensor | None = None

    def put(self, call: Call, results: Tensor) -> None:
        self.buffer[call.places].copy_(results)

    def take(self, call: Call) -> list[Tensor]:
        return [self._select(self.buffer, self.layout.sources[uses]) for uses in call.argument_uses]

    def put_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        if self.gradients is None:
            self.gradients = self._new(self.layout.num_uses + 1)
            self.gradients[-1].zero_()  # what no use has made
        for uses, gradient in zip(call.argument_uses, gradients, strict=True):
            self.gradients[uses].zero_() if gradient is None else self.gradients[uses].copy_(gradient)

    def take_gradients(self, call: Call) -> Tensor | None:
        """The gradient of a call's results, None where nothing takes any of them."""
        if not call.is_used:
            return None
        layout = self.layout
        gradient = self._select(self.gradients, layout.takers[call.results])
        if call.extras.start < call.extras.stop:
            further = self._select(self.gradients, layout.extra_uses[call.extras])
            _rows(gradient).index_add_(0, layout.extra_rows[call.extras], _rows(further))
        return gradient

    def _new(self, count: int) -> Tensor:
        return torch.empty((count, *self.shape), **self.options)

    def _select(self, source: Tensor, index: Tensor) -> Tensor:
        selected = self._new(len(index))
        torch.index_select(_rows(source), 0, index, out=_rows(selected))
        return selected


def _rows(values: Tensor) -> Tensor:
    """A view of (G, ...) as (G, F) in the order of memory, in which a row is copied as one piece."""
    if values.dim() == 4 and not values.is_contiguous():
        values = values.permute(0, 2, 3, 1)
    return values.flatten(1)


# The buffer is written and read outside autograd's sight. A token, passed from one step to the next, gives the way back
# its order: a call's gradient is read when all calls that took its results have left theirs. It has no gradient itself.


class _Take(Function):
    """A call's arguments out of the buffer; on the way back their gradients into the other."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, values: _Values, call: Call) -> tuple[Tensor, ...]:
        ctx.values, ctx.call = values, call
        ctx.set_materialize_grads(False)
        return token.new_empty(0), *values.take(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.values.put_gradients(ctx.call, gradients)
        return None, None, None


class _Put(Function):
    """A call's results into the buffer; on the way back their gradient out of the other."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, results: Tensor, values: _Values, call: Call) -> Tensor:
        ctx.values, ctx.call = values, call
        ctx.set_materialize_grads(False)
        values.put(call, results)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        return None, ctx.values.take_gradients(ctx.call), None, None
