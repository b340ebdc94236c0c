"""Strings of ops -> a short common supersequence: one string of which each of them is a subsequence.

The ops along any path of a graph run in that order, each in a call of its own, so that a schedule of few calls is a
short common supersequence of the paths' ops. The shortest one is hard to find (Maier 1978, The complexity of some
problems on subsequences and supersequences). A greedy rule finds a first solution here, and a local search improves it.
Other files compute the strings (`paths.py`), and the nodes that run in each call (`schedulers.py`).

Every op of every string is one bit of a Python integer, with one free bit between any two strings. A set of positions
is therefore one integer, and all strings advance by one op in a few integer operations. A call is represented by the
set of all positions of its op.

Shapes: P strings, L length of the longest.
"""

from dataclasses import dataclass

import numpy as np

WINDOW = 20
"""The number of calls that are planned anew at a time, or fewer in short solutions. The exact number matters little."""
ENOUGH, WORTH, COSTLY = 600, 30, 8192
"""The search plans calls anew for as long as it pays: `ENOUGH` of them, and `WORTH` for each call that it has saved. In
longer strings a call takes more time, so that one counts as two if there are `COSTLY` ops in all strings."""


def short_supersequence(strings_PL: np.ndarray) -> list[int]:
    """Return a short string of ops of which every row of `strings_PL` is a subsequence. The search is deterministic.

    Args:
        strings_PL: (P, L) ops, 0 or greater, every row followed by -1.
    """
    positions = _positions(strings_PL)
    fewest = lower_bound(strings_PL)
    calls = _greedy(positions.of_op, positions.all, positions.first, True)
    letters, first, effort, windows = positions.all.bit_count(), len(calls), 0.0, 0
    while len(calls) > fewest and effort < min(ENOUGH, 2 * letters) + WORTH * (first - len(calls)):
        width = _width(calls)
        calls, more = _sweep(positions, calls, windows)
        windows += more
        effort += more * width * (1 + letters / COSTLY)
    op = {mask: op for op, mask in enumerate(positions.of_op)}
    return [op[call] for call in _needed(positions, calls)]


def lower_bound(strings_PL: np.ndarray) -> int:
    """Return a lower bound of the length of any supersequence: the sum over ops of the most that any string has."""
    string, _ = np.nonzero(strings_PL >= 0)
    op = strings_PL[strings_PL >= 0]
    width = op.max(initial=0) + 1
    count = np.bincount(string * width + op, minlength=len(strings_PL) * width)
    return int(count.reshape(len(strings_PL), width).max(axis=0, initial=0).sum())


@dataclass(frozen=True)
class _Positions:
    """Sets of positions as integers: those of every op, the first and last positions of the strings, and all."""

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


def _greedy(ops: list[int], rest: int, front: int, forward: bool) -> list[int]:
    """Return calls that run all positions in `rest`, which are contiguous in each string.

    The next op is one whose remaining positions are all in front, because this call is needed and cannot run more
    later. If there is none, it is the op in front of the longest string; of several, the first in `ops`.

    Args:
        ops: the positions of every op.
        rest: the positions to run.
        front: the first position of each string in `rest`; if not `forward`, the last, as calls are planned backwards.
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
    """Return the positions that remain after a call, and those of them that are in front."""
    run = front & call
    rest ^= run
    return rest, (front ^ run) | ((run << 1 if forward else run >> 1) & rest)


def _sweep(positions: _Positions, calls: list[int], turn: int) -> tuple[list[int], int]:
    """Plan overlapping windows of the calls anew; return no more calls than before, and the number of windows.

    A window must run the positions that neither the calls before it nor those after it can run. To vary the windows,
    `turn`, the number of windows planned before, determines the end from which each is planned, the order of the ops,
    and the calls at which the windows of a sweep begin.
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
    """Return the necessary calls, without those whose later calls can run all positions that remain before them."""
    after = _rests(positions, calls)
    rest, front = positions.all, positions.first
    needed = []
    for position, call in enumerate(calls, start=1):
        if rest & after[len(calls) - position][0]:
            needed.append(call)
            rest, front = _run(call, rest, front, True)
    return needed


def _rests(positions: _Positions, calls: list[int]) -> list[tuple[int, int]]:
    """For n = 0, 1, ...: return the positions that the last n calls cannot run, and which of them end their string."""
    rest, back = positions.all, positions.last
    rests = [(rest, back)]
    for call in reversed(calls):
        rest, back = _run(call, rest, back, False)
        rests.append((rest, back))
    return rests
