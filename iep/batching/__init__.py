"""Batching of many small tree-shaped networks: graph -> schedule -> layout -> execute, and a slow reference.

Knows nothing of CLEVR: imports torch, numpy, the standard library and itself.
"""

from iep.batching.cells import Cell
from iep.batching.deferred import DeferredWeightGrads
from iep.batching.execute import execute
from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.layout import Layout, lay_out
from iep.batching.lazy.future import Future
from iep.batching.lazy.scope import scope
from iep.batching.placed import Homes, PlacedLayout, lay_out_placed, least_time
from iep.batching.reference import run_prefix
from iep.batching.schedulers import SCHEDULERS, Group, Schedule, make_schedule
from iep.batching.sharing import share
from iep.batching.types import Read, Signature, Types
from iep.batching.vertex import Edges, Outcome, VertexFunction, VertexNetwork, VertexPlan, Vertices

__all__ = [
    "SCHEDULERS",
    "Cell",
    "DeferredWeightGrads",
    "Edges",
    "Future",
    "Graph",
    "Group",
    "Homes",
    "Layout",
    "Outcome",
    "PlacedLayout",
    "Read",
    "Schedule",
    "Signature",
    "Types",
    "VertexFunction",
    "VertexNetwork",
    "VertexPlan",
    "Vertices",
    "execute",
    "graph_from_prefix",
    "lay_out",
    "lay_out_placed",
    "least_time",
    "make_schedule",
    "run_prefix",
    "scope",
    "share",
]
