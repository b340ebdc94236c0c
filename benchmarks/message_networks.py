"""Networks of messages for asynchronous training: the reduction of lists, and the sentiment of every phrase.

They are experiments of Gaunt et al. 2017 (AMPNet, section 6) on generated data. Every operation with weights is an op,
so that it can have a worker and an optimiser of its own; `graphs.py` has two more of them.

Shapes: B samples, N outputs of all samples, T tokens of a sequence, V vertices of a tree, G rows of a call, H width,
C classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.messages import (
    Apply,
    Bcast,
    Concat,
    Cond,
    Group,
    Instance,
    Isu,
    MessageGraph,
    Result,
    Split,
    Ungroup,
)
from benchmarks.trees import SENTIMENTS, Tree, lstm_state, sst_like
from iep.batching.execute import execute
from iep.batching.placement import OpPlacement, longest_first
from iep.batching.plan import Plan, Read

STATES, INPUTS, SCORES = range(3)
"""The columns: states (H,), tokens, words or kinds (), and scores."""


class MessageNetwork(nn.Module):
    """A network of messages, whose modules are `ops`.

    Subclasses have three methods: `instances`, from samples to their first messages and the column of each input;
    `inputs`, the values of these; and `targets`, what the outputs should be.

    Args:
        costs: the relative work of each op.
    """

    def __init__(self, messages: MessageGraph, ops: Sequence[nn.Module], costs: Mapping[int, float]):
        super().__init__()
        self.messages, self.ops, self.costs = messages, nn.ModuleList(ops), costs

    def placement(self, workers: int) -> OpPlacement:
        """Return a placement on workers of the CPU, with the most expensive ops on workers of their own."""
        ops = longest_first(self.costs, workers)
        return OpPlacement((torch.device("cpu"),) * workers, ops, ops[0], ops[len(self.ops) - 1])

    def plan(self, samples: Sequence[Any], placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch."""
        return self.messages.plan(*self.instances(samples), placement)

    def forward(self, samples: Sequence[Any], plan: Plan | None = None) -> Tensor:
        """Return the outputs, (N, C), under a plan of the samples."""
        return execute(plan or self.plan(samples), dict(enumerate(self.ops)), self.inputs(samples))[0]

    def loss(self, samples: Sequence[Any]) -> Callable[[Tensor], Tensor]:
        """Return the function that maps the outputs for these samples to their mean cross-entropy."""
        targets = self.targets(samples)
        return lambda outputs: cross_entropy(outputs.view(len(targets), -1), targets)

    def planned(self, samples: Sequence[Any]) -> tuple[Sequence[Any], Plan]:
        """Return samples with their plan, as `score` reads them."""
        return samples, self.plan(samples)

    @torch.no_grad()
    def score(self, samples: Sequence[Any], plan: Plan) -> float:
        """Return the accuracy."""
        targets = self.targets(samples)
        return (self(samples, plan).view(len(targets), -1).argmax(dim=1) == targets).double().mean().item()


REDUCTIONS = (np.sum, np.min, np.max, lambda digits: np.floor(digits.mean() + 0.5))
"""The sum, the minimum, the maximum and the rounded mean; answers are modulo 10."""
DIGITS, MAX_DIGITS = 10, 9


class Reduction(NamedTuple):
    """A sequence and its answer."""

    tokens: np.ndarray
    """(T,) the reduction, DIGITS or greater, and one digit or more."""
    answer: int


def list_reductions(number: int, rng: np.random.Generator) -> list[Reduction]:
    """Return random sequences of 1 to `MAX_DIGITS` digits, the shortest first."""

    def one() -> Reduction:
        kind, digits = rng.integers(len(REDUCTIONS)), rng.integers(DIGITS, size=rng.integers(1, MAX_DIGITS + 1))
        return Reduction(np.array([DIGITS + kind, *digits]), int(REDUCTIONS[kind](digits)) % DIGITS)

    return sorted((one() for _ in range(number)), key=lambda each: len(each.tokens))


