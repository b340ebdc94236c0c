"""Graph, schedule and a device for every op -> what each device does, and what moves between them: plain data.

A group of the schedule runs on its op's device. Every device has a layout of its own, with buffers of its own, in which
moves are calls: right after the call that makes them, the rows that another device needs depart; there they arrive
before the first call that takes one. So a slot moves to a device at most once, and only if it is needed there. Each
device does its part in the schedule's order, and what it waits for was begun earlier in that order, so that devices
never wait for each other in a circle. Running it is `threads.py`.

Shapes: K calls, U uses, as in `layout.py`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.layout import Call, Layout, lay_out_steps
from iep.batching.schedulers import Schedule
from iep.batching.steps import Steps, leads_to_root, steps_of
from iep.batching.types import Types, one_column


@dataclass(frozen=True)
class Homes:
    """Where everything is: positions in a list of devices, in which one device may stand several times."""

    devices: tuple[torch.device, ...]
    ops: Mapping[int, int]
    """Of every op that may run."""
    inputs: int
    roots: int
    """Where the results are wanted."""


@dataclass(frozen=True)
class Departure:
    """The op of a call that hands on the rows of a move."""

    move: int


@dataclass(frozen=True)
class Arrival:
    """The op of a call that brings them in."""

    move: int


@dataclass(frozen=True)
class Move:
    """Rows that cross together: of one call's results, what one other device needs."""

    after: int
    """The call that makes them, counted from 1 as the schedule's groups."""
    source: int
    destination: int
    rows: tuple[int, ...]
    """How many of each column, from 0 on."""


@dataclass(frozen=True, eq=False)
class PlacedLayout:
    """What every device does, and what moves."""

    homes: Homes
    layouts: tuple[Layout, ...]
    """Of each device; the first and the last call of those that neither hold the inputs nor the roots are empty."""
    moves: tuple[Move, ...]
    """In the order of their departures."""

    @property
    def calls(self) -> tuple[Call, Call]:
        """The inputs' arrival and the roots' departure."""
        return self.layouts[self.homes.inputs].calls[0], self.layouts[self.homes.roots].calls[-1]

    def rows_moved(self, column: int) -> int:
        """How many values of a column cross on the way forward; as many gradients do on the way back."""
        return sum(move.rows[column] for move in self.moves if column < len(move.rows))

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "PlacedLayout":
        """The same with `function` of its index tensors."""
        return replace(self, layouts=tuple(layout.map(function) for layout in self.layouts))

    def on_devices(self) -> "PlacedLayout":
        """The same with each layout's index tensors on its own device."""
        there = zip(self.layouts, self.homes.devices, strict=True)
        return replace(
            self,
            layouts=tuple(layout.map(lambda index, to=to: index.to(to, non_blocking=True)) for layout, to in there),
        )


def lay_out_placed(graph: Graph, schedule: Schedule, homes: Homes, types: Types | None = None) -> PlacedLayout:
    """The layout of `schedule` on several devices; `types` as of `lay_out`.

    Raises:
        ValueError: as `lay_out`, or an op of the schedule has no home.
    """
    types = types or one_column(graph)
    steps = steps_of(graph, schedule, types)
    homeless = {op for op in steps.ops[1:-1] if op not in homes.ops}
    if homeless:
        raise ValueError(f"op {min(homeless)} is to run, but is placed on no device")
    home_K = [homes.inputs, *(homes.ops[op] for op in steps.ops[1:-1]), homes.roots]
    crossings = _crossings(steps, np.array(home_K))
    each, leads = _each(steps), leads_to_root(graph, types, steps)
    return PlacedLayout(
        homes=homes,
        layouts=tuple(
            lay_out_steps(_steps_at(position, each, home_K, crossings, steps), leads)
            for position in range(len(homes.devices))
        ),
        moves=tuple(_move(crossing, home_K, steps.column) for crossing in crossings),
    )


def least_time(layout: PlacedLayout, cost_of_row: Mapping[int, float]) -> float:
    """How long a run takes at least, where a call takes its rows times its op's `cost_of_row`, and moves take no time.

    By how much it is less than the sum over all calls is what devices gain by working at the same time.
    """
    clocks, departures = [0.0] * len(layout.layouts), dict[int, float]()
    left = [list(reversed(part.calls[1:-1])) for part in layout.layouts]
    while any(left):
        for at, calls in enumerate(left):
            while calls and not (isinstance(calls[-1].op, Arrival) and calls[-1].op.move not in departures):
                call = calls.pop()
                if isinstance(call.op, Arrival):
                    clocks[at] = max(clocks[at], departures[call.op.move])
                elif isinstance(call.op, Departure):
                    departures[call.op.move] = clocks[at]
                else:
                    clocks[at] += call.rows * cost_of_row[call.op]
    return max(clocks)


