"""Layout, modules and inputs -> results: one module call per group of the schedule.

Arguments are gathered by place, so nothing depends on the order in which results arrive. What the modules compute is
theirs, and so is how; every result has the shape of an input, and a call's row g is the result of its node g.

Shapes: G rows of a call, B examples, F numbers of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import pairwise
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
    arrival, *_, departure = layout.calls
    if len(inputs) != arrival.rows or not departure.rows:
        raise ValueError(
            f"{len(inputs)} inputs for a graph of {arrival.rows} inputs and {departure.rows} roots, "
            "expected as many inputs as the graph has, and at least one root"
        )
    run = _Run(layout, inputs)
    context = DeferredWeightGrads() if defer_weight_grads and torch.is_grad_enabled() else nullcontext()
    token, results = inputs.new_empty(0), inputs
    for before, call in pairwise(layout.calls):
        token, *arguments = _Exchange.apply(token, results, run, before, call)
        if call is departure:
            break
        with context:
            results = modules[call.op](*arguments)
        if results.shape != (call.rows, *inputs.shape[1:]):
            raise ValueError(
                f"op {call.op} returned {tuple(results.shape)} for a group of {call.rows}, "
                f"expected {(call.rows, *inputs.shape[1:])}"
            )
    run.values = None  # arguments are copies, so that nothing reads it on the way back
    return arguments[0]


class _Buffer:
    """Rows of values of one shape, each in the order in which an input's numbers lie in memory, so that it is copied as
    one piece."""

    def __init__(self, inputs: Tensor, count: int):
        dense = inputs.is_contiguous() or inputs.is_contiguous(memory_format=torch.channels_last)
        self.shape = inputs.shape[1:]
        self.strides = (self.shape.numel(), *(inputs if dense else inputs.contiguous()).stride()[1:])
        self.rows = inputs.new_empty(count, self.shape.numel())
        self.values = self.shaped(self.rows)

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Copy (G, ...) values, or zeros, into G rows."""
        self.values[rows].zero_() if values is None else self.values[rows].copy_(values)

    def read(self, index: Tensor) -> Tensor:
        """(G, ...) copies of G rows."""
        return self.shaped(self.rows.index_select(0, index))

    def shaped(self, rows: Tensor) -> Tensor:
        """A view of rows as (G, ...) values."""
        return rows.as_strided((len(rows), *self.shape), self.strides)


class _Run:
    """What the exchanges of one run work on: values, and on the way back their gradients."""

    def __init__(self, layout: Layout, inputs: Tensor):
        self.layout = layout
        self.values: _Buffer | None = _Buffer(inputs, layout.num_places)
        self.like = inputs.detach()
        self.gradients: _Buffer | None = None

    def arguments(self, call: Call) -> list[Tensor]:
        return [self.values.read(self.layout.sources[uses]) for uses in call.argument_uses]

    def take_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a call's arguments."""
        if self.gradients is None:
            self.gradients = _Buffer(self.like, self.layout.num_uses + 1)
            self.gradients.write(slice(-1, None), None)  # what no use has made
        for uses, gradient in zip(call.argument_uses, gradients, strict=True):
            self.gradients.write(uses, gradient)

    def result_gradient(self, call: Call) -> Tensor | None:
        """The gradient of a call's results, None where nothing takes any of them."""
        if not call.is_used:
            return None
        rows = self.gradients.rows.index_select(0, self.layout.takers[call.results])
        if call.extras.start < call.extras.stop:
            further = self.gradients.rows.index_select(0, self.layout.extra_uses[call.extras])
            rows.index_add_(0, self.layout.extra_rows[call.extras], further)
        return self.gradients.shaped(rows)


class _Exchange(Function):
    """A call's results into the buffer, and out of it the next call's arguments; on the way back their gradients.

    The buffers are written and read outside autograd's sight. A token, passed from one exchange to the next, gives the
    way back its order: a call's gradient is read when all calls that took its results have left theirs.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, results: Tensor, run: _Run, call: Call, following: Call) -> tuple[Tensor, ...]:
        ctx.run, ctx.call, ctx.following = run, call, following
        ctx.set_materialize_grads(False)
        run.values.write(call.places, results)
        return token.new_empty(0), *run.arguments(following)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.run.take_gradients(ctx.following, gradients)
        gradient = ctx.run.result_gradient(ctx.call)
        if not ctx.call.argument_uses:  # the inputs' arrival: the end of the way back
            ctx.run.gradients = None
        return None, gradient, None, None, None
