"""Graph and schedule -> where every value lies while the schedule runs: the indices that gather and scatter need.

The tensors of a column (`types.py`) live in one buffer, those that a call makes side by side in *places*. A call's
places are used again once all that takes its results has run, so the buffer is about as large as the most tensors that
wait at any one time. On the way back gradients arrive in another order, by *use*: one row for each tensor that each
call takes, in the order of the calls. Both ways, what is produced together is written with one contiguous copy, and
what is consumed together is read with one indexed copy. A data loader's workers can make a layout: it holds no values.

Shapes: K calls and the inputs' arrival and the roots' departure; of one column, R results (tensors made), in the order
of the calls, and U uses.
"""

import sys
from bisect import bisect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, count, pairwise
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph, stable_order
from iep.batching.schedulers import Schedule
from iep.batching.steps import Steps, leads_to_root, steps_of
from iep.batching.types import Types, one_column


class Argument(NamedTuple):
    """A tensor that a call takes."""

    column: int
    block: int
    """Which of the column's blocks taken it is."""
    uses: slice
    """Which uses of the column it is, one a row."""
    first_place: int | None
    """Where it begins, if its rows lie one after the other."""
    shape: tuple[int, ...]
    """(G,); or (G, count), where several rows are side by side."""


class Result(NamedTuple):
    """A tensor that a call makes."""

    column: int
    block: int
    """Which of the column's blocks made it is."""
    results: slice
    """Which results of the column it is, one a row."""
    places: slice
    """Where they lie."""
    is_used: bool
    """Some of them lead to a root."""
    first_use: int | None
    """Where their gradient begins, if each row has one use, and these come one after the other."""
    extras: slice
    """Which of the column's extra uses are of them."""


class Call(NamedTuple):
    """One module call; or, with no arguments, what arrives; or, with no results, what departs."""

    op: Hashable
    """None for the inputs' arrival and the roots' departure."""
    rows: int
    """G."""
    arguments: tuple[Argument, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, eq=False)
class Column:
    """Where the tensors of one column lie, and their gradients."""

    num_places: int
    """Places of the buffer."""
    uses: tuple[int, ...]
    """Rows of each block taken."""
    results: tuple[int, ...]
    """Rows of each block made."""
    sources: torch.Tensor
    """(U,) place that each use reads."""
    takers: torch.Tensor
    """(R,) the first use of each result; U for one without."""
    extra_rows: torch.Tensor
    """(X,) rows of their calls whose results have further uses, once for each of them."""
    extra_uses: torch.Tensor
    """(X,) these uses."""
    only_arrives: bool
    """No call makes any of it: what arrives is the buffer."""
    stays: bool
    """What lies in a place lies there to the end."""

    @property
    def num_uses(self) -> int:
        """U."""
        return len(self.sources)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Column":
        """The same with `function` of its index tensors."""
        names = ("sources", "takers", "extra_rows", "extra_uses")
        return replace(self, **{name: function(getattr(self, name)) for name in names})


@dataclass(frozen=True, eq=False)
class Layout:
    """Where values and gradients lie; integers only, cheap to pickle."""

    calls: tuple[Call, ...]
    """The inputs' arrival, the schedule's groups, the roots' departure."""
    columns: tuple[Column, ...]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Layout":
        """The same layout with `function` of its index tensors, such as copies on another device."""
        return replace(self, columns=tuple(column.map(function) for column in self.columns))


def lay_out(graph: Graph, schedule: Schedule, types: Types | None = None, reuse: bool = True) -> Layout:
    """The layout of `schedule`, which runs every node of `graph` once, arguments first.

    Args:
        types: which tensors the values are; None where each is one tensor, and all have the inputs' shape.
        reuse: use places again for the smallest buffer; otherwise every value has a place of its own.

    Raises:
        ValueError: the schedule leaves nodes out, repeats one, or runs one before its arguments; an op has no
            signature, or reads a tensor that an argument's value lacks, or tensors of several columns as one.
    """
    types = types or one_column(graph)
    steps = steps_of(graph, schedule, types)
    return lay_out_steps(steps, leads_to_root(graph, types, steps), reuse)


