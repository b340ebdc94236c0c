"""Graph and schedule -> plan: the rows that every call reads and writes. Only integers are computed, no tensor values.

All values of one kind (a shape and dtype) form a *column* and lie in one buffer: first the inputs, then the results of
the calls, in the order of execution. A call therefore writes adjacent rows, and reads rows that earlier calls wrote.
`execute.py` runs a plan. The workers of a data loader can make plans, which are small and cheap to pickle.

Shapes: N nodes, K calls, G nodes of a call, S slots, F tensors of a value, R tensors that a node reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.schedulers import Group, Schedule, Segment

ROW_BITS = 40
"""The number of bits of the row in an address, which is enough for any row."""


class Read(NamedTuple):
    """One tensor that a module reads in a call of G nodes."""

    first: int
    """The position among the node's arguments, counted from 0."""
    count: int | None = None  # type: ignore[assignment]  # hides the method of tuples
    """None for a (G, ...) tensor; otherwise arguments `first` to `first + count - 1` are stacked, (G, count, ...)."""
    field: int = 0
    """The position of the tensor in the argument's value."""

    @property
    def width(self) -> int:
        """The number of the node's arguments that are read."""
        return 1 if self.count is None else self.count


class Signature(NamedTuple):
    """The tensors that the module of an op reads and returns."""

    reads: tuple[Read, ...]
    makes: tuple[int, ...] = (0,)
    """The columns of the returned tensors, in order."""


@dataclass(frozen=True, eq=False)
class Types:
    """The columns of a graph's values, for nodes that return several tensors or tensors of several shapes."""

    inputs: np.ndarray
    """The column of each input, (num_inputs,), one tensor each. Inputs of a column are in the order of slots."""
    signatures: Mapping[int, Signature]
    """The signature of each op."""
    roots: tuple[tuple[np.ndarray, np.ndarray | int], ...]
    """The outputs of a run, each (slots, field): the tensor `field` of the values at `slots`, all in one column."""
    fields: np.ndarray | None = None
    """Offsets that are added to `Read.field` for each node and argument, (N, A)."""


class Argument(NamedTuple):
    """The rows of a column that a call reads as one tensor."""

    column: int
    rows: slice
    """Rows of the column's buffer if they are adjacent, otherwise rows of the column's `index`."""
    is_adjacent: bool
    count: int | None = None  # type: ignore[assignment]  # hides the method of tuples
    """The count of the `Read`: there are `count` rows for each of the G nodes, one node after the other."""


class Result(NamedTuple):
    """The rows of a column that a call writes."""

    column: int
    rows: slice


class Call(NamedTuple):
    """One module call."""

    op: int
    size: int
    """The number of nodes, G."""
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    segments: tuple[Segment, ...] | None = None
    """The functions of an op group's call, and the rows of each."""
    in_op_group: tuple[int, int] | None = None
    """For a call of an op group: its index among the group's calls, and the offset of its first row in their rows."""


class Functions(NamedTuple):
    """The functions of the rows of an op group's call, as tensors."""

    index: torch.Tensor  # type: ignore[assignment]  # hides the method of tuples
    """The position of each row's function among the op group's functions in the plan, (G,) int64, ascending."""
    ends: torch.Tensor
    """The end of the rows of each of these functions, (F,) int32."""


@dataclass(frozen=True, eq=False)
class OpGroup:
    """The functions of an op group that a plan runs."""

    ops: tuple[int, ...]
    """The F functions, ascending."""
    index: torch.Tensor
    """The position of the function of each row of all calls, F for padding, (sum of G,) int64."""
    ends: torch.Tensor
    """The end of the rows of each function in each of K calls, (K, F) int32."""
    order: torch.Tensor
    """The rows of all calls, sorted by function, (sum of G,) int64."""
    total_ends: torch.Tensor
    """The end of each function's rows in `order`, (F,) int32."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors, in order."""
        return self.index, self.ends, self.order, self.total_ends


