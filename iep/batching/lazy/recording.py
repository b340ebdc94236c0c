"""Calls on futures -> nodes: what a lazy scope has recorded, in plain lists of integers.

Every result has an *address*: results of nodes count up from 0 in the order of recording, tensors from outside are
-1, -2, ... Nodes of one key (function or module, its arguments' structure, shapes, dtypes, devices and static values,
gradients on or off, autocast) are of one op. What is recorded becomes a graph in `lowering.py`.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from iep.batching.lazy.current import autocast_of_thread, is_in_forward, off_for, recording_into, users_line
from iep.batching.lazy.future import Backward, Future, from_outside, futures_in, values_of
from iep.batching.lazy.kernels import (
    NOW,
    SINGLY,
    STATIC,
    Call,
    Kernel,
    Leaf,
    Spec,
    changes_argument,
    fill,
    find_kernel,
    known,
    name_of,
    warn_singly,
)
from iep.batching.lazy.noted import Noted, version_of
from iep.batching.lazy.recorded import STATIC_KINDS, Behind, Column, Constant, Modes, Nodes, Op, general_key

is_grad_enabled, is_any_autocast_enabled = torch.is_grad_enabled, torch._C._is_any_autocast_enabled

DENSE = frozenset((Tensor, nn.Parameter, nn.Buffer))


class _NotRecordableError(ValueError):
    """An argument that no node can have."""


class Recording:
    """Nodes, and tensors from outside, of one scope.

    Args:
        run: called with the recording, addresses to compute, and what asked for them; puts into `computed` what it has
            computed.
        constants: tensors that are shared by all calls, besides parameters.
    """

    def __init__(self, run: Callable[["Recording", list[int], str], None], constants: list[Tensor]):
        self._run = run
        self.ops: list[Op] = []
        self.node_op = array("q")
        self.taken = array("q")
        """The addresses that nodes take, node after node."""
        self._nodes: Nodes | None = None
        self.num_addresses = 0
        self.columns: list[Column] = []
        self.inputs: list[Tensor] = []
        self.input_columns: list[Column] = []
        self._input_versions: list[int | None] = []
        self.changed: set[int] = set()
        """The addresses among those of inputs that are futures' own: what they were changed to."""
        self.computed: dict[int, Tensor] = {}
        self.futures: list[ref] = []
        self.backwards: list[Backward] = []
        self.ran_at_once: Counter[tuple[str, str]] = Counter()
        self.is_over, self.is_in_forward = False, is_in_forward()
        self.takes: Callable[[nn.Module], bool]
        """Whether calls of a module are for `call`; set by the scope."""
        self.call: Callable[[Callable, tuple, Mapping[str, Any]], Any]
        """What a recorded module's or function's call with these arguments returns; set by the scope."""
        self._ops_by_key: dict[tuple, Op | Behind | Kernel] = {}
        self._columns_by_spec: dict[Spec, Column] = {}
        self._columns_of_inputs: dict[tuple, Column] = {}
        """By type and layout too."""
        self._inputs_by_id: dict[int, int | None] = {}
        self._constants = {id(tensor): Constant(tensor) for tensor in constants}

    def record(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """A node for `function(*args, **kwargs)`: returns futures in the structure of what it would return.

        Where it cannot be a node, it runs at once and its result is returned.
        """
        if self.is_over:
            return function(*values_of(args), **values_of(dict(kwargs)))
        key: list = [function, is_grad_enabled() or off_for(self), getattr(function, "training", None)]
        addresses: list[int] = []
        if is_any_autocast_enabled():
            key.append(autocast_of_thread())
        try:
            self._walk(args, key, addresses)
            if kwargs:
                self._walk_other(kwargs, key, addresses)
            op = self._ops_by_key.get(tuple(key))
        except (TypeError, _NotRecordableError) as failure:
            return self._run_at_once(function, args, kwargs, f"{failure}")
        if type(op) is not Op:
            if op is None:
                return self._record_new(tuple(key), function, args, kwargs, addresses)
            if type(op) is Behind:
                return self._record_behind(op.op, tuple(key), function, args, kwargs)
            return op.structure if op.how == STATIC else self._run_at_once(function, args, kwargs, op.reason)

        first = self.num_addresses
        self.node_op.append(op.index)
        self.taken.extend(addresses)
        if op.is_single:
            self.num_addresses = first + 1
            future = Future(op.columns[0], first)
            self.futures.append(ref(future))
            return future
        futures = []
        for column in op.columns:
            future = Future(column, first)
            futures.append(future)
            self.futures.append(ref(future))
            first += 1
        self.num_addresses = first
        return tuple(futures) if op.is_tuple else fill(op.kernel.structure, futures)

    def _record_new(
        self, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any], addresses: list[int]
    ) -> Any:
        """As `record`, of a call whose like has not been recorded."""
        if any(type(part) is Column and part.recording is not self for part in key):
            # Other scopes' futures are tensors from outside to this one.
            return self.record(function, values_of(args, but_of=self), values_of(dict(kwargs), but_of=self))
        self._new_op(key, function, args, kwargs, addresses)
        return self.record(function, args, kwargs)

    def _record_behind(self, op: Op, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """As `record`, of a call of an op that changes its first argument, or was not recorded since anything ran."""
        op.note(len(self.node_op))
        self._ops_by_key[key] = op
        result = self.record(function, args, kwargs)
        if op.kernel.is_in_place:
            self._ops_by_key[key] = Behind(op)
            if type(args[0]) is not Future:
                raise ValueError(from_outside(name_of(function)))
            args[0].become(result, name_of(function))
            return args[0]
        return result

    def _walk(self, values: Iterable, key: list, addresses: list[int]) -> None:
        """Append to `key` what arguments are, and to `addresses` where their tensors are."""
        for value in values:
            kind = type(value)
            if kind is Future:
                key.append(value._column)
                addresses.append(value._address)
            elif kind is tuple or kind is list:
                key.append(kind)
                key.append(len(value))
                self._walk(value, key, addresses)
            elif kind is Tensor:
                address = self._inputs_by_id.get(id(value))
                if address is None:
                    if id(value) in self._constants:
                        key.append(self._constants[id(value)])
                        continue
                    address = self._new_input(value)
                key.append(self.input_columns[-1 - address])
                addresses.append(address)
            elif kind is float:
                key.append(float)
                key.append(value or repr(value))  # 0.0 and -0.0 are equal
            elif kind in STATIC_KINDS:
                key.append(kind)  # 1, 1.0 and True are equal
                key.append(value)
            else:
                self._walk_other(value, key, addresses)

    def _walk_other(self, value: Any, key: list, addresses: list[int]) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            if id(value) not in self._constants and kind is nn.Parameter:
                self._constants[id(value)] = Constant(value)
            if id(value) in self._constants:
                key.append(self._constants[id(value)])
            else:
                address = self.add_input(value)
                key.append(self.input_columns[-1 - address])
                addresses.append(address)
        elif isinstance(value, dict):
            key += (dict, len(value), *value)
            self._walk(value.values(), key, addresses)
        elif kind is slice:
            key.append(slice)
            self._walk((value.start, value.stop, value.step), key, addresses)
        elif isinstance(value, tuple):  # a named one
            key.append(kind)
            self._walk(value, key, addresses)
        else:
            key.append(kind)
            key.append(value)

    def add_input(self, tensor: Tensor) -> int:
        """The address of a tensor from outside; each is kept once."""
        address = self._inputs_by_id.get(id(tensor))
        return self._new_input(tensor) if address is None else address

    def _new_input(self, tensor: Tensor) -> int:
        spec = (type(tensor), tensor.layout, tensor.shape, tensor.dtype, tensor.device)
        column = self._columns_of_inputs.get(spec)
        if column is None:
            if type(tensor) not in DENSE or tensor.layout is not torch.strided:
                raise _NotRecordableError(f"it takes a {type(tensor).__name__} of layout {tensor.layout}")
            column = self._columns_of_inputs[spec] = self._column(spec[2:])
        self.inputs.append(tensor)
        self.input_columns.append(column)
        self._input_versions.append(version_of(tensor))
        address = self._inputs_by_id[id(tensor)] = -len(self.inputs)
        return address

    def take_over(self, tensor: Tensor) -> tuple[Column, int]:
        """Where a tensor is that a future of a known value has become; apart from the same tensor from outside."""
        before = self._inputs_by_id.get(id(tensor))
        address = self._new_input(tensor)
        self.changed.add(address)
        self._inputs_by_id[id(tensor)] = before
        return self.input_columns[-1 - address], address

    def input_future(self, tensor: Tensor) -> Future:
        """A future that stands for a tensor from outside."""
        address = self.add_input(tensor)
        future = Future(self.input_columns[-1 - address], address)
        self.futures.append(ref(future))
        return future

    def futures_for(self, arguments: Any) -> Any:
        """Nested lists, tuples and dicts with futures in the places of tensors that are not shared by all calls."""
        if (
            isinstance(arguments, Tensor)
            and type(arguments) is not nn.Parameter
            and id(arguments) not in self._constants
        ):
            return self.input_future(arguments)
        if isinstance(arguments, dict):
            return {name: self.futures_for(value) for name, value in arguments.items()}
        if type(arguments) in (list, tuple):
            return type(arguments)(self.futures_for(value) for value in arguments)
        return arguments

    def nodes(self) -> Nodes:
        """All nodes."""
        if self._nodes is None or len(self._nodes.op) != len(self.node_op):
            self._nodes = Nodes.of(self.node_op, self.taken, self.ops)
        return self._nodes

    def pending_nodes(self) -> np.ndarray:
        """Nodes that have not run, rising."""
        if not self.computed:
            return np.arange(len(self.node_op))
        has_run = np.zeros(self.num_addresses, dtype=bool)
        has_run[list(self.computed)] = True
        return np.flatnonzero(~has_run[self.nodes().address])

    def results_of(self, nodes: np.ndarray) -> np.ndarray:
        """Addresses of all results of nodes, rising."""
        is_chosen = np.zeros(len(self.node_op), dtype=bool)
        is_chosen[nodes] = True
        return np.flatnonzero(is_chosen[self.nodes().maker])

    def values_at(self, addresses: np.ndarray, columns: np.ndarray) -> dict[int, Tensor]:
        """By column, the values at addresses of tensors from outside or of what has been computed, (n, ...) each."""
        values: dict[int, Tensor] = {}
        for column in np.unique(columns).tolist():
            there = addresses[columns == column].tolist()
            values[column] = torch.stack([self.inputs[-1 - at] if at < 0 else self.computed[at] for at in there])
        return values

    def tensor(self, address: int) -> Tensor:
        """What is at an address from outside, or of what has been computed."""
        return self.inputs[-1 - address] if address < 0 else self.computed[address]

    def forget(self) -> None:
        """Let go of all that futures outside do not hold."""
        self.is_over = True
        for kept in (
            *(self.inputs, self.input_columns, self.computed, self.futures, self.backwards),
            *(self._inputs_by_id, self._ops_by_key, self._constants),
        ):
            kept.clear()

    def look_anew(self) -> None:
        """Something has run: what modules are made of may change before their next calls are recorded."""
        for key, op in self._ops_by_key.items():
            if type(op) is Op:
                self._ops_by_key[key] = Behind(op)

    def check(self, nodes: np.ndarray) -> None:
        """Refuse modules of `nodes`, rising, and tensors, that were changed after calls of them were recorded."""
        first = np.full(len(self.ops), -1)
        first[self.nodes().op[nodes[::-1]]] = nodes[::-1]
        for op, node in zip(self.ops, first.tolist(), strict=True):
            if node >= 0:
                op.check(node)
        for tensor, version in zip(self.inputs, self._input_versions, strict=True):
            if version is not None and tensor._version != version:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed in place after a call on it was recorded"
                )

    def _column(self, spec: tuple) -> Column:
        column = self._columns_by_spec.get(spec)
        if column is None:
            column = self._columns_by_spec[spec] = Column(self, len(self.columns), *spec)
            self.columns.append(column)
        return column

    def _new_op(
        self, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any], addresses: list[int]
    ) -> Op | Kernel:
        """What nodes of `key` run; a kernel by itself where they are no nodes."""
        call, specs = self._call_of(function, args, kwargs)
        if not specs:
            self._ops_by_key[key] = Kernel(NOW, "it takes no tensor")
            return self._ops_by_key[key]
        facts, general = known(function), general_key(key, function)
        kernel = facts.kernels.get(general)
        if kernel is None:
            with recording_into(None):
                kernel = find_kernel(call, specs, lambda: [self.read(address) for address in addresses])
            if kernel.is_lasting and general is not None:
                facts.remember(general_key(key, function), kernel)  # which knows now what it calls
        if kernel.how in (STATIC, NOW):
            self._ops_by_key[key] = kernel
            return kernel
        if kernel.how == SINGLY:
            warn_singly(function, kernel.reason)
        columns = tuple(map(self._column, kernel.outputs))
        shared = tuple(part.tensor for part in key if type(part) is Constant)
        op = Op(
            len(self.ops),
            call,
            kernel,
            len(specs),
            columns,
            Modes(torch.is_grad_enabled(), autocast_of_thread()),
            is_single=type(kernel.structure) is Leaf,
            is_tuple=type(kernel.structure) is tuple
            and kernel.structure == tuple(map(Leaf, range(len(kernel.outputs)))),
            shared=shared,
            noted=Noted(function, shared),
            since=len(self.node_op),
        )
        self.ops.append(op)
        self._ops_by_key[key] = Behind(op) if kernel.is_in_place else op
        return op

    def _call_of(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Call, list[Spec]]:
        """The call with leaves in the places of what differs between nodes, and these leaves' specs."""
        specs: list[Spec] = []

        def leave(value: Any) -> Any:
            kind = type(value)
            if kind is Future or (isinstance(value, Tensor) and id(value) not in self._constants):
                specs.append(Spec(value.shape, value.dtype, value.device))
                return Leaf(len(specs) - 1)
            if kind is tuple or kind is list:
                return kind([leave(part) for part in value])
            if isinstance(value, dict):
                return {name: leave(part) for name, part in value.items()}
            if kind is slice:
                return slice(leave(value.start), leave(value.stop), leave(value.step))
            if isinstance(value, tuple):
                parts = [leave(part) for part in value]
                return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
            return value

        return Call(function, leave(args), leave(dict(kwargs))), specs

    def _run_at_once(self, function: Callable, args: tuple, kwargs: Mapping[str, Any], why: str) -> Any:
        self.ran_at_once[name_of(function), why] += 1
        with recording_into(None):
            arguments = values_of(args), values_of(dict(kwargs))
            values = [future.value for future in futures_in((args, kwargs))]
            versions = list(map(version_of, values))
            result = function(*arguments[0], **arguments[1])
        if list(map(version_of, values)) != versions:  # what was recorded before may take them as they were
            raise ValueError(changes_argument(function))
        return result

    def read(self, address: int) -> Tensor:
        """The value at an address; runs what it depends on."""
        if self.is_over:
            raise ValueError("the scope of this future ended with an exception before it was computed")
        if address < 0:
            return self.inputs[-1 - address]
        if address not in self.computed:
            self._run(self, [address], f"a value is read at {users_line()}")
        return self.computed[address]
