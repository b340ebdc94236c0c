"""Sample graphs -> a template: calls of fixed sizes, into which the nodes of most similar graphs fit.

All plans of a template have the same calls, rows and shapes, and differ only in the values of their index tensors, so
that one CUDA graph can run them (`cuda_graph.py`). Rows that a graph does not need are padding. They read the spare
input, which is the last one, belong to no function, and are read by no other row.

Shapes: N nodes, K calls, A arguments, V ops, F functions of a family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.paths import op_strings
from iep.batching.plan import Argument, Call, Column, Family, Plan, Result
from iep.batching.schedulers import last_calls, reads_of
from iep.batching.supersequence import short_supersequence

MARGIN = 2.0
"""A call has room for this many square roots of nodes beyond the most that any sample graph runs in it."""


@dataclass(frozen=True, eq=False)
class Template:
    """Calls of fixed sizes for graphs whose ops all belong to families, and whose values are of one kind."""

    plan: Plan
    """The plan of a graph without nodes: every row is padding."""
    family_V: np.ndarray
    """The position of each op's family among the plan's families."""
    function_V: np.ndarray
    """The position of each op among those of its family."""
    family_K: np.ndarray
    size_K: np.ndarray
    first_row_K: np.ndarray
    """The first row of each call's results."""
    family_row_K: np.ndarray
    """The first row of each call among the rows of all calls of its family."""
    first_read_KA: np.ndarray
    """The first entry of each call's arguments in the index."""

    @property
    def num_inputs(self) -> int:
        """The greatest number of inputs of a graph that fits, without the spare input."""
        return self.plan.inputs[0].rows.stop - 1

    @property
    def num_roots(self) -> int:
        """The greatest number of roots of a graph that fits."""
        return self.plan.roots[0].rows.stop - self.plan.roots[0].rows.start

    def plan_of(self, graph: Graph) -> Plan | None:
        """Return the plan of a graph in the template's calls, or None if it does not fit.

        A plan returns the results of `num_roots` roots, those of the graph first, and has `num_inputs` inputs and the
        spare one.
        """
        calls = len(self.size_K)
        if graph.num_inputs > self.num_inputs or len(graph.roots) > self.num_roots:
            return None
        call_N = last_calls(self.family_K, self.family_V[graph.op], reads_of(graph))
        if (call_N < 0).any() or ((count_K := np.bincount(call_N, minlength=calls)) > self.size_K).any():
            return None
        function_N = self.function_V[graph.op]
        order_N = np.lexsort((function_N, call_N))  # the rows of a call are sorted by function
        place_N = np.empty(graph.num_nodes, dtype=np.int64)
        place_N[order_N] = np.arange(graph.num_nodes) - np.repeat(count_K.cumsum() - count_K, count_K)
        row_S = np.concatenate([np.arange(graph.num_inputs), self.first_row_K[call_N] + place_N])

        index = np.full(len(self.plan.columns[0].index), self.num_inputs)
        for argument, slot_N in enumerate(graph.args.T):
            reads_N = slot_N >= 0
            index[self.first_read_KA[call_N[reads_N], argument] + place_N[reads_N]] = row_S[slot_N[reads_N]]
        first = self.plan.roots[0].rows.start
        index[first : first + len(graph.roots)] = row_S[graph.roots]
        families = {}
        for number, (op, family) in enumerate(self.plan.families.items()):
            own_N = self.family_K[call_N] == number
            count_KF = np.zeros((calls, len(family.ops)), dtype=np.int32)
            np.add.at(count_KF, (call_N[own_N], function_N[own_N]), 1)
            ends_KF = count_KF[self.family_K == number].cumsum(axis=1, dtype=np.int32)
            rows = self.family_row_K[call_N[own_N]] + place_N[own_N]
            order = np.zeros(len(family.order), dtype=np.int64)
            order[: len(rows)] = rows[np.lexsort((rows, function_N[own_N]))]
            total_F = ends_KF.sum(axis=0, dtype=np.int32)
            tensors = zip(
                ("ends", "order", "total_ends"), map(torch.from_numpy, (ends_KF, order, total_F)), strict=True
            )
            families[op] = replace(family, **dict(tensors))
        columns = (replace(self.plan.columns[0], index=torch.from_numpy(index)),)
        return replace(self.plan, columns=columns, families=families)


