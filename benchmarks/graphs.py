"""Gated graph networks of messages for asynchronous training: deduction, and a property of molecules.

In every step of a gated graph network (Li et al. 2016), each vertex sends its state through a linear layer of its
edges' type, adds up what it receives, and updates its state by a GRU cell. The layer of every type, the cell, the
embedding and the readout are ops. Both experiments are those of Gaunt et al. 2017 (AMPNet, section 6) on made-up data.

Deduction is task 15 of bAbI (Weston et al. 2015): "Mice are afraid of wolves. Gertrude is a mouse. What is Gertrude
afraid of?" The answer is a vertex two edges away from the animal that the question names.

Molecules are like those of QM9 (Ramakrishnan et al. 2014). The number to predict is not their dipole moment but their
*polarity*, the sum of the magnitudes of the bonds' dipoles. Partial charges are those of an iteration in the manner of
Gasteiger and Marsili 1980, so that each depends on the atoms within four bonds. It is no property of real molecules.

Shapes: B graphs, V vertices of one, E edges or bonds, G rows of a call, H width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.message_networks import INPUTS, SCORES, STATES, MessageNetwork
from benchmarks.messages import (
    Apply,
    Bcast,
    Concat,
    Cond,
    Flatmap,
    Group,
    Instance,
    Isu,
    MessageGraph,
    Node,
    Reduce,
    Result,
    Ungroup,
)
from iep.batching.placement import OpPlacement
from iep.batching.plan import Plan

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


Readout = tuple[tuple[str, Node], ...]
"""The names and nodes of messages that read out; the first one is "readout"."""


@cache
def gated_graph(types: int, steps: int, readout: Readout) -> MessageGraph:
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
        **dict(readout),
    )


class GatedGraphNetwork(MessageNetwork):
    """The embedding and the steps of a network; subclasses read out.

    Args:
        kinds: the number of kinds of vertices.
        types: the number of types of edges.
        modules: the modules of the ops that read out.
    """

    def __init__(self, kinds: int, types: int, width: int, steps: int, modules: Sequence[nn.Module], readout: Readout):
        linear = [nn.Linear(width, width) for _ in range(types)]
        ops = [nn.Embedding(kinds, width), nn.GRUCell(width, width), Sum(), *linear, *modules]
        often = range(CELL, LINEAR + types)
        weights = [sum(map(torch.numel, module.parameters())) for module in ops]
        costs = {op: weights[op] * (steps if op in often else 1) for op in range(len(ops))} | {EMBEDDING: 0}
        super().__init__(gated_graph(types, steps, readout), ops, costs)
        self.steps = steps

    def placement(self, workers: int) -> OpPlacement:
        """Return the balanced placement, with sums on the worker of the cell that reads them."""
        balanced = super().placement(workers)
        return replace(balanced, ops={**balanced.ops, SUM: balanced.ops[CELL]})

    def instances(self, samples: Sequence[TypedGraph]) -> tuple[list[Instance], np.ndarray]:
        """Return the instances. Slot 0 is a state of zeros, and the vertices of all graphs follow."""
        ends = 1 + np.cumsum([len(each.kinds) for each in samples])
        spans = zip(ends.tolist(), samples, strict=True)
        instances = [[("vertices", range(end - len(each.kinds), end), At(each))] for end, each in spans]
        return instances, np.array([STATES] + [INPUTS] * (ends[-1] - 1))

    def inputs(self, samples: Sequence[TypedGraph]) -> dict[int, Tensor]:
        """Return a state of zeros and the kinds of all vertices."""
        zeros = self.ops[EMBEDDING].weight.new_zeros(1, self.ops[EMBEDDING].embedding_dim)
        return {STATES: zeros, INPUTS: torch.from_numpy(np.concatenate([each.kinds for each in samples]))}


IS, IS_REVERSED, AFRAID, AFRAID_REVERSED = range(4)
"""The types of edges of deduction. There is an edge in both directions for each fact."""
VERTICES = 54
"""The number of vertices of the inflated graphs of Gaunt et al. 2017, half of them animals, the others species."""


def deductions(number: int, rng: np.random.Generator, vertices: int = VERTICES) -> list[TypedGraph]:
    """Return random questions; the animal that a question names is a vertex of kind 1, and others are of kind 0."""
    species = np.arange((vertices + 1) // 2)
    animals = np.arange(len(species), vertices)

    def one() -> TypedGraph:
        kind_of = rng.integers(len(species), size=len(animals))
        feared = (species + rng.integers(1, len(species), size=len(species))) % len(species)
        facts = [(animals, IS, kind_of), (kind_of, IS_REVERSED, animals)]
        facts += [(species, AFRAID, feared), (feared, AFRAID_REVERSED, species)]
        edges = [np.column_stack([source, np.full_like(source, kind), target]) for source, kind, target in facts]
        named = rng.integers(len(animals))
        kinds = (np.arange(vertices) == animals[named]).astype(np.int64)
        return TypedGraph(kinds, np.concatenate(edges), int(feared[kind_of[named]]))

    return [one() for _ in range(number)]


VERTEX_SCORES = (
    ("readout", Apply("scores", LINEAR + 4, makes=(SCORES,))),
    ("scores", Result(order=lambda at: at.vertex)),
)


class Deducer(GatedGraphNetwork):
    """A gated graph network that scores every vertex as the answer; all graphs have the same number of vertices."""

    def __init__(self, width: int = 5, steps: int = 2):
        super().__init__(2, 4, width, steps, [nn.Linear(width, 1)], VERTEX_SCORES)

    def targets(self, samples: Sequence[TypedGraph]) -> Tensor:
        """Return the answers, (B,)."""
        return torch.tensor([each.answer for each in samples])


H, C, N, O, F = range(5)  # noqa: E741
"""The elements, which are the kinds of vertices."""
SINGLE, DOUBLE, TRIPLE, AROMATIC = range(4)
"""The types of bonds, which are those of edges; every bond has an edge in each direction."""
VALENCES, ELECTRONEGATIVITIES = (1, 4, 3, 2, 1), np.array([2.20, 2.55, 3.04, 3.44, 3.98])
"""By element; the electronegativities are Pauling's."""
ORDERS, LENGTHS = np.array([1, 2, 3, 1.5]), np.array([1.5, 1.3, 1.2, 1.4])
"""By type of bond: its order, and its length in angstroms."""
HEAVY_ATOMS, ROUNDS = 9, 4
"""The greatest number of atoms other than hydrogen, and the rounds in which charge flows."""
MEAN, DEVIATION = 2.74, 0.86
"""The mean and the standard deviation of the polarity of 20,000 molecules."""


