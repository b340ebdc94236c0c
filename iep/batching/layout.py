"""Graph and schedule -> where every value lies while the schedule runs: the indices that gather and scatter need.

Values live in one buffer, the results of a call side by side in *places*. A call's places are used again once all that
takes its results has run, so the buffer is about as large as the most values that wait at any one time. On the way
back gradients arrive in another order, by *use*: one row for each argument of each node in the order of the calls,
then one for each root. Both ways, what is produced together is written with one contiguous copy, and what is consumed
together is read with one indexed copy. The data loader's workers can make a layout: it holds no values.

Shapes: K calls and the inputs' arrival, N nodes, R results (num_inputs + N, in the order of the calls), U uses.
"""

import sys
from bisect import bisect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.schedulers import Schedule


@dataclass(frozen=True)
class Call:
    """One module call; or, with no arguments, what arrives; or, with no results, what departs."""

    op: Hashable
    """None for the inputs' arrival and the roots' departure."""
    rows: int
    """G."""
    argument_uses: tuple[slice, ...]
    """Which uses each of its arguments is, one a row."""
    results: slice
    """Which results it makes, one a row."""
    places: slice
    """Where they lie."""
    is_used: bool
    """Some of them lead to a root."""
    extras: slice
    """Which of the layout's extra uses are of them."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where values and gradients lie; integers only, cheap to pickle."""

    calls: tuple[Call, ...]
    """The inputs' arrival, the schedule's groups, the roots' departure."""
    num_places: int
    """Places of the buffer."""
    num_uses: int
    sources: torch.Tensor
    """(U,) place that each use reads."""
    takers: torch.Tensor
    """(R,) the first use of each result; U for one without."""
    extra_rows: torch.Tensor
    """(X,) rows of their calls whose results have further uses, once for each of them."""
    extra_uses: torch.Tensor
    """(X,) these uses."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Layout":
        """The same layout with `function` of its index tensors, such as copies on another device."""
        names = ("sources", "takers", "extra_rows", "extra_uses")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


@dataclass(frozen=True, eq=False)
class Steps:
    """Calls in their order, and the slots that they take and make; what a layout is made of."""

    num_slots: int
    ops: Sequence[Hashable]
    """(K,) of the calls."""
    rows: np.ndarray
    """(K,) of each argument and of the results."""
    arity: np.ndarray
    """(K,) how many arguments; 0 for what arrives."""
    makes: np.ndarray
    """(K,) how many results: `rows`, or 0 for what departs."""
    made: np.ndarray
    """(R,) slots of the results."""
    taken: np.ndarray
    """(U,) slots of the uses: of each call one argument after the other."""

    @cached_property
    def call_of_result(self) -> np.ndarray:
        """(R,)"""
        return np.repeat(np.arange(len(self.rows)), self.makes)

    @cached_property
    def call_of_use(self) -> np.ndarray:
        """(U,)"""
        return np.repeat(np.arange(len(self.rows)), self.rows * self.arity)

    @cached_property
    def call_of_slot(self) -> np.ndarray:
        """(num_slots,) the call that makes each slot; the last call, which makes none, for those that none makes."""
        call = np.full(self.num_slots, len(self.rows) - 1)
        call[self.made] = self.call_of_result
        return call


def lay_out(graph: Graph, schedule: Schedule) -> Layout:
    """The layout of `schedule`, which runs every node of `graph` once, arguments first.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments.
    """
    steps = steps_of(graph, schedule)
    return lay_out_steps(steps, leads_to_root(graph, steps))


def steps_of(graph: Graph, schedule: Schedule) -> Steps:
    """The inputs' arrival, the schedule's groups, the roots' departure.

    Raises:
        ValueError: as `lay_out`.
    """
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if not np.array_equal(np.sort(order_N), np.arange(graph.num_nodes)):
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    makes_K = np.array([graph.num_inputs, *(len(group.nodes) for group in schedule), 0])
    rows_K = np.append(makes_K[:-1], len(graph.roots))
    first_K = np.cumsum(makes_K) - makes_K
    args_N = graph.args[order_N]
    arity_K = np.concatenate([[0], (args_N[first_K[1:-1] - graph.num_inputs] >= 0).sum(axis=1), [1]])
    steps = Steps(
        num_slots=graph.num_inputs + graph.num_nodes,
        ops=[None, *(group.op for group in schedule), None],
        rows=rows_K,
        arity=arity_K,
        makes=makes_K,
        made=np.append(np.arange(graph.num_inputs), graph.num_inputs + order_N),
        taken=np.empty((rows_K * arity_K).sum(), dtype=np.int64),
    )
    first_use_K = np.cumsum(rows_K * arity_K) - rows_K * arity_K
    taker, position = np.nonzero(args_N >= 0)
    call = steps.call_of_result[graph.num_inputs + taker]
    use = first_use_K[call] + position * rows_K[call] + graph.num_inputs + taker - first_K[call]
    steps.taken[use] = args_N[taker, position]
    steps.taken[len(taker) :] = graph.roots
    if (steps.call_of_slot[steps.taken] >= steps.call_of_use).any():
        raise ValueError("a schedule runs a node before its arguments")
    return steps


def lay_out_steps(steps: Steps, leads: np.ndarray) -> Layout:
    """The layout of `steps`, in which what is taken has been made; `leads` says of each slot if it leads to a root."""
    count_K, num_calls = steps.makes, len(steps.rows)
    first_K, call_R = np.cumsum(count_K) - count_K, steps.call_of_result
    result_of_slot = np.zeros(steps.num_slots, dtype=np.int64)
    result_of_slot[steps.made] = np.arange(len(steps.made))
    result_U = result_of_slot[steps.taken]
    last_use_K = np.arange(num_calls)
    np.maximum.at(last_use_K, call_R[result_U], steps.call_of_use)
    places, num_places = _places(count_K.tolist(), last_use_K.tolist())
    place_U = (np.array([place.start for place in places]) - first_K)[call_R[result_U]] + result_U
    takers, extra_results, extra_uses = _takers(result_U, len(call_R))
    is_used_K = np.bincount(call_R[leads[steps.made]], minlength=num_calls) > 0

    rows, arity = steps.rows.tolist(), steps.arity.tolist()
    starts = zip(rows, arity, (np.cumsum(steps.rows * steps.arity) - steps.rows * steps.arity).tolist(), strict=True)
    arguments = [tuple(slice(use + i * size, use + (i + 1) * size) for i in range(many)) for size, many, use in starts]
    bounds_K = np.append(first_K, len(call_R))
    extras = _slices(np.searchsorted(extra_results, bounds_K))
    columns = (steps.ops, rows, arguments, _slices(bounds_K), places, is_used_K.tolist(), extras)
    return Layout(
        calls=tuple(Call(*fields) for fields in zip(*columns, strict=True)),
        num_places=num_places,
        num_uses=len(result_U),
        sources=torch.from_numpy(place_U),
        takers=torch.from_numpy(takers),
        extra_rows=torch.from_numpy(extra_results - first_K[call_R[extra_results]]),
        extra_uses=torch.from_numpy(extra_uses),
    )


def leads_to_root(graph: Graph, steps: Steps) -> np.ndarray:
    """(num_inputs + N,) bool: the slots that a root's value depends on, roots included; `steps` are of `graph`."""
    is_taken = np.zeros(steps.num_slots, dtype=bool)
    is_taken[steps.taken] = True
    if is_taken.all():  # and so all lead to a root
        return is_taken
    # One entry more than there are slots: -1, no argument, reads the last.
    leads = np.arange(graph.num_inputs + graph.num_nodes + 1) == graph.num_inputs + graph.num_nodes
    new = graph.roots
    while len(new):
        leads[new] = True
        taken = graph.args[new[new >= graph.num_inputs] - graph.num_inputs]
        new = np.unique(taken[~leads[taken]])
    return leads[:-1]


