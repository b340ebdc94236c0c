"""Strings of ops -> one short string that holds each of them in order, other ops in between: a supersequence.

The ops along any path of a graph run in that order, each in a call of its own, so that a schedule of few calls is a
short common supersequence of the paths' ops. The shortest is hard to find (Maier 1978, The complexity of some problems
on subsequences and supersequences); this is a quick rule, and a local search that improves what the rule found. Where
the strings come from, and which node runs in which call, is not its concern.

Every op of every string is one bit of a Python integer, string after string with a bit left free between any two. A
set of positions is then one integer, and all strings advance by one op in a few integer operations. A call stands for
its op as the set of all that op's positions.

Shapes: P strings, L length of the longest.
"""

from dataclasses import dataclass

import numpy as np

WINDOW = 20
"""Calls that are planned anew at a time; fewer where there are few. Somewhat more or fewer do as well."""
MOST_PLANNED, LEAST_SWEEPS, PATIENCE = 800, 4, 400
"""The search ends when it has planned `MOST_PLANNED` calls anew and swept `LEAST_SWEEPS` times over all of them, or
when it has planned `PATIENCE` calls without a gain."""
GOOD, LONGER = 1.35, 3
"""Where there are still more than `GOOD` times as many calls as the lower bound, both are `LONGER` times as many."""


def short_supersequence(strings_PL: np.ndarray) -> list[int]:
    """Return a short string of ops that every row of `strings_PL` is a subsequence of; the same for the same rows.

    Args:
        strings_PL: (P, L) ops, 0 or greater, every row followed by -1.
    """
    positions = _positions(strings_PL)
    fewest = lower_bound(strings_PL)
    # The first rule suits strings that are much alike, as programs are; the second suits random ones.
    longest_first = _greedy(positions.of_op, positions.all, positions.first, True, False)
    commonest_first = _greedy(positions.of_op, positions.all, positions.last, False, True)
    calls = min(longest_first, commonest_first, key=len)
    sweeps = windows = planned = stale = 0
    while len(calls) > fewest:
        times = LONGER if len(calls) > GOOD * fewest else 1
        if (planned >= times * MOST_PLANNED and sweeps >= LEAST_SWEEPS) or stale >= times * PATIENCE:
            break
        before = len(calls)
        calls, more = _sweep(positions, calls, windows)
        stale = 0 if len(calls) < before else stale + more * _width(calls)
        sweeps, windows, planned = sweeps + 1, windows + more, planned + more * _width(calls)
    op = {mask: op for op, mask in enumerate(positions.of_op)}
    return [op[call] for call in _needed(positions, calls)]


def lower_bound(strings_PL: np.ndarray) -> int:
    """Return a length that no supersequence is below: for every op the most that any string has of it, summed."""
    string, _ = np.nonzero(strings_PL >= 0)
    op = strings_PL[strings_PL >= 0]
    width = op.max(initial=0) + 1
    count = np.bincount(string * width + op, minlength=len(strings_PL) * width)
    return int(count.reshape(len(strings_PL), width).max(axis=0, initial=0).sum())


@dataclass(frozen=True)
class _Positions:
    """Sets of positions as integers: those of every op, each string's first and last, and all."""

    of_op: list[int]
    first: int
    last: int
    all: int