class _Crossing(NamedTuple):
    maker: int
    """The call that makes the tensors."""
    destination: int
    taker: int
    """The first call there that takes one of them."""
    tensors: np.ndarray


def _move(crossing: _Crossing, home_K: list[int], column: np.ndarray) -> Move:
    maker, destination, _, tensors = crossing
    return Move(maker, home_K[maker], destination, tuple(np.bincount(column[tensors]).tolist()))


def _crossings(steps: Steps, home_K: np.ndarray) -> list[_Crossing]:
    """What has to move, in the order of the calls that make it."""
    maker_U, home_U = steps.call_of_tensor[steps.taken], home_K[steps.call_of_use]
    crossing = np.flatnonzero(home_K[maker_U] != home_U)
    move_U = maker_U[crossing] * (int(home_K.max()) + 1) + home_U[crossing]
    # Each tensor's first use there: uses are in the order of the calls.
    num_tensors = len(steps.column)
    keys, first = np.unique(move_U * num_tensors + steps.taken[crossing], return_index=True)
    uses = crossing[first]
    cuts = np.flatnonzero(np.diff(keys // num_tensors)) + 1
    return [
        _Crossing(int(maker_U[part[0]]), int(home_U[part[0]]), int(steps.call_of_use[part].min()), steps.taken[part])
        for part in np.split(uses, cuts)
        if len(part)
    ]


class _Step(NamedTuple):
    """One call of `Steps`."""

    op: Hashable
    rows: int
    taken: Sequence[np.ndarray]
    """Its blocks."""
    counts: Sequence[int]
    """How many tensors of each node lie side by side in each of them; 0 where they are not stacked."""
    made: Sequence[np.ndarray]
    """Its blocks."""


def _each(steps: Steps) -> list[_Step]:
    """The steps one by one."""
    taken = _pieces(steps.taken, np.cumsum(steps.take_rows))
    made = _pieces(steps.made, np.cumsum(steps.make_rows))
    counts, calls = steps.take_count.tolist(), np.arange(len(steps.rows) + 1)
    cuts_T = pairwise(np.searchsorted(steps.take_call, calls).tolist())
    cuts_M = pairwise(np.searchsorted(steps.make_call, calls).tolist())
    return [
        _Step(op, rows, taken[slice(*t)], counts[slice(*t)], made[slice(*m)])
        for op, rows, t, m in zip(steps.ops, steps.rows.tolist(), cuts_T, cuts_M, strict=True)
    ]


def _pieces(rows: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    return [rows[start:end] for start, end in pairwise([0, *ends.tolist()])]


def _steps_at(position: int, each: list[_Step], home_K: list[int], crossings: list[_Crossing], whole: Steps) -> Steps:
    """What one device does of `whole`."""
    last, column = len(each) - 1, whole.column
    # By time: call k at 3k + 1, after what arrives for it and before what departs.
    timed = [(3 * call + 1, step) for call, step in enumerate(each) if home_K[call] == position]
    timed += [(3 * end + 1, _Step(None, 0, (), (), ())) for end in (0, last) if home_K[end] != position]
    for move, (maker, destination, taker, tensors) in enumerate(crossings):
        blocks = [tensors[column[tensors] == which] for which in np.unique(column[tensors])]
        if home_K[maker] == position:
            timed.append((3 * maker + 2, _Step(Departure(move), len(tensors), blocks, [0] * len(blocks), ())))
        if destination == position:
            timed.append((3 * taker, _Step(Arrival(move), len(tensors), (), (), blocks)))
    steps = [step for _, step in sorted(timed, key=itemgetter(0))]
    take_call, take_rows, taken = _joined([step.taken for step in steps])
    make_call, make_rows, made = _joined([step.made for step in steps])
    return Steps(
        column=column,
        slot=whole.slot,
        ops=[step.op for step in steps],
        rows=np.array([step.rows for step in steps]),
        take_call=take_call,
        take_rows=take_rows,
        take_count=np.array([count for step in steps for count in step.counts], dtype=np.int64),
        taken=taken,
        make_call=make_call,
        make_rows=make_rows,
        made=made,
        parts=whole.parts,
    )


def _joined(blocks_K: list[Sequence[np.ndarray]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Call and rows of every block, and all their tensors."""
    call = np.repeat(np.arange(len(blocks_K)), [len(blocks) for blocks in blocks_K])
    blocks = [block for blocks in blocks_K for block in blocks]
    rows = np.array([len(block) for block in blocks], dtype=np.int64)
    return call, rows, np.concatenate([np.empty(0, dtype=np.int64), *blocks])
