"""A layout's calls, one after the other: values through buffers, and on the way back their gradients through others.

What runs on one device; which runs there are, and on which devices, is `execute.py`'s.

Shapes: G rows of a call, F numbers of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.call_in_place import CallInPlace, LayerInPlace, can_be_in_place, is_plain
from iep.batching.cells import Cell, CellCall, WeightsOfRun
from iep.batching.deferred import DeferredWeightGrads
from iep.batching.in_place import CallsInPlace, apply_in_place
from iep.batching.layout import Argument, Call, Layout, Result

Module = Cell | Callable[..., Tensor | tuple[Tensor, ...] | None]
Modules = Sequence[Module] | Mapping[Any, Module]


def run_calls(
    run: "Run", modules: Modules, results: tuple[Tensor, ...], defer: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a layout's calls; returns a token that the way back begins with, and what departs last.

    Args:
        modules: by op, what maps a call's arguments to its results.
        results: those of the first call.
        defer: as in `execute`.

    Raises:
        ValueError: as `execute`, of modules.
    """
    token = torch.empty(0, device=run.device)
    context = DeferredWeightGrads() if defer and run.records else nullcontext()
    weights, calls, at = WeightsOfRun(defer), run.layout.calls, 0
    departure = len(calls) - 1
    while at < departure:
        before, at = calls[at], at + 1
        call = calls[at]
        module = None if at == departure else modules[call.op]
        if isinstance(module, Cell):
            in_place = _in_place(run, modules, before, results, calls[at:departure])
            if in_place:
                token = apply_in_place(token, run, before, CallsInPlace(in_place), results, weights)
                results, at = (), at + len(in_place) - 1  # they are kept already
                continue
        if run.records and isinstance(module, Cell):
            weight, bias, aside = weights.of(module.layer)
            token = CellCall.apply(token, run, before, call, module, aside, weight, bias, *results)
            results = ()
            continue
        if run.records:
            token, *arguments = _Exchange.apply(token, run, before, call, *results)
        else:
            arguments = run.exchange(before, call, results)
        if module is not None:
            with context:
                returned = module(*arguments)
            results = run.checked(call, returned)
    run.values = []  # arguments are copies, so that nothing reads it on the way back
    return token, tuple(arguments)


def _in_place(
    run: "Run", modules: Modules, before: Call, results: Sequence[Tensor], calls: Sequence[Call]
) -> list[CallInPlace]:
    """The first calls, as long as they are of cells that run in place, after one that has made `results`."""
    found: list[CallInPlace] = []
    layers: dict[int, LayerInPlace] = {}
    made = [*results, *(buffer.rows for buffer in run.values if buffer is not None)]
    stays = run.read_only and all(column.stays for column in run.layout.columns)
    if not stays or not all(is_plain(tensor, run.device) for tensor in made):
        return found
    dtypes = {at: kind.dtype for at, kind in enumerate(run.kinds) if kind is not None}
    dtypes.update((each.column, values.dtype) for each, values in zip(before.results, results, strict=False))
    known = set(dtypes.values())
    for call in calls:
        cell = modules[call.op]
        if not isinstance(cell, Cell):
            break
        layer = cell.layer
        dtype = layer.weight.dtype
        if known != {dtype} and any(dtypes.setdefault(column, dtype) != dtype for column in _columns(call)):
            break
        if id(layer) not in layers:
            if not can_be_in_place(layer, run.device):
                break
            layers[id(layer)] = LayerInPlace(layer)
        in_place = cell.in_place(call, layers[id(layer)])
        if in_place is None:
            break
        found.append(in_place)
    return found


def _columns(call: Call) -> list[int]:
    return [each.column for each in (*call.arguments, *call.results)]


