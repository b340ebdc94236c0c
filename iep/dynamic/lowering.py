"""The recorded calls of a lazy scope -> a graph with its types.

Shapes: N nodes, R results, U arguments of all nodes, A greatest number of one node, F futures.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types
from iep.batching.sharing import share
from iep.dynamic.future import Future
from iep.dynamic.recording import Recording


class Lowered(NamedTuple):
    """A graph, and the tensors and futures of the recording that its inputs and roots stand for."""

    graph: Graph
    types: Types
    inputs: list[int]
    """The numbers of the tensors from outside of the scope."""
    roots: list[list[tuple[Future, bool]]]
    """The futures that each of the types' roots computes, and whether they can require gradients."""


def lower(recording: Recording, futures: Sequence[Future], shared: bool = False) -> Lowered:
    """Return the graph that computes `futures`. If `shared`, nodes of one op with equal arguments are merged."""
    ops, op_N, address_U = recording.ops, np.array(recording.node_op), np.array(recording.arguments)
    leaves_N = np.array([op.num_leaves for op in ops])[op_N]
    width_N = np.array([len(op.columns) for op in ops])[op_N]
    first_N, maker_R = np.cumsum(width_N) - width_N, np.repeat(np.arange(len(op_N)), width_N)
    reader_U = np.repeat(np.arange(len(op_N)), leaves_N)
    argument_U = np.arange(len(reader_U)) - np.repeat(np.cumsum(leaves_N) - leaves_N, leaves_N)
    address_F = np.array([future._address for future in futures])
    node_F = maker_R[address_F]
    op_F, field_F = op_N[node_F], address_F - first_N[node_F]

    needed_N = _needed(maker_R, reader_U, address_U, address_F)
    position_N, kept = np.cumsum(needed_N) - 1, needed_N[reader_U]
    op_N, address_U, row_U, argument_U = op_N[needed_N], address_U[kept], position_N[reader_U[kept]], argument_U[kept]
    is_input_U = address_U < 0
    inputs, number = np.unique(-1 - address_U[is_input_U], return_inverse=True)
    made = address_U[~is_input_U]
    slot_U, field_U = np.empty_like(address_U), np.zeros_like(address_U)
    slot_U[is_input_U], slot_U[~is_input_U] = number, len(inputs) + position_N[maker_R[made]]
    field_U[~is_input_U] = made - first_N[maker_R[made]]
    args_NA = np.full((len(op_N), int(leaves_N.max())), -1)
    fields_NA = np.zeros_like(args_NA)
    args_NA[row_U, argument_U], fields_NA[row_U, argument_U] = slot_U, field_U
    graph = Graph(len(inputs), op_N, args_NA, np.zeros_like(op_N), len(inputs) + position_N[node_F])
    if shared:
        # Only nodes that read the same results of their arguments are equal: each kind counts as an op.
        kinds, kind_N = np.unique(np.column_stack([op_N, fields_NA]), axis=0, return_inverse=True)
        graph = share(replace(graph, op=kind_N.ravel()))
        graph, fields_NA = replace(graph, op=kinds[graph.op, 0]), kinds[graph.op, 1:]

    column_F = np.array([future._column.index for future in futures])
    by_column = [np.flatnonzero(column_F == column) for column in np.unique(column_F)]
    types = Types(
        inputs=np.array([recording.input_columns[number].index for number in inputs.tolist()], dtype=np.int64),
        signatures={
            n: Signature(tuple(map(Read, range(ops[n].num_leaves))), tuple(column.index for column in ops[n].columns))
            for n in np.unique(graph.op).tolist()
        },
        roots=tuple((graph.roots[which], field_F[which]) for which in by_column),
        fields=fields_NA,
    )
    grads = [ops[n].grad and ops[n].kernel.grads[i] for n, i in zip(op_F.tolist(), field_F.tolist(), strict=True)]
    roots = [[(futures[n], grads[n]) for n in which.tolist()] for which in by_column]
    return Lowered(graph, types, inputs.tolist(), roots)


def _needed(maker_R: np.ndarray, reader_U: np.ndarray, address_U: np.ndarray, address_F: np.ndarray) -> np.ndarray:
    """Return whether the results at `address_F` depend on each node, (N,)."""
    needed_N = np.ones(int(maker_R[-1]) + 1, dtype=bool)
    while True:  # drop the nodes whose results nothing reads, until there are none
        is_used_R = np.zeros(len(maker_R), dtype=bool)
        is_used_R[address_F] = True
        is_used_R[address_U[needed_N[reader_U] & (address_U >= 0)]] = True
        is_used_N = np.zeros_like(needed_N)
        is_used_N[maker_R[is_used_R]] = True
        if (is_used_N == needed_N).all():
            return needed_N
        needed_N = is_used_N
