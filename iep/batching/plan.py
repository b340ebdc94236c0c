"""Graph and schedule -> plan: which rows every call reads and writes. Integers only; no tensor of values is touched.

All values of one kind (a shape and dtype) form a *column* and lie in one buffer: first the inputs, then the results of
the calls, in the order of execution. A call therefore writes adjacent rows, and reads rows that earlier calls wrote.
`execute.py` runs a plan. A data loader's workers can make one: it is small, and cheap to pickle.

Shapes: N nodes, K calls, G nodes of a call, S slots, F tensors of a value, R tensors that a node reads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.schedulers import Group, Schedule, Segment


class Read(NamedTuple):
    """One tensor that a module takes, for a call of G nodes."""

    first: int
    """Which of the node's arguments it is, counted from 0."""
    count: int | None = None
    """None for a (G, ...) tensor; otherwise arguments `first` to `first + count - 1` side by side, (G, count, ...)."""
    field: int = 0
    """Which tensor of the argument's value."""


class Signature(NamedTuple):
    """The tensors that the module of an op takes and returns."""

    reads: tuple[Read, ...]
    makes: tuple[int, ...] = (0,)
    """The columns of the returned tensors, in order."""


@dataclass(frozen=True, eq=False)
class Types:
    """The columns of a graph's values, for nodes that return several tensors or tensors of several shapes."""

    inputs: np.ndarray
    """(num_inputs,) column of each input, one tensor; the inputs of a column are given in the order of the slots."""
    signatures: Mapping[int, Signature]
    """By op."""
    roots: tuple[tuple[np.ndarray, np.ndarray | int], ...]
    """What a run returns, one tensor for each: slots, and which tensor of their values (all of one column)."""
    fields: np.ndarray | None = None
    """(N, A) added to the `field` with which each argument is read."""


class Argument(NamedTuple):
    """The rows of a column that a call reads as one tensor."""

    column: int
    rows: slice
    """Of the column's buffer where the rows are adjacent, otherwise of the column's `index`."""
    is_adjacent: bool
    count: int | None = None
    """As in `Read`: the rows are those of G nodes, `count` for each, one node after the other."""


class Result(NamedTuple):
    """The rows of a column that a call writes."""

    column: int
    rows: slice


class Call(NamedTuple):
    """One module call."""

    op: int
    size: int
    """G."""
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]
    segments: tuple[Segment, ...] | None = None
    """Of a call of a family: its functions and the nodes of each."""


@dataclass(frozen=True, eq=False)
class Column:
    """The buffer of the values of one kind."""

    num_rows: int
    """Of the inputs, which come first, and of all results."""
    index: torch.Tensor
    """(U,) int64, the rows that calls read, except where they are adjacent."""
    device: torch.device | None = None
    """None for the device of the inputs."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All calls of a minibatch in order. Printed, it shows every call in one line."""

    calls: tuple[Call, ...]
    columns: tuple[Column, ...]
    inputs: tuple[Result, ...]
    """The first rows of the columns that have inputs."""
    roots: tuple[Argument, ...]
    """The tensors that a run returns."""
    num_devices: int = 1
    """Column c of the types, on the device at position p, is column c * num_devices + p; see `placement.py`."""

    def rows(self, argument: Argument) -> slice | torch.Tensor:
        """Return the rows that an argument reads: a slice of the column's buffer, or an index tensor."""
        return argument.rows if argument.is_adjacent else self.columns[argument.column].index[argument.rows]

    def to(self, device: torch.device | str) -> "Plan":
        """Return the plan with its index tensors on `device`; those of a placed column are on the column's device."""
        columns = [
            replace(column, index=column.index.to(column.device or device, non_blocking=True))
            for column in self.columns
        ]
        return replace(self, columns=tuple(columns))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Plan":
        """Return the plan with `function` of its index tensors."""
        return replace(self, columns=tuple(replace(each, index=function(each.index)) for each in self.columns))

    def __str__(self) -> str:
        several = len(self.columns) > 1
        lines = [
            f"column {number}: {column.num_rows} rows"
            + (f" on device {number % self.num_devices}, {column.device}" if column.device else "")
            for number, column in enumerate(self.columns)
        ]
        lines.append(f"inputs: {', '.join(_describe_rows(each.column, each.rows, several) for each in self.inputs)}")
        for number, call in enumerate(self.calls):
            reads = ", ".join(self._describe(each, several) for each in call.arguments)
            writes = ", ".join(_describe_rows(each.column, each.rows, several) for each in call.results)
            nodes = "1 node" if call.size == 1 else f"{call.size} nodes"
            what = f"op {call.op} on {nodes}"
            if call.op < 0:
                what = f"copy of {nodes} to device {call.results[0].column % self.num_devices}"
            elif call.segments is not None:
                what = f"family {call.op} ({_describe_segments(call.segments)}) on {nodes}"
            lines.append(f"call {number}: {what}, reads {reads}, writes {writes}")
        lines.append(f"roots: {', '.join(self._describe(each, several) for each in self.roots)}")
        return "\n".join(lines)

    def _describe(self, argument: Argument, several: bool) -> str:
        text = _describe_rows(argument.column, self.rows(argument), several)
        return text if argument.count is None else f"{text} ({argument.count} a node)"


