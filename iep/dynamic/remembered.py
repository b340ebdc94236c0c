"""Plans are remembered: graphs of the same shape are scheduled and planned once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TypeVar

import numpy as np

MOST_NODES = 1 << 18
"""The most nodes of all graphs whose plans are kept; the one used longest ago goes first."""

Value = TypeVar("Value")

_values: dict[bytes, tuple[int, object]] = {}
"""With the number of nodes of their graphs, the one used longest ago first."""
_is_off: ContextVar[bool] = ContextVar("nothing_remembered", default=False)


def remembered(key: bytes, nodes: int, make: Callable[[], Value]) -> tuple[Value, bool]:
    """Return the value of `key`, made for a graph of so many nodes if it is not there, and whether it was."""
    if _is_off.get():
        return make(), False
    found = _values.pop(key, None)
    nodes, value = _values[key] = found or (nodes, make())
    while sum(count for count, _ in list(_values.values())) > MOST_NODES:
        _values.pop(next(iter(_values)), None)
    return value, found is not None


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Within it, plans are made anew and not kept: for measuring what they cost."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


def key_of(name: str, *arrays: np.ndarray | int) -> bytes:
    """Return a digest of a name and of integers."""
    digest = blake2b(name.encode())
    for array in arrays:
        array = np.ascontiguousarray(array, dtype=np.int64)
        digest.update(str(array.shape).encode())
        digest.update(array)
    return digest.digest()
