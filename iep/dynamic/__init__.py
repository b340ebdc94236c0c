"""Front ends that batch other dynamic networks: the lazy scope and vertex functions. See docs/dynamic_networks.md."""

from iep.dynamic.future import Future
from iep.dynamic.scope import scope
from iep.dynamic.vertex import Edges, Results, VertexFunction, VertexNetwork, VertexPlan, Vertices

__all__ = ["Edges", "Future", "Results", "VertexFunction", "VertexNetwork", "VertexPlan", "Vertices", "scope"]