def _positions(strings_PL: np.ndarray) -> _Positions:
    length_P = (strings_PL >= 0).sum(axis=1)
    end_P = np.cumsum(length_P + 1) - 1
    op = strings_PL[strings_PL >= 0]
    position = np.arange(len(op)) + np.repeat(np.arange(len(length_P)), length_P)
    width = op.max(initial=-1) + 1
    # A row of bits for each op, one for the first positions and one for the last.
    row = np.concatenate([op, np.full(len(end_P), width), np.full(len(end_P), width + 1)])
    position = np.concatenate([position, end_P - length_P, end_P - 1])
    octets = np.zeros((width + 2, end_P.max(initial=0) // 8 + 1), dtype=np.uint8)
    np.add.at(octets, (row, position >> 3), (1 << (position & 7)).astype(np.uint8))
    *of_op, first, last = [int.from_bytes(bits.tobytes(), "little") for bits in octets]
    return _Positions(of_op, first, last, sum(of_op))


def _greedy(ops: list[int], rest: int, front: int, forward: bool, commonest: bool = False) -> list[int]:
    """Return calls, in the order of the strings, that run the positions `rest`: of every string some adjacent ones.

    First an op whose positions all stand in front: that call has to come at some time, and no time is better than now.
    Where there is none, the op in front of the longest string, or the `commonest` in front; of several, the first in
    `ops`.

    Args:
        ops: every op's positions.
        rest: what to run.
        front: the first of each string's positions in `rest`, or the last if not `forward`: planned from the end.
    """
    behind = [rest]  # behind[d]: positions with at least d others to run after them
    while deeper := (behind[-1] >> 1 if forward else behind[-1] << 1) & rest:
        behind.append(deeper)
    live = [positions for positions in ops if positions & rest]
    calls = []
    while front:
        waiting = rest ^ front
        for call in live:
            if not waiting & call:
                break
        else:
            if commonest:
                counts = [(front & positions).bit_count() for positions in live]
                call = live[counts.index(max(counts))]
            else:
                while not front & behind[-1]:
                    behind.pop()
                longest = front & behind[-1]
                for call in live:
                    if longest & call:
                        break
        run = front & call
        rest ^= run
        front = (front ^ run) | ((run << 1 if forward else run >> 1) & rest)
        if not rest & call:
            live.remove(call)
        calls.append(call)
    return calls if forward else calls[::-1]


def _run(call: int, rest: int, front: int, forward: bool) -> tuple[int, int]:
    """Return the positions that are left after a call, and those of them in front."""
    run = front & call
    rest ^= run
    return rest, (front ^ run) | ((run << 1 if forward else run >> 1) & rest)


def _sweep(positions: _Positions, calls: list[int], turn: int) -> tuple[list[int], int]:
    """Return as many calls or fewer, and the number of windows: each is planned anew, half of it being the last one's.

    What a window must run is what neither the calls before it nor those after it can. So that no two windows are alike,
    they are planned from either end in turn, with the ops in another order, and do not begin at the same calls in every
    sweep; `turn`, the number of windows planned before, sees to that.
    """
    calls = calls.copy()
    width = _width(calls)
    after = _rests(positions, calls)
    rest, front = positions.all, positions.first
    start, step, first_turn = 0, max(1, (1 + turn % 3) * width // 6), turn
    while start < len(calls):
        end = min(start + width, len(calls))
        is_last = end == len(calls)
        rest_after, back = after[len(calls) - end]
        window, forward = rest & rest_after, turn % 2 == 0
        split = turn % len(positions.of_op)
        ops = positions.of_op[split:] + positions.of_op[:split]
        planned = _greedy(ops, window, (front if forward else back) & window, forward)
        if len(planned) <= end - start:
            calls[start:end] = planned
        turn += 1
        if is_last:
            break
        for call in calls[start : start + step]:
            rest, front = _run(call, rest, front, True)
        start, step = start + step, max(1, width // 2)
    return calls, turn - first_turn


def _width(calls: list[int]) -> int:
    return min(WINDOW, max(3, len(calls) // 2))


def _needed(positions: _Positions, calls: list[int]) -> list[int]:
    """Return the calls without those that can be left out: what is left before such a call, those after it can run."""
    after = _rests(positions, calls)
    rest, front = positions.all, positions.first
    needed = []
    for position, call in enumerate(calls, start=1):
        if rest & after[len(calls) - position][0]:
            needed.append(call)
            rest, front = _run(call, rest, front, True)
    return needed


def _rests(positions: _Positions, calls: list[int]) -> list[tuple[int, int]]:
    """Return, by number of last calls, what these leave when they run as much as they can, and every string's last."""
    rest, back = positions.all, positions.last
    rests = [(rest, back)]
    for call in reversed(calls):
        rest, back = _run(call, rest, back, False)
        rests.append((rest, back))
    return rests