def molecules(number: int, rng: np.random.Generator) -> list[TypedGraph]:
    """Return random molecules of up to 29 atoms, 9 of them heavy, the smallest first."""
    return sorted((molecule(rng) for _ in range(number)), key=lambda each: len(each.kinds))


def molecule(rng: np.random.Generator) -> TypedGraph:
    """Return a random molecule: perhaps an aromatic ring, then atoms at random places, a ring, and hydrogens."""
    size = rng.choice(np.arange(5, HEAVY_ATOMS + 1), p=[0.03, 0.07, 0.1, 0.2, 0.6])
    atoms, bonds = [C], list[tuple[int, int, int]]()
    free = [VALENCES[C]]

    def add(element: int, parent: int, kind: int) -> None:
        order = int(ORDERS[kind])
        bonds.append((parent, len(atoms), kind))
        atoms.append(element)
        free.append(VALENCES[element] - order)
        free[parent] -= order

    if size >= 6 and rng.random() < 0.25:
        atoms = [C if rng.random() < 0.85 else N for _ in range(6)]
        bonds = [(n, (n + 1) % 6, AROMATIC) for n in range(6)]
        free = [VALENCES[each] - 3 for each in atoms]
    while len(atoms) < size and any(free):
        parent = int(rng.choice(np.flatnonzero(free)))
        element = int(rng.choice([C, N, O, F], p=[0.7, 0.13, 0.15, 0.02]))
        most = min(free[parent], VALENCES[element], 3)
        add(element, parent, min(int(rng.choice([SINGLE, DOUBLE, TRIPLE], p=[0.75, 0.18, 0.07])), most - 1))
    bonded = {frozenset(bond[:2]) for bond in bonds}
    open_pairs = [
        (u, v) for v in np.flatnonzero(free).tolist() for u in range(v) if free[u] and frozenset((u, v)) not in bonded
    ]
    if open_pairs and rng.random() < 0.5:
        u, v = open_pairs[rng.integers(len(open_pairs))]
        bonds.append((u, v, SINGLE))
        free[u], free[v] = free[u] - 1, free[v] - 1
    for parent, count in enumerate(free[:]):
        for _ in range(count):
            add(H, parent, SINGLE)
    kinds, bonds = np.array(atoms), np.array(bonds)
    edges = np.concatenate([bonds[:, [0, 2, 1]], bonds[:, [1, 2, 0]]])
    return TypedGraph(kinds, edges, polarity(kinds, bonds))


