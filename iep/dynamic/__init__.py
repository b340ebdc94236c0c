"""Front ends of `iep.batching` for networks whose shape depends on the example."""

from iep.dynamic.edges import Edges
from iep.dynamic.vertex import Outcome, VertexFunction, VertexNetwork, VertexPlan, Vertices

__all__ = ["Edges", "Outcome", "VertexFunction", "VertexNetwork", "VertexPlan", "Vertices"]
