"""Gated graph sequence neural networks (Li et al. 2016), whose vertices pass messages along typed edges.

In every step, each vertex sends its state through a linear layer of its edges' type, adds up what it receives, and
updates its state by a GRU cell. The layer of every type, the cell, the embedding and the readout are ops, so that each
can have a worker of its own. `deduction.py` and `molecules.py` have the data and what is read out.

Shapes: B graphs, V vertices of one, N of all, E directed edges, G rows of a call, H width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from iep.batching.execute import execute
from iep.batching.placement import OpPlacement, balanced_placement
from iep.batching.plan import Plan
from iep.dynamic.messages import Apply, Bcast, Concat, Cond, Flatmap, Group, Isu, MessageGraph, Node, Reduce, Ungroup

STATES, KINDS, SCORES = range(3)
"""The columns: states (H,), kinds of vertices (), and what is read out, (1,)."""
EMBEDDING, CELL, SUM, LINEAR = range(4)
"""The ops; the layer of edge type t is op LINEAR + t, and the ops of the readout follow."""
ZERO, SUMMANDS = 0, 4
"""The input slot of a state of zeros, and the number of states that are added in one call."""


@dataclass(frozen=True, eq=False)
class TypedGraph:
    """A graph with directed, typed edges. Every vertex is the target of at least one edge."""

    kinds: np.ndarray = field(repr=False)
    """The kind of each vertex, (V,)."""
    edges: np.ndarray = field(repr=False)
    """The source, type and target of each edge, (E, 3)."""
    answer: int | float = 0
    """The vertex or the number to predict."""

    @cached_property
    def targets(self) -> list[dict[int, list[int]]]:
        """By vertex and type, the targets of its outgoing edges."""
        targets: list[dict[int, list[int]]] = [{} for _ in self.kinds]
        for source, kind, target in self.edges.tolist():
            targets[source].setdefault(kind, []).append(target)
        return targets

    @cached_property
    def in_degrees(self) -> list[int]:
        """The number of incoming edges of each vertex."""
        return np.bincount(self.edges[:, 2], minlength=len(self.kinds)).tolist()


class At(NamedTuple):
    """The state of a message: a graph, one of its vertices, the step, and the type of an edge."""

    graph: TypedGraph
    vertex: int = 0
    step: int = 0
    type: int = 0


class Sum(nn.Module):
    """The sum of the states of each row."""

    def forward(self, x_GNH: Tensor) -> Tensor:
        """Return the sums, (G, H)."""
        return x_GNH.sum(1)


Readout = Callable[[int], Mapping[str, Node]]
"""The number of the first op after the layers of the types -> the nodes that read out, first of which is "readout"."""


@cache
def message_graph(types: int, steps: int, readout: Readout) -> MessageGraph:
    """Return the network of messages (AMPNet, section 4)."""
    return MessageGraph(
        vertices=Ungroup("embedding", lambda at: [At(at.graph, vertex) for vertex in range(len(at.graph.kinds))]),
        embedding=Apply("is_last", EMBEDDING),
        is_last=Cond(lambda at: at.step == steps, {True: "readout", False: "bcast"}),
        bcast=Bcast(("types", "update.1")),
        types=Flatmap("type", lambda at: [at._replace(type=each) for each in at.graph.targets[at.vertex]]),
        type=Cond(lambda at: at.type, {n: f"linear{n}" for n in range(types)}),
        **{f"linear{n}": Apply("targets", LINEAR + n) for n in range(types)},
        targets=Flatmap(
            "group", lambda at: [At(at.graph, each, at.step) for each in at.graph.targets[at.vertex][at.type]]
        ),
        group=Group("sum", size=lambda at: at.graph.in_degrees[at.vertex]),
        sum=Reduce("update.0", SUM, SUMMANDS, ZERO),
        update=Concat("cell"),
        cell=Apply("next", CELL, reads=2),
        next=Isu("is_last", lambda at: at._replace(step=at.step + 1)),
        **readout(LINEAR + types),
    )


class GatedGraphNetwork(nn.Module):
    """The embedding and the steps of a network; subclasses read out.

    Args:
        kinds: the number of kinds of vertices.
        types: the number of types of edges.
        steps: the number of propagation steps.
        modules: the modules of the ops that read out; the last one makes the roots.
        readout: the nodes of messages that read out.
    """

    def __init__(self, kinds: int, types: int, width: int, steps: int, modules: Sequence[nn.Module], readout: Readout):
        super().__init__()
        self.types, self.steps, self.readout = types, steps, readout
        linear = (nn.Linear(width, width) for _ in range(types))
        self.ops = nn.ModuleList([nn.Embedding(kinds, width), nn.GRUCell(width, width), Sum(), *linear, *modules])

    def placement(self, workers: int) -> OpPlacement:
        """Return a placement on workers of the CPU, with the most expensive ops on workers of their own.

        Sums are on the worker of the cell that reads them.
        """
        weights = {op: sum(map(torch.numel, module.parameters())) for op, module in enumerate(self.ops)}
        steps = {op: self.steps if CELL <= op < LINEAR + self.types else 1 for op in weights}
        costs = {op: steps[op] * weights[op] for op in weights} | {EMBEDDING: 0}
        balanced = balanced_placement(costs, workers, EMBEDDING, len(self.ops) - 1)
        return replace(balanced, ops={**balanced.ops, SUM: balanced.ops[CELL]})

    def plan(self, graphs: Sequence[TypedGraph], placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch. Slot 0 is a state of zeros, and the vertices of all graphs follow."""
        ends = 1 + np.cumsum([len(each.kinds) for each in graphs])
        instances = [
            [("vertices", range(end - len(each.kinds), end), At(each))]
            for each, end in zip(graphs, ends.tolist(), strict=True)
        ]
        columns = np.array([STATES] + [KINDS] * (ends[-1] - 1))
        return message_graph(self.types, self.steps, self.readout).plan(instances, columns, placement)

    def inputs(self, graphs: Sequence[TypedGraph]) -> dict[int, Tensor]:
        """Return the inputs of a plan of the same graphs."""
        zeros = self.ops[EMBEDDING].weight.new_zeros(1, self.ops[EMBEDDING].embedding_dim)
        return {STATES: zeros, KINDS: torch.from_numpy(np.concatenate([each.kinds for each in graphs]))}

    def forward(self, graphs: Sequence[TypedGraph]) -> Tensor:
        """Return what is read out, (R, 1)."""
        return execute(self.plan(graphs), dict(enumerate(self.ops)), self.inputs(graphs))[0]

    def states(self, graph: TypedGraph) -> Tensor:
        """Return the last states of one graph's vertices, (V, H), edge by edge: the slow reference in plain PyTorch."""
        h_VH = self.ops[EMBEDDING](torch.from_numpy(graph.kinds))
        for _ in range(self.steps):
            received = [torch.zeros_like(h_VH[0]) for _ in graph.kinds]
            for source, kind, target in graph.edges.tolist():
                received[target] = received[target] + self.ops[LINEAR + kind](h_VH[source])
            h_VH = self.ops[CELL](torch.stack(received), h_VH)
        return h_VH
