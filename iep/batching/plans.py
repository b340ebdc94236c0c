"""Graph -> layout, remembered: graphs of the same shape are scheduled and laid out once."""

import threading
from collections import OrderedDict
from hashlib import blake2b

import numpy as np

from iep.batching.graph import Graph
from iep.batching.layout import Layout, lay_out
from iep.batching.schedulers import make_schedule
from iep.batching.types import Types

MOST_PLANS = 64
"""Layouts that are kept; the one used longest ago goes first."""

_plans: OrderedDict[bytes, Layout] = OrderedDict()
_lock = threading.Lock()


def plan(graph: Graph, types: Types, scheduler: str) -> tuple[Layout, bool]:
    """The layout of what `scheduler` makes of `graph`, and whether it was there already.

    Raises:
        ValueError: there is no such scheduler.
    """
    key = _key(graph, types, scheduler)
    with _lock:
        if key in _plans:
            _plans.move_to_end(key)
            return _plans[key], True
    layout = lay_out(graph, make_schedule(graph, scheduler), types)
    with _lock:
        _plans[key] = layout
        while len(_plans) > MOST_PLANS:
            _plans.popitem(last=False)
    return layout, False


def forget_plans() -> None:
    """Begin anew; for who measures what plans cost."""
    with _lock:
        _plans.clear()


def _key(graph: Graph, types: Types, scheduler: str) -> bytes:
    """A digest of all integers that a layout depends on."""
    digest = blake2b(f"{scheduler} {graph.num_inputs} {sorted(types.signatures.items())}".encode())
    fields = () if types.fields is None else (types.fields,)
    for array in (graph.op, graph.args, *fields, types.inputs, *(part for root in types.roots for part in root)):
        array = np.ascontiguousarray(array, dtype=np.int64)
        digest.update(f"{array.shape}".encode())
        digest.update(array)
    return digest.digest()
