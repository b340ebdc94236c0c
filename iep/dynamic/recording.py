"""Calls on futures -> nodes: the calls that a lazy scope has recorded since its last run, in plain lists of integers.

Results of nodes have *addresses* from 0 on, in the order of recording; tensors from outside have -1, -2, ... Nodes with
the same key (function or module, structure, shapes, dtypes, devices and static values of its arguments, gradients on or
off, autocast) have the same op. `lowering.py` makes a graph of them.

A run computes every future that is still referenced. Nothing recorded before a run is therefore used after it: the
recording starts anew, and computed futures are treated as tensors from outside.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn

from iep.dynamic.future import Future, is_in_forward, lost_gradient, recording_into, values_of
from iep.dynamic.kernels import NOW, STATIC, Autocast, Kernel, Recorded, Spec, kernel_of, name_of, state_of, tensors_of
from iep.dynamic.nested import Leaf, fill, mapped, split

is_any_autocast_enabled = torch._C._is_any_autocast_enabled
STATIC_KINDS = frozenset((type(None), bool, int, str, torch.dtype, torch.device))
"""The types of most arguments that are not tensors."""
PLAIN_KINDS = STATIC_KINDS | {float, complex, bytes, type(...), torch.Size, torch.layout, torch.memory_format, type}
DENSE = frozenset((Tensor, nn.Parameter, nn.Buffer))


@dataclass(frozen=True, eq=False, slots=True)
class FutureColumn:
    """The shape, dtype and device of a column of futures."""

    recording: "Recording"
    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A tensor that all calls of an op share, such as a parameter."""

    tensor: Tensor


@dataclass(eq=False, slots=True)
class Op:
    """The call that all nodes with the same key run."""

    index: int
    call: Recorded
    kernel: Kernel
    grad: bool
    autocast: Autocast
    num_leaves: int
    """The number of tensors among the arguments of each node."""
    columns: tuple[FutureColumn, ...]
    """The columns of the results."""
    constants: list[Tensor]
    """The tensors among the arguments that all calls share."""
    is_single: bool
    is_tuple: bool
    """True if a call returns a tuple of tensors, False if it returns one tensor."""
    noted: tuple
    """The state on which the calls depend besides their arguments, at the time of the first recorded call."""

    def check(self) -> None:
        """Raise a ValueError if the state on which the calls depend has changed since the first one was recorded."""
        if _note(self.call.function, self.constants)[:2] != self.noted[:2]:
            raise ValueError(
                f"{name_of(self.call.function)} was changed (parameters, buffers, parts, hooks or training mode) after "
                "a call of it was recorded and before it ran: calls run when a value is read, and at the scope's end"
            )


