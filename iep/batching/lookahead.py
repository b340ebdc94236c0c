"""The search of the scheduler `lookahead`: the paths of a graph -> a short sequence of calls in which all of them run.

The nodes of a path run one after another, so that the ops of the calls contain those of every path, in order. Any such
sequence of ops is a schedule, in which every node runs in the last call of its op that is before the calls of all its
readers. The fewest calls are therefore a shortest common supersequence of the ops along the paths, which is hard to
find (Maier 1978, The complexity of some problems on subsequences and supersequences). Here, a greedy rule finds a first
solution, and a local search plans windows of its calls anew.

Every op of every string is one bit of a Python integer, with one free bit between any two strings. A set of positions
is therefore one integer, and all strings advance by one op in a few integer operations. A call is represented by the
set of all positions of its op.

Shapes: N nodes, A greatest number of arguments, P strings, L length of the longest, K calls.
"""

import numpy as np

MOST_PATHS = 1 << 16
"""The greatest number of pairs of a prefix and its last node that are followed from one distance. Only graphs with
repeatedly shared nodes have more."""
WINDOW, PATIENCE = 12, 400
"""The number of calls that are planned anew at a time, and that of calls planned without an improvement at which the
search ends."""


def op_strings(op_N: np.ndarray, reads_NA: np.ndarray) -> np.ndarray | None:
    """Return the ops of the paths from a leaf to a root in the order in which they run, (P, L), filled up with -1.

    Paths that lead from the roots through the same ops are followed together, as many programs of a minibatch begin
    alike. No string is the end of another, and none occurs twice. Return None for a graph with very many paths.

    Args:
        op_N: (N,) ops, 0 or greater.
        reads_NA: (N, A) ids of the nodes whose results each node reads, less than its own; -1 elsewhere.
    """
    count, width = len(op_N), int(op_N.max(initial=0)) + 1
    node = _roots(reads_NA)
    entry = np.full(len(node), -1)
    entries, steps = 0, [np.empty(0, dtype=np.int64)]
    while len(node):
        # An entry, the op that follows it, and the node that runs it; sorting puts the nodes of a new entry together.
        key = np.sort(((entry + 1) * width + op_N[node]) * count + node)
        key = key[_differs(key)]
        if len(key) > MOST_PATHS:
            return None
        step, node = np.divmod(key, count)
        is_new = _differs(step)
        entry = np.cumsum(is_new) + (entries - 1)
        steps.append(step[is_new])
        entries += len(steps[-1])
        below = reads_NA[node]
        row, column = np.nonzero(below >= 0)
        entry, node = entry[row], below[row, column]
    # The entry before each entry, -1 at a root, and its last op; the last of each is for -1, no entry.
    above, letter = np.divmod(np.append(np.concatenate(steps), 0), width)
    above, letter[-1] = above - 1, -1
    has_below = np.zeros(entries + 1, dtype=bool)
    has_below[above[:-1]] = True
    end = np.flatnonzero(~has_below[:-1])
    columns = []
    while (end >= 0).any():
        columns.append(letter[end])
        end = above[end]
    return np.stack(columns, axis=1) if columns else np.zeros((0, 0), dtype=np.int64)


def _roots(reads_NA: np.ndarray) -> np.ndarray:
    """Return the ids of the nodes that no other node reads."""
    is_read = np.zeros(len(reads_NA) + 1, dtype=bool)
    is_read[reads_NA] = True
    return np.flatnonzero(~is_read[:-1])


