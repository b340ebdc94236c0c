"""Sample graphs -> a template: calls of fixed sizes, into which the nodes of most similar graphs fit.

All plans of a template have the same calls, rows and shapes, and differ only in the values of their index tensors, so
that one CUDA graph can run them (`cuda_graph.py`). Rows that a graph does not need are padding. They belong to no
function and are read by no other row. Their own values, which nothing computes, stand for their arguments, so that the
undefined gradients of these are added to rows that nothing reads, a different one for each.

Shapes: N nodes, K calls, M rows, A arguments, V ops, F functions of an op group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.paths import op_strings
from iep.batching.plan import Argument, Call, Column, Plan, Result, make_op_group
from iep.batching.schedulers import last_calls
from iep.batching.supersequence import short_supersequence

MARGIN = 2.0
"""A call has rows for this many square roots of nodes beyond the most that any sample graph runs in it."""


@dataclass(frozen=True, eq=False)
class Template:
    """Calls of fixed sizes for graphs whose ops all belong to op groups, and whose values are of one kind."""

    op_groups: Mapping[int, tuple[int, ...]]
    """The ops of each op group, by its number."""
    arity: tuple[int, ...]
    """The number of arguments of each op group."""
    call_K: np.ndarray
    """The position of the op group of each call."""
    size_K: np.ndarray
    """The number of rows of each call."""
    num_inputs: int
    """The greatest number of inputs of a graph that fits."""
    num_roots: int
    """The greatest number of roots of a graph that fits."""

    def plan_of(self, graph: Graph) -> Plan | None:
        """Return the plan of a graph in the template's calls, or None if it does not fit.

        A plan returns the results of `num_roots` roots, those of the graph first, and has `num_inputs` inputs.
        """
        if graph.num_inputs > self.num_inputs or len(graph.roots) > self.num_roots:
            return None
        op_group_V, function_V = _positions(self.op_groups)
        function_N = function_V[graph.op]
        call_N = last_calls(self.call_K, op_group_V[graph.op], graph.reads)
        if (call_N < 0).any() or ((count_K := np.bincount(call_N, minlength=len(self.size_K))) > self.size_K).any():
            return None
        order_N = np.lexsort((function_N, call_N))  # the rows of a call are sorted by function
        row_N = np.empty(graph.num_nodes, dtype=np.int64)
        row_N[order_N] = np.arange(graph.num_nodes) - np.repeat(count_K.cumsum() - count_K, count_K)
        row_N += (self.num_inputs + self.size_K.cumsum() - self.size_K)[call_N]
        row_S = np.concatenate([np.arange(graph.num_inputs), row_N])
        num_rows = self.num_inputs + int(self.size_K.sum())
        reads_AM, function_M = np.tile(np.arange(num_rows), (max(self.arity), 1)), np.full(num_rows, len(function_V))
        function_M[row_N] = function_N
        for reads_M, slot_N in zip(reads_AM, graph.args.T, strict=False):
            reads_M[row_N[slot_N >= 0]] = row_S[slot_N[slot_N >= 0]]

        calls, index, row, read, numbers = [], [], self.num_inputs, 0, [*self.op_groups]
        functions: list[list[np.ndarray]] = [[] for _ in numbers]
        for op_group, size in zip(self.call_K.tolist(), self.size_K.tolist(), strict=True):
            rows, arguments = slice(row, row + size), []
            for reads_M in reads_AM[: self.arity[op_group]]:
                arguments.append(Argument(0, slice(read, read + size), False))
                index.append(reads_M[rows])
                read += size
            place = len(functions[op_group]), sum(map(len, functions[op_group]))
            functions[op_group].append(function_M[rows])
            calls.append(Call(numbers[op_group], size, tuple(arguments), (Result(0, rows),), (), place))
            row += size
        roots = np.zeros(self.num_roots, dtype=np.int64)
        roots[: len(graph.roots)] = row_S[graph.roots]
        return Plan(
            tuple(calls),
            (Column(num_rows, torch.from_numpy(np.concatenate([*index, roots]))),),
            (Result(0, slice(0, self.num_inputs)),),
            (Argument(0, slice(read, read + self.num_roots), False),),
            op_groups={
                number: make_op_group(self.op_groups[number], rows_K)
                for number, rows_K in zip(numbers, functions, strict=True)
                if rows_K
            },
        )


def make_template(graphs: Sequence[Graph], op_groups: Mapping[int, int]) -> Template:
    """Return a template into which sample graphs fit, with a margin for others.

    The calls are a short common supersequence of the op groups on all paths of all graphs, as for `lookahead`.

    Args:
        op_groups: the number of the op group of every op.
    """
    ops_of = {
        number: tuple(op for op, each in sorted(op_groups.items()) if each == number)
        for number in sorted(set(op_groups.values()))
    }
    op_group_V, _ = _positions(ops_of)
    found = [op_strings(op_group_V[graph.op], graph.reads) for graph in graphs]
    strings = [each for each in found if each is not None]
    assert len(strings) == len(found), "programs are trees, which have no more paths than leaves"
    width = max(each.shape[1] for each in strings)
    padded = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in strings]
    call_K = np.array(short_supersequence(np.unique(np.concatenate(padded), axis=0)), dtype=np.int64)

    most_K, arity = np.zeros(len(call_K), dtype=np.int64), [1] * len(ops_of)
    for graph in graphs:
        op_group_N, arity_N = op_group_V[graph.op], (graph.args >= 0).sum(axis=1)
        call_N = last_calls(call_K, op_group_N, graph.reads)
        most_K = np.maximum(most_K, np.bincount(call_N, minlength=len(call_K)))
        arity = [int(arity_N[op_group_N == number].max(initial=each)) for number, each in enumerate(arity)]
    size_K = np.ceil(most_K + MARGIN * np.sqrt(most_K) + 1).astype(np.int64)
    num_roots = max(len(graph.roots) for graph in graphs)
    num_inputs = max(num_roots, *(graph.num_inputs for graph in graphs))  # there may be one input for each root
    return Template(ops_of, tuple(arity), call_K, size_K, num_inputs, num_roots)


def _positions(op_groups: Mapping[int, tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each op's op group, and that of the op in it, (V,) each."""
    op_group_V, function_V = (np.full(1 + max(map(max, op_groups.values())), -1) for _ in range(2))
    for position, ops in enumerate(op_groups.values()):
        op_group_V[[*ops]], function_V[[*ops]] = position, np.arange(len(ops))
    return op_group_V, function_V
