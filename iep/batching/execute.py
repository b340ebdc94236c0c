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
        inputs: (num_inputs, ...), one row per input slot; results are kept in their dtype and memory format.
        defer_weight_grads: compute each weight's gradient once, over all calls (`deferred.py`).

    Gradients cannot be differentiated again.

    Raises:
        ValueError: there are not as many inputs as the graph has, it has no roots, or a module returns another shape
            than its arguments have, or numbers that their dtype cannot hold (floating-point ones, where it is whole).
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
        _check_results(call, results, inputs)
    run.values = None  # arguments are copies, so that nothing reads it on the way back
    return arguments[0]


def _check_results(call: Call, results: Tensor, inputs: Tensor) -> None:
    expected = (call.rows, *inputs.shape[1:])
    if results.shape != expected:
        raise ValueError(
            f"op {call.op} returned {tuple(results.shape)} for a group of {call.rows}, expected {expected}"
        )
    if not torch.can_cast(results.dtype, inputs.dtype):
        raise ValueError(f"op {call.op} returned {results.dtype}, expected what {inputs.dtype} can hold")


class _Buffer:
    """Rows of values of one shape, each in the order in which an input's numbers lie in memory, so that it is copied as
    one piece."""

    def __init__(self, rows: Tensor, shape: torch.Size, strides: tuple[int, ...]):
        """`rows` (count, F) for values of `shape`, each laid out by `strides`."""
        self.rows, self.shape, self.strides = rows, shape, strides
        self.values = self.shaped(rows)

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Copy (G, ...) values, or zeros, into G rows."""
        self.values[rows].zero_() if values is None else self.values[rows].copy_(values)

    def read(self, index: Tensor) -> Tensor:
        """(G, ...) copies of G rows: tensors of their own, which a module may change in place."""
        count, size = len(index), self.rows.shape[1]
        values = self.rows.new_empty_strided((count, *self.shape), (size, *self.strides))
        flat = values.as_strided((count, size), (size, 1))
        torch.index_select(self.rows, 0, index, out=flat)
        return values

    def shaped(self, rows: Tensor) -> Tensor:
        """A view of rows as (G, ...) values."""
        return rows.as_strided((len(rows), *self.shape), (rows.shape[1], *self.strides))


class _Run:
    """What the exchanges of one run work on: values, and on the way back their gradients."""

    def __init__(self, layout: Layout, inputs: Tensor):
        self.layout = layout
        dense = inputs.is_contiguous() or inputs.is_contiguous(memory_format=torch.channels_last)
        self.shape, self.strides = inputs.shape[1:], (inputs if dense else inputs.contiguous()).stride()[1:]
        self.kind = {"dtype": inputs.dtype, "device": inputs.device}
        self.values: _Buffer | None = self._buffer(layout.num_places)
        self.gradients: _Buffer | None = None

    def _buffer(self, count: int) -> _Buffer:
        return _Buffer(torch.empty(count, self.shape.numel(), **self.kind), self.shape, self.strides)

    def arguments(self, call: Call) -> list[Tensor]:
        return [self.values.read(self.layout.sources[uses]) for uses in call.argument_uses]

    def take_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a call's arguments."""
        if self.gradients is None:
            self.gradients = self._buffer(self.layout.num_uses + 1)
            self.gradients.write(slice(-1, None), None)  # what no use has made
        for uses, gradient in zip(call.argument_uses, gradients, strict=True):
            self.gradients.write(uses, gradient)

    def result_gradient(self, call: Call) -> Tensor | None:
        """The gradient of a call's results, None where none of them leads to a root."""
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
        if not ctx.needs_input_grad[0]:  # the end of the way back: nothing before this call has a gradient
            ctx.run.gradients = None
        return None, gradient, None, None, None