def _describe_rows(column: int, rows: slice | torch.Tensor, several: bool) -> str:
    if isinstance(rows, slice):
        text = f"{rows.start}" if rows.stop == rows.start + 1 else f"{rows.start}:{rows.stop}"
    else:
        text = " ".join(map(str, rows.tolist()))
    return f"{column}[{text}]" if several else f"[{text}]"


def _describe_segments(segments: tuple[Segment, ...]) -> str:
    return ", ".join(f"op {each.op} on {each.rows.stop - each.rows.start}" for each in segments)


def one_column(graph: Graph) -> Types:
    """Return the types of a graph whose values are single tensors of the inputs' shape, and whose roots are wanted."""
    ops, kind = graph.kinds
    arity = np.zeros(len(ops), dtype=np.int64)
    arity[kind] = (graph.args >= 0).sum(axis=1)
    reads = [tuple(map(Read, range(many))) for many in range(int(arity.max(initial=0)) + 1)]
    return Types(
        inputs=np.zeros(graph.num_inputs, dtype=np.int64),
        signatures={op: Signature(reads[many]) for op, many in zip(ops.tolist(), arity.tolist(), strict=True)},
        roots=((graph.roots, 0),),
    )


def make_plan(
    graph: Graph, schedule: Schedule, types: Types | None = None, devices: Sequence[torch.device] = ()
) -> Plan:
    """Return the plan of `schedule`, which runs every node of `graph` once, arguments first.

    Args:
        types: the columns of the values; None where every value is one tensor of the inputs' shape.
        devices: column c is on device c % D of them; without any, all are on the device of the inputs. For
            `placement.py`.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments; an op has no
            signature, or reads a tensor that an argument's value lacks, or tensors of several columns as one; the
            functions of a family have different signatures.
    """
    types = types or one_column(graph)
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if len(order_N) != graph.num_nodes or not (np.bincount(order_N, minlength=graph.num_nodes) == 1).all():
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    size_K = np.array([len(group.nodes) for group in schedule], dtype=np.int64)
    signature_K = [_signature(group, types) for group in schedule]
    inputs = np.bincount(types.inputs).tolist()
    where, results_K, num_rows = _write(graph, types, order_N, size_K, signature_K, inputs)
    index = _Index(len(num_rows))
    calls = []
    reads = _read(graph, types, where, order_N, size_K, signature_K)
    for group, signature, results, column_GR, row_GR in zip(schedule, signature_K, results_K, *reads, strict=True):
        arguments, r = [], 0
        for _, count, _ in signature.reads:
            columns, rows = (each[:, r : r + (count or 1)].ravel() for each in (column_GR, row_GR))
            arguments.append(index.argument(columns, rows, count, f"op {group.op}"))
            r += count or 1
        calls.append(Call(group.op, len(group.nodes), tuple(arguments), results, group.segments))
    roots = tuple(_root(where, slots, fields, index) for slots, fields in types.roots)
    columns = [
        Column(count, index.tensor(column), devices[column % len(devices)] if devices else None)
        for column, count in enumerate(num_rows)
    ]
    given = tuple(Result(column, slice(0, count)) for column, count in enumerate(inputs) if count)
    return Plan(tuple(calls), tuple(columns), given, roots, max(1, len(devices)))


