"""A layer of experts -> the ways to run it that a benchmark compares: its own three, and a plain loop over experts.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, D inputs, O outputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from iep.workloads.experts import Experts

BATCHED, GROUPED, LOOP, VANILLA = "batched", "grouped", "sort and loop", "vanilla"
NAMES = (BATCHED, GROUPED, LOOP, VANILLA)
ENOUGH_TOKENS = 1024
"""Of a minibatch, where one token runs after the other; the time of all is reckoned by their number."""


@dataclass(frozen=True)
class ExpertsWay:
    """One way to run a minibatch of tokens."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    """As `Experts.forward`: (T, D), (T, K), (T, K) -> (T, O)."""
    enough_tokens: int | None = None
    """No more tokens of a minibatch are run; None for all."""
    refusal: str | None = None
    """Why it cannot be run here."""


def ways_to_run(layer: Experts) -> tuple[ExpertsWay, ...]:
    """All of `NAMES`, in this order, on the same weights."""
    return (
        ExpertsWay(BATCHED, _executed(layer, "batched")),
        ExpertsWay(GROUPED, _executed(layer, "grouped"), refusal=layer.grouped_refusal()),
        ExpertsWay(LOOP, lambda *inputs: sort_and_loop(layer, *inputs)),
        ExpertsWay(VANILLA, _executed(layer, "vanilla"), enough_tokens=ENOUGH_TOKENS),
    )


def sort_and_loop(layer: Experts, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
    """(T, O) as one writes it in plain PyTorch: sort rows by expert, one call each, add what they make to its token."""
    k = experts_TK.shape[1]
    flat_R = experts_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    tokens_R = order_R // k
    active, counts = flat_R[order_R].unique_consecutive(return_counts=True)
    results = [
        (rows @ layer.hidden_weights[expert]).relu() @ layer.output_weights[expert]
        for expert, rows in zip(active.tolist(), x_TD[tokens_R].split(counts.tolist()), strict=True)
    ]
    result_RO = torch.cat(results) * gates_TK.flatten()[order_R, None]
    return result_RO.new_zeros(len(x_TD), result_RO.shape[1]).index_add(0, tokens_R, result_RO)


def uniform_experts(tokens: int, experts: int, k: int, seed: int) -> Tensor:
    """(T, K) int64: of `experts`, at least k, every token's k different ones, each choice as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    chosen_TK = torch.empty(tokens, 0, dtype=torch.int64)
    for already in range(k):
        drawn_T1 = torch.randint(experts - already, (tokens, 1), generator=generator)
        for earlier_T in chosen_TK.sort(dim=1).values.unbind(1):  # step over those that are taken, the least first
            drawn_T1 += drawn_T1 >= earlier_T[:, None]
        chosen_TK = torch.cat([chosen_TK, drawn_T1], dim=1)
    return chosen_TK


def _executed(layer: Experts, execution: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def forward(x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        layer.execution = execution
        return layer(x_TD, experts_TK, gates_TK)

    return forward