class Cell(nn.Module):
    """A layer of a recurrent network: h = ReLU(W [x, h] + b)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(2 * width, width)

    def forward(self, x_GH: Tensor, h_GH: Tensor) -> Tensor:
        """Return the next states, (G, H)."""
        return self.linear(torch.cat([x_GH, h_GH], dim=1)).relu()


class Position(NamedTuple):
    """The state of a message: a token of a sequence of this length."""

    token: int
    length: int


Samples = Callable[[int, np.random.Generator], list]
"""A number and a generator of random numbers -> that many samples."""


class Experiment(NamedTuple):
    """Samples, and a network with the attribute and methods of `MessageNetwork`."""

    samples: Samples
    network: Callable[..., nn.Module]
    unseen: Samples | None = None
    """Makes the samples for the score; None for `samples`."""
    score: str = "accuracy"
    """The name of the score; lower is better for an `error`."""


class ListReducer(MessageNetwork):
    """An embedding of tokens, `layers` recurrent layers, each of which is a loop, and a linear layer on the last state.

    Op 0 is the embedding, op 1 the linear layer, and op 2 + n layer n.
    """

    def __init__(self, width: int = 128, layers: int = 1):
        ops = [nn.Embedding(DIGITS + len(REDUCTIONS), width), nn.Linear(width, DIGITS)]
        super().__init__(recurrent(layers), [*ops, *(Cell(width) for _ in range(layers))], {})
        self.layers = layers

    def placement(self, workers: int) -> OpPlacement:
        """Return a placement on workers of the CPU: the layers in turn, and the two other ops beside or after them."""
        first, last = min(self.layers, workers - 1), min(self.layers + 1, workers - 1)
        ops = {0: first, 1: last, **{2 + layer: layer % workers for layer in range(self.layers)}}
        return OpPlacement((torch.device("cpu"),) * workers, ops, first, last)

    def instances(self, samples: Sequence[Reduction]) -> tuple[list[Instance], np.ndarray]:
        """Return the instances. Slot 0 is the state before the first token, and the tokens follow."""
        instances, first = [], 1
        for sample in samples:
            start = Position(0, len(sample.tokens))
            before = [(f"input{layer}.1", [0], start) for layer in range(self.layers)]
            instances.append([("tokens", range(first, first + start.length), start), *before])
            first += start.length
        return instances, np.array([STATES] + [INPUTS] * (first - 1))

    def inputs(self, samples: Sequence[Reduction]) -> dict[int, Tensor]:
        """Return a state of zeros and the tokens."""
        zeros = self.ops[1].weight.new_zeros(1, self.ops[1].in_features)
        return {STATES: zeros, INPUTS: torch.from_numpy(np.concatenate([each.tokens for each in samples]))}

    def targets(self, samples: Sequence[Reduction]) -> Tensor:
        """Return the answers, (B,)."""
        return torch.tensor([each.answer for each in samples])


@cache
def recurrent(layers: int) -> MessageGraph:
    """Return the network of messages, in which each layer is a loop over the tokens (AMPNet, section 4)."""
    nodes = {
        "tokens": Ungroup("embedding", lambda at: [at._replace(token=token) for token in range(at.length)]),
        "embedding": Apply("input0.0", 0),
        "head": Apply("scores", 1, makes=(SCORES,)),
        "scores": Result(),
    }
    for layer in range(layers):
        above, last = ([], "head") if layer == layers - 1 else ([f"input{layer + 1}.0"], None)
        nodes |= {
            f"input{layer}": Concat(f"cell{layer}"),
            f"cell{layer}": Apply(f"output{layer}", 2 + layer, reads=2),
            f"output{layer}": Bcast((f"next{layer}", *above)),
            f"next{layer}": Isu(f"more{layer}", lambda at: at._replace(token=at.token + 1)),
            f"more{layer}": Cond(lambda at: at.token < at.length, {True: f"input{layer}.1", False: last}),
        }
    return MessageGraph(**nodes)


VALUES = (0, 1, -1, None, 2, -2)
"""The value of word n, at position n modulo 6; None negates."""
WORDS = 600
"""The number of words, whose frequencies follow Zipf's law; some unseen sentences have words that no seen one has."""