def polarity(kinds: np.ndarray, bonds: np.ndarray) -> float:
    """Return the sum over bonds of length times difference of charges, in elementary charges times angstroms.

    In round n, each bond moves 2^-n of the difference of its atoms' electronegativities, times 0.1 and its order, as
    charge. An atom's electronegativity rises with its charge.

    Args:
        kinds: the element of each atom, (V,).
        bonds: two atoms and a type of each bond, (E, 3).
    """
    first, second, kind = bonds.T
    charges = np.zeros(len(kinds))
    for step in range(1, ROUNDS + 1):
        pull = ELECTRONEGATIVITIES[kinds] + charges
        flow = 0.1 * 2.0**-step * ORDERS[kind] * (pull[second] - pull[first])
        np.add.at(charges, first, flow)
        np.add.at(charges, second, -flow)
    return float((LENGTHS[kind] * np.abs(charges[first] - charges[second])).sum())


class GatedReadout(nn.Module):
    """The part of each vertex in the state of its graph, sigmoid(W_i h) tanh(W_j h) (Li et al. 2016, equation 7)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, h_GH: Tensor) -> Tensor:
        """Return the parts, (G, H)."""
        gate, value = self.linear(h_GH).chunk(2, dim=1)
        return gate.sigmoid() * value.tanh()


SUM_OF_ATOMS = (
    ("readout", Apply("atoms", LINEAR + 4)),
    ("atoms", Group("sum_of_atoms", size=lambda at: len(at.graph.kinds), key=lambda at: at._replace(vertex=0))),
    ("sum_of_atoms", Reduce("head", SUM, SUMMANDS, ZERO)),
    ("head", Apply("polarity", LINEAR + 5, makes=(SCORES,))),
    ("polarity", Result()),
)


class PolarityRegressor(GatedGraphNetwork):
    """A gated graph network with a gated readout, which is added up over the atoms, and a linear layer on the sum.

    Outputs are polarities less `MEAN` over `DEVIATION`.
    """

    def __init__(self, width: int = 100, steps: int = 4):
        modules = [GatedReadout(width), nn.Linear(width, 1)]
        super().__init__(len(VALENCES), len(ORDERS), width, steps, modules, SUM_OF_ATOMS)

    def targets(self, samples: Sequence[TypedGraph]) -> Tensor:
        """Return what the outputs should be, (B, 1)."""
        return (self.ops[-1].weight.new_tensor([[each.answer] for each in samples]) - MEAN) / DEVIATION

    def loss(self, samples: Sequence[TypedGraph]) -> Callable[[Tensor], Tensor]:
        """Return the function that maps the outputs for these molecules to their mean squared error."""
        targets = self.targets(samples)
        return lambda outputs: mse_loss(outputs, targets)

    @torch.no_grad()
    def score(self, samples: Sequence[TypedGraph], plan: Plan) -> float:
        """Return the mean absolute error relative to the standard deviation `DEVIATION`; lower is better."""
        return (self(samples, plan) - self.targets(samples)).abs().mean().item()
