"""Sample graphs -> a template: calls of fixed sizes, into which the nodes of most similar graphs fit.

All plans of a template have the same calls, rows and shapes, and differ only in the values of their index tensors, so
that one CUDA graph can run them (`cuda_graph.py`). Rows that a graph does not need are padding. They read the spare
input, which is the last one, belong to no function, and are read by no other row. The gradient of the spare input is
undefined.

Shapes: N nodes, K calls, A arguments, V ops, F functions of a family.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.paths import op_strings
from iep.batching.plan import Argument, Call, Column, Plan, Result, make_family
from iep.batching.schedulers import last_calls, reads_of
from iep.batching.supersequence import short_supersequence

MARGIN = 2.0
"""A call has rows for this many square roots of nodes beyond the most that any sample graph runs in it."""


@dataclass(frozen=True, eq=False)
class Template:
    """Calls of fixed sizes for graphs whose ops all belong to families, and whose values are of one kind."""

    plan: Plan
    """The plan of a graph without nodes: every row is padding."""
    family_V: np.ndarray
    """The position of each op's family among the plan's families."""
    function_V: np.ndarray
    """The position of each op among those of its family."""

    @property
    def num_inputs(self) -> int:
        """The greatest number of inputs of a graph that fits, without the spare input."""
        return self.plan.inputs[0].rows.stop - 1

    @property
    def num_roots(self) -> int:
        """The greatest number of roots of a graph that fits."""
        return self.plan.roots[0].rows.stop - self.plan.roots[0].rows.start

    @cached_property
    def _calls(self) -> "_Calls":
        calls, numbers = self.plan.calls, list(self.plan.families)
        return _Calls(
            np.array([numbers.index(call.op) for call in calls]),
            np.array([call.size for call in calls]),
            np.array([call.results[0].rows.start for call in calls]),
            np.array([call.in_family[1] for call in calls]),
            np.array([call.arguments[0].rows.start for call in calls]),
        )

    def plan_of(self, graph: Graph) -> Plan | None:
        """Return the plan of a graph in the template's calls, or None if it does not fit.

        A plan returns the results of `num_roots` roots, those of the graph first, and has `num_inputs` inputs and the
        spare one.
        """
        calls = self._calls
        if graph.num_inputs > self.num_inputs or len(graph.roots) > self.num_roots:
            return None
        call_N = last_calls(calls.family, self.family_V[graph.op], reads_of(graph))
        if (call_N < 0).any() or ((count_K := np.bincount(call_N, minlength=len(calls.size))) > calls.size).any():
            return None
        function_N = self.function_V[graph.op]
        order_N = np.lexsort((function_N, call_N))  # the rows of a call are sorted by function
        offset_N = np.empty(graph.num_nodes, dtype=np.int64)
        offset_N[order_N] = np.arange(graph.num_nodes) - np.repeat(count_K.cumsum() - count_K, count_K)
        row_S = np.concatenate([np.arange(graph.num_inputs), calls.first_row[call_N] + offset_N])

        index = np.full(len(self.plan.columns[0].index), self.num_inputs)
        for number, slot_N in enumerate(graph.args.T):
            own = slot_N >= 0
            first_N = calls.first_read[call_N[own]] + number * calls.size[call_N[own]]
            index[first_N + offset_N[own]] = row_S[slot_N[own]]
        first = self.plan.roots[0].rows.start
        index[first : first + len(graph.roots)] = row_S[graph.roots]
        columns = (replace(self.plan.columns[0], index=torch.from_numpy(index)),)
        families = {}
        for number, (op, family) in enumerate(self.plan.families.items()):
            own = calls.family[call_N] == number
            size_KF = np.zeros((len(calls.size), len(family.ops)), dtype=np.int32)
            np.add.at(size_KF, (call_N[own], function_N[own]), 1)
            ends_KF = size_KF[calls.family == number].cumsum(axis=1, dtype=np.int32)
            function_of_row = np.full(len(family.index), len(family.ops))
            function_of_row[calls.family_row[call_N[own]] + offset_N[own]] = function_N[own]
            families[op] = make_family(family.ops, function_of_row, ends_KF)
        return replace(self.plan, columns=columns, families=families)


class _Calls(NamedTuple):
    """Arrays of K calls."""

    family: np.ndarray
    """The position of the family among the plan's families."""
    size: np.ndarray
    first_row: np.ndarray
    """The first row of the results."""
    family_row: np.ndarray
    """The first row among those of all calls of the family."""
    first_read: np.ndarray
    """The first entry of the index. Each argument has `size` entries, one argument after the other."""


def make_template(graphs: Sequence[Graph], families: Mapping[int, int]) -> Template:
    """Return a template into which sample graphs fit, with a margin for others.

    The calls are a short common supersequence of the families on all paths of all graphs, as for `lookahead`.

    Args:
        families: the number of the family of every op.
    """
    numbers = sorted(set(families.values()))
    ops_of = [[op for op, each in sorted(families.items()) if each == number] for number in numbers]
    family_V, function_V = (np.full(1 + max(families), -1) for _ in range(2))
    for position, ops in enumerate(ops_of):
        family_V[ops], function_V[ops] = position, np.arange(len(ops))
    family_K = _common_calls(graphs, family_V)
    most_K = np.zeros(len(family_K), dtype=np.int64)
    arity = [1] * len(numbers)
    for graph in graphs:
        family_N, arity_N = family_V[graph.op], (graph.args >= 0).sum(axis=1)
        call_N = last_calls(family_K, family_N, reads_of(graph))
        most_K = np.maximum(most_K, np.bincount(call_N[call_N >= 0], minlength=len(family_K)))
        arity = [int(arity_N[family_N == number].max(initial=each)) for number, each in enumerate(arity)]
    size_K = np.ceil(most_K + MARGIN * np.sqrt(most_K) + 1).astype(np.int64)

    num_roots = max(len(graph.roots) for graph in graphs)
    spare = max(num_roots, *(graph.num_inputs for graph in graphs))  # minibatches may have one input for each root
    calls, row, read, in_families = [], spare + 1, 0, [(0, 0)] * len(numbers)
    for family, size in zip(family_K.tolist(), size_K.tolist(), strict=True):
        starts = [read + number * size for number in range(arity[family])]
        arguments = tuple([Argument(0, slice(start, start + size), False) for start in starts])
        results = (Result(0, slice(row, row + size)),)
        calls.append(Call(numbers[family], size, arguments, results, (), in_families[family]))
        number, first = in_families[family]
        row, read, in_families[family] = row + size, read + arity[family] * size, (number + 1, first + size)
    columns = (Column(row, torch.full((read + num_roots,), spare)),)
    roots = (Argument(0, slice(read, read + num_roots), False),)
    found = {}
    for number, ops, (num_calls, num_rows) in zip(numbers, ops_of, in_families, strict=True):
        ends_KF = np.zeros((num_calls, len(ops)), dtype=np.int32)
        found[number] = make_family(tuple(ops), np.full(num_rows, len(ops)), ends_KF)
    plan = Plan(tuple(calls), columns, (Result(0, slice(0, spare + 1)),), roots, families=found)
    return Template(plan, family_V, function_V)


def _common_calls(graphs: Sequence[Graph], family_V: np.ndarray) -> np.ndarray:
    """Return the positions of the families of calls in which all graphs can run, (K,)."""
    strings = [op_strings(family_V[each.op], reads_of(each), np.ones(each.num_nodes, dtype=bool)) for each in graphs]
    width = max(each.shape[1] for each in strings)
    padded = [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in strings]
    return np.array(short_supersequence(np.unique(np.concatenate(padded), axis=0)), dtype=np.int64)