def sentiment_trees(number: int, rng: np.random.Generator) -> list[Tree]:
    """Return random binary trees with a label at every vertex, the smallest first."""
    return sorted((replace(each, labels=labels_of(each)) for each in sst_like(number, WORDS, rng)), key=len)


def labels_of(tree: Tree) -> np.ndarray:
    """Return the label of each vertex, (V,), which is its value plus 2.

    The value of a phrase is the sum of its parts' values, limited to -2 to 2, or if a part is a word that negates, the
    negative value of the other part.
    """
    values: list[int | None] = []
    for word, (left, right) in zip(tree.words.tolist(), tree.children.tolist(), strict=True):
        if left < 0:
            values.append(VALUES[word % len(VALUES)])
        elif values[left] is None or values[right] is None:
            values.append(-(values[right if values[left] is None else left] or 0))
        else:
            values.append(max(-2, min(2, values[left] + values[right])))
    return np.array([2 + (value or 0) for value in values])


class Leaf(nn.Module):
    """The cell of leaves."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, 3 * width)

    def forward(self, x_GH: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c, (G, H) each."""
        return lstm_state(self.linear(x_GH))


class Inner(nn.Module):
    """The cell of inner vertices, which have weights of their own."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(2 * width, 5 * width)

    def forward(self, h_G2H: Tensor, c_G2H: Tensor) -> tuple[Tensor, Tensor]:
        """Return h and c, (G, H) each."""
        return lstm_state(self.linear(h_G2H.flatten(1)), c_G2H)


class At(NamedTuple):
    """The state of a message: a vertex of a tree."""

    tree: Tree
    vertex: int


LEAF, INNER, HEAD = 1, 2, 3
"""The ops of `LEAVES_TO_ROOT`, besides 0 for the embedding."""
LEAVES_TO_ROOT = MessageGraph(
    words=Ungroup("embedding", lambda at: [At(at.tree, leaf) for leaf in np.flatnonzero(at.tree.words >= 0).tolist()]),
    embedding=Apply("leaf", 0),
    leaf=Apply("state", LEAF, makes=(STATES, STATES)),
    state=Bcast(("h", "has_parent")),
    h=Split(("head", None)),
    head=Apply("scores", HEAD, makes=(SCORES,)),
    scores=Result(order=lambda at: at.vertex),
    has_parent=Cond(lambda at: at.vertex < len(at.tree) - 1, {True: "children", False: None}),
    children=Group(
        "inner",
        size=lambda at: 2,
        key=lambda at: At(at.tree, at.tree.places[at.vertex][0]),
        order=lambda at: at.tree.places[at.vertex][1],
    ),
    inner=Apply("state", INNER, (Read(0, 2), Read(2, 2)), (STATES, STATES)),
)
"""The network of messages of a Tree-LSTM, a loop from the leaves to the root (AMPNet, section 4)."""


class SentimentTreeLSTM(MessageNetwork):
    """A Tree-LSTM with words at the leaves and a linear classifier of every vertex (Tai et al. 2015)."""

    def __init__(self, width: int = 128):
        ops = [nn.Embedding(WORDS, width), Leaf(width), Inner(width), nn.Linear(width, SENTIMENTS)]
        super().__init__(LEAVES_TO_ROOT, ops, {0: 0, LEAF: 3, INNER: 10, HEAD: 1})

    def instances(self, samples: Sequence[Tree]) -> tuple[list[Instance], np.ndarray]:
        """Return the instances, whose inputs are the words of the trees' leaves."""
        ends = np.cumsum([each.num_leaves for each in samples]).tolist()
        spans = zip([0, *ends[:-1]], ends, samples, strict=True)
        return [[("words", range(*span), At(tree, 0))] for *span, tree in spans], np.full(ends[-1], INPUTS)

    def inputs(self, samples: Sequence[Tree]) -> dict[int, Tensor]:
        """Return the words."""
        return {INPUTS: torch.from_numpy(np.concatenate([each.words[each.words >= 0] for each in samples]))}

    def targets(self, samples: Sequence[Tree]) -> Tensor:
        """Return the labels of all vertices, (N,), by trees."""
        return torch.from_numpy(np.concatenate([each.labels for each in samples]))