class Recording:
    """The nodes of one scope, and the tensors from outside that they read.

    Args:
        run: a function that gives the referenced futures their values. It is called with the recording, these futures
            in the order of their addresses, and the reason for the run.
        ran_at_once: counts the calls that cannot be recorded, by their name and the reason.
        constants: tensors that are shared by all calls, besides parameters.
    """

    def __init__(self, run: Callable, ran_at_once: Counter[tuple[str, str]], constants: Iterable[Tensor]):
        self._run, self._ran_at_once = run, ran_at_once
        self.is_over, self._is_in_forward = False, is_in_forward()
        self._constants = {id(tensor): Constant(tensor) for tensor in constants}
        self._columns: dict[tuple, FutureColumn] = {}
        self._start()

    def _start(self) -> None:
        self.ops: list[Op] = []
        self.node_op = array("q")
        self.arguments = array("q")
        """The addresses of the arguments of all nodes, one node after the other."""
        self.inputs: list[Tensor] = []
        self.input_columns: list[FutureColumn] = []
        self._input_versions: list[int | None] = []
        self._input_addresses: dict[int, int] = {}
        self._num_results = 0
        self._held: set[ref] = set()
        self._let_go = self._held.discard
        self._ops_by_key: dict[tuple, Op | Kernel] = {}

    def run(self, why: str) -> None:
        """Run the recorded calls, which gives all referenced futures their values; `why` is the reason for the run."""
        if self.is_over:
            raise ValueError("the scope of this future ended with an exception before it was computed")
        futures = [future for reference in list(self._held) if (future := reference()) is not None]
        if futures:
            for op in self.ops:
                op.check()
            with recording_into(None):
                self._run(self, sorted(futures, key=lambda future: future._address), why)
        self._start()

    def end(self) -> None:
        """Release everything that futures do not refer to."""
        self._start()
        self._constants.clear()
        self._run, self.is_over = None, True

    def unchanged(self, numbers: Iterable[int]) -> list[Tensor]:
        """Return tensors from outside, none of which may have changed; number n has the address -1 - n."""
        tensors = [self.inputs[number] for number in numbers]
        for tensor, number in zip(tensors, numbers, strict=True):
            if version_of(tensor) != self._input_versions[number]:
                shape = tuple(tensor.shape)
                raise ValueError(f"a tensor of shape {shape} was changed in place after a call on it was recorded")
        return tensors

    def futures_for(self, arguments: Any) -> Any:
        """Return nested arguments in which futures replace the tensors that belong to one sample."""

        def future_for(value: Any) -> Any:
            is_own = type(value) is not Future and self._is_samples(value)
            return Future(self._column(*Spec.of(value)), 0, value) if is_own else value

        return mapped(future_for, arguments)

    def _is_samples(self, value: Any) -> bool:
        """Return whether a value is a future, or a tensor that is not shared by all calls."""
        is_constant = type(value) is nn.Parameter or id(value) in self._constants
        return type(value) is Future or (isinstance(value, Tensor) and not is_constant)

    def record(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Add a node for `function(*args, **kwargs)`, and return futures in the structure of its result.

        If the call cannot be a node, it runs now, and its result is returned.
        """
        grad = is_grad_enabled()
        if not grad and is_in_forward() and not self._is_in_forward:
            raise lost_gradient()
        key: list = [function, grad, getattr(function, "training", None)]
        addresses: list[int] = []
        if is_any_autocast_enabled():
            key.append(_autocast())
        try:
            self._walk(args, key, addresses)
            if kwargs:
                self._walk_other(kwargs, key, addresses)
            op = self._ops_by_key.get(tuple(key))
        except TypeError as failure:
            return self._run_now(function, args, kwargs, f"{failure}")
        if op is None:
            if any(type(part) is FutureColumn and part.recording is not self for part in key):
                # To this scope, futures of other scopes are tensors from outside.
                args, kwargs = values_of(args, but_of=self), values_of(dict(kwargs), but_of=self)
            else:
                self._add_op(tuple(key), function, args, kwargs)
            return self.record(function, args, kwargs)
        if type(op) is Kernel:
            return op.structure if op.how == STATIC else self._run_now(function, args, kwargs, op.reason)

        self.node_op.append(op.index)
        self.arguments.extend(addresses)
        address, held, futures = self._num_results, self._held, []
        for column in op.columns:
            future = Future(column, address)
            held.add(ref(future, self._let_go))
            futures.append(future)
            address += 1
        self._num_results = address
        if op.is_single:
            return future
        return tuple(futures) if op.is_tuple else fill(op.kernel.structure, futures)

    def _walk(self, values: Iterable, key: list, addresses: list[int]) -> None:
        """Append descriptions of arguments to `key`, and the addresses of their tensors to `addresses`."""
        for value in values:
            kind = type(value)
            if kind is Future and value._value is None:
                key.append(value._column)
                addresses.append(value._address)
            elif kind is tuple or kind is list:
                key.append(kind)
                key.append(len(value))
                self._walk(value, key, addresses)
            elif kind is Tensor and id(value) not in self._constants:
                address = self._input_addresses.get(id(value)) or self._add_input(value)
                key.append(self.input_columns[-1 - address])
                addresses.append(address)
            elif kind in STATIC_KINDS:
                key.append(kind)  # because 1 and True are equal
                key.append(value)
            else:
                self._walk_other(value, key, addresses)

    def _walk_other(self, value: Any, key: list, addresses: list[int]) -> None:
        kind = type(value)
        if kind is Future:
            value = value._value
        if isinstance(value, Tensor):
            if kind is nn.Parameter and id(value) not in self._constants:
                self._constants[id(value)] = Constant(value)
            if id(value) in self._constants:
                key.append(self._constants[id(value)])
                return
            address = self._input_addresses.get(id(value)) or self._add_input(value)
            key.append(self.input_columns[-1 - address])
            addresses.append(address)
        elif isinstance(value, dict):
            key += (dict, len(value), *value)
            self._walk(value.values(), key, addresses)
        elif kind is slice or isinstance(value, tuple):
            key.append(kind)
            self._walk((value.start, value.stop, value.step) if kind is slice else value, key, addresses)
        else:
            key += (kind, repr(value) if kind is float else value)  # because 0.0 and -0.0 are equal

    def _add_input(self, tensor: Tensor) -> int:
        if type(tensor) not in DENSE or tensor.layout is not torch.strided:
            raise TypeError(f"an argument is a {type(tensor).__name__} of layout {tensor.layout}")
        self.inputs.append(tensor)
        self.input_columns.append(self._column(tensor.shape, tensor.dtype, tensor.device))
        self._input_versions.append(version_of(tensor))
        address = self._input_addresses[id(tensor)] = -len(self.inputs)
        return address

    def _column(self, *spec: Any) -> FutureColumn:
        column = self._columns.get(spec)
        if column is None:
            column = self._columns[spec] = FutureColumn(self, len(self._columns), *spec)
        return column

    def _add_op(self, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Add the op of the calls with `key`."""
        (args, kwargs), leaves = split((args, dict(kwargs)), self._is_samples)
        call = Recorded(function, args, kwargs)
        kernel = Kernel(NOW, "no argument is a tensor")
        if leaves:
            general = tuple(map(_general, key[1:])) if all(map(_is_plain, key[1:])) else None
            with recording_into(None):
                kernel = kernel_of(call, general, list(map(Spec.of, leaves)), lambda: values_of(leaves))
        if kernel.how in (STATIC, NOW):
            self._ops_by_key[key] = kernel
            return
        constants = [part.tensor for part in key if type(part) is Constant]
        op = self._ops_by_key[key] = Op(
            index=len(self.ops),
            call=call,
            kernel=kernel,
            grad=is_grad_enabled(),
            autocast=_autocast(),
            num_leaves=len(leaves),
            columns=tuple(self._column(*spec) for spec in kernel.outputs),
            constants=constants,
            is_single=type(kernel.structure) is Leaf,
            is_tuple=type(kernel.structure) is tuple and all(type(part) is Leaf for part in kernel.structure),
            noted=_note(function, constants),
        )
        self.ops.append(op)

    def _run_now(self, function: Callable, args: tuple, kwargs: Mapping[str, Any], why: str) -> Any:
        self._ran_at_once[name_of(function), why] += 1
        with recording_into(None):
            return function(*values_of(args), **values_of(dict(kwargs)))


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for a tensor of inference mode, which has no counter."""
    return None if tensor.is_inference() else tensor._version


def _note(function: Callable, constants: list[Tensor]) -> tuple:
    tensors = [*tensors_of(function), *constants]  # kept, so that no other tensor gets the id of one of them
    return state_of(function), [(id(tensor), version_of(tensor)) for tensor in tensors], tensors


def _autocast() -> Autocast:
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if is_autocast_enabled(kind))


def _is_plain(part: Any) -> bool:
    return isinstance(part, FutureColumn | Constant | type) or type(part) in PLAIN_KINDS or type(part) is tuple


def _general(part: Any) -> Any:
    """Return a part of a key without objects that belong to a scope or keep tensors alive."""
    if type(part) is Constant:
        return Spec.of(part.tensor), part.tensor.requires_grad
    return Spec.of(part) if type(part) is FutureColumn else part