class _Kind(NamedTuple):
    """What the values of a column have in common; each one's numbers lie in memory as those of the first did."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, values: Tensor, device: torch.device) -> "_Kind":
        dense = values.is_contiguous() or values.is_contiguous(memory_format=torch.channels_last)
        strides = (values if dense else values.contiguous()).stride()[1:]
        return cls(values.shape[1:], strides, values.dtype, device)

    def buffer_of(self, values: Tensor) -> "_Buffer":
        """The values themselves, or a copy where they lie otherwise."""
        size = self.shape.numel()
        lie_well = values.stride()[1:] == self.strides and (len(values) < 2 or values.stride(0) == size)
        dense = values if lie_well else values.new_empty_strided(values.shape, (size, *self.strides)).copy_(values)
        return _Buffer(dense.as_strided((len(values), size), (size, 1)), self)

    def buffer(self, count: int) -> "_Buffer":
        return _Buffer(torch.empty(count, self.shape.numel(), dtype=self.dtype, device=self.device), self)


class _Buffer:
    """Rows of values of one shape, each in the order in which its numbers lie in memory, so that it is copied as one
    piece."""

    def __init__(self, rows: Tensor, kind: _Kind):
        """`rows` (count, F)."""
        self.rows, self.kind = rows, kind
        self.values = self.shaped(rows)

    def alias(self, first: int, shape: tuple[int, ...]) -> Tensor:
        """(*shape, ...) rows from `first` on, themselves: not a view of them in autograd's eyes."""
        size = self.rows.shape[1]
        strides = (size, *self.kind.strides) if len(shape) == 1 else (shape[1] * size, size, *self.kind.strides)
        start = self.rows.storage_offset() + first * size
        return self.rows.new_empty(0).set_(self.rows.untyped_storage(), start, (*shape, *self.kind.shape), strides)

    def write(self, rows: slice, values: Tensor | None) -> None:
        """Copy values, or zeros, into rows."""
        room = self.values[rows]
        if values is None:
            room.zero_()
        else:
            room.copy_(values if values.dim() == room.dim() else values.flatten(0, 1))

    def read(self, index: Tensor, shape: tuple[int, ...], recorded: bool) -> Tensor:
        """(*shape, ...) copies of rows: tensors of their own, which a module may change in place.

        Args:
            recorded: autograd is to see them; then none is a view, of which it would forbid the change.
        """
        size = self.rows.shape[1]
        if len(self.kind.shape) == len(shape) == 1:
            return self.rows.index_select(0, index)
        if len(self.kind.shape) == 1 and not recorded:
            return self.rows.index_select(0, index).view(*shape, size)
        strides = (size, *self.kind.strides) if len(shape) == 1 else (shape[1] * size, size, *self.kind.strides)
        values = self.rows.new_empty_strided((*shape, *self.kind.shape), strides)
        torch.index_select(self.rows, 0, index, out=values.as_strided((len(index), size), (size, 1)))
        return values

    def shaped(self, rows: Tensor) -> Tensor:
        """A view of rows as values."""
        if len(self.kind.shape) == 1:
            return rows
        return rows.as_strided((len(rows), *self.kind.shape), (rows.shape[1], *self.kind.strides))