def _takers(result_U: np.ndarray, num_results: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first use of each result, U without any; and the results and uses of all further ones, results rising."""
    uses = np.argsort(result_U, kind="stable")
    results = result_U[uses]
    further = np.append(False, results[1:] == results[:-1])[: len(results)]
    takers = np.full(num_results, len(result_U))
    takers[results[~further]] = uses[~further]
    return takers, results[further], uses[further]


def _places(rows_K: list[int], last_use_K: list[int]) -> tuple[list[slice], int]:
    """Places of every call's results, such that those needed at one time do not overlap; and how many that takes.

    Each call takes the first gap that is wide enough (first fit: Wilson et al. 1995, Dynamic Storage Allocation).
    """
    gaps = [(0, sys.maxsize)]  # rising
    expiring: list[list[slice]] = [[] for _ in range(len(rows_K) + 1)]
    places, num_places = [], 0
    for call, (rows, last_use) in enumerate(zip(rows_K, last_use_K, strict=True)):
        # What this call itself takes has been read when its results are written.
        for unused in expiring[call]:
            _free(gaps, unused.start, unused.stop)
        if not rows:
            places.append(slice(0, 0))
            continue
        index = next(index for index, (first, end) in enumerate(gaps) if end - first >= rows)
        start, end = gaps[index]
        gaps[index : index + 1] = [(start + rows, end)] if start + rows < end else []
        places.append(slice(start, start + rows))
        expiring[max(last_use, call + 1)].append(places[-1])
        num_places = max(num_places, start + rows)
    return places, num_places


def _free(gaps: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a gap to `gaps`, joined with its neighbours."""
    index = bisect(gaps, (start, end))
    before = gaps[index - 1] if index else (0, -1)
    after = gaps[index]  # the last gap has no end: there always is one
    joined = (before[0] if before[1] == start else start, after[1] if after[0] == end else end)
    gaps[index - (before[1] == start) : index + (after[0] == end)] = [joined]


def _slices(bounds: np.ndarray) -> list[slice]:
    return [slice(*pair) for pair in pairwise(bounds.tolist())]
