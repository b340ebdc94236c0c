"""Graph, schedule and types -> the calls in their order, and which tensors each takes and makes.

Tensors are numbered value by value: an input is one, a node as many as its op's signature says. A call takes *blocks*
of them, one for each argument, and makes blocks, one for each column it writes.

Shapes: K calls and the inputs' arrival and the roots' departure, N nodes, T blocks taken, M blocks made, U uses (the
rows of all blocks taken), R results (the rows of all blocks made), V tensors.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph, stable_order
from iep.batching.schedulers import Schedule
from iep.batching.types import Signature, Types

LARGEST_TABLE = 1 << 16
"""Ops beyond this are looked up by search."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Calls in their order, and the tensors that they take and make."""

    column: np.ndarray
    """(V,) column of each tensor."""
    slot: np.ndarray
    """(V,) of whose value it is."""
    ops: Sequence[Hashable]
    """(K,) of the calls; None for what arrives and what departs."""
    rows: np.ndarray
    """(K,) nodes of each call."""
    take_call: np.ndarray
    """(T,) the call of each block taken, rising."""
    take_rows: np.ndarray
    """(T,)"""
    take_count: np.ndarray
    """(T,) how many tensors of each node lie side by side in the block; 0 where it is one that is not stacked."""
    taken: np.ndarray
    """(U,) the tensors taken, block after block."""
    make_call: np.ndarray
    """(M,) the call of each block made, rising."""
    make_rows: np.ndarray
    """(M,)"""
    made: np.ndarray
    """(R,) the tensors made, block after block."""
    parts: tuple[int, ...] = ()
    """As in `Types`."""

    @cached_property
    def call_of_use(self) -> np.ndarray:
        """(U,)"""
        return self.take_call.repeat(self.take_rows)

    @cached_property
    def call_of_tensor(self) -> np.ndarray:
        """(V,) the call that makes each tensor; the last call, which makes none, for those that none makes."""
        call = np.full(len(self.column), len(self.rows) - 1)
        call[self.made] = self.make_call.repeat(self.make_rows)
        return call


def steps_of(graph: Graph, schedule: Schedule, types: Types) -> Steps:
    """The inputs' arrival, the schedule's groups, the roots' departure.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments; an op has no
            signature, or reads a tensor that an argument's value lacks, or tensors of several columns as one.
    """
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if len(order_N) != graph.num_nodes or not (np.bincount(order_N, minlength=graph.num_nodes) == 1).all():
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    ops = sorted({group.op for group in schedule})
    if not types.signatures.keys() >= set(ops):
        raise ValueError(f"op {min(set(ops) - types.signatures.keys())} has no signature")
    table = _Table(graph, types, ops)
    order = _order_of(schedule, ops, order_N)
    made, taken = _made(graph, types, table, order), _taken(graph, types, table, order)
    rows = np.concatenate(
        [[graph.num_inputs], order.sizes_G, [max((len(slots) for slots, _ in types.roots), default=0)]]
    )
    slot = np.repeat(np.arange(len(table.width_of_slot)), table.width_of_slot)
    steps = Steps(table.column, slot, [None, *(group.op for group in schedule), None], rows, *taken, *made, types.parts)
    _check_order(steps)
    return steps


class _Signatures(NamedTuple):
    """The signatures of the ops, by the position of an op among them.

    Shapes: P ops, Q most reads of one, R most tensors that they are, F most tensors of a value.
    """

    num_reads: np.ndarray
    """(P,)"""
    count: np.ndarray
    """(P, Q) of tensors side by side; 0 where there is one that is not stacked."""
    num_read: np.ndarray
    """(P,) how many tensors a node reads."""
    read: np.ndarray
    """(4, P, R) of each: which of the op's reads it belongs to, the argument, its field, its place in the read."""
    width: np.ndarray
    """(P,) tensors of a value."""
    makes: np.ndarray
    """(P, F) their columns."""


