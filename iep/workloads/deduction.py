"""Basic deduction: "Mice are afraid of wolves. Gertrude is a mouse. What is Gertrude afraid of?"

This is task 15 of bAbI (Weston et al. 2015) on generated data, as graphs with typed edges (Li et al. 2016, section
5.1), for the experiment of Gaunt et al. 2017 (AMPNet, section 6). Half of the vertices are animals, the others are
species. Each animal *is* of a species, and each species *is afraid of* another one. The answer is two edges away from
the animal that the question names.

Shapes: B graphs, V vertices of each.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.dynamic.messages import Apply, Node, Result
from iep.workloads.gated_graphs import SCORES, GatedGraphNetwork, TypedGraph

IS, IS_REVERSED, AFRAID, AFRAID_REVERSED = range(4)
"""The types of edges. There is an edge in both directions for each fact."""
VERTICES = 54
"""The number of vertices of the inflated graphs of Gaunt et al. 2017."""


def deductions(number: int, rng: np.random.Generator, vertices: int = VERTICES) -> list[TypedGraph]:
    """Return random questions; the animal that a question names is a vertex of kind 1, and others are of kind 0.

    Raises:
        ValueError: there are fewer than 3 vertices.
    """
    if vertices < 3:
        raise ValueError(f"{vertices} vertices, expected an animal and two species or more")
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


class Deducer(GatedGraphNetwork):
    """A gated graph network that scores every vertex as the answer; all graphs have the same number of vertices."""

    def __init__(self, width: int = 5, steps: int = 2):
        super().__init__(2, 4, width, steps, [nn.Linear(width, 1)], _readout)

    def loss(self, graphs: Sequence[TypedGraph]) -> Callable[..., Tensor]:
        """Return the function that maps the scores of these graphs' vertices, (B V, 1), to their mean cross-entropy."""
        return partial(_loss, torch.tensor([each.answer for each in graphs]))

    @torch.no_grad()
    def score(self, graphs: Sequence[TypedGraph]) -> float:
        """Return the accuracy."""
        answers = torch.tensor([each.answer for each in graphs])
        return (self(graphs).view(len(graphs), -1).argmax(dim=1) == answers).double().mean().item()

    def one(self, graph: TypedGraph) -> Tensor:
        """Return the scores of one graph, (V, 1): the slow reference in plain PyTorch."""
        return self.ops[-1](self.states(graph))


def _readout(op: int) -> dict[str, Node]:
    return {"readout": Apply("scores", op, makes=(SCORES,)), "scores": Result(order=lambda at: at.vertex)}


def _loss(answers_B: Tensor, scores: Tensor) -> Tensor:
    return cross_entropy(scores.view(len(answers_B), -1), answers_B)
