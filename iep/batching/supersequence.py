"""Strings of ops -> one short string that holds each of them in order, other ops in between: a supersequence.

The ops along any path of a graph run in that order, each in a call of its own, so that a schedule of few calls is a
short common supersequence of the paths' ops. The shortest is hard to find (Maier 1978, The complexity of some problems
on subsequences and supersequences); this is a quick rule, and a local search that improves what the rule found. Where
the strings come from, and which node runs in which call, is not its concern.

Every op of every string is one bit of a Python integer, string after string with a bit left free between any two. A
set of places is then one integer, and all strings go on by one op in a few integer operations.

Shapes: P strings, L length of the longest.
"""

from dataclasses import dataclass

import numpy as np

WINDOW = 20
"""Calls that are planned anew at a time. Somewhat more or fewer do as well."""
SWEEPS = 8
PATIENCE = 2
"""Sweeps over all calls: at most, and in a row without a gain. Few gain anything after the fourth."""


def short_supersequence(strings_PL: np.ndarray) -> list[int]:
    """A short string of ops that every row of `strings_PL` is a subsequence of; the same for the same rows.

    Args:
        strings_PL: (P, L) ops, 0 or greater, every row followed by -1.
    """
    places = _places(strings_PL)
    fewest = _lower_bound(strings_PL)
    forward = _greedy(places.of_op, places.all, places.first, True)
    backward = _greedy(places.of_op, places.all, places.last, False)
    calls = min(forward, backward, key=len)
    stale = 0
    for sweep in range(SWEEPS):
        if len(calls) == fewest or stale == PATIENCE:
            break
        before = len(calls)
        calls = _sweep(places, calls, first_step=WINDOW // 4 if sweep % 2 else WINDOW // 2)
        stale = stale + 1 if len(calls) == before else 0
    return calls


def _lower_bound(strings_PL: np.ndarray) -> int:
    """No supersequence is shorter than this: for every op the most that any string has of it, summed over ops."""
    string, _ = np.nonzero(strings_PL >= 0)
    op = strings_PL[strings_PL >= 0]
    width = op.max(initial=0) + 1
    count = np.bincount(string * width + op, minlength=len(strings_PL) * width)
    return int(count.reshape(len(strings_PL), width).max(axis=0, initial=0).sum())


@dataclass(frozen=True)
class _Places:
    """Sets of places as integers: those of every op, each string's first and last, and all."""

    of_op: list[int]
    first: int
    last: int
    all: int


def _places(strings_PL: np.ndarray) -> _Places:
    length_P = (strings_PL >= 0).sum(axis=1)
    end_P = np.cumsum(length_P + 1) - 1
    op = strings_PL[strings_PL >= 0]
    place = np.arange(len(op)) + np.repeat(np.arange(len(length_P)), length_P)
    width = op.max(initial=-1) + 1

    bits = np.zeros((width + 2, (end_P.max(initial=0) >> 3) + 1), dtype=np.uint8)
    row = np.concatenate([op, np.full(len(end_P), width), np.full(len(end_P), width + 1)])
    place = np.concatenate([place, end_P - length_P, end_P - 1])
    np.add.at(bits, (row, place >> 3), (1 << (place & 7)).astype(np.uint8))
    *of_op, first, last = [int.from_bytes(octets.tobytes(), "little") for octets in bits]
    return _Places(of_op, first, last, sum(of_op))


def _greedy(of_op: list[int], rest: int, front: int, forward: bool) -> list[int]:
    """Calls, in the order of the strings, that run the places `rest`: within every string a run without gaps.

    First an op whose places all stand in front: it costs nothing, since any other plan must run it too. Where there is
    none, the op in front of the longest string.

    Args:
        front: the first place of every run, or the last if not `forward`, which plans from the end.
    """
    behind = [rest]  # behind[d]: places with at least d others behind them
    while deeper := (behind[-1] >> 1 if forward else behind[-1] << 1) & rest:
        behind.append(deeper)
    live = [(op, places) for op, places in enumerate(of_op) if places & rest]
    calls = []
    while front:
        waiting = rest ^ front
        for choice in live:
            if not waiting & choice[1]:
                break
        else:
            while not front & behind[-1]:
                behind.pop()
            longest = front & behind[-1]
            choice = next(choice for choice in live if longest & choice[1])
        op, places = choice
        run = front & places
        rest ^= run
        front = (front ^ run) | ((run << 1 if forward else run >> 1) & rest)
        if not rest & places:
            live.remove(choice)
        calls.append(op)
    return calls if forward else calls[::-1]


def _sweep(places: _Places, calls: list[int], first_step: int) -> list[int]:
    """As many calls or fewer: window after window is planned anew, each half in the last, from either end in turn.

    What a window must run is what neither the calls before it nor those after it can.
    """
    calls = calls.copy()
    after = _rests(places, calls)
    rest, front = places.all, places.first
    start, step, forward = 0, first_step, False
    while start < len(calls):
        end = min(start + WINDOW, len(calls))
        rest_after, back = after[len(calls) - end]
        window, forward = rest & rest_after, not forward
        planned = _greedy(places.of_op, window, (front if forward else back) & window, forward)
        last = end == len(calls)
        if len(planned) <= end - start:
            calls[start:end] = planned
        if last:
            break
        for op in calls[start : start + step]:
            run = front & places.of_op[op]
            rest ^= run
            front = (front ^ run) | ((run << 1) & rest)
        start, step = start + step, WINDOW // 2
    return calls


def _rests(places: _Places, calls: list[int]) -> list[tuple[int, int]]:
    """By number of last calls: what these leave to run when they take as much as they can, and every string's last."""
    rest, back = places.all, places.last
    rests = [(rest, back)]
    for op in reversed(calls):
        run = back & places.of_op[op]
        rest ^= run
        back = (back ^ run) | ((run >> 1) & rest)
        rests.append((rest, back))
    return rests