def lay_out_steps(steps: Steps, leads: np.ndarray, reuse: bool = True) -> Layout:
    """The layout of `steps`, in which what is taken has been made; `leads`: which tensors lead to a root; `reuse` as of
    `lay_out`."""
    first_T = steps.take_rows.cumsum() - steps.take_rows
    first_M = steps.make_rows.cumsum() - steps.make_rows
    column_T = _column_of_blocks(steps, steps.taken, first_T, steps.take_rows)
    column_M = _column_of_blocks(steps, steps.made, first_M, steps.make_rows)
    arguments: list[tuple[Argument, ...]] = [()] * len(column_T)
    results: list[tuple[Result, ...]] = [()] * len(column_M)
    columns: list[Column] = []
    for column in range(int(steps.column.max(initial=0)) + 1):
        blocks_T, blocks_M = (column_T == column).nonzero()[0], (column_M == column).nonzero()[0]
        laid = _lay_out_column(steps, leads, reuse, blocks_T, blocks_M)
        parts = range(len(columns), len(columns) + (steps.parts[column] if column < len(steps.parts) else 1))
        columns += [laid.column] * len(parts)
        for block, argument in zip(blocks_T.tolist(), laid.arguments, strict=True):
            arguments[block] = tuple(Argument(part, *argument) for part in parts)
        for block, result in zip(blocks_M.tolist(), laid.results, strict=True):
            results[block] = tuple(Result(part, *result) for part in parts)
    calls = np.arange(len(steps.rows) + 1)
    cuts_T = pairwise(np.searchsorted(steps.take_call, calls).tolist())
    cuts_M = pairwise(np.searchsorted(steps.make_call, calls).tolist())
    each = zip(steps.ops, steps.rows.tolist(), cuts_T, cuts_M, strict=True)
    return Layout(
        tuple(
            Call(op, rows, tuple(chain(*arguments[slice(*t)])), tuple(chain(*results[slice(*m)])))
            for op, rows, t, m in each
        ),
        tuple(columns),
    )


