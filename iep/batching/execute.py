"""Plan, modules and inputs -> the roots' values: one module call for each call of the plan.

The values of a column lie in one buffer. For every call, the arguments are gathered from the buffers, the module
runs, and the results are written to adjacent rows. In training, each module call is an ordinary part of autograd's
graph. Only the exchange with the buffers between two calls is an autograd function of its own. Its backward pass adds
the gradients of the next call's arguments to a second set of buffers and reads the gradients of the results before it.
Hooks, autocast, checkpointing, and weights that a module uses in any way therefore work as they do without a plan.

Shapes: G rows of a call, F numbers of a value.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.plan import Argument, Call, Plan, Result
from iep.batching.schedulers import Segment

Modules = Mapping[int, Callable[..., Tensor | tuple[Tensor, ...]]]
CallContext = Callable[[], AbstractContextManager[Any]]
"""A function that returns the context manager in which the module of a call runs."""


@overload
def execute(
    plan: Plan,
    modules: Modules,
    inputs: Tensor,
    call_context: CallContext = nullcontext,
) -> Tensor: ...
@overload
def execute(
    plan: Plan,
    modules: Modules,
    inputs: Mapping[int, Tensor],
    call_context: CallContext = nullcontext,
) -> tuple[Tensor, ...]: ...
def execute(
    plan: Plan,
    modules: Modules,
    inputs: Tensor | Mapping[int, Tensor],
    call_context: CallContext = nullcontext,
) -> Tensor | tuple[Tensor, ...]:
    """Run a plan, and return the roots' values, (B, ...) in the order of the roots.

    Args:
        plan: the plan, with its index tensors on the device of `inputs`, or if it is placed, of their columns.
        modules: by op, a callable that maps the arguments of a call, (G, ...) each in order, to its results (G, ...): a
            tensor, or as many as the op's signature has. Row g belongs to node g. It must not change its arguments in
            place, as they may share memory with results of other calls; PyTorch raises an error if it needs gradients.
            An op group's number may have a callable `(functions, *arguments)`, with `plan.functions` of the call;
            without one, its functions run in a loop. A callable with a method `run_in_place(states, buffers, call)`
            reads and writes the buffers itself, and returns the states of the columns after it.
        inputs: (num_inputs, ...), one row for each input slot, for a graph without types; results are kept in the same
            dtype and memory format. For a graph with types, one such tensor for each column that has inputs; the
            result is then a tuple with a tensor for each of the types' roots.
        call_context: a function that returns the context manager in which the module of a call runs, if the run is
            recorded for a backward pass. It is called once for each call.

    Gradients cannot be differentiated again.

    Raises:
        ValueError: the graph has no roots, or inputs or results of a module have another number or shape than in the
            plan, or a dtype that the dtype of their column cannot represent.
    """
    if not plan.roots:
        raise ValueError("the plan has no roots: an empty minibatch cannot be run")
    given = {0: inputs} if isinstance(inputs, Tensor) else inputs
    used = tuple(given[made.column // plan.num_devices] for made in plan.inputs)
    values = _run(plan, modules, used, call_context)
    return values[0] if isinstance(inputs, Tensor) else tuple(values)


def _run(
    plan: Plan,
    modules: Modules,
    inputs: tuple[Tensor, ...],
    call_context: CallContext,
) -> Sequence[Tensor]:
    """Run the calls in order. Between two calls, write the results of one and read the arguments of the next.

    The *state* of a column represents its values between two calls, (num_rows, F), and takes no memory. Its gradient is
    the gradient of these values, which a backward pass therefore passes from one exchange to the previous one.
    """
    buffers = Buffers(plan)
    is_recorded = torch.is_grad_enabled()
    states: Sequence[Tensor] = ()
    results, values = plan.inputs, inputs

    def exchange(reads: Sequence[Argument]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Write `values`, and return the states and the arguments."""
        if not is_recorded:
            buffers.write(results, values)
            return (), buffers.arguments(reads)
        found = _Exchange.apply(buffers, results, reads, *states, *values)
        num_states = len(buffers.kinds)
        return found[:num_states], found[num_states:]

    for call in plan.calls:
        is_op_group = call.segments is not None and call.op in modules
        module: Any = modules[call.op] if is_op_group else None
        if hasattr(module, "run_in_place"):
            if results:
                states, _ = exchange(())
            states = module.run_in_place(states, buffers, call)
            results, values = (), ()
        else:
            states, arguments = exchange(call.arguments)
            with call_context() if is_recorded else nullcontext():
                values = run_call(plan, modules, call, arguments)
            results = call.results
    _, found = exchange(plan.roots)
    buffers.values.clear()  # the modules' own graphs save the tensors that the backward pass needs
    return found


