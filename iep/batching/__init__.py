"""Batching of many small tree-shaped networks: graph -> schedule -> execute, and the slow reference beside it.

Knows nothing of CLEVR: imports torch, numpy, the standard library and itself.
"""

from iep.batching.execute import execute
from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.reference import run_prefix
from iep.batching.schedulers import SCHEDULERS, Group, Schedule, make_schedule

__all__ = [
    "SCHEDULERS",
    "Graph",
    "Group",
    "Schedule",
    "execute",
    "graph_from_prefix",
    "make_schedule",
    "run_prefix",
]
