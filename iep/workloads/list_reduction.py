"""List reduction: sequences whose first token names a reduction of the digits that follow; the answer is a digit.

This is the first experiment of Gaunt et al. 2017 (AMPNet, section 6) on generated data. A recurrent network with ReLU
reads the tokens, and a linear layer classifies its last state. Layers of the network can be stacked. Every operation
with weights is an op, so that it can have a worker of its own.

Shapes: B sequences, T tokens of a sequence, M tokens of a minibatch, H width, N nodes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from iep.batching.execute import execute
from iep.batching.placement import OpPlacement
from iep.batching.plan import Plan
from iep.dynamic.messages import Apply, Bcast, Concat, Cond, Isu, MessageGraph, Result, Ungroup

REDUCTIONS = (np.sum, np.min, np.max, lambda digits: np.floor(digits.mean() + 0.5))
"""The sum, the minimum, the maximum and the rounded mean; answers are modulo 10."""
DIGITS, MAX_DIGITS = 10, 9
TOKENS = DIGITS + len(REDUCTIONS)
STATES, WORDS, SCORES = range(3)
"""The columns: states (H,), tokens (), and scores (10,)."""
EMBEDDING, HEAD, CELL = range(3)
"""The ops; layer n of the recurrent network is op CELL + n."""


@dataclass(frozen=True, eq=False)
class Reduction:
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
    """The state of a message: the token, counted from 0, of a sequence of this length."""

    token: int
    length: int


@cache
def message_graph(layers: int) -> MessageGraph:
    """Return the network of messages, in which each layer is a loop over the tokens (AMPNet, section 4)."""
    nodes = {
        "tokens": Ungroup("embedding", lambda at: [at._replace(token=token) for token in range(at.length)]),
        "embedding": Apply("input0.0", EMBEDDING),
        "head": Apply("scores", HEAD, makes=(SCORES,)),
        "scores": Result(),
    }
    for layer in range(layers):
        above, last = ([], "head") if layer == layers - 1 else ([f"input{layer + 1}.0"], None)
        nodes |= {
            f"input{layer}": Concat(f"cell{layer}"),
            f"cell{layer}": Apply(f"output{layer}", CELL + layer, reads=2),
            f"output{layer}": Bcast((f"next{layer}", *above)),
            f"next{layer}": Isu(f"more{layer}", lambda at: at._replace(token=at.token + 1)),
            f"more{layer}": Cond(lambda at: at.token < at.length, {True: f"input{layer}.1", False: last}),
        }
    return MessageGraph(**nodes)


class ListReducer(nn.Module):
    """An embedding of tokens, `layers` recurrent layers, and a linear layer on the last state."""

    def __init__(self, width: int = 128, layers: int = 1):
        super().__init__()
        self.width, self.layers = width, layers
        ops = [nn.Embedding(TOKENS, width), nn.Linear(width, DIGITS), *(Cell(width) for _ in range(layers))]
        self.ops = nn.ModuleList(ops)

    def placement(self, workers: int) -> OpPlacement:
        """Return a placement on workers of the CPU: the layers in turn, and the two other ops beside or after them."""
        cells = {CELL + layer: layer % workers for layer in range(self.layers)}
        first, last = min(self.layers, workers - 1), min(self.layers + 1, workers - 1)
        return OpPlacement((torch.device("cpu"),) * workers, {EMBEDDING: first, HEAD: last, **cells}, first, last)

    def plan(self, sequences: Sequence[Reduction], placement: OpPlacement | None = None) -> Plan:
        """Return the plan of a minibatch. Slot 0 is the state before the first token, and the tokens follow."""
        instances, first = [], 1
        for sequence in sequences:
            start = Position(0, len(sequence.tokens))
            before = [(f"input{layer}.1", [0], start) for layer in range(self.layers)]
            instances.append([("tokens", range(first, first + start.length), start), *before])
            first += start.length
        return message_graph(self.layers).plan(instances, np.array([STATES] + [WORDS] * (first - 1)), placement)

    def inputs(self, sequences: Sequence[Reduction]) -> dict[int, Tensor]:
        """Return the inputs of a plan of the same sequences."""
        tokens_M = torch.from_numpy(np.concatenate([each.tokens for each in sequences]))
        return {STATES: self.ops[HEAD].weight.new_zeros(1, self.width), WORDS: tokens_M}

    def loss(self, sequences: Sequence[Reduction]) -> Callable[..., Tensor]:
        """Return the function that maps the scores of these sequences, (B, 10), to their mean cross-entropy."""
        return partial(cross_entropy, target=torch.tensor([each.answer for each in sequences]))

    @torch.no_grad()
    def score(self, sequences: Sequence[Reduction]) -> float:
        """Return the accuracy."""
        answers = torch.tensor([each.answer for each in sequences])
        return (self(sequences).argmax(dim=1) == answers).double().mean().item()

    def forward(self, sequences: Sequence[Reduction]) -> Tensor:
        """Return the scores of the answers, (B, 10)."""
        return execute(self.plan(sequences), dict(enumerate(self.ops)), self.inputs(sequences))[0]

    def one(self, sequence: Reduction) -> Tensor:
        """Return the scores of one sequence, (10,), token by token: the slow reference in plain PyTorch."""
        embedding, head, *cells = self.ops
        h = [head.weight.new_zeros(1, self.width)] * self.layers
        for token in torch.from_numpy(sequence.tokens):
            x = embedding(token[None])
            for layer, cell in enumerate(cells):
                x = h[layer] = cell(x, h[layer])
        return head(h[-1])[0]
