"""A cache of plans, by which graphs of the same shape are scheduled and planned once."""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

MOST_NODES = 1 << 18
"""The greatest number of nodes of all graphs with cached plans; the least recently used plan is dropped first."""

_plans: dict[bytes, tuple[int, Any]] = {}
"""The plans and the numbers of nodes of their graphs, the least recently used first."""


def cached_plan(make: Callable[[], Any], nodes: int, name: str, *arrays: np.ndarray | int) -> tuple[Any, bool]:
    """Return the plan of a graph, and whether it was cached. Name and integers are all on which the plan depends."""
    digest = blake2b(name.encode())
    for array in arrays:
        array = np.ascontiguousarray(array, dtype=np.int64)
        digest.update(str(array.shape).encode())
        digest.update(array)
    key = digest.digest()
    found = _plans.pop(key, None)
    nodes, plan = _plans[key] = found or (nodes, make())
    while sum(count for count, _ in list(_plans.values())) > MOST_NODES:
        _plans.pop(next(iter(_plans)), None)
    return plan, found is not None


def clear_plan_cache() -> None:
    """Forget all plans, so that the time of making them can be measured."""
    _plans.clear()