def _differs(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the previous one; the first value counts as different."""
    differs = np.ones(len(values), dtype=bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def last_calls(calls: np.ndarray, kind: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """Return the last call of every node's kind before the calls of all its readers, (N,); -1 if there is none.

    Args:
        calls: (K,) kinds.
        kind: (N,).
        reads: (N, A) nodes whose results each node reads, -1 elsewhere.
    """
    # Every call as one number, by kind and then by time; the first entry means no call.
    width = len(calls) + 1
    by_kind = np.concatenate([[-2], np.sort(calls * width + np.arange(len(calls)))])
    call = np.full(len(kind), -1)
    limit = np.full(len(kind) + 1, len(calls))  # the first call of any reader; the last entry is for -1, no node
    nodes = _roots(reads)
    while len(nodes):
        own = kind[nodes] * width
        latest = by_kind[np.searchsorted(by_kind, own + limit[nodes]) - 1] - own
        call[nodes] = np.maximum(latest, -1)
        reached = np.zeros(len(kind) + 1, dtype=bool)
        below = reads[nodes]
        np.minimum.at(limit, below.ravel(), np.repeat(call[nodes], below.shape[1]))
        reached[below] = True
        nodes = np.flatnonzero(reached[:-1])
    return call


def fewest_calls(strings_PL: np.ndarray) -> int:
    """Return a lower bound of the length of any supersequence: the sum over ops of the most that any string has."""
    string, _ = np.nonzero(strings_PL >= 0)
    op = strings_PL[strings_PL >= 0]
    width = op.max(initial=0) + 1
    count = np.bincount(string * width + op, minlength=len(strings_PL) * width)
    return int(count.reshape(len(strings_PL), width).max(axis=0, initial=0).sum())


def short_supersequence(strings_PL: np.ndarray) -> list[int]:
    """Return a short string of ops of which every row of `strings_PL` is a subsequence. The search is deterministic.

    Args:
        strings_PL: (P, L) ops, 0 or greater, every row followed by -1.
    """
    ops, first, last = _positions(strings_PL)
    every, fewest = sum(ops), fewest_calls(strings_PL)
    calls, turn, stale = _greedy(ops, every, first), 0, 0
    while len(calls) > fewest and stale < PATIENCE:
        # Sweep over all calls by windows that overlap. A window must run the positions that neither the calls
        # before it nor those after it can run. Each is planned with the ops in another order.
        before, start, width = len(calls), 0, min(WINDOW, max(3, len(calls) // 2))
        after = _rests(calls, every, last)
        rest, front = every, first
        while start < len(calls):
            end, split = min(start + width, len(calls)), turn % len(ops)
            window = rest & after[len(calls) - end]
            planned = _greedy(ops[split:] + ops[:split], window, front & window)
            if len(planned) <= end - start:
                calls[start:end] = planned
            turn, stale, step = turn + 1, stale + width, width // 3
            for call in calls[start : start + step]:
                rest, front = _run(call, rest, front)
            start += step
        if len(calls) < before:
            stale = 0
    op = {positions: op for op, positions in enumerate(ops)}
    return [op[call] for call in calls]


def _positions(strings_PL: np.ndarray) -> tuple[list[int], int, int]:
    """Return the positions of every op, and the first and last positions of the strings."""
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
    return of_op, first, last


def _greedy(ops: list[int], rest: int, front: int) -> list[int]:
    """Return calls that run the positions `rest`, which are adjacent in every string.

    The next op is one whose remaining positions are all in front, because this call is needed and cannot run more
    later. If there is none, it is the op in front of the longest string; of several, the first in `ops`.

    Args:
        ops: the positions of every op.
        rest: the positions to run.
        front: the first position of each string in `rest`.
    """
    behind = [rest]  # behind[d]: positions with at least d others to run after them
    while deeper := (behind[-1] >> 1) & rest:
        behind.append(deeper)
    live = [positions for positions in ops if positions & rest]
    calls = []
    while front:
        waiting = rest ^ front
        call = next((each for each in live if not waiting & each), 0)
        if not call:
            while not front & behind[-1]:
                behind.pop()
            longest = front & behind[-1]
            call = next(each for each in live if longest & each)
        rest, front = _run(call, rest, front)
        if not rest & call:
            live.remove(call)
        calls.append(call)
    return calls


def _run(call: int, rest: int, front: int) -> tuple[int, int]:
    """Return the positions that remain after a call, and those of them that are in front."""
    run = front & call
    rest ^= run
    return rest, (front ^ run) | ((run << 1) & rest)


def _rests(calls: list[int], rest: int, back: int) -> list[int]:
    """Return the positions that the last 0, 1, 2 ... calls cannot run; `back` are the last positions of the strings."""
    rests = [rest]
    for call in reversed(calls):
        run = back & call
        rest ^= run
        back = (back ^ run) | ((run >> 1) & rest)
        rests.append(rest)
    return rests
