"""Calls on futures -> nodes: the calls that a lazy scope has recorded since its last run, in plain lists of integers.

The *address* of result r of node n is n * MOST_RESULTS + r; tensors from outside have -1, -2, ... Nodes with the same
key have the same op. The key is everything on which a call depends: the function or module and the module's state, the
structure, shapes, dtypes, devices and static values of the arguments, gradients on or off, and autocast. `lower` makes
a graph of the nodes.

A run computes every future that is still referenced. Nothing recorded before a run is therefore used after it: the
recording starts anew, and computed futures are treated as tensors from outside.

Shapes: N nodes, O ops, U arguments of all nodes, A greatest number of one node, F futures.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.hooks import RemovableHandle

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types
from iep.batching.sharing import share
from iep.dynamic.future import LEAF, Future, Nested, forbid_lost_gradients, recording_into, split, values_of
from iep.dynamic.kernels import ENTERED, NOW, Kernel, Op, Spec, is_autograd_function, kernel_of_torch, name_of
from iep.dynamic.observing import State, module_of, observe, plain_key, state_of, version_of
from iep.dynamic.report import BatchingReport

STATIC_KINDS = frozenset((type(None), bool, int, str, torch.dtype, torch.device))
"""The types of most arguments that are not tensors. Equal values of one of these types are the same value."""
MOST_RESULTS = 1 << 16
"""A number above that of the results of any node."""
MOST_KERNELS = 4096
"""The greatest number of kernels of one function or module that are kept."""
_of_modules: WeakKeyDictionary[nn.Module, dict[tuple, Kernel]] = WeakKeyDictionary()
_of_torch: dict[Callable, dict[tuple, Kernel]] = {}


class OpaqueError(Exception):
    """An argument is not a tensor, a plain value, or a nested structure of these."""


class Recording:
    """The nodes of one scope, and the tensors from outside that they read.

    Args:
        run: a function that gives the referenced futures their values. It is called with the recording, these futures
            in the order of their addresses, and the reason for the run.
        enter: a function that makes a call at once, whose own calls are recorded.
        report: counts the calls that are observed or run at once.
        constants: tensors that are shared by all calls, besides parameters.
    """

    def __init__(self, run: Callable, enter: Callable, report: BatchingReport, constants: Iterable[Tensor]):
        self._run, self._enter, self._report = run, enter, report
        self.is_over = self._is_running = False
        self._constants = {id(tensor): tensor for tensor in constants}
        self.specs: list[Spec] = []
        """The spec of the values of each column."""
        self.pending: list[Tensor] = []
        """By column, a tensor without values, of which the futures are views."""
        self._columns: dict[Spec, int] = {}
        self._kernels: dict[Callable, dict[tuple, Kernel]] = {}
        """The kernels that are valid in this scope alone."""
        self._states: dict[Callable, tuple[int, State]] = {}
        """The numbers and states of the modules that were called since a module has last changed."""
        self._numbers: dict[tuple, int] = {}
        self._modules: dict[int, nn.Module] = {}
        """By `id`, all modules that calls have run."""
        self._start()

    def _start(self) -> None:
        self.ops: list[Op] = []
        self.node_op = array("q")
        self.arguments = array("q")
        """The addresses of the arguments of all nodes, one node after the other."""
        self.inputs: list[Tensor] = []
        self.input_columns: list[int] = []
        self._versions: dict[int, tuple[Tensor, Any]] = {}
        """The tensors on which results depend, with their versions."""
        self._input_addresses: dict[int, int] = {}
        self._held: set[ref] = set()
        self._ops_by_key: dict[tuple, Op | Kernel] = {}
        self._used_modules: set[int] = set()
        """The `id`s of the modules on which the recorded calls depend."""

    def run(self, why: str) -> None:
        """Run the recorded calls, which gives all referenced futures their values; `why` is the reason for the run.

        Raises:
            ValueError: the scope has ended with an exception, the recorded calls are already running, or a module or
                tensor changed after a call of it was recorded.
        """
        if self.is_over:
            raise ValueError("the scope of this future ended with an exception before it was computed")
        if self._is_running:
            raise ValueError("a recorded call reads a future that is not one of its arguments: pass it as an argument")
        futures = [future for reference in list(self._held) if (future := reference()) is not None]
        if futures:
            self._check_unchanged()
            self._is_running = True
            try:
                with recording_into(None):
                    self._run(self, sorted(futures, key=lambda future: future._address), why)
            finally:
                self._is_running = False
        self._start()

    def end(self) -> None:
        """Release everything that futures do not refer to."""
        self._start()
        for kept in (self._constants, self._kernels, self._states, self._numbers, self._modules):
            kept.clear()
        self.is_over = True
        del self._run, self._enter, self._report

    def changes(self, changed: nn.Module | RemovableHandle, *args: Any) -> None:
        """Run the recorded calls if they depend on a module whose attribute or hook is about to change.

        Args:
            changed: a module, or the handle of a hook.
            args: the arguments of the change: an attribute's name and value, or the dict of a new hook.
        """
        if isinstance(changed, nn.Module):
            modules = [changed] if vars(changed).get(args[0], self) is not args[-1] else []
        else:
            hooks = args[0] if args else changed.hooks_dict_ref()
            modules = [each for each in self._modules.values() if any(part is hooks for part in vars(each).values())]
        known = self._modules.keys() & map(id, modules)
        if known:
            self._run_dependent(known)
            self._forget_states()

    def _run_dependent(self, modules: Iterable[int]) -> None:
        """Run the recorded calls if they depend on any of some modules, given by `id`."""
        if not self._used_modules.isdisjoint(modules):
            self.run("a module changes")

    def _forget_states(self) -> None:
        self._states.clear()
        self._kernels.clear()

    def state(self, function: Callable) -> tuple[int, State]:
        """Return a number that tells the states of a module apart, and the state of the module that a call runs."""
        found = self._states.get(function)
        if found is None:
            module = module_of(function)
            state = state_of(*([] if module is None else [module]))
            self._modules |= state.modules
            if module is not None:
                self._constants |= {id(buffer): buffer for buffer in module.buffers()}
            number = self._numbers.setdefault(tuple(state.facts.items()), len(self._numbers))
            found = self._states[function] = number, state
        return found

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._versions.setdefault(id(tensor), (tensor, version_of(tensor)))

    def _check_unchanged(self) -> None:
        """Raise a ValueError if the state on which calls depend has changed since they were recorded."""
        when = "after a call was recorded and before it ran: calls run when a value is read, and at the scope's end"
        for tensor, version in self._versions.values():
            if version_of(tensor) != version:
                what = "changed in place" if version[1] == tensor.requires_grad else "given another requires_grad"
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} was {what} {when}")
        for function, state in {op.function: op.state for op in self.ops}.items():
            module = module_of(function)
            if module is not None and (changed := state_of(module).changed_since(state)):
                raise ValueError(f"{changed[0]} was changed {when}")

    def future_for(self, value: Any) -> Any:
        """Return a nested value in which futures replace the tensors that belong to one sample."""
        if type(value) is Future or type(value) in STATIC_KINDS:
            return value
        if isinstance(value, Tensor):
            return self._future(self._column(Spec.of(value)), 0, value) if self._is_samples(value) else value
        return tree_map_only(Tensor, self.future_for, value)

    def _future(self, column: int, address: int, value: Tensor | None = None) -> Future:
        future = self.pending[column].as_subclass(Future)
        future._recording, future._column, future._address = self, column, address
        if value is not None:
            future._value = value
        return future

    def _is_samples(self, value: Any) -> bool:
        """Return whether a value is a future, or a tensor that is not shared by all calls."""
        return isinstance(value, Tensor) and type(value) is not nn.Parameter and id(value) not in self._constants

    def record(self, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Add a node for `function(*args, **kwargs)`, and return futures in the structure of its result.

        If the call cannot be a node, it runs now, and its result is returned.
        """
        forbid_lost_gradients()
        number, _ = self._states.get(function) or self.state(function)
        key: list = [function, number, is_grad_enabled(), _autocast(), len(args), *kwargs]
        addresses: list[int] = []
        self._carries_grad = False
        try:
            self._walk((*args, *kwargs.values()) if kwargs else args, key, addresses)
        except OpaqueError as failure:
            how = NOW if _is_torch(function) else ENTERED
            return self._run_now(Kernel(how, f"{failure}"), function, args, kwargs)
        whole_key = tuple(key)
        op = self._ops_by_key.get(whole_key)
        if op is None:
            return self._record_first(whole_key, function, args, kwargs)
        if isinstance(op, Kernel):
            return self._run_now(op, function, args, kwargs)

        address, held, futures = len(self.node_op) * MOST_RESULTS, self._held, []
        self.node_op.append(op.index)
        self.arguments.extend(addresses)
        carries_grad = op.grad and (self._carries_grad or op.has_grad)
        for column, has_grad in zip(op.columns, op.kernel.grads, strict=True):
            future = self._future(column, address)
            future._carries_grad = carries_grad and has_grad
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
                self._carries_grad |= value._carries_grad
            elif kind in STATIC_KINDS:
                key += (kind, value)
            elif isinstance(value, Tensor):
                self._walk_tensor(value.value if isinstance(value, Future) else value, key, addresses)
            elif kind is tuple or kind is list:
                key += (kind, len(value))
                self._walk(value, key, addresses)
            elif kind is dict:
                key += (kind, len(value))
                self._walk([part for item in value.items() for part in item], key, addresses)
            elif (plain := plain_key(value)) is not None:
                key.append(plain)
            else:
                parts, structure = tree_flatten(value)
                if structure.is_leaf():
                    raise OpaqueError(f"an argument is a {kind.__name__}, whose contents are unknown")
                key.append(structure)
                self._walk(parts, key, addresses)

    def _walk_tensor(self, tensor: Tensor, key: list, addresses: list[int]) -> None:
        self._carries_grad |= tensor.requires_grad
        if type(tensor) is nn.Parameter:
            self._constants[id(tensor)] = tensor
        if id(tensor) in self._constants:
            key += (nn.Parameter, id(tensor))
            return
        address = self._input_addresses.get(id(tensor))
        if address is None:
            self.inputs.append(tensor)
            self.input_columns.append(self._column(Spec.of(tensor)))
            self._versions[id(tensor)] = tensor, version_of(tensor)
            address = self._input_addresses[id(tensor)] = -len(self.inputs)
        key.append(self.input_columns[-1 - address])
        addresses.append(address)

    def _record_first(self, key: tuple, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Record a call of a kind that has no op yet. If it has no kernel either, run it now and observe it."""
        arguments, leaves = split((args, dict(kwargs)), self._is_samples)
        specs = [Spec.of(leaf) for leaf in leaves]
        described = [
            (Spec.of(part), part.requires_grad) if isinstance(part, Tensor) else plain_key(part)
            for part in arguments.parts
        ]
        state = self._states[function][1]
        kind = arguments.structure, *key[2:4], *specs, *described, *state.facts.items()
        kernel = self._kernels.get(function, {}).get(kind) or _kept(function, state).get(kind)
        if kernel is None and not leaves:
            kernel = Kernel(NOW, "no argument is a tensor")
        elif kernel is None and _is_torch(function) and not _autocast():
            with recording_into(None):
                kernel = _kept(function, state)[kind] = kernel_of_torch(function, arguments, specs)
        elif kernel is None:
            return self._observe(kind, function, arguments, leaves)
        if kernel.how in (NOW, ENTERED):
            self._ops_by_key[key] = kernel
        else:
            self._add_op(key, function, arguments, kernel)
        return self.record(function, args, kwargs)

    def _observe(self, kind: tuple, function: Callable, arguments: Nested, leaves: Sequence[Any]) -> Any:
        """Make the first call of a kind now, and keep the kernel that it shows."""
        state = self._states[function][1]
        if any(type(leaf) is Future and leaf._value is None for leaf in leaves):
            self.run(f"the first call of {name_of(function)} is observed")
        self._run_dependent(state.modules if isinstance(function, nn.Module) else self._used_modules)
        kernel, result, modules = observe(function, arguments, values_of(leaves))
        self._modules |= modules
        if kernel.changes:
            self._forget_states()
        if self.state(function)[1].facts == state.facts:  # otherwise another call may change nothing
            self._kernels.setdefault(function, {})[kind] = kernel
            if modules.keys() <= state.modules.keys():
                _kept(function, state)[kind] = kernel
        self._report.add_first(function, kernel)
        return self.future_for(result)

    def _add_op(self, key: tuple, function: Callable, arguments: Nested, kernel: Kernel) -> None:
        state, columns = self._states[function][1], tuple(map(self._column, kernel.outputs))
        result_of = _result_of(kernel.result, len(columns))
        is_opaque = not (_is_torch(function) or isinstance(function, nn.Module))
        tensors = [tensor for tensor, _ in state.tensors.values()]
        has_grad = is_opaque or any(tensor.requires_grad for tensor in tensors)
        grad, autocast = key[2:4]
        op = Op(len(self.ops), function, arguments, grad, autocast, kernel, columns, result_of, has_grad, state)
        self._ops_by_key[key] = op
        self.ops.append(op)
        self._note([*tensors, *(part for part in arguments.parts if isinstance(part, Tensor))])
        self._used_modules |= self._modules.keys() if is_opaque else state.modules.keys()

    def _column(self, spec: Spec) -> int:
        column = self._columns.setdefault(spec, len(self.specs))
        if column == len(self.specs):
            self.specs.append(spec)
            self.pending.append(torch.empty(spec.shape, dtype=spec.dtype, device="meta"))
        return column

    def _run_now(self, kernel: Kernel, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        self._report.ran_at_once[name_of(function), kernel.reason] += 1
        if kernel.how == ENTERED:
            return self._enter(function, args, kwargs)
        if kernel.changes:
            self._run_dependent(self._states[function][1].modules)
        with recording_into(None):
            result = function(*values_of(args), **values_of(dict(kwargs)))
        if kernel.changes:
            self._forget_states()
        return result if _is_torch(function) else self.future_for(result)


def _kept(function: Callable, state: State) -> dict[tuple, Kernel]:
    """Return the kernels of a function that are kept for later scopes, by kind of call.

    Kernels of modules with a complete state and of PyTorch's functions are kept. Those of the user's functions are not,
    as these functions may depend on more than their arguments.
    """
    kernels: dict[tuple, Kernel] = {}
    if isinstance(function, nn.Module) and state.is_complete:
        kernels = _of_modules.setdefault(function, kernels)
    elif _is_torch(function):
        kernels = _of_torch.setdefault(function, kernels)
    if len(kernels) == MOST_KERNELS:  # a number that differs between calls adds a kernel for each value
        kernels.clear()
    return kernels


def _is_torch(function: Callable) -> bool:
    """Return whether PyTorch itself defines a function, which then runs no code of the user."""
    is_users = module_of(function) is not None or is_autograd_function(function)
    return not is_users and (getattr(function, "__module__", None) or "torch").startswith("torch")


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
) -> tuple[Graph, Types, list[Tensor], list[list[Future]]]:
    """Return the graph that computes `futures`. If `shared`, nodes of one op with equal arguments are merged.

    Returns:
        The graph, its types, the tensors that are its inputs, and for each of the types' roots the futures that it
        computes.
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
    roots = [[futures[n] for n in which.tolist()] for which in by_column]
    return graph, types, [recording.inputs[n] for n in inputs.tolist()], roots
