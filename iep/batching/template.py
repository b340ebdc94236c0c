"""Sample graphs -> a template: calls of fixed sizes, into which the nodes of most similar graphs fit.

All plans of a template have the same calls, rows and shapes, and differ only in the values of their index tensors, so
that one CUDA graph can run them (`cuda_graph.py`). Rows that a graph does not need are padding. They belong to no
function and are read by no other row. Their own values, which nothing computes, stand for their arguments, so that the
undefined gradients of these are added to rows that nothing reads, a different one for each.

Shapes: N nodes, K calls, A arguments, V ops, F functions of an op group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.lookahead import last_calls, op_strings, short_supersequence
from iep.batching.plan import Argument, Call, Column, Plan, Result, make_op_group
from iep.batching.schedulers import reads_of

MARGIN = 2.0
"""A call has rows for this many square roots of nodes beyond the most that any sample graph runs in it."""


@dataclass(frozen=True, eq=False)
class Template:
    """Calls of fixed sizes for graphs whose ops all belong to op groups, and whose values are of one kind."""

    plan: Plan
    """The plan of a graph without nodes: every row is padding."""
    op_group_V: np.ndarray
    """The position of each op's op group among the plan's op groups."""
    function_V: np.ndarray
    """The position of each op among those of its op group."""

    @property
    def num_inputs(self) -> int:
        """The greatest number of inputs of a graph that fits."""
        return self.plan.inputs[0].rows.stop

    @property
    def num_roots(self) -> int:
        """The greatest number of roots of a graph that fits."""
        return self.plan.roots[0].rows.stop - self.plan.roots[0].rows.start

    @cached_property
    def _calls(self) -> "_Calls":
        calls, numbers = self.plan.calls, list(self.plan.op_groups)
        assert all(call.in_op_group for call in calls)
        return _Calls(
            np.array([numbers.index(call.op) for call in calls]),
            np.array([call.size for call in calls]),
            np.array([call.results[0].rows.start for call in calls]),
            np.array([call.in_op_group[1] for call in calls if call.in_op_group]),
            np.array([call.arguments[0].rows.start for call in calls]),
        )

    def plan_of(self, graph: Graph) -> Plan | None:
        """Return the plan of a graph in the template's calls, or None if it does not fit.

        A plan returns the results of `num_roots` roots, those of the graph first, and has `num_inputs` inputs.
        """
        calls = self._calls
        if graph.num_inputs > self.num_inputs or len(graph.roots) > self.num_roots:
            return None
        call_N = last_calls(calls.op_group, self.op_group_V[graph.op], reads_of(graph))
        if (call_N < 0).any() or ((count_K := np.bincount(call_N, minlength=len(calls.size))) > calls.size).any():
            return None
        function_N = self.function_V[graph.op]
        order_N = np.lexsort((function_N, call_N))  # the rows of a call are sorted by function
        offset_N = np.empty(graph.num_nodes, dtype=np.int64)
        offset_N[order_N] = np.arange(graph.num_nodes) - np.repeat(count_K.cumsum() - count_K, count_K)
        row_S = np.concatenate([np.arange(graph.num_inputs), calls.first_row[call_N] + offset_N])

        index = self.plan.columns[0].index.numpy().copy()
        for number, slot_N in enumerate(graph.args.T):
            own = slot_N >= 0
            first_N = calls.first_read[call_N[own]] + number * calls.size[call_N[own]]
            index[first_N + offset_N[own]] = row_S[slot_N[own]]
        first = self.plan.roots[0].rows.start
        index[first : first + len(graph.roots)] = row_S[graph.roots]
        columns = (replace(self.plan.columns[0], index=torch.from_numpy(index)),)
        op_groups = {}
        for number, (op, op_group) in enumerate(self.plan.op_groups.items()):
            own = calls.op_group[call_N] == number
            size_KF = np.zeros((len(calls.size), len(op_group.ops)), dtype=np.int32)
            np.add.at(size_KF, (call_N[own], function_N[own]), 1)
            ends_KF = size_KF[calls.op_group == number].cumsum(axis=1, dtype=np.int32)
            function_of_row = np.full(len(op_group.index), len(op_group.ops))
            function_of_row[calls.op_group_row[call_N[own]] + offset_N[own]] = function_N[own]
            op_groups[op] = make_op_group(op_group.ops, function_of_row, ends_KF)
        return replace(self.plan, columns=columns, op_groups=op_groups)


class _Calls(NamedTuple):
    """Arrays of K calls."""

    op_group: np.ndarray
    """The position of the op group among the plan's op groups."""
    size: np.ndarray
    first_row: np.ndarray
    """The first row of the results."""
    op_group_row: np.ndarray
    """The first row among those of all calls of the op group."""
    first_read: np.ndarray
    """The first entry of the index. Each argument has `size` entries, one argument after the other."""