@lru_cache(maxsize=64)
def _signatures(signatures: tuple[Signature, ...]) -> _Signatures:
    reads = [
        [
            (place, read.first + beside, read.field, beside)
            for place, read in enumerate(signature.reads)
            for beside in range(read.count or 1)
        ]
        for signature in signatures
    ]
    counts = [[read.count or 0 for read in signature.reads] for signature in signatures]
    makes = [signature.makes for signature in signatures]
    return _Signatures(
        num_reads=np.array([*map(len, counts)], dtype=np.int64),
        count=_matrix(counts),
        num_read=np.array([*map(len, reads)], dtype=np.int64),
        read=np.stack([_matrix([[read[part] for read in each] for each in reads]) for part in range(4)]),
        width=np.array([*map(len, makes)], dtype=np.int64),
        makes=_matrix(makes),
    )


def _matrix(rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Zeros after the rows' ends."""
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[0] * (width - len(row))] for row in rows], dtype=np.int64).reshape(len(rows), width)


class _Table:
    """What is read of every node, and the tensors' numbers."""

    def __init__(self, graph: Graph, types: Types, ops: list[int]):
        self.ops = ops
        self.of = _signatures(tuple(types.signatures[op] for op in ops))
        """By the position of an op among them, P."""
        self.kind = _positions(ops, graph.op)
        """(N,)"""
        width_N = self.of.width[self.kind]
        width_S = np.concatenate([np.ones(graph.num_inputs, dtype=np.int64), width_N])
        self.width_of_slot = width_S
        self.tensor = width_S.cumsum() - width_S
        """(num_inputs + N,) the first tensor of each slot's value."""
        makes = self.of.makes
        nodes, fields = np.nonzero(np.arange(makes.shape[1]) < width_N[:, None])
        self.column = np.concatenate([types.inputs, makes[self.kind[nodes], fields]])
        """(V,)"""


class _Order(NamedTuple):
    """The nodes in the order in which they run; G groups."""

    kind_G: np.ndarray
    """Position of its op among the ops."""
    sizes_G: np.ndarray
    node_N: np.ndarray
    call_N: np.ndarray
    """Counted from 1."""
    row_N: np.ndarray
    """In its call."""


def _order_of(schedule: Schedule, ops: list[int], node_N: np.ndarray) -> _Order:
    sizes_G = np.array([len(group.nodes) for group in schedule], dtype=np.int64)
    kind_G = _positions(ops, np.array([group.op for group in schedule], dtype=np.int64))
    call_N = np.repeat(np.arange(1, len(schedule) + 1), sizes_G)
    row_N = np.arange(len(node_N)) - np.repeat(sizes_G.cumsum() - sizes_G, sizes_G)
    return _Order(kind_G, sizes_G, node_N, call_N, row_N)


def _positions(ops: list[int], op: np.ndarray) -> np.ndarray:
    """Where each op stands among `ops`, which rise."""
    if not ops or ops[-1] > LARGEST_TABLE or ops[0] < 0:
        return np.searchsorted(ops, op)
    position = np.empty(ops[-1] + 1, dtype=np.int64)
    position[ops] = np.arange(len(ops))
    return position[op]


Blocks = tuple[np.ndarray, ...]


def _made(graph: Graph, types: Types, table: _Table, order: _Order) -> Blocks:
    """Call and rows of the blocks made, and their tensors."""
    arriving = stable_order(types.inputs) if types.arrival is None else types.arrival
    arrivals = np.bincount(types.inputs)
    arrivals = arrivals[arrivals > 0]
    width_G = table.of.width[order.kind_G]
    make_call = np.concatenate(
        [np.zeros(len(arrivals), dtype=np.int64), np.repeat(np.arange(len(width_G)), width_G) + 1]
    )
    make_rows = np.concatenate([arrivals, order.sizes_G.repeat(width_G)])
    first_M = make_rows.cumsum() - make_rows
    first_block_K = np.concatenate([[0], len(arrivals) + width_G.cumsum() - width_G])
    made = np.empty(make_rows.sum(), dtype=np.int64)
    made[: graph.num_inputs] = arriving
    for field in range(table.of.makes.shape[1]):
        has = table.of.width[table.kind[order.node_N]] > field
        block = first_block_K[order.call_N[has]] + field
        made[first_M[block] + order.row_N[has]] = table.tensor[graph.num_inputs + order.node_N[has]] + field
    return make_call, make_rows, made