def make_op_group(ops: tuple[int, ...], functions_K: Sequence[np.ndarray]) -> OpGroup:
    """Return an op group of F functions, given the position of the function of each row of its calls.

    Args:
        functions_K: (G,) of each call, ascending; F and more for padding.
    """
    index_N = np.minimum(np.concatenate(functions_K), len(ops))
    ends_KF = np.stack([np.searchsorted(each, range(len(ops)), side="right") for each in functions_K]).astype(np.int32)
    order_N, total_F = index_N.argsort(kind="stable"), ends_KF.sum(axis=0, dtype=np.int32)
    return OpGroup(ops, *map(torch.from_numpy, (index_N, ends_KF, order_N, total_F)))


@dataclass(frozen=True, eq=False)
class Column:
    """The buffer of the values of one kind."""

    num_rows: int
    """The number of rows: those of the inputs, which are first, and those of all results."""
    index: torch.Tensor
    """The rows that calls read, (U,) int64, without those that are adjacent."""
    device: torch.device | None = None
    """None for the device of the inputs."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All calls of a minibatch in order. A printed plan shows every call in one line."""

    calls: tuple[Call, ...]
    columns: tuple[Column, ...]
    inputs: tuple[Result, ...]
    """The first rows of the columns that have inputs."""
    roots: tuple[Argument, ...]
    """The tensors that a run returns."""
    num_devices: int = 1
    """Column c of the types on the device at position p is column c * num_devices + p; see `placement.py`."""
    op_groups: Mapping[int, OpGroup] = field(default_factory=dict)
    """The op groups that have calls, by number."""

    def functions(self, call: Call) -> Functions:
        """Return the functions of the rows of an op group's call."""
        assert call.in_op_group is not None
        op_group, (number, first) = self.op_groups[call.op], call.in_op_group
        return Functions(op_group.index[first : first + call.size], op_group.ends[number])

    def rows(self, argument: Argument) -> slice | torch.Tensor:
        """Return the rows that an argument reads: a slice of the column's buffer, or an index tensor."""
        return argument.rows if argument.is_adjacent else self.columns[argument.column].index[argument.rows]

    def to(self, device: torch.device | str) -> "Plan":
        """Return the plan with its index tensors on `device`; those of a placed column are on the column's device."""
        return self._map(lambda tensor, own: tensor.to(own or device, non_blocking=True))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All index tensors."""
        of_op_groups = (tensor for each in self.op_groups.values() for tensor in each.tensors)
        return [*(column.index for column in self.columns), *of_op_groups]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Plan":
        """Return the plan with `function` applied to its index tensors."""
        return self._map(lambda tensor, _: function(tensor))

    def _map(self, function: Callable[[torch.Tensor, torch.device | None], torch.Tensor]) -> "Plan":
        columns = tuple(replace(each, index=function(each.index, each.device)) for each in self.columns)
        op_groups = {
            op: OpGroup(each.ops, *(function(tensor, None) for tensor in each.tensors))
            for op, each in self.op_groups.items()
        }
        return replace(self, columns=columns, op_groups=op_groups)

    def __str__(self) -> str:
        lines = [
            f"column {number}: {column.num_rows} rows"
            + (f" on device {number % self.num_devices}, {column.device}" if column.device else "")
            for number, column in enumerate(self.columns)
        ]
        lines.append(f"inputs: {self._describe(self.inputs)}")
        for number, call in enumerate(self.calls):
            nodes = "1 node" if call.size == 1 else f"{call.size} nodes"
            what = f"op {call.op} on {nodes}"
            if call.op < 0:
                what = f"copy of {nodes} to device {call.results[0].column % self.num_devices}"
            elif call.segments is not None:
                functions = ", ".join(f"op {each.op} on {each.rows.stop - each.rows.start}" for each in call.segments)
                what = f"op group {call.op} ({functions}) on {nodes}"
            reads, writes = self._describe(call.arguments), self._describe(call.results)
            lines.append(f"call {number}: {what}, reads {reads}, writes {writes}")
        lines.append(f"roots: {self._describe(self.roots)}")
        return "\n".join(lines)

    def _describe(self, tensors: Sequence[Argument | Result]) -> str:
        texts = []
        for each in tensors:
            rows = self.rows(each) if isinstance(each, Argument) else each.rows
            if isinstance(rows, torch.Tensor):
                text = " ".join(map(str, rows.tolist()))
            else:
                text = f"{rows.start}" if rows.stop == rows.start + 1 else f"{rows.start}:{rows.stop}"
            count = f" ({each.count} a node)" if isinstance(each, Argument) and each.count is not None else ""
            texts.append(f"{each.column if len(self.columns) > 1 else ''}[{text}]{count}")
        return ", ".join(texts)


def one_column(graph: Graph) -> Types:
    """Return the types of a graph whose values are single tensors of the inputs' shape, and whose roots are wanted.

    Raises:
        ValueError: nodes of one op have different numbers of arguments.
    """
    ops, kind = graph.kinds
    arity_N, arity = (graph.args >= 0).sum(axis=1), np.zeros(len(ops), dtype=np.int64)
    arity[kind] = arity_N
    if (differs_N := arity[kind] != arity_N).any():
        raise ValueError(f"nodes of op {graph.op[np.argmax(differs_N)]} have different numbers of arguments")
    signatures = {op: Signature(tuple(map(Read, range(n)))) for op, n in zip(ops.tolist(), arity.tolist(), strict=True)}
    return Types(np.zeros(graph.num_inputs, dtype=np.int64), signatures, ((graph.roots, 0),))


def make_plan(
    graph: Graph, schedule: Schedule, types: Types | None = None, devices: Sequence[torch.device] = ()
) -> Plan:
    """Return the plan of `schedule`, which runs every node of `graph` once, arguments first.

    Args:
        types: the columns of the values; None if every value is one tensor of the inputs' shape.
        devices: the D devices of `placement.py`: column c is on device c % D. If empty, all columns are on the device
            of the inputs.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments; an op reads a tensor
            that does not exist, or tensors of several columns as one; or signatures in an op group differ.
    """
    types = types or one_column(graph)
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if len(order_N) != graph.num_nodes or not (np.bincount(order_N, minlength=graph.num_nodes) == 1).all():
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    signature_K = [_signature(group, types) for group in schedule]
    used = set(signature_K)
    num_columns = 1 + max([int(types.inputs.max(initial=-1)), *(column for each in used for column in each.makes)])
    num_fields = max((len(each.makes) for each in used), default=1)
    layout = _Layout(graph.num_inputs + graph.num_nodes, num_fields, num_columns)
    inputs = [layout.write(np.flatnonzero(types.inputs == each), 0, each) for each in np.unique(types.inputs).tolist()]
    args_AN = graph.args.T.copy()  # numpy selects from long rows much faster than from short ones
    fields_AN = None if types.fields is None else types.fields.T.copy()
    calls, ops_of = [], dict[int, list[np.ndarray]]()
    for group, signature in zip(schedule, signature_K, strict=True):
        arguments = []
        for read in signature.reads:
            which = slice(read.first, read.first + read.width)
            slots = args_AN[which].take(group.nodes, axis=1).T.ravel()
            fields = 0 if fields_AN is None else fields_AN[which].take(group.nodes, axis=1).T.ravel()
            arguments.append(layout.read(slots, fields + read.field, read.count, f"op {group.op}"))
        slots = graph.num_inputs + group.nodes
        results = tuple([layout.write(slots, field, column) for field, column in enumerate(signature.makes)])
        place = None
        if group.segments is not None:
            others = ops_of.setdefault(group.op, [])
            place = len(others), sum(map(len, others))
            others.append(graph.op[group.nodes])
        calls.append(Call(group.op, len(group.nodes), tuple(arguments), results, group.segments, place))
    roots = types.roots if any(len(slots) for slots, _ in types.roots) else ()  # an empty minibatch has none
    reads = tuple(layout.read(slots, fields, None, f"root {number}") for number, (slots, fields) in enumerate(roots))
    columns = [
        Column(count, layout.index(column), devices[column % len(devices)] if devices else None)
        for column, count in enumerate(layout.num_rows)
    ]
    op_groups = {}
    for number, ops_K in ops_of.items():
        ops = np.unique(np.concatenate(ops_K))
        op_groups[number] = make_op_group(tuple(ops.tolist()), [np.searchsorted(ops, each) for each in ops_K])
    return Plan(tuple(calls), tuple(columns), tuple(inputs), reads, max(1, len(devices)), op_groups)


def _signature(group: Group, types: Types) -> Signature:
    """Return the signature of a call, which all functions of an op group share."""
    if group.segments is None:
        return types.signatures[group.op]
    found = {types.signatures[segment.op] for segment in group.segments}
    if len(found) > 1:
        raise ValueError(f"the functions of op group {group.op} have different signatures, expected one")
    return found.pop()


class _Layout:
    """The rows of all tensors, and the index tensors of the columns, while a plan grows.

    Row r of column c has the address (c << ROW_BITS) + r.
    """

    def __init__(self, num_slots: int, num_fields: int, num_columns: int):
        self.address_FS = np.full((num_fields, num_slots + 1), -1)
        """The address of each tensor, -1 if it is not written. The last column is for -1, no slot."""
        self.num_rows = [0] * num_columns
        self.reads: list[list[tuple[np.ndarray, str]]] = [[] for _ in range(num_columns)]
        """By column, the addresses that each argument reads one by one, and what reads them."""
        self.length = [0] * num_columns

    def write(self, slots: np.ndarray, field: int, column: int) -> Result:
        """Assign the next rows of a column to a tensor of the values at `slots`."""
        start, first = self.num_rows[column], column << ROW_BITS
        stop = self.num_rows[column] = start + len(slots)
        self.address_FS[field, slots] = np.arange(first + start, first + stop)
        return Result(column, slice(start, stop))

    def read(self, slots: np.ndarray, fields: np.ndarray | int, count: int | None, reader: str) -> Argument:
        """Return the argument that reads a tensor, numbered in `fields`, of each of the values at `slots`.

        If the rows are not adjacent, `index` checks that they have been written and belong to one column.
        """
        size, address = len(slots), self.address_FS[fields, slots]
        first = int(address[0])
        column, row = max(first, 0) >> ROW_BITS, first & (1 << ROW_BITS) - 1
        is_adjacent = int(address[-1]) - first == size - 1 and (size < 3 or (address[1:] - address[:-1] == 1).all())
        if is_adjacent and first >= 0:
            return Argument(column, slice(row, row + size), True, count)
        self.reads[column].append((address, reader))
        self.length[column] += size
        return Argument(column, slice(self.length[column] - size, self.length[column]), False, count)

    def index(self, column: int) -> torch.Tensor:
        """Return the whole index of a column.

        Raises:
            ValueError: a tensor was read before it was written, does not exist, or belongs to another column.
        """
        addresses = [np.empty(0, dtype=np.int64), *(address for address, _ in self.reads[column])]
        rows = np.concatenate(addresses) - (column << ROW_BITS)
        if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows[column]:
            for address, reader in self.reads[column]:
                if address.min() < 0:
                    raise ValueError(f"{reader} reads a tensor that does not exist or that a later call computes")
                if len(np.unique(address >> ROW_BITS)) > 1:
                    raise ValueError(f"{reader} reads tensors of several columns as one")
        return torch.from_numpy(rows)
