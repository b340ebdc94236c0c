"""Plans, remembered: graphs of the same shape are scheduled and laid out once."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TypeVar

import numpy as np

from iep.batching.graph import Graph
from iep.batching.layout import Layout, lay_out
from iep.batching.schedulers import make_schedule
from iep.batching.types import Types

MOST_NODES = 1 << 18
"""Of all graphs together whose plans are kept; what was used longest ago goes first."""

Plan = TypeVar("Plan")


class _Memory:
    """Plans by key, the one used longest ago first, and how many nodes their graphs have together."""

    def __init__(self) -> None:
        self.plans: OrderedDict[bytes, tuple[int, object]] = OrderedDict()
        self.nodes = 0
        self.lock = threading.Lock()


_everyones = _Memory()
_own: ContextVar[_Memory | None] = ContextVar("plans", default=None)


def remembered(key: bytes, nodes: int, make: Callable[[], Plan]) -> tuple[Plan, bool]:
    """The plan of this key, made for a graph of so many nodes if it is not there; and whether it was."""
    memory = _own.get() or _everyones
    with memory.lock:
        if key in memory.plans:
            memory.plans.move_to_end(key)
            return memory.plans[key][1], True
    plan = make()
    with memory.lock:
        before, _ = memory.plans.pop(key, (0, None))  # another thread's, made meanwhile
        memory.plans[key] = nodes, plan
        memory.nodes += nodes - before
        while memory.nodes > MOST_NODES:
            memory.nodes -= memory.plans.popitem(last=False)[1][0]
    return plan, False


@contextmanager
def nothing_remembered() -> Iterator[None]:
    """Within it every shape is a new one; for who measures what plans cost."""
    token = _own.set(_Memory())
    try:
        yield
    finally:
        _own.reset(token)


def key_of(name: str, *arrays: np.ndarray | int) -> bytes:
    """A digest of a name and of integers, all that a plan depends on."""
    digest = blake2b(name.encode())
    for array in arrays:
        array = np.ascontiguousarray(array, dtype=np.int64)
        digest.update(str(array.shape).encode())
        digest.update(array)
    return digest.digest()


def plan(graph: Graph, types: Types, scheduler: str) -> tuple[Layout, bool]:
    """The layout of what `scheduler` makes of `graph`, and whether it was there already.

    Raises:
        ValueError: there is no such scheduler.
    """
    name = f"{scheduler} {graph.num_inputs} {sorted(types.signatures.items())}"
    fields = () if types.fields is None else (types.fields,)
    key = key_of(name, graph.op, graph.args, *fields, types.inputs, *(part for root in types.roots for part in root))
    return remembered(key, graph.num_nodes, lambda: lay_out(graph, make_schedule(graph, scheduler), types))