def _column_of_blocks(steps: Steps, tensors: np.ndarray, first: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Column of each block of tensors; 0 for an empty one."""
    column = np.zeros(len(rows), dtype=np.int64)
    column[rows > 0] = steps.column[tensors[first[rows > 0]]]
    return column


class _LaidOut(NamedTuple):
    column: Column
    arguments: list[tuple]
    """Uses and shape of the blocks that calls take."""
    results: list[tuple]
    """The fields of `Result` but for the column, of those that they make."""


def _lay_out_column(
    steps: Steps, leads: np.ndarray, reuse: bool, blocks_T: np.ndarray, blocks_M: np.ndarray
) -> _LaidOut:
    """One column: its buffer, and where the blocks of it that calls take and make lie."""
    rows_T, rows_M, call_M = steps.take_rows[blocks_T], steps.make_rows[blocks_M], steps.make_call[blocks_M]
    taken, made = _rows_of(steps.taken, steps.take_rows, blocks_T), _rows_of(steps.made, steps.make_rows, blocks_M)
    block_R = np.repeat(np.arange(len(blocks_M)), rows_M)
    result_of_tensor = np.zeros(len(steps.column), dtype=np.int64)
    result_of_tensor[made] = np.arange(len(made))
    result_U = result_of_tensor[taken]
    only_arrives = not call_M.any()
    bounds_M = bounds_of(rows_M)
    first_M = bounds_M[:-1]
    stays = only_arrives or not reuse
    if stays:
        places, num_places, place_U = _slices(bounds_M), len(made), result_U
    else:
        last_use_M = call_M.copy()
        np.maximum.at(last_use_M, block_R[result_U], np.repeat(steps.take_call[blocks_T], rows_T))
        places, num_places = _places(call_M.tolist(), rows_M.tolist(), last_use_M.tolist())
        place_U = (np.array([place.start for place in places], dtype=np.int64) - first_M)[block_R[result_U]] + result_U
    takers, extra_results, extra_uses = _takers(result_U, len(made))
    is_used_M = np.bincount(block_R[leads[made]], minlength=len(blocks_M)) > 0

    extras = _slices(np.searchsorted(extra_results, bounds_M))
    bounds_T = bounds_of(rows_T)
    uses = _slices(bounds_T)
    counts = steps.take_count[blocks_T].tolist()
    shapes = [(rows // many, many) if many else (rows,) for rows, many in zip(rows_T.tolist(), counts, strict=True)]
    return _LaidOut(
        Column(
            num_places=num_places,
            uses=tuple(rows_T.tolist()),
            results=tuple(rows_M.tolist()),
            sources=torch.from_numpy(place_U),
            takers=torch.from_numpy(takers),
            extra_rows=torch.from_numpy(extra_results - first_M[block_R[extra_results]]),
            extra_uses=torch.from_numpy(extra_uses),
            only_arrives=only_arrives,
            stays=stays,
        ),
        list(zip(count(), uses, _runs(place_U, bounds_T), shapes)),
        list(zip(count(), _slices(bounds_M), places, is_used_M.tolist(), _runs(takers, bounds_M, extras), extras)),
    )


def _runs(values: np.ndarray, bounds: np.ndarray, but: list[slice] | None = None) -> list[int | None]:
    """The first value of each block in which values rise one by one; None for others, empty ones, and where `but` is
    not empty."""
    if not len(values):
        return [None] * (len(bounds) - 1)
    breaks = bounds_of(values[1:] - values[:-1] != 1)
    firsts, lasts = bounds[:-1], bounds[1:] - 1
    firsts = np.minimum(firsts, len(values) - 1)  # of empty blocks, which are left out
    rising = (breaks[firsts] == breaks[lasts]) & (lasts >= firsts)
    found = [value if rises else None for value, rises in zip(values[firsts].tolist(), rising.tolist(), strict=True)]
    if but is not None:
        found = [None if part.stop > part.start else run for run, part in zip(found, but, strict=True)]
    return found


def _rows_of(tensors: np.ndarray, rows: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """The tensors of some of the blocks, block after block."""
    if len(blocks) == len(rows):
        return tensors
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[blocks] = True
    return tensors[chosen.repeat(rows)]


def _takers(result_U: np.ndarray, num_results: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first use of each result, U without any; and the results and uses of all further ones, results rising."""
    uses = stable_order(result_U)
    results = result_U[uses]
    further = np.zeros(len(results), dtype=bool)
    further[1:] = results[1:] == results[:-1]
    takers = np.empty(num_results, dtype=np.int64)
    takers.fill(len(result_U))
    takers[results[~further]] = uses[~further]
    return takers, results[further], uses[further]


def _places(calls: list[int], rows: list[int], last_uses: list[int]) -> tuple[list[slice], int]:
    """Places of the blocks that calls make, such that those needed at one time do not overlap; and how many that takes.

    Each block takes the first gap that is wide enough (first fit: Wilson et al. 1995, Dynamic Storage Allocation).
    """
    gaps = [(0, sys.maxsize)]  # rising
    waiting: list[tuple[int, int, int]] = []  # a heap of last use, start and end
    places, num_places = [], 0
    for call, size, last_use in zip(calls, rows, last_uses, strict=True):
        # What this call itself takes has been read when its results are written.
        while waiting and waiting[0][0] <= call:
            _, start, end = heappop(waiting)
            _free(gaps, start, end)
        if not size:
            places.append(slice(0, 0))
            continue
        index = next(index for index, (first, end) in enumerate(gaps) if end - first >= size)
        start, end = gaps[index]
        gaps[index : index + 1] = [(start + size, end)] if start + size < end else []
        places.append(slice(start, start + size))
        heappush(waiting, (max(last_use, call + 1), start, start + size))
        num_places = max(num_places, start + size)
    return places, num_places


def _free(gaps: list[tuple[int, int]], start: int, end: int) -> None:
    """Add a gap to `gaps`, joined with its neighbours."""
    index = bisect(gaps, (start, end))
    before = gaps[index - 1] if index else (0, -1)
    after = gaps[index]  # the last gap has no end: there always is one
    joined = (before[0] if before[1] == start else start, after[1] if after[0] == end else end)
    gaps[index - (before[1] == start) : index + (after[0] == end)] = [joined]


def bounds_of(rows: np.ndarray) -> np.ndarray:
    """(n + 1,) where blocks of so many rows, (n,), begin, and where the last one ends."""
    bounds = np.zeros(len(rows) + 1, dtype=np.int64)
    rows.cumsum(out=bounds[1:])
    return bounds


def _slices(bounds: np.ndarray) -> list[slice]:
    return [slice(*pair) for pair in pairwise(bounds.tolist())]
