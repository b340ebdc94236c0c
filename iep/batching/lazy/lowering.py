"""What a lazy scope has recorded -> a graph with its types, and which address everything in it is.

Addresses are those of `recording.py`. What has been computed already counts as an input.

Shapes: N nodes of the graph, A greatest number of arguments, R addresses that are wanted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from iep.batching.graph import Graph
from iep.batching.lazy.recording import Recording
from iep.batching.sharing import share
from iep.batching.types import Read, Signature, Types


@dataclass(frozen=True, eq=False)
class Lowered:
    """A graph, and what its inputs and results are to the recording."""

    graph: Graph
    types: Types
    inputs: np.ndarray
    """(num_inputs,) address of each input."""
    wanted: tuple[np.ndarray, ...]
    """Addresses of the results, for each of the types' roots."""


def waiting_nodes(recording: Recording, addresses: Sequence[int]) -> np.ndarray:
    """As `needed_nodes`; quick where these are all that have not run."""
    nodes, every = recording.pending_nodes(), recording.nodes()
    is_used = np.zeros(recording.num_addresses, dtype=bool)
    is_used[every.taken[every.taken >= 0]] = True
    is_used[addresses] = True
    if np.logical_or.reduceat(is_used, every.address)[nodes].all():  # each is wanted, or taken by what is
        return nodes
    return needed_nodes(recording, addresses)


def needed_nodes(recording: Recording, addresses: Sequence[int]) -> np.ndarray:
    """The nodes that have not run and that values at `addresses` depend on, rising."""
    found, waiting = set[int](), list(addresses)
    _, _, first, taken, maker = recording.nodes()
    while waiting:
        address = waiting.pop()
        if address < 0 or address in recording.computed:
            continue
        node = int(maker[address])
        if node not in found:
            found.add(node)
            waiting.extend(taken[first[node] : first[node + 1]].tolist())
    return np.array(sorted(found), dtype=np.int64)


def lower(recording: Recording, nodes: np.ndarray, wanted: np.ndarray, shared: bool = False) -> Lowered:
    """The graph of `nodes`, (N,) rising, none of which has run, that returns the values at `wanted`, (R,) rising.

    Args:
        shared: nodes of one op with equal arguments are one.
    """
    all_op, address_N, first, taken, maker_of = recording.nodes()
    count_N = (first[1:] - first[:-1])[nodes]
    flat = taken[np.repeat(first[nodes], count_N) + _places(count_N)]
    if shared and len(nodes):
        same = _same_results(recording, nodes, count_N, flat, address_N, all_op)
        kept = same[address_N[nodes]] == address_N[nodes]
        flat = np.where(flat >= 0, same[flat], flat)[np.repeat(kept, count_N)]
        nodes, count_N, stand_ins = nodes[kept], count_N[kept], same[wanted]
    else:
        stand_ins = wanted

    position = np.full(len(address_N) + 1, -1)  # the last entry is that of tensors from outside
    position[nodes] = np.arange(len(nodes))
    maker = np.where(flat >= 0, maker_of[np.maximum(flat, 0)], -1)
    node = position[maker]
    inputs, number = _numbered(flat, node < 0, recording.num_addresses, len(recording.inputs))
    slot = np.where(node < 0, number, len(inputs) + node)
    field = np.where(node < 0, 0, flat - address_N[maker])
    op_N = all_op[nodes]
    args_NA, fields_NA, signatures = _arguments(recording, op_N, count_N, slot, field)

    table = _columns_of_ops(recording)
    maker_R = maker_of[stand_ins]
    slot_R, field_R = len(inputs) + position[maker_R], stand_ins - address_N[maker_R]
    column_R = table[all_op[maker_R], field_R]
    by_column = [np.flatnonzero(column_R == one) for one in np.unique(column_R)]
    columns = _input_columns(recording, inputs, table)
    return Lowered(
        graph=Graph(len(inputs), op_N, args_NA, np.zeros(len(nodes), dtype=np.int64), slot_R),
        types=Types(
            inputs=columns,
            signatures=signatures,
            roots=tuple((slot_R[rows], field_R[rows]) for rows in by_column),
            fields=fields_NA,
        ),
        inputs=inputs,
        wanted=tuple(wanted[rows] for rows in by_column),
    )


def without_gradients(recording: Recording, lowered: Lowered) -> list[np.ndarray] | None:
    """For each of `lowered.wanted`, which of its values no gradient leads to, as without a scope: nothing that they are
    made of requires one, or they were recorded without. None where there are none such."""
    graph = lowered.graph
    ops = {op: recording.ops[op] for op in lowered.types.signatures}
    if all(op.modes.grad and op.kernel.has_grad for op in ops.values()):
        return None
    recorded_without = _of_ops(graph.op, {index: not op.modes.grad for index, op in ops.items()})
    by_arguments = _of_ops(graph.op, {index: op.modes.grad and not op.kernel.has_grad for index, op in ops.items()})
    inputs = [not recording.tensor(address).requires_grad for address in lowered.inputs.tolist()]
    free = np.concatenate([np.array(inputs, dtype=bool), recorded_without, [True]])  # the last is that of no argument
    nodes = np.flatnonzero(by_arguments)
    while len(nodes):
        new = free[graph.args[nodes]].all(axis=1)
        free[graph.num_inputs + nodes[new]] = True
        nodes = nodes[~new] if new.any() else nodes[:0]
    return [free[slots] for slots, _ in lowered.types.roots]


