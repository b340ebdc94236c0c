"""A cache of plans, by which graphs of the same shape are scheduled and planned once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TypeVar

import numpy as np

MOST_NODES = 1 << 18
"""The greatest number of nodes of all graphs with cached plans; the least recently used plan is dropped first."""

Value = TypeVar("Value")

_values: dict[bytes, tuple[int, object]] = {}
"""The values and the numbers of nodes of their graphs, the least recently used first."""
_is_off: ContextVar[bool] = ContextVar("nothing_remembered", default=False)


def remembered(key: bytes, nodes: int, make: Callable[[], Value]) -> tuple[Value, bool]:
    """Return the cached value of `key`, made now if it is missing, and whether it was cached."""
    if _is_off.get():
        return make(), False
    found = _values.pop(key, None)
    nodes, value = _values[key] = found or (nodes, make())
    while sum(count for count, _ in list(_values.values())) > MOST_NODES:
        _values.pop(next(iter(_values)), None)
    return value, found is not None


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Make plans anew in the block, and do not cache them, so that their time can be measured."""
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
