"""Sample graphs -> a template: calls of fixed sizes, into which the nodes of most similar graphs fit.

All plans of a template have the same calls, rows and shapes, and differ only in the values of their index tensors, so
that one CUDA graph can run them (`cuda_graph.py`). Unused rows are padding: they belong to no
function, and nothing reads them. A padding row names itself as its argument, so that its undefined gradient is added to
a row that nothing reads.

Shapes: N nodes, S slots, R roots, K calls, M rows, A arguments, V ops, O op groups.
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
"""The spare rows of a call are `MARGIN * sqrt(n)`, where n is the most nodes that a sample graph runs in it."""


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
        call_N = last_calls(self.call_K, op_group_V[graph.op], graph.reads)
        if (call_N < 0).any():
            return None
        count_K = np.bincount(call_N, minlength=len(self.size_K))
        if (count_K > self.size_K).any():
            return None
        function_N = function_V[graph.op]
        row_N = self._rows(function_N, call_N, count_K)
        row_S = np.concatenate([np.arange(graph.num_inputs), row_N])

        num_rows = self.num_inputs + int(self.size_K.sum())
        function_M = np.full(num_rows, len(function_V))
        function_M[row_N] = function_N
        reads_AM = np.tile(np.arange(num_rows), (max(self.arity), 1))
        for reads_M, slot_N in zip(reads_AM, graph.args.T, strict=False):
            has_argument_N = slot_N >= 0
            slots = slot_N[has_argument_N]
            reads_M[row_N[has_argument_N]] = row_S[slots]
        root_R = np.zeros(self.num_roots, dtype=np.int64)
        root_R[: len(graph.roots)] = row_S[graph.roots]
        return self._plan(reads_AM, function_M, root_R)

    def _rows(self, function_N: np.ndarray, call_N: np.ndarray, count_K: np.ndarray) -> np.ndarray:
        """Return the row of each node, (N,). The rows of a call are sorted by function."""
        order_N = np.lexsort((function_N, call_N))
        nodes_before_K = count_K.cumsum() - count_K
        rows_before_K = self.size_K.cumsum() - self.size_K
        position_N = np.empty(len(call_N), dtype=np.int64)
        position_N[order_N] = np.arange(len(call_N)) - np.repeat(nodes_before_K, count_K)
        return self.num_inputs + rows_before_K[call_N] + position_N

    def _plan(self, reads_AM: np.ndarray, function_M: np.ndarray, root_R: np.ndarray) -> Plan:
        """Return a plan of the template.

        Args:
            reads_AM: the row that each row reads as each argument.
            function_M: the position of the function of each row in its op group, greater than all for padding.
            root_R: the rows of the roots.
        """
        numbers = [*self.op_groups]
        functions: list[list[np.ndarray]] = [[] for _ in numbers]
        calls, index = [], []
        row, read = self.num_inputs, 0
        for op_group, size in zip(self.call_K.tolist(), self.size_K.tolist(), strict=True):
            rows = slice(row, row + size)
            row += size
            arguments = []
            for reads_M in reads_AM[: self.arity[op_group]]:
                index.append(reads_M[rows])
                arguments.append(Argument(0, slice(read, read + size), False))
                read += size
            others = functions[op_group]
            calls.append(
                Call(
                    op=numbers[op_group],
                    size=size,
                    arguments=tuple(arguments),
                    results=(Result(0, rows),),
                    segments=(),
                    in_op_group=(len(others), sum(map(len, others))),
                )
            )
            others.append(function_M[rows])

        index.append(root_R)
        column = Column(row, torch.from_numpy(np.concatenate(index)))
        roots = Argument(0, slice(read, read + self.num_roots), False)
        op_groups = {
            number: make_op_group(self.op_groups[number], functions_K)
            for number, functions_K in zip(numbers, functions, strict=True)
            if functions_K
        }
        return Plan(
            calls=tuple(calls),
            columns=(column,),
            inputs=(Result(0, slice(0, self.num_inputs)),),
            roots=(roots,),
            op_groups=op_groups,
        )


def make_template(graphs: Sequence[Graph], op_groups: Mapping[int, int]) -> Template:
    """Return a template into which sample graphs fit, with a margin for others.

    The calls are a short common supersequence of the op groups on all paths of all graphs, as for `lookahead`.

    Args:
        op_groups: the number of the op group of every op.
    """
    ops_of: dict[int, tuple[int, ...]] = {}
    for number in sorted(set(op_groups.values())):
        ops = [op for op, each in op_groups.items() if each == number]
        ops_of[number] = tuple(sorted(ops))
    op_group_V, _ = _positions(ops_of)
    call_K = _calls(graphs, op_group_V)
    most_K = np.zeros(len(call_K), dtype=np.int64)
    arity_O = np.ones(len(ops_of), dtype=np.int64)
    for graph in graphs:
        op_group_N = op_group_V[graph.op]
        call_N = last_calls(call_K, op_group_N, graph.reads)
        count_K = np.bincount(call_N, minlength=len(call_K))
        most_K = np.maximum(most_K, count_K)
        arity_N = (graph.args >= 0).sum(axis=1)
        np.maximum.at(arity_O, op_group_N, arity_N)
    size_K = np.ceil(most_K + MARGIN * np.sqrt(most_K) + 1)
    num_roots = max(len(graph.roots) for graph in graphs)
    most_inputs = max(graph.num_inputs for graph in graphs)
    return Template(
        op_groups=ops_of,
        arity=tuple(arity_O.tolist()),
        call_K=call_K,
        size_K=size_K.astype(np.int64),
        num_inputs=max(num_roots, most_inputs),  # there may be one input for each root
        num_roots=num_roots,
    )


def _calls(graphs: Sequence[Graph], op_group_V: np.ndarray) -> np.ndarray:
    """Return the position of the op group of each call, (K,)."""
    strings = []
    for graph in graphs:
        found = op_strings(op_group_V[graph.op], graph.reads)
        assert found is not None, "programs are trees, which have no more paths than leaves"
        strings.append(found)
    width = max(each.shape[1] for each in strings)
    padded = []
    for each in strings:
        missing = width - each.shape[1]
        padded.append(np.pad(each, ((0, 0), (0, missing)), constant_values=-1))
    distinct = np.unique(np.concatenate(padded), axis=0)
    return np.array(short_supersequence(distinct), dtype=np.int64)


def _positions(op_groups: Mapping[int, tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the position of each op's op group, and the position of the op in it, (V,) each."""
    num_ops = 1 + max(map(max, op_groups.values()))
    op_group_V = np.full(num_ops, -1)
    function_V = np.full(num_ops, -1)
    for position, ops in enumerate(op_groups.values()):
        op_group_V[[*ops]] = position
        function_V[[*ops]] = np.arange(len(ops))
    return op_group_V, function_V