def make_template(graphs: Sequence[Graph], families: Mapping[int, int]) -> Template:
    """Return a template into which sample graphs fit, with a margin for others.

    The calls are a short common supersequence of the families on all paths of all graphs, as for `lookahead`.

    Args:
        families: the number of the family of every op.
    """
    numbers = sorted(set(families.values()))
    ops_of = [tuple(sorted(op for op, each in families.items() if each == number)) for number in numbers]
    family_V, function_V = (np.full(1 + max(families), -1) for _ in range(2))
    for position, ops in enumerate(ops_of):
        family_V[list(ops)], function_V[list(ops)] = position, np.arange(len(ops))
    strings = [
        op_strings(family_V[graph.op], reads_of(graph), np.ones(graph.num_nodes, dtype=bool)) for graph in graphs
    ]
    width = max(each.shape[1] for each in strings)
    strings = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in strings]
    family_K = np.array(short_supersequence(np.unique(np.concatenate(strings), axis=0)))
    called = [last_calls(family_K, family_V[graph.op], reads_of(graph)) for graph in graphs]
    most_K = np.max([np.bincount(call_N[call_N >= 0], minlength=len(family_K)) for call_N in called], axis=0)
    size_K = np.ceil(most_K + MARGIN * np.sqrt(most_K) + 1).astype(np.int64)

    num_roots = max(len(graph.roots) for graph in graphs)
    spare = max(num_roots, *(graph.num_inputs for graph in graphs))  # at most one input for each root, or as many
    first_row_K = spare + 1 + size_K.cumsum() - size_K
    family_row_K, call_of_family_K = np.zeros_like(size_K), np.zeros_like(size_K)
    for position in range(len(numbers)):
        own = family_K == position
        family_row_K[own], call_of_family_K[own] = size_K[own].cumsum() - size_K[own], np.arange(own.sum())
    arity = np.array([_arity(graphs, family_V, position) for position in range(len(numbers))])
    reads_K = arity[family_K] * size_K
    first_read_KA = (reads_K.cumsum() - reads_K)[:, None] + size_K[:, None] * np.arange(arity.max(initial=1))
    calls = []
    for call, (position, size, first) in enumerate(
        zip(family_K.tolist(), size_K.tolist(), first_row_K.tolist(), strict=True)
    ):
        starts = first_read_KA[call, : arity[position]].tolist()
        arguments = tuple(Argument(0, slice(start, start + size), False) for start in starts)
        place = int(call_of_family_K[call]), int(family_row_K[call])
        calls.append(Call(numbers[position], size, arguments, (Result(0, slice(first, first + size)),), (), place))
    num_reads = int(reads_K.sum())
    roots = Argument(0, slice(num_reads, num_reads + num_roots), False)
    column = Column(spare + 1 + int(size_K.sum()), torch.full((num_reads + num_roots,), spare))
    found = {}
    for position, (number, ops) in enumerate(zip(numbers, ops_of, strict=True)):
        own = family_K == position
        rows = torch.zeros(int(size_K[own].sum()), dtype=torch.int64)
        ends_KF = torch.zeros(int(own.sum()), len(ops), dtype=torch.int32)
        found[number] = Family(ops, rows, ends_KF, rows, ends_KF.sum(0, dtype=torch.int32))
    plan = Plan(tuple(calls), (column,), (Result(0, slice(0, spare + 1)),), (roots,), families=found)
    return Template(plan, family_V, function_V, family_K, size_K, first_row_K, family_row_K, first_read_KA)


def _arity(graphs: Sequence[Graph], family_V: np.ndarray, position: int) -> int:
    """Return the number of arguments of a family's functions."""
    return max(int((graph.args[family_V[graph.op] == position] >= 0).sum(axis=1).max(initial=0)) for graph in graphs)
