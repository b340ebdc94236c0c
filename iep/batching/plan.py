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
            f"column {number}: {column.num_rows} rows" + (f" on {column.device}" if column.device else "")
            for number, column in enumerate(self.columns)
        ]
        lines.append(f"inputs: {', '.join(_describe_rows(each.column, each.rows, several) for each in self.inputs)}")
        for number, call in enumerate(self.calls):
            reads = ", ".join(self._describe(each, several) for each in call.arguments)
            writes = ", ".join(_describe_rows(each.column, each.rows, several) for each in call.results)
            what = (
                f"op {call.op}" if call.segments is None else f"family {call.op} ({_describe_segments(call.segments)})"
            )
            nodes = "1 node" if call.size == 1 else f"{call.size} nodes"
            lines.append(f"call {number}: {what} on {nodes}, reads {reads}, writes {writes}")
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
    ops, first = np.unique(graph.op, return_index=True)
    arity = (graph.args[first] >= 0).sum(axis=1)
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
            signature, or reads a tensor that an argument's value lacks, or tensors of several columns as one.
    """
    types = types or one_column(graph)
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if len(order_N) != graph.num_nodes or not (np.bincount(order_N, minlength=graph.num_nodes) == 1).all():
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    first_K = np.cumsum([0, *(len(group.nodes) for group in schedule)])
    signature_K = [_signature(group, types) for group in schedule]
    results_K, num_rows = _results(first_K.tolist(), signature_K, np.bincount(types.inputs).tolist())
    table = _table_of_rows(graph, types, order_N, first_K, results_K)
    reads = _Reads(graph, types, table, order_N, first_K, signature_K)
    index = _Index(len(num_rows))
    calls = tuple(
        Call(group.op, len(group.nodes), reads.arguments(k, index), results_K[k], group.segments)
        for k, group in enumerate(schedule)
    )
    roots = tuple(_root(table, slots, fields, index) for slots, fields in types.roots)
    inputs = enumerate(np.bincount(types.inputs).tolist())
    return Plan(
        calls,
        tuple(
            Column(count, index.tensor(column), devices[column % len(devices)] if devices else None)
            for column, count in enumerate(num_rows)
        ),
        tuple(Result(column, slice(0, count)) for column, count in inputs if count),
        roots,
        max(1, len(devices)),
    )


def _signature(group: Group, types: Types) -> Signature:
    """Return the signature of a call; all functions of a family have the same."""
    op = group.op if group.segments is None else group.segments[0].op
    if op not in types.signatures:
        raise ValueError(f"op {op} has no signature")
    return types.signatures[op]


def _results(
    first_K: list[int], signature_K: list[Signature], inputs: list[int]
) -> tuple[list[tuple[Result, ...]], list[int]]:
    """Return the results of every call, and the number of rows of every column; `inputs` are those of each column."""
    columns = max([0, *(column for signature in set(signature_K) for column in signature.makes)])
    num_rows = inputs + [0] * (columns + 1 - len(inputs))
    results_K = []
    for signature, (start, stop) in zip(signature_K, pairwise(first_K), strict=True):
        made = []
        for column in signature.makes:
            first = num_rows[column]
            num_rows[column] += stop - start
            made.append(Result(column, slice(first, num_rows[column])))
        results_K.append(tuple(made))
    return results_K, num_rows


class _Table(NamedTuple):
    """Where the tensors of every slot's value are; -1 where a value has fewer than others."""

    column_SF: np.ndarray
    row_SF: np.ndarray
    call_S: np.ndarray
    """The call that computes each slot; -1 for the inputs."""


def _table_of_rows(
    graph: Graph, types: Types, order_N: np.ndarray, first_K: np.ndarray, results_K: list[tuple[Result, ...]]
) -> _Table:
    num_slots, num_fields = graph.num_inputs + graph.num_nodes, max([1, *map(len, results_K)])
    column_SF, row_SF = np.full((num_slots, num_fields), -1), np.full((num_slots, num_fields), -1)
    call_S = np.full(num_slots, -1)
    column_SF[: graph.num_inputs, 0] = types.inputs
    for column in np.unique(types.inputs):
        slots = np.flatnonzero(types.inputs == column)
        row_SF[slots, 0] = np.arange(len(slots))
    size_K = np.diff(first_K)
    call_N, slot_N = np.repeat(np.arange(len(size_K)), size_K), graph.num_inputs + order_N
    call_S[slot_N] = call_N
    for field in range(num_fields):
        made = [results[field] if field < len(results) else _NOTHING for results in results_K]
        column_SF[slot_N, field] = np.repeat(np.array([each.column for each in made], dtype=np.int64), size_K)
        offset_K = np.array([each.rows.start for each in made], dtype=np.int64) - first_K[:-1]
        row_SF[slot_N, field] = np.repeat(offset_K, size_K) + np.arange(len(order_N))
    return _Table(column_SF, row_SF, call_S)


_NOTHING = Result(-1, slice(-1, -1))


class _Index:
    """The index tensors of the columns while they grow."""

    def __init__(self, num_columns: int):
        self.pieces: list[list[np.ndarray]] = [[] for _ in range(num_columns)]
        self.length = [0] * num_columns

    def argument(self, column: int, rows: np.ndarray, is_adjacent: bool, count: int | None) -> Argument:
        """Return the argument that reads `rows`."""
        size = len(rows)
        if is_adjacent:
            first = int(rows[0])
            return Argument(column, slice(first, first + size), True, count)
        self.pieces[column].append(rows)
        self.length[column] += size
        return Argument(column, slice(self.length[column] - size, self.length[column]), False, count)

    def tensor(self, column: int) -> torch.Tensor:
        """Return the whole index of a column."""
        return torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *self.pieces[column]]))