def make_template(graphs: Sequence[Graph], op_groups: Mapping[int, int]) -> Template:
    """Return a template into which sample graphs fit, with a margin for others.

    The calls are a short common supersequence of the op groups on all paths of all graphs, as for `lookahead`.

    Args:
        op_groups: the number of the op group of every op.
    """
    numbers = sorted(set(op_groups.values()))
    ops_of = [[op for op, each in sorted(op_groups.items()) if each == number] for number in numbers]
    op_group_V, function_V = (np.full(1 + max(op_groups), -1) for _ in range(2))
    for position, ops in enumerate(ops_of):
        op_group_V[ops], function_V[ops] = position, np.arange(len(ops))
    op_group_K = _common_calls(graphs, op_group_V)
    most_K = np.zeros(len(op_group_K), dtype=np.int64)
    arity = [1] * len(numbers)
    for graph in graphs:
        op_group_N, arity_N = op_group_V[graph.op], (graph.args >= 0).sum(axis=1)
        call_N = last_calls(op_group_K, op_group_N, reads_of(graph))
        most_K = np.maximum(most_K, np.bincount(call_N[call_N >= 0], minlength=len(op_group_K)))
        arity = [int(arity_N[op_group_N == number].max(initial=each)) for number, each in enumerate(arity)]
    size_K = np.ceil(most_K + MARGIN * np.sqrt(most_K) + 1).astype(np.int64)

    num_roots = max(len(graph.roots) for graph in graphs)
    num_inputs = max(num_roots, *(graph.num_inputs for graph in graphs))  # there may be one input for each root
    calls, index, row, read, in_op_groups = [], [], num_inputs, 0, [(0, 0)] * len(numbers)
    for op_group, size in zip(op_group_K.tolist(), size_K.tolist(), strict=True):
        starts = [read + number * size for number in range(arity[op_group])]
        arguments = tuple([Argument(0, slice(start, start + size), False) for start in starts])
        results = (Result(0, slice(row, row + size)),)
        calls.append(Call(numbers[op_group], size, arguments, results, (), in_op_groups[op_group]))
        index += [np.arange(row, row + size)] * arity[op_group]
        number, first = in_op_groups[op_group]
        row, read, in_op_groups[op_group] = row + size, read + arity[op_group] * size, (number + 1, first + size)
    columns = (Column(row, torch.from_numpy(np.concatenate([*index, np.arange(num_roots)]))),)
    roots = (Argument(0, slice(read, read + num_roots), False),)
    found = {}
    for number, ops, (num_calls, num_rows) in zip(numbers, ops_of, in_op_groups, strict=True):
        ends_KF = np.zeros((num_calls, len(ops)), dtype=np.int32)
        found[number] = make_op_group(tuple(ops), np.full(num_rows, len(ops)), ends_KF)
    plan = Plan(tuple(calls), columns, (Result(0, slice(0, num_inputs)),), roots, op_groups=found)
    return Template(plan, op_group_V, function_V)


def _common_calls(graphs: Sequence[Graph], op_group_V: np.ndarray) -> np.ndarray:
    """Return the positions of the op groups of calls in which all graphs can run, (K,)."""
    found = [op_strings(op_group_V[each.op], reads_of(each)) for each in graphs]
    strings = [each for each in found if each is not None]
    assert len(strings) == len(found), "programs are trees, which have no more paths than leaves"
    width = max(each.shape[1] for each in strings)
    padded = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in strings]
    return np.array(short_supersequence(np.unique(np.concatenate(padded), axis=0)), dtype=np.int64)