class Run:
    """What a layout's exchanges work on: the values of each column on a device, and on the way back their gradients.

    A column takes its values' shape, dtype and memory format from the first that are written into it.
    """

    def __init__(self, layout: Layout, device: torch.device, read_only: bool = False):
        self.layout, self.device, self.read_only = layout, device, read_only
        self.records = torch.is_grad_enabled()
        self.kinds: list[_Kind | None] = [None] * len(layout.columns)
        self.values: list[_Buffer | None] = [None] * len(layout.columns)
        self.gradients: list[_Buffer | None] = []
        self.way_back = -1
        # Of every block at once: cheaper than a slice for each.
        self.sources = [column.sources.split(column.uses) for column in layout.columns]

    def exchange(self, call: Call, following: Call, results: tuple[Tensor, ...]) -> list[Tensor]:
        """Keep a call's results, unless they are there already; returns the next call's arguments."""
        if results:
            self.keep(call, results)
        # What departs is the user's, to do with as they like.
        alias = self.read_only and len(following.results) > 0
        return [self._argument(taken, alias) for taken in following.arguments]

    def room(self, at: int, width: int, dtype: torch.dtype) -> Tensor:
        """(places, width) a column's rows, new ones where nothing has been written yet: not a view in autograd's eyes.

        Raises:
            ValueError: the column holds other values.
        """
        if self.kinds[at] is None:
            self.kinds[at] = _Kind(torch.Size([width]), (1,), dtype, self.device)
            self.values[at] = self.kinds[at].buffer(self.layout.columns[at].num_places)
        kind = self.kinds[at]
        if kind.shape != (width,) or kind.dtype != dtype:
            held = f"{tuple(kind.shape)} of {kind.dtype}"
            raise ValueError(f"a column holds values {held}, expected ({width},) of {dtype}")
        return self.values[at].alias(0, (len(self.values[at].rows),))

    def keep(self, call: Call, results: tuple[Tensor, ...]) -> None:
        """Keep a call's results."""
        for made, values in zip(call.results, results, strict=True):
            self._write(made, values)

    def _argument(self, taken: Argument, alias: bool) -> Tensor:
        at, block, _, first, shape = taken
        if alias and first is not None and self.layout.columns[at].stays:
            return self.values[at].alias(first, shape)
        return self.values[at].read(self.sources[at][block], shape, self.records)

    def _write(self, made: Result, values: Tensor) -> None:
        at = made.column
        if self.kinds[at] is None:
            kind = self.kinds[at] = _Kind.of(values, self.device)
            column = self.layout.columns[at]
            if column.only_arrives:
                self.values[at] = kind.buffer_of(values)
                return
            self.values[at] = kind.buffer(column.num_places)
        self.values[at].write(made.places, values)

    def checked(self, call: Call, returned: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """What a module returned, one tensor for each that the call makes, which its column can hold."""
        results = (returned,) if isinstance(returned, Tensor) else tuple(returned or ())
        if len(results) != len(call.results):
            raise ValueError(f"op {call.op} returned {len(results)} tensors, expected {len(call.results)}")
        for made, values in zip(call.results, results, strict=True):
            kind = self.kinds[made.column]
            rows = made.results.stop - made.results.start
            shape = values.shape
            if shape[0] == rows and kind is not None and shape[1:] == kind.shape and values.dtype == kind.dtype:
                continue
            expected = (rows, *(shape[1:] if kind is None else kind.shape))
            if shape != expected:
                raise ValueError(f"op {call.op} returned {tuple(shape)} for a group of {rows}, expected {expected}")
            if kind is not None and values.dtype != kind.dtype and not torch.can_cast(values.dtype, kind.dtype):
                raise ValueError(f"op {call.op} returned {values.dtype}, expected what {kind.dtype} can hold")
        return results

    def take_gradients(self, call: Call, gradients: Sequence[Tensor | None]) -> None:
        """Keep the gradients of a call's arguments."""
        self.begin_way_back()
        for (at, _, uses, *_), gradient in zip(call.arguments, gradients, strict=True):
            if self.gradients[at] is not None:
                self.gradients[at].write(uses, gradient)

    def begin_way_back(self) -> None:
        """Make room for the gradients, unless this way back has it already."""
        way_back = torch._C._current_graph_task_id()
        if not self.gradients or way_back != self.way_back:  # gradients that were handed out stay as they are
            self.way_back = way_back
            self.gradients = [self._room(at) for at in range(len(self.kinds))]
            self.takers = [column.takers.split(column.results) for column in self.layout.columns]

    def _room(self, at: int) -> _Buffer | None:
        """Room for the gradients of a column; None where it has none."""
        kind, num_uses = self.kinds[at], self.layout.columns[at].num_uses
        if kind is None or not (kind.dtype.is_floating_point or kind.dtype.is_complex):
            return None
        buffer = kind.buffer(num_uses + 1)
        buffer.write(slice(-1, None), None)  # what no use has made
        return buffer

    def result_gradients(self, call: Call) -> list[Tensor | None]:
        """The gradients of a call's results, None for one of which nothing leads to a root."""
        return [self.result_gradient(made) for made in call.results]

    def gradients_before(self, call: Call, num_results: int, goes_on: bool) -> list[Tensor | None]:
        """Those of the results that a call gave to the next one, of which there may be none; the way back ends here,
        unless it goes on."""
        found = self.result_gradients(call) if num_results else []
        if not goes_on:
            self.gradients = []
        return found

    def result_gradient(self, made: Result) -> Tensor | None:
        """The same of one result."""
        buffer = self.gradients[made.column]
        if buffer is None or not made.is_used:
            return None
        if made.first_use is not None:
            return buffer.values[made.first_use : made.first_use + made.results.stop - made.results.start]
        column = self.layout.columns[made.column]
        rows = buffer.rows.index_select(0, self.takers[made.column][made.block])
        if made.extras.start < made.extras.stop:
            further = buffer.rows.index_select(0, column.extra_uses[made.extras])
            rows.index_add_(0, column.extra_rows[made.extras], further)
        return buffer.shaped(rows)


class _Exchange(Function):
    """A call's results into the buffers, and out of them the next call's arguments; on the way back their gradients.

    The buffers are written and read outside autograd's sight. A token, passed from one exchange to the next, gives the
    way back its order: a call's gradients are read when all calls that took its results have left theirs.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, run: Run, call: Call, following: Call, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.call, ctx.following, ctx.num_results = run, call, following, len(results)
        ctx.set_materialize_grads(False)
        arguments = run.exchange(call, following, results)
        if run.read_only and call is run.layout.calls[0]:
            ctx.save_for_backward(*results)  # autograd then notices when what is given is changed before the way back
        ctx.mark_non_differentiable(*(x for x in arguments if not (x.is_floating_point() or x.is_complex())))
        return token.new_empty(0), *arguments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        ctx.run.take_gradients(ctx.following, gradients)
        found = ctx.run.gradients_before(ctx.call, ctx.num_results, ctx.needs_input_grad[0])
        return None, None, None, None, *found