def _root(table: _Table, slots: np.ndarray, fields: np.ndarray | int, index: _Index) -> Argument:
    fields = np.broadcast_to(fields, slots.shape)
    has = fields < table.row_SF.shape[1]
    columns = np.where(has, table.column_SF[slots, np.where(has, fields, 0)], -1)
    if (columns < 0).any():
        at = int(np.argmin(columns))
        raise ValueError(f"a root reads tensor {fields[at]} of slot {slots[at]}, which it lacks")
    if (columns[1:] != columns[:-1]).any():
        raise ValueError("a root reads tensors of several columns as one")
    rows = table.row_SF[slots, fields]
    return index.argument(int(columns[0]) if len(columns) else 0, rows, _is_adjacent(rows), None)


def _is_adjacent(rows: np.ndarray) -> bool:
    return len(rows) > 0 and bool((rows[1:] - rows[:-1] == 1).all())


class _Reads:
    """What the calls read, for all nodes at once: the r-th tensor that a node reads is in row r of the arrays."""

    def __init__(
        self,
        graph: Graph,
        types: Types,
        table: _Table,
        order_N: np.ndarray,
        first_K: np.ndarray,
        signature_K: list[Signature],
    ):
        self.signature_K, self.first_K = signature_K, first_K.tolist()
        signatures = {signature: kind for kind, signature in enumerate(dict.fromkeys(signature_K))}
        each = [
            [(at, read.field) for read in signature.reads for at in range(read.first, read.first + (read.count or 1))]
            for signature in signatures
        ]
        num_reads = max([1, *map(len, each)])
        # (kinds, R, 2) argument and field; the argument -1 of a node that reads fewer tensors is not read.
        padded = [reads + [(-1, 0)] * (num_reads - len(reads)) for reads in each]
        reads_PR2 = np.array(padded, dtype=np.int64).reshape(-1, num_reads, 2)
        kind_K = np.array([signatures[signature] for signature in signature_K], dtype=np.int64)
        call_N = np.repeat(np.arange(len(kind_K)), np.diff(first_K))
        args_AN, nodes_N = graph.args.T[:, order_N], np.arange(len(order_N))
        self.row_RN = np.empty((num_reads, len(order_N)), dtype=np.int64)
        self.column_RN = np.empty_like(self.row_RN)
        for r in range(num_reads):
            argument_N, field_N = reads_PR2[kind_K, r].T[:, call_N]
            is_there_N = argument_N < len(args_AN)
            slot_N = args_AN[np.where(is_there_N, argument_N, 0), nodes_N]
            if types.fields is not None:
                field_N = field_N + types.fields[order_N, np.where(is_there_N, argument_N, 0)]
            is_there_N &= (slot_N >= 0) & (field_N < table.row_SF.shape[1])
            field_N = np.where(is_there_N, field_N, 0)
            self.row_RN[r], self.column_RN[r] = table.row_SF[slot_N, field_N], table.column_SF[slot_N, field_N]
            is_bad_N = (argument_N >= 0) & (~is_there_N | (self.column_RN[r] < 0))
            if is_bad_N.any():
                at = int(np.argmax(is_bad_N))
                argument, field = reads_PR2[kind_K[call_N[at]], r]
                raise ValueError(
                    f"op {graph.op[order_N[at]]} reads tensor {field} of argument {argument}, "
                    f"which node {order_N[at]} lacks"
                )
            if ((argument_N >= 0) & (table.call_S[slot_N] >= call_N)).any():
                raise ValueError("a schedule runs a node before its arguments")
        self._find_breaks(first_K)

    def _find_breaks(self, first_K: np.ndarray) -> None:
        """Find which calls read adjacent rows, and rows of one column: those with no break among them."""
        first, last = first_K[:-1], first_K[1:] - 1
        breaks_RN, changes_RN = np.zeros_like(self.row_RN), np.zeros_like(self.row_RN)
        np.cumsum(self.row_RN[:, 1:] - self.row_RN[:, :-1] != 1, axis=1, out=breaks_RN[:, 1:])
        self.adjacent_RK = (breaks_RN[:, first] == breaks_RN[:, last]).tolist()
        self.column_RK = self.column_RN[:, first]
        if self.column_RN.any():  # several columns
            np.cumsum(self.column_RN[:, 1:] != self.column_RN[:, :-1], axis=1, out=changes_RN[:, 1:])
            self.column_RK = np.where(changes_RN[:, first] == changes_RN[:, last], self.column_RK, -1)
        self.column_RK = self.column_RK.tolist()

    def arguments(self, k: int, index: _Index) -> tuple[Argument, ...]:
        """Return the arguments of call k."""
        start, stop, r, found = self.first_K[k], self.first_K[k + 1], 0, []
        for read in self.signature_K[k].reads:
            column, count = self.column_RK[r][k], read.count
            if count is None:
                rows, is_adjacent = self.row_RN[r, start:stop], self.adjacent_RK[r][k]
            else:
                rows = self.row_RN[r : r + count, start:stop].T.ravel()
                is_adjacent = _is_adjacent(rows)
            if column < 0 or (count is not None and any(self.column_RK[r + n][k] != column for n in range(count))):
                raise ValueError(f"call {k} reads tensors of several columns as one")
            found.append(index.argument(column, rows, is_adjacent, count))
            r += count or 1
        return tuple(found)