def _signature(group: Group, types: Types) -> Signature:
    """Return the signature of a call; all functions of a family have the same."""
    ops = [group.op] if group.segments is None else [segment.op for segment in group.segments]
    missing = [op for op in ops if op not in types.signatures]
    if missing:
        raise ValueError(f"op {missing[0]} has no signature")
    if len({types.signatures[op] for op in ops}) > 1:
        raise ValueError(f"the functions of family {group.op} have different signatures, expected one")
    return types.signatures[ops[0]]


class _Where(NamedTuple):
    """Where the tensors of every slot's value are; -1 where a value has fewer than others."""

    column_SF: np.ndarray
    row_SF: np.ndarray
    call_S: np.ndarray
    """The call that computes each slot; -1 for the inputs."""


def _write(
    graph: Graph,
    types: Types,
    order_N: np.ndarray,
    size_K: np.ndarray,
    signature_K: list[Signature],
    inputs: list[int],
) -> tuple[_Where, list[tuple[Result, ...]], list[int]]:
    """Return where all values are, the results of every call, and the number of rows of every column."""
    makes = {signature.makes for signature in signature_K}
    num_fields = max([1, *map(len, makes)])
    num_rows = inputs + [0] * (max([0, *(column + 1 for each in makes for column in each)]) - len(inputs))
    results_K, made_KF = [], []
    for signature, size in zip(signature_K, size_K.tolist(), strict=True):
        results = []
        for column in signature.makes:
            results.append(Result(column, slice(num_rows[column], num_rows[column] + size)))
            num_rows[column] += size
        results_K.append(tuple(results))
        made_KF.append([(each.column, each.rows.start) for each in results] + [(-1, -1)] * (num_fields - len(results)))
    num_slots = graph.num_inputs + graph.num_nodes
    where = _Where(*np.full((2, num_slots, num_fields), -1), np.full(num_slots, -1))
    where.column_SF[: graph.num_inputs, 0] = types.inputs
    for column in range(len(inputs)):
        where.row_SF[np.flatnonzero(types.inputs == column), 0] = np.arange(inputs[column])
    slot_N, call_N = graph.num_inputs + order_N, np.repeat(np.arange(len(size_K)), size_K)
    place_N = np.arange(len(order_N)) - np.repeat(np.cumsum(size_K) - size_K, size_K)  # in its call
    made_NF2 = np.array(made_KF, dtype=np.int64).reshape(-1, num_fields, 2)[call_N]
    where.column_SF[slot_N] = made_NF2[:, :, 0]
    where.row_SF[slot_N] = made_NF2[:, :, 1] + place_N[:, None]
    where.call_S[slot_N] = call_N
    return where, results_K, num_rows


