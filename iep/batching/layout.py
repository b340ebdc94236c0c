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
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.schedulers import Schedule


@dataclass(frozen=True)
class Call:
    """One module call; or, with op None, the inputs' arrival or the roots' departure."""

    op: int | None
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


def lay_out(graph: Graph, schedule: Schedule) -> Layout:
    """The layout of `schedule`, which runs every node of `graph` once, arguments first.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments.
    """
    order_N = np.concatenate([np.empty(0, dtype=np.int64), *(group.nodes for group in schedule)])
    if not np.array_equal(np.sort(order_N), np.arange(graph.num_nodes)):
        raise ValueError(f"a schedule of {len(order_N)} nodes for a graph of {graph.num_nodes}, expected each once")
    rows_K = np.array([graph.num_inputs, *(len(group.nodes) for group in schedule)])
    first_K = np.cumsum(rows_K) - rows_K
    call_R = np.repeat(np.arange(len(rows_K)), rows_K)
    arity_K = np.append(0, (graph.args[order_N[first_K[1:] - graph.num_inputs]] >= 0).sum(axis=1))
    first_use_K = np.cumsum(rows_K * arity_K) - rows_K * arity_K

    result_U, call_U = _uses(graph, order_N, call_R, rows_K, first_K, first_use_K)
    if (call_R[result_U] >= call_U).any():
        raise ValueError("a schedule runs a node before its arguments")
    last_use_K = np.arange(len(rows_K))
    np.maximum.at(last_use_K, call_R[result_U], call_U)
    places, num_places = _places(rows_K.tolist(), last_use_K.tolist())
    place_U = (np.array([place.start for place in places]) - first_K)[call_R[result_U]] + result_U
    takers, extra_results, extra_uses = _takers(result_U, len(call_R))
    is_used_K = np.ones(len(rows_K), dtype=bool)
    if (takers == len(result_U)).any():  # otherwise every result is taken, and so all lead to a root
        slot_R = np.append(np.arange(graph.num_inputs), graph.num_inputs + order_N)
        is_used_K = np.bincount(call_R[_leads_to_root(graph)[slot_R]], minlength=len(rows_K)) > 0

    ops = [None, *(group.op for group in schedule)]
    starts = zip(rows_K.tolist(), arity_K.tolist(), first_use_K.tolist(), strict=True)
    arguments = [
        tuple(slice(use + i * rows, use + (i + 1) * rows) for i in range(arity)) for rows, arity, use in starts
    ]
    results = _slices(np.append(first_K, len(call_R)))
    extras = _slices(np.searchsorted(extra_results, np.append(first_K, len(call_R))))
    columns = (ops, rows_K.tolist(), arguments, results, places, is_used_K.tolist(), extras)
    roots, nothing = slice(len(result_U) - len(graph.roots), len(result_U)), slice(0, 0)
    return Layout(
        calls=(
            *(Call(*fields) for fields in zip(*columns, strict=True)),
            Call(None, len(graph.roots), (roots,), nothing, nothing, False, nothing),
        ),
        num_places=num_places,
        num_uses=len(result_U),
        sources=torch.from_numpy(place_U),
        takers=torch.from_numpy(takers),
        extra_rows=torch.from_numpy(extra_results - first_K[call_R[extra_results]]),
        extra_uses=torch.from_numpy(extra_uses),
    )


def _uses(
    graph: Graph,
    order_N: np.ndarray,
    call_R: np.ndarray,
    rows_K: np.ndarray,
    first_K: np.ndarray,
    first_use_K: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The result that each use is of, and the call that it is an argument of, (U,) each; the roots' uses come last."""
    result_of_slot = np.arange(len(call_R))
    result_of_slot[graph.num_inputs + order_N] = graph.num_inputs + np.arange(graph.num_nodes)
    args_N = graph.args[order_N]
    taker, position = np.nonzero(args_N >= 0)
    call = call_R[graph.num_inputs + taker]
    use = first_use_K[call] + position * rows_K[call] + graph.num_inputs + taker - first_K[call]
    result_U = np.empty(len(taker) + len(graph.roots), dtype=np.int64)
    call_U = np.full(len(result_U), len(rows_K))
    result_U[use], call_U[use] = result_of_slot[args_N[taker, position]], call
    result_U[len(taker) :] = result_of_slot[graph.roots]
    return result_U, call_U


def _leads_to_root(graph: Graph) -> np.ndarray:
    """(num_inputs + N,) bool: the slots that a root's value depends on, roots included."""
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