def _of_ops(op_N: np.ndarray, is_so: dict[int, bool]) -> np.ndarray:
    table = np.zeros(max(is_so) + 1, dtype=bool)
    table[list(is_so)] = list(is_so.values())
    return table[op_N]


def _numbered(flat: np.ndarray, outside: np.ndarray, num_addresses: int, num_inputs: int) -> tuple:
    """The different addresses from outside, rising, and for each of `flat` its number among them."""
    is_there = np.zeros(num_inputs + num_addresses, dtype=bool)
    is_there[flat[outside] + num_inputs] = True
    number = np.cumsum(is_there) - 1
    return np.flatnonzero(is_there) - num_inputs, number[flat + num_inputs]


def _places(count_N: np.ndarray) -> np.ndarray:
    """0 to count - 1 for every node, one after the other."""
    return np.arange(count_N.sum()) - np.repeat(np.cumsum(count_N) - count_N, count_N)


def _columns_of_ops(recording: Recording) -> np.ndarray:
    """(ops, most results) column of every result of every op."""
    most = max((len(op.columns) for op in recording.ops), default=1)
    table = np.full((len(recording.ops), most), -1)
    for op in recording.ops:
        table[op.index, : len(op.columns)] = [column.index for column in op.columns]
    return table


def _input_columns(recording: Recording, inputs: np.ndarray, table: np.ndarray) -> np.ndarray:
    own = np.array([column.index for column in recording.input_columns], dtype=np.int64)
    columns = np.empty(len(inputs), dtype=np.int64)
    outside = inputs < 0
    columns[outside] = own[-1 - inputs[outside]]
    computed, nodes = inputs[~outside], recording.nodes()
    maker = nodes.maker[computed]
    columns[~outside] = table[nodes.op[maker], computed - nodes.address[maker]]
    return columns


def _arguments(
    recording: Recording, op_N: np.ndarray, count_N: np.ndarray, slot: np.ndarray, field: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, dict[int, Signature]]:
    """Arguments of the nodes, the fields that differ between nodes of an op, and the ops' signatures.

    Where none differ, as is usual, they are in the signatures, and what stands twice in a row with all nodes of an op,
    as the two results of a vertex do that another takes, is one argument, read twice: there is less to plan.

    Args:
        slot: of each tensor that a node takes, one node after the other.
        field: which result of that slot it is.
    """
    most = max(int(count_N.max(initial=1)), 1)
    row, column = np.repeat(np.arange(len(op_N)), count_N), _places(count_N)
    place = op_N[row] * most + column
    field_of_place = np.zeros(len(recording.ops) * most, dtype=np.int64)
    field_of_place[place] = field
    is_new = np.ones(len(field_of_place), dtype=bool)
    fields_NA = None
    if (field_of_place[place] == field).all():
        again = np.append(False, (slot[1:] == slot[:-1]) & (row[1:] == row[:-1]))[: len(slot)]
        is_new[:] = False
        is_new[place[~again]] = True
    else:
        field_of_place[:] = 0
        fields_NA = np.zeros((len(op_N), most), dtype=np.int64)
        fields_NA[row, column] = field
    argument = np.cumsum(is_new.reshape(-1, most), axis=1) - 1
    stays, column = is_new[place], argument.ravel()[place]
    args_NA = np.full((len(op_N), int(column.max(initial=0)) + 1 if fields_NA is None else most), -1)
    args_NA[row[stays], column[stays]] = slot[stays]
    signatures = {}
    for op in (recording.ops[index] for index in np.unique(op_N).tolist()):
        firsts, fields = argument[op.index].tolist(), field_of_place.reshape(-1, most)[op.index].tolist()
        reads = [Read(firsts[leaf], field=fields[leaf]) for leaf in range(op.num_leaves)]
        signatures[op.index] = Signature(tuple(reads), tuple(column.index for column in op.columns))
    return args_NA, fields_NA, signatures


def _same_results(
    recording: Recording,
    nodes: np.ndarray,
    count_N: np.ndarray,
    flat: np.ndarray,
    address_N: np.ndarray,
    all_op: np.ndarray,
) -> np.ndarray:
    """For every address the first one with an equal result. Every result is a node of its own to `share`."""
    width_O = np.array([len(op.columns) for op in recording.ops])
    width_N, offset = width_O[all_op[nodes]], len(recording.inputs) + recording.num_addresses
    slot = np.arange(recording.num_addresses) + len(recording.inputs)  # what has run is an input
    result = np.repeat(address_N[nodes], width_N) + _places(width_N)
    slot[result] = offset + np.arange(len(result))
    slot = np.concatenate([np.arange(len(recording.inputs))[::-1], slot])  # address -1 is the first input
    args = np.full((len(nodes), int(count_N.max(initial=1))), -1)
    args[np.repeat(np.arange(len(nodes)), count_N), _places(count_N)] = slot[flat + len(recording.inputs)]
    args = np.repeat(args, width_N, axis=0)
    op = np.repeat(all_op[nodes], width_N) * int(width_O.max()) + _places(width_N)
    merged = share(Graph(offset, op, args, np.zeros_like(op), offset + np.arange(len(op)))).roots
    _, first, kind = np.unique(merged, return_index=True, return_inverse=True)
    same = np.arange(recording.num_addresses)
    same[result] = result[first[kind]]
    return same