def _read(
    graph: Graph,
    types: Types,
    where: _Where,
    order_N: np.ndarray,
    size_K: np.ndarray,
    signature_K: list[Signature],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for every call (G, R) columns and rows: those of the R tensors that each of its nodes reads."""
    kinds = {signature: kind for kind, signature in enumerate(dict.fromkeys(signature_K))}
    reads = [[(at, r.field) for r in s.reads for at in range(r.first, r.first + (r.count or 1))] for s in kinds]
    kind_K = np.array([kinds[signature] for signature in signature_K], dtype=np.int64)
    width_K = np.array([len(each) for each in reads], dtype=np.int64)[kind_K]
    first_P = np.cumsum([0, *map(len, reads)])
    # One entry for every tensor that is read, call by call, node by node.
    call_U = np.repeat(np.arange(len(size_K)), size_K * width_K)
    node_U = np.repeat(order_N, np.repeat(width_K, size_K))
    place_U = np.arange(len(node_U)) - np.repeat(np.cumsum(size_K * width_K) - size_K * width_K, size_K * width_K)
    read_U = first_P[kind_K[call_U]] + place_U % np.maximum(width_K, 1)[call_U]
    argument_U, field_U = np.array([read for each in reads for read in each], dtype=np.int64).reshape(-1, 2)[read_U].T
    is_there_U = argument_U < graph.args.shape[1]
    argument_U = np.where(is_there_U, argument_U, 0)
    slot_U = graph.args[node_U, argument_U]
    if types.fields is not None:
        field_U = field_U + types.fields[node_U, argument_U]
    is_there_U &= (slot_U >= 0) & (field_U < where.row_SF.shape[1])
    column_U = np.where(is_there_U, where.column_SF[slot_U, np.where(is_there_U, field_U, 0)], -1)
    if (column_U < 0).any():
        at = int(np.argmin(column_U))
        node, (argument, field) = node_U[at], [each for reads in reads for each in reads][read_U[at]]
        raise ValueError(f"op {graph.op[node]} reads tensor {field} of argument {argument}, which node {node} lacks")
    if (where.call_S[slot_U] >= call_U).any():
        raise ValueError("a schedule runs a node before its arguments")
    row_U, bounds = where.row_SF[slot_U, field_U], np.cumsum([0, *(size_K * width_K)]).tolist()
    shapes = list(zip(size_K.tolist(), width_K.tolist(), pairwise(bounds), strict=True))
    return tuple([values[a:b].reshape(size, width) for size, width, (a, b) in shapes] for values in (column_U, row_U))


def _root(where: _Where, slots: np.ndarray, fields: np.ndarray | int, index: "_Index") -> Argument:
    fields = np.broadcast_to(fields, slots.shape)
    is_there = fields < where.row_SF.shape[1]
    columns = np.where(is_there, where.column_SF[slots, np.where(is_there, fields, 0)], -1)
    if (columns < 0).any():
        at = int(np.argmin(columns))
        raise ValueError(f"a root reads tensor {fields[at]} of slot {slots[at]}, which it lacks")
    return index.argument(columns, where.row_SF[slots, fields], None, "a root")


class _Index:
    """The index tensors of the columns while they grow."""

    def __init__(self, num_columns: int):
        self.pieces: list[list[np.ndarray]] = [[] for _ in range(num_columns)]
        self.length = [0] * num_columns

    def argument(self, columns: np.ndarray, rows: np.ndarray, count: int | None, what: str) -> Argument:
        """Return the argument that reads `rows`, all of one column.

        Raises:
            ValueError: they are not; names `what` reads them.
        """
        if not len(rows):
            return Argument(0, slice(0, 0), True, count)
        if len(self.pieces) > 1 and (columns != columns[0]).any():
            raise ValueError(f"{what} reads tensors of several columns as one")
        column, first, last, size = int(columns[0]), int(rows[0]), int(rows[-1]), len(rows)
        if last - first == size - 1 and (rows[1:] - rows[:-1] == 1).all():
            return Argument(column, slice(first, last + 1), True, count)
        self.pieces[column].append(rows)
        self.length[column] += size
        return Argument(column, slice(self.length[column] - size, self.length[column]), False, count)

    def tensor(self, column: int) -> torch.Tensor:
        """Return the whole index of a column."""
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *self.pieces[column]]))