def run_call(plan: Plan, modules: Modules, call: Call, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the module of a call, or those of its segments, or copy its arguments to another device.

    Raises:
        ValueError: the module does not return as many tensors as the call writes.
    """
    if call.op < 0:
        devices: list[Any] = [plan.columns[result.column].device for result in call.results]
        # A copy to the CPU must not be asynchronous, because calls on the CPU read it at once.
        return tuple(
            argument.to(device, non_blocking=device.type != "cpu")
            for argument, device in zip(arguments, devices, strict=True)
        )
    if call.segments is None:
        returned = modules[call.op](*arguments)
    elif call.op in modules:
        returned = modules[call.op](plan.functions(call), *arguments)
    else:
        returned = _run_segments(modules, call.segments, arguments)
    results = (returned,) if isinstance(returned, Tensor) else returned
    is_sequence = isinstance(results, tuple | list)
    if not is_sequence or len(results) != len(call.results):
        what = f"{len(results)} tensors" if is_sequence else type(results).__name__
        raise ValueError(f"op {call.op} returned {what}, expected {len(call.results)}")
    return results


def _run_segments(
    modules: Modules, segments: Sequence[Segment], arguments: Sequence[Tensor]
) -> Tensor | tuple[Tensor, ...]:
    """Run the module of each segment on its rows of the arguments, and return their results, concatenated."""
    sizes = [segment.rows.stop - segment.rows.start for segment in segments]
    parts = zip(*(argument.split(sizes) for argument in arguments), strict=True)
    results: list[Any] = []
    for segment, part in zip(segments, parts, strict=True):
        module = modules[segment.op]
        results.append(module(*part))
    if isinstance(results[0], Tensor):
        return torch.cat(results)
    return tuple(map(torch.cat, zip(*results, strict=True)))


class _Kind:
    """The shape, dtype, device and memory order of the values of a column."""

    def __init__(self, values: Tensor):
        """Describe a column by its first `values`, (G, ...)."""
        self.shape = values.shape[1:]
        self.dtype = values.dtype
        self.device = values.device
        channels_last = values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last)
        self.is_channels_last = channels_last and not values.is_contiguous()
        memory_format = torch.channels_last if self.is_channels_last else torch.contiguous_format
        one = torch.empty((1, *self.shape), device="meta", memory_format=memory_format)
        self.strides = one.stride()[1:]

    def buffer(self, num_rows: int, zeros: bool = False) -> Tensor:
        """Allocate (num_rows, F) rows, each in memory order, so that a row is copied as one contiguous piece."""
        make = torch.zeros if zeros else torch.empty
        size = self.shape.numel()
        return make(num_rows, size, dtype=self.dtype, device=self.device)

    def state(self, num_rows: int) -> Tensor:
        """Return a (num_rows, F) placeholder in the memory of one number, which carries the buffer's gradient.

        It has floats for a column of integers.
        """
        has_gradients = self.dtype.is_floating_point or self.dtype.is_complex
        dtype = self.dtype if has_gradients else torch.float32
        one = torch.empty(1, dtype=dtype, device=self.device)
        return one.expand(num_rows, self.shape.numel())

    def view(self, rows: Tensor, count: int | None = None) -> Tensor:
        """View (G, F) rows as values (G, ...), or (G * count, F) rows as (G, count, ...)."""
        if count is None and len(self.shape) == 1:
            return rows
        step, offset = rows.stride(0), rows.storage_offset()
        sizes: tuple[int, ...]
        if count is None:
            sizes = (len(rows), *self.shape)
            return rows.as_strided(sizes, (step, *self.strides), offset)
        sizes = (len(rows) // count, count, *self.shape)
        return rows.as_strided(sizes, (count * step, step, *self.strides), offset)

    def flatten(self, values: Tensor) -> Tensor:
        """Return values, (G, ...) or (G, count, ...), as rows, (n, F)."""
        values = values.movedim(-3, -1) if self.is_channels_last else values
        leading = values.shape[: values.dim() - len(self.shape)]
        return values.reshape(leading.numel(), self.shape.numel())


class Buffers:
    """The values of each column during a run, and during a step of the backward pass their gradients."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.kinds: dict[int, _Kind] = {}
        self.values: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor | None] = {}

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers from 0 to the number of the last row of the longest column."""
        device = next(iter(self.values.values())).device
        num_rows = max(column.num_rows for column in self.plan.columns)
        return torch.arange(num_rows, device=device)

    def write(self, results: Sequence[Result], values: Sequence[Tensor]) -> None:
        """Write the results of a call, or the inputs.

        Raises:
            ValueError: a result has another shape than the column, or a dtype that the dtype of the column cannot
                represent.
        """
        for (column, rows), given in zip(results, values, strict=True):
            size = rows.stop - rows.start
            kind = self.kinds.get(column)
            if kind is None:
                kind = self.kinds[column] = _Kind(given)
            found = tuple(given.shape)
            expected = (size, *kind.shape)
            if found != expected:
                raise ValueError(f"{self._source(results)} {found}, expected {expected}")
            if given.dtype != kind.dtype and not torch.can_cast(given.dtype, kind.dtype):
                what = f"{given.dtype}, which a column of {kind.dtype} cannot hold"
                raise ValueError(f"{self._source(results)} {what}")
            num_rows = self.plan.columns[column].num_rows
            if num_rows == size:  # no other call writes into the column: its values are the buffer
                self.values[column] = kind.flatten(given.detach())
                continue
            if column not in self.values:
                self.values[column] = kind.buffer(num_rows)
            kind.view(self.values[column][rows]).copy_(given)

    def _source(self, results: Sequence[Result]) -> str:
        calls = (f"op {call.op} returned" for call in self.plan.calls if call.results is results)
        return next(calls, "an input is")

    def read(self, argument: Argument) -> Tensor:
        """Return an argument, (G, ...) or (G, count, ...): a view of the buffer if the rows are adjacent, or a copy."""
        kind = self.kinds[argument.column]
        values = self.values[argument.column]
        if not argument.is_adjacent:
            gathered = values.index_select(0, self.rows(argument))
            return kind.view(gathered, argument.count)
        # A row is written once, before it is read, so that the backward pass may save a view of the buffer. `.data`
        # does not share the buffer's version counter, which later writes increase. A saved view keeps the whole buffer,
        # so that a copy of a small part of it takes less memory.
        rows = values.data[argument.rows]
        if 2 * len(rows) < len(values):
            rows = rows.clone()
        return kind.view(rows, argument.count)

    def rows(self, argument: Argument) -> Tensor:
        """Return the numbers of the rows that an argument reads."""
        rows = self.plan.rows(argument)
        return rows if isinstance(rows, Tensor) else self.numbers[rows]

    def arguments(self, reads: Sequence[Argument]) -> list[Tensor]:
        """Return the arguments of a call, or copies of the roots."""
        found = [self.read(each) for each in reads]
        if reads is self.plan.roots:
            return [each.clone() for each in found]
        return found

    def add_gradient(self, argument: Argument, gradient: Tensor | None) -> None:
        """Add the gradient of an argument to the gradients of the rows from which it was read."""
        if gradient is None:
            return
        column = argument.column
        kind = self.kinds[column]
        rows = self.gradients.get(column)
        if rows is None:
            num_rows = self.plan.columns[column].num_rows
            rows = self.gradients[column] = kind.buffer(num_rows, zeros=True)
        if argument.is_adjacent:
            own = kind.view(rows[argument.rows], argument.count)
            own.add_(gradient)
            return
        flat = kind.flatten(gradient)
        if flat.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
            flat = flat.clone()  # if a module returns its argument, this is also the gradient of its result
        rows.index_add_(0, self.rows(argument), flat)

    def gradient(self, made: Result) -> Tensor | None:
        """Return the gradient of a result, or None if no value of its column has a gradient yet."""
        gradients = self.gradients.get(made.column)
        if gradients is None:
            return None
        rows = gradients[made.rows]
        if made in self.plan.inputs and len(rows) < len(gradients):
            rows = rows.clone()  # an input's `grad` may be kept, and a view would keep the whole buffer
        return self.kinds[made.column].view(rows)


# Autograd does not see the buffers, in which the values are. It sees an exchange and its neighbours:
#
#                      results     +------------+    arguments
#         call k    -------------> |            | ------------->  call k + 1
#                   <------------- |            | <-------------
#                     gradients    |  exchange  |    gradients
#                       state      |            |      state
#     last exchange -------------> |            | ------------->  next exchange
#                   <------------- |            | <-------------
#                    gradients of  +------------+  gradients of
#                      all rows                      all rows
#
# A state is a single element in the shape of all rows of a column. Forward, it carries no values, and only leads
# autograd from one exchange to the next. Backward, its gradient is the buffer of the gradients: an exchange adds the
# gradients of the arguments to it, reads the gradients of the results from it, and passes it to the last exchange.
class _Exchange(Function):
    """Write the results of a call, then read the arguments of the next; in the backward pass, the reverse.

    The gradients of the states belong to one backward pass, as one may run within another or end before it reaches the
    inputs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        buffers: Buffers,
        results: Sequence[Result],
        reads: Sequence[Argument],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Write the results, and read the arguments of the next call.

        Args:
            tensors: the old states, then the values of the results.

        Returns:
            the new states, then the arguments.
        """
        num_states = len(buffers.kinds)
        states = [each.detach() for each in tensors[:num_states]]
        values = tensors[num_states:]
        ctx.set_materialize_grads(False)
        if results is buffers.plan.inputs:
            ctx.save_for_backward(*values)  # autograd detects changes of the inputs, which are not copied
        buffers.write(results, values)
        columns = tuple(buffers.kinds)
        for column in columns[num_states:]:
            num_rows = buffers.plan.columns[column].num_rows
            states.append(buffers.kinds[column].state(num_rows))
        ctx.buffers = buffers
        ctx.results = results
        ctx.reads = reads
        ctx.columns = columns
        ctx.num_states = num_states
        arguments = buffers.arguments(reads)
        whole_numbers = [each for each in arguments if not (each.is_floating_point() or each.is_complex())]
        ctx.mark_non_differentiable(*whole_numbers)
        return *states, *arguments

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # an error if an input has been changed
        buffers, columns = ctx.buffers, ctx.columns
        of_columns = gradients[: len(columns)]
        of_arguments = gradients[len(columns) :]
        buffers.gradients = dict(zip(columns, of_columns, strict=True))
        for argument, gradient in zip(ctx.reads, of_arguments, strict=True):
            buffers.add_gradient(argument, gradient)
        of_results = [buffers.gradient(each) for each in ctx.results]
        of_states = [buffers.gradients[column] for column in columns[: ctx.num_states]]
        buffers.gradients = {}
        return None, None, None, *of_states, *of_results
