"""A layout's calls, one after the other: values through a buffer, and on the way back their gradients through another.

What runs on one device; which runs there are, and on which devices, is `execute.py`'s.

Shapes: G rows of a call, F numbers of a value.
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

Module = Callable[..., Tensor | None]
Modules = Sequence[Module] | Mapping[Any, Module]


def run_calls(run: "Run", modules: Modules, results: Tensor | None, defer: bool) -> tuple[Tensor, ...]:
    """Run a layout's calls; returns a token that the way back begins with, and what departs last.

    Args:
        modules: by op, what maps a call's arguments to its results.
        results: those of the first call.
        defer: as in `execute`.

    Raises:
        ValueError: as `execute`, of modules.
    """
    token = torch.empty(0, **run.kind)
    context = DeferredWeightGrads() if defer and torch.is_grad_enabled() else nullcontext()
    departure = run.layout.calls[-1]
    for before, call in pairwise(run.layout.calls):
        token, *arguments = _Exchange.apply(token, results, run, before, call)
        if call is departure:
            break
        with context:
            results = modules[call.op](*arguments)
        run.check(call, results)
    run.values = None  # arguments are copies, so that nothing reads it on the way back
    return token, *arguments


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


class Run:
    """What a layout's exchanges work on: values like `inputs` on a device, and on the way back their gradients."""

    def __init__(self, layout: Layout, inputs: Tensor, device: torch.device):
        self.layout = layout
        dense = inputs.is_contiguous() or inputs.is_contiguous(memory_format=torch.channels_last)
        self.shape, self.strides = inputs.shape[1:], (inputs if dense else inputs.contiguous()).stride()[1:]
        self.kind = {"dtype": inputs.dtype, "device": device}
        self.values: _Buffer | None = self._buffer(layout.num_places)
        self.gradients: _Buffer | None = None

    def _buffer(self, count: int) -> _Buffer:
        return _Buffer(torch.empty(count, self.shape.numel(), **self.kind), self.shape, self.strides)

    def check(self, call: Call, results: Tensor | None) -> None:
        """Refuse results of another shape or type than the buffer holds."""
        if results is None and call.results.start == call.results.stop:
            return
        expected = (call.rows, *self.shape)
        if results.shape != expected:
            raise ValueError(
                f"op {call.op} returned {tuple(results.shape)} for a group of {call.rows}, expected {expected}"
            )
        if not torch.can_cast(results.dtype, self.kind["dtype"]):
            raise ValueError(f"op {call.op} returned {results.dtype}, expected what {self.kind['dtype']} can hold")

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
    def forward(
        ctx: Any, token: Tensor, results: Tensor | None, run: Run, call: Call, following: Call
    ) -> tuple[Tensor, ...]:
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