def _taken(graph: Graph, types: Types, table: _Table, order: _Order) -> Blocks:
    """Call, rows and tensors side by side of the blocks taken, and their tensors."""
    reads_G = table.of.num_reads[order.kind_G]
    group_T = np.repeat(np.arange(len(order.kind_G)), reads_G)
    first_block_G = reads_G.cumsum() - reads_G
    place_T = np.arange(len(group_T)) - first_block_G[group_T]
    count_T = table.of.count[order.kind_G[group_T], place_T]
    rows_T = order.sizes_G[group_T] * np.maximum(count_T, 1)
    roots = [_root_tensors(table, *root) for root in types.roots]
    first_T = rows_T.cumsum() - rows_T
    taken = np.empty(rows_T.sum(), dtype=np.int64)
    kind_N = order.kind_G.repeat(order.sizes_G)
    # Every tensor that a node reads, node by node.
    width_N = table.of.num_read[kind_N]
    read_U = np.arange(width_N.sum()) - np.repeat(width_N.cumsum() - width_N, width_N)
    node_U, kind_U, row_U = (each.repeat(width_N) for each in (order.node_N, kind_N, order.row_N))
    place_U, argument_U, field_U, beside_U = table.of.read[:, kind_U, read_U]
    column_U = np.minimum(argument_U, graph.args.shape[1] - 1)
    slot_U = graph.args[node_U, column_U]
    if types.fields is not None:
        field_U = field_U + types.fields[node_U, column_U]
    bad_U = (argument_U > column_U) | (slot_U < 0) | (field_U >= table.width_of_slot[slot_U])
    if bad_U.any():
        at = int(np.argmax(bad_U))
        raise ValueError(
            f"op {table.ops[kind_U[at]]} reads tensor {field_U[at]} of argument {argument_U[at]}, "
            f"which node {node_U[at]} lacks"
        )
    block_U = np.repeat(first_block_G[order.call_N - 1], width_N) + place_U
    taken[first_T[block_U] + row_U * np.maximum(count_T, 1)[block_U] + beside_U] = table.tensor[slot_U] + field_U
    return (
        np.concatenate([group_T + 1, np.full(len(roots), len(order.kind_G) + 1)]),
        np.concatenate([rows_T, np.array([len(root) for root in roots], dtype=np.int64)]),
        np.concatenate([count_T, np.zeros(len(roots), dtype=np.int64)]),
        np.concatenate([taken, *roots]),
    )


def _root_tensors(table: _Table, slots: np.ndarray, fields: np.ndarray | int) -> np.ndarray:
    bad = fields >= table.width_of_slot[slots]
    if bad.any():
        at = int(np.argmax(bad))
        field, slot = np.broadcast_to(fields, slots.shape)[at], slots[at]
        raise ValueError(f"a root reads tensor {field} of slot {slot}, which has {table.width_of_slot[slot]}")
    return table.tensor[slots] + fields


def _check_order(steps: Steps) -> None:
    if (steps.call_of_tensor[steps.taken] >= steps.call_of_use).any():
        raise ValueError("a schedule runs a node before its arguments")
    column_U = steps.column[steps.taken]
    first_T = steps.take_rows.cumsum() - steps.take_rows
    filled = steps.take_rows > 0
    same = column_U == np.repeat(column_U[first_T[filled]], steps.take_rows[filled])
    if not same.all():
        op = steps.ops[steps.call_of_use[np.argmin(same)]]
        raise ValueError(f"{'a root' if op is None else f'op {op}'} reads tensors of several columns as one")


def leads_to_root(graph: Graph, types: Types, steps: Steps) -> np.ndarray:
    """(V,) bool: the tensors of the values that a root's value depends on, roots' included; `steps` are of `graph`."""
    num_slots = graph.num_inputs + graph.num_nodes
    roots = np.concatenate([np.empty(0, dtype=np.int64), *(slots for slots, _ in types.roots)])
    # One entry more than there are slots: -1, no argument, reads the last.
    leads = np.zeros(num_slots + 1, dtype=bool)
    leads[graph.args] = True
    leads[roots] = True
    if not leads[:-1].all():  # otherwise each is taken by what leads to a root
        leads[:] = np.arange(num_slots + 1) == num_slots
        new = roots
        while len(new):
            leads[new] = True
            taken = graph.args[new[new >= graph.num_inputs] - graph.num_inputs]
            new = np.unique(taken[~leads[taken]])
    return leads[steps.slot]
