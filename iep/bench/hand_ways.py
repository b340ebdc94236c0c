"""The networks that are batched by hand, as ways to run a minibatch (`contest.py`)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.bench.contest import Way
from iep.bench.hand_tagger import PackedTagger, pack
from iep.bench.hand_trees import HandTreeFC, HandTreeLSTM
from iep.bench.tree_levels import levels_of

HAND = "by hand: levels"
PACKED = "by hand: packed nn.LSTM"


def step(
    model: nn.Module, forward: Callable[[Any], Tensor], loss: Callable[[Any, Tensor], Tensor]
) -> Callable[[Any, bool], Tensor]:
    """A step of `model` as `Way.compute` is asked for it: gradients are left in its parameters, none are kept."""

    def compute(plan: Any, training: bool) -> Tensor:
        if not training:
            with torch.inference_mode():
                return forward(plan)
        model.zero_grad(set_to_none=True)
        value = loss(plan, forward(plan))
        value.backward()
        return value.detach()

    return compute


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Summed over rows."""
    return functional.cross_entropy(scores, labels, reduction="sum")


def tree_lstm_by_hand(model: HandTreeLSTM) -> Way:
    compute = step(model, model, lambda levels, scores: summed_cross_entropy(scores, levels.labels))
    return Way(HAND, levels_of, compute, calls=lambda levels: len(levels.rows))


def tree_fc_by_hand(model: HandTreeFC) -> Way:
    compute = step(model, model, lambda levels, roots: roots.sum())
    return Way(HAND, levels_of, compute, calls=lambda levels: len(levels.arguments))


def tagger_by_hand(model: PackedTagger) -> Way:
    compute = step(model, model, lambda packed, scores: summed_cross_entropy(scores, packed.tags))
    return Way(PACKED, pack, compute)
