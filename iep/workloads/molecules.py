"""Molecules like those of QM9 (Ramakrishnan et al. 2014), generated, with a number that follows from their bonds.

The experiment is that of Gaunt et al. 2017 (AMPNet, section 6), which predicts the norm of the dipole moment from the
graph of atoms and bonds. Here, the number is the *polarity*, the sum of the magnitudes of the bonds' dipoles. Partial
charges are those of an iteration in the manner of Gasteiger and Marsili 1980 (Iterative partial equalization of orbital
electronegativity), so that each depends on the atoms within four bonds. It is no property of real molecules.

Shapes: B molecules, V atoms of one, N of all, E bonds.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from iep.dynamic.messages import Apply, Group, Node, Reduce, Result
from iep.workloads.gated_graphs import SCORES, SUM, SUMMANDS, ZERO, GatedGraphNetwork, TypedGraph

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


class PolarityRegressor(GatedGraphNetwork):
    """A gated graph network with a gated readout, which is added up over the atoms, and a linear layer on the sum."""

    def __init__(self, width: int = 100, steps: int = 4):
        modules = [GatedReadout(width), nn.Linear(width, 1)]
        super().__init__(len(VALENCES), len(ORDERS), width, steps, modules, _readout)

    def loss(self, graphs: Sequence[TypedGraph]) -> Callable[..., Tensor]:
        """Return the function of the outputs for these molecules, (B, 1), that returns the mean squared error.

        Outputs are polarities less `MEAN` over `DEVIATION`.
        """
        return partial(mse_loss, target=self._targets(graphs))

    @torch.no_grad()
    def score(self, graphs: Sequence[TypedGraph]) -> float:
        """Return the mean absolute error relative to the standard deviation `DEVIATION`; lower is better."""
        return (self(graphs) - self._targets(graphs)).abs().mean().item()

    def one(self, graph: TypedGraph) -> Tensor:
        """Return the output for one molecule, (1,): the slow reference in plain PyTorch."""
        *_, readout, head = self.ops
        return head(readout(self.states(graph)).sum(0))

    def _targets(self, graphs: Sequence[TypedGraph]) -> Tensor:
        answers = self.ops[-1].weight.new_tensor([each.answer for each in graphs])
        return (answers[:, None] - MEAN) / DEVIATION


def _readout(op: int) -> dict[str, Node]:
    return {
        "readout": Apply("atoms", op),
        "atoms": Group("sum_of_atoms", size=lambda at: len(at.graph.kinds), key=lambda at: at._replace(vertex=0)),
        "sum_of_atoms": Reduce("head", SUM, SUMMANDS, ZERO),
        "head": Apply("polarity", op + 1, makes=(SCORES,)),
        "polarity": Result(),
    }
