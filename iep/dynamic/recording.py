"""Calls on futures -> nodes: the calls that a lazy scope has recorded since its last run, in plain lists of integers.

The *address* of result r of node n is n * MOST_RESULTS + r; tensors from outside have -1, -2, ... Nodes with the same
key (function or module, structure, shapes, dtypes, devices and static values of its arguments, gradients on or off,
autocast) have the same op. `lower` makes a graph of them.

A run computes every future that is still referenced. Nothing recorded before a run is therefore used after it: the
recording starts anew, and computed futures are treated as tensors from outside.

Shapes: N nodes, O ops, U arguments of all nodes, A greatest number of one node, F futures.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types
from iep.batching.sharing import share
from iep.dynamic.future import LEAF, Future, Nested, forbid_lost_gradients, recording_into, split, values_of
from iep.dynamic.kernels import NOW, STATIC, Kernel, Op, Spec, kernel_of, name_of, state_of, tensors_of

STATIC_KINDS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
"""The types of most arguments that are not tensors."""
MOST_RESULTS = 1 << 16
"""A number above that of the results of any node."""


class Recording:
    """The nodes of one scope, and the tensors from outside that they read.

    Args:
        run: a function that gives the referenced futures their values. It is called with the recording, these futures
            in the order of their addresses, and the reason for the run.
        ran_at_once: counts the calls that cannot be recorded, by their name and the reason.
        constants: tensors that are shared by all calls, besides parameters.
    """

    def __init__(self, run: Callable, ran_at_once: Counter[tuple[str, str]], constants: Iterable[Tensor]):
        self._run, self._ran_at_once, self.is_over = run, ran_at_once, False
        self._constants = {id(tensor): tensor for tensor in constants}
        self.specs: list[Spec] = []
        """The spec of the values of each column."""
        self._columns: dict[Spec, int] = {}
        self._start()

    def _start(self) -> None:
        self.ops: list[Op] = []
        self.node_op = array("q")
        self.arguments = array("q")
        """The addresses of the arguments of all nodes, one node after the other."""
        self.inputs: list[Tensor] = []
        self.input_columns: list[int] = []
        self._versions: dict[int, tuple[Tensor, int | None]] = {}
        """The tensors on which results depend, and how often they had been changed in place."""
        self._input_addresses: dict[int, int] = {}
        self._held: set[ref] = set()
        self._ops_by_key: dict[tuple, Op | Kernel] = {}

    def run(self, why: str) -> None:
        """Run the recorded calls, which gives all referenced futures their values; `why` is the reason for the run."""
        if self.is_over:
            raise ValueError("the scope of this future ended with an exception before it was computed")
        futures = [future for reference in list(self._held) if (future := reference()) is not None]
        if futures:
            self._check_unchanged()
            with recording_into(None):
                self._run(self, sorted(futures, key=lambda future: future._address), why)
        self._start()

    def end(self) -> None:
        """Release everything that futures do not refer to."""
        self._start()
        self._constants.clear()
        self.is_over = True
        del self._run

    def _note(self, function: Callable, tensors: Iterable[Tensor] = ()) -> tuple:
        """Note the versions of tensors, and return the state of a module on which its calls depend."""
        own = tensors_of(function)
        for tensor in (*own, *tensors):
            self._versions.setdefault(id(tensor), (tensor, _version_of(tensor)))
        return state_of(function), list(map(id, own))

    def _check_unchanged(self) -> None:
        """Raise a ValueError if the state on which calls depend has changed since they were recorded."""
        when = "after a call was recorded and before it ran: calls run when a value is read, and at the scope's end"
        for op in self.ops:
            if self._note(op.function) != op.noted:
                raise ValueError(f"{name_of(op.function)} was changed (parts, hooks or training mode) {when}")
        for tensor, version in self._versions.values():
            if _version_of(tensor) != version:
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} was changed in place {when}")

    def future_for(self, value: Any) -> Any:
        """Return a nested value in which futures replace the tensors that belong to one sample."""
        if isinstance(value, Tensor):
            return Future(self, self._column(Spec.of(value)), 0, value) if self._is_samples(value) else value
        is_known = type(value) is Future or type(value) in STATIC_KINDS
        return value if is_known else tree_map_only(Tensor, self.future_for, value)

    def _is_samples(self, value: Any) -> bool:
        """Return whether a value is a future, or a tensor that is not shared by all calls."""
        is_shared = type(value) is nn.Parameter or id(value) in self._constants
        return isinstance(value, Tensor | Future) and not is_shared

    def record(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Add a node for `function(*args, **kwargs)`, and return futures in the structure of its result.

        If the call cannot be a node, it runs now, and its result is returned.
        """
        forbid_lost_gradients()
        key: list = [function, is_grad_enabled(), getattr(function, "training", None), _autocast()]
        addresses: list[int] = []
        try:
            self._walk((*args, kwargs) if kwargs else args, key, addresses)
            op = self._ops_by_key.get(tuple(key))
        except TypeError as failure:
            return self._run_now(function, args, kwargs, f"{failure}")
        if op is None:
            self._add_op(tuple(key), function, args, kwargs)
            return self.record(function, args, kwargs)
        if isinstance(op, Kernel):
            return op.result.fill(()) if op.how == STATIC else self._run_now(function, args, kwargs, op.reason)

        address, held, futures = len(self.node_op) * MOST_RESULTS, self._held, []
        self.node_op.append(op.index)
        self.arguments.extend(addresses)
        for column in op.columns:
            future = Future(self, column, address)
            held.add(ref(future, held.discard))
            futures.append(future)
            address += 1
        return op.result_of(futures)

    def _walk(self, values: Iterable, key: list, addresses: list[int]) -> None:
        """Append descriptions of arguments to `key`, and the addresses of their tensors to `addresses`."""
        for value in values:
            kind = type(value)
            if kind is Future and value._value is None and value._recording is self:
                key.append(value._column)
                addresses.append(value._address)
            elif kind in STATIC_KINDS:
                # 1 and True are equal, and so are 0.0 and -0.0.
                key += (kind, repr(value) if kind is float else value)
            elif kind is Future or isinstance(value, Tensor):
                self._walk_tensor(value.value if kind is Future else value, key, addresses)
            elif kind is tuple or kind is list:
                key += (kind, len(value))
                self._walk(value, key, addresses)
            elif kind is dict:
                key += (dict, len(value), *value)
                self._walk(value.values(), key, addresses)
            elif kind is slice:
                bounds = value.start, value.stop, value.step
                if not all(type(bound) in STATIC_KINDS for bound in bounds):
                    raise TypeError("a slice depends on values")
                key += (slice, *bounds)
            else:
                parts, structure = tree_flatten(value)
                if structure.is_leaf():
                    key += (kind, value)
                else:
                    key.append(structure)
                    self._walk(parts, key, addresses)

    def _walk_tensor(self, tensor: Tensor, key: list, addresses: list[int]) -> None:
        if type(tensor) is nn.Parameter:
            self._constants[id(tensor)] = tensor
        if id(tensor) in self._constants:
            key += (nn.Parameter, id(tensor))
            return
        address = self._input_addresses.get(id(tensor))
        if address is None:
            self.inputs.append(tensor)
            self.input_columns.append(self._column(Spec.of(tensor)))
            self._versions[id(tensor)] = tensor, _version_of(tensor)
            address = self._input_addresses[id(tensor)] = -len(self.inputs)
        key.append(self.input_columns[-1 - address])
        addresses.append(address)

    def _add_op(self, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Add the op of the calls with `key`."""
        arguments, leaves = split((args, dict(kwargs)), self._is_samples)
        kernel, modes = Kernel(NOW, "no argument is a tensor"), (is_grad_enabled(), _autocast())
        if leaves:
            with recording_into(None):
                kernel = kernel_of(function, arguments, modes, list(map(Spec.of, leaves)))
        if kernel.how in (STATIC, NOW):
            self._ops_by_key[key] = kernel
            return
        columns = tuple(map(self._column, kernel.outputs))
        constants = [part for part in arguments.parts if isinstance(part, Tensor)]
        result_of, noted = _result_of(kernel.result, len(columns)), self._note(function, constants)
        op = Op(len(self.ops), function, arguments, *modes, kernel, columns, result_of, noted)
        self._ops_by_key[key] = op
        self.ops.append(op)

    def _column(self, spec: Spec) -> int:
        column = self._columns.setdefault(spec, len(self.specs))
        if column == len(self.specs):
            self.specs.append(spec)
        return column

    def _run_now(self, function: Callable, args: tuple, kwargs: Mapping[str, Any], why: str) -> Any:
        self._ran_at_once[name_of(function), why] += 1
        with recording_into(None):
            return function(*values_of(args), **values_of(dict(kwargs)))


def _version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed in place; None for a tensor of inference mode, which has no counter."""
    return None if tensor.is_inference() else tensor._version


def _result_of(result: Nested, count: int) -> Callable[[list[Future]], Any]:
    """Return the function from `count` futures to a nested result; the usual results are made quickly."""
    example = result.fill(range(count))
    if example == 0:
        return itemgetter(0)
    return tuple if type(example) is tuple and example == tuple(range(count)) else result.fill


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the kinds of devices for which autocast is enabled, each with its dtype."""
    if not (is_autocast_enabled("cpu") or is_autocast_enabled("cuda")):
        return ()
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if is_autocast_enabled(kind))


def lower(
    recording: Recording, futures: Sequence[Future], shared: bool = False
) -> tuple[Graph, Types, list[Tensor], list[list[tuple[Future, bool]]]]:
    """Return the graph that computes `futures`. If `shared`, nodes of one op with equal arguments are merged.

    Returns:
        The graph, its types, the tensors that are its inputs, and for each of the types' roots the futures that it
        computes, with whether they can require gradients.
    """
    ops, op_N, address_U = recording.ops, np.array(recording.node_op), np.array(recording.arguments)
    leaves_O = [sum(part is LEAF for part in op.arguments.parts) for op in ops]
    leaves_N = np.array(leaves_O)[op_N]
    reader_U = np.repeat(np.arange(len(op_N)), leaves_N)
    argument_U = np.arange(len(reader_U)) - np.repeat(np.cumsum(leaves_N) - leaves_N, leaves_N)
    node_U, field_U = divmod(address_U, MOST_RESULTS)
    node_F, field_F = divmod(np.array([future._address for future in futures]), MOST_RESULTS)

    needed_N, is_input_U = np.ones(len(op_N), dtype=bool), address_U < 0
    while True:  # drop the nodes whose results nothing reads, until there are none
        is_used_N = np.zeros_like(needed_N)
        is_used_N[node_F] = is_used_N[node_U[needed_N[reader_U] & ~is_input_U]] = True
        if (is_used_N == needed_N).all():
            break
        needed_N = is_used_N
    position_N, is_input_U = np.cumsum(needed_N) - 1, is_input_U & needed_N[reader_U]
    inputs, number = np.unique(-1 - address_U[is_input_U], return_inverse=True)
    slot_U = len(inputs) + position_N[node_U]
    slot_U[is_input_U], field_U[is_input_U] = number, 0
    args_NA = np.full((len(op_N), int(leaves_N.max())), -1)
    fields_NA = np.zeros_like(args_NA)
    args_NA[reader_U, argument_U], fields_NA[reader_U, argument_U] = slot_U, field_U
    graph = Graph(
        len(inputs), op_N[needed_N], args_NA[needed_N], np.zeros(needed_N.sum(), int), len(inputs) + position_N[node_F]
    )
    fields_NA = fields_NA[needed_N]
    if shared:
        # Only nodes that read the same results of their arguments are equal: each kind counts as an op.
        kinds, kind_N = np.unique(np.column_stack([graph.op, fields_NA]), axis=0, return_inverse=True)
        graph = share(replace(graph, op=kind_N.ravel()))
        graph, fields_NA = replace(graph, op=kinds[graph.op, 0]), kinds[graph.op, 1:]

    column_F = np.array([future._column for future in futures])
    by_column = [np.flatnonzero(column_F == column) for column in np.unique(column_F)]
    used_ops = np.unique(graph.op).tolist()
    types = Types(
        inputs=np.array([recording.input_columns[n] for n in inputs.tolist()], dtype=np.int64),
        signatures={n: Signature(tuple(map(Read, range(leaves_O[n]))), ops[n].columns) for n in used_ops},
        roots=tuple((graph.roots[which], field_F[which]) for which in by_column),
        fields=fields_NA,
    )
    makers = [(ops[n], i) for n, i in zip(op_N[node_F].tolist(), field_F.tolist(), strict=True)]
    grads = [op.grad and op.kernel.grads[i] for op, i in makers]
    roots = [[(futures[n], grads[n]) for n in which.tolist()] for which in by_column]
    return graph, types, [recording.inputs[n] for n in inputs.tolist()], roots
