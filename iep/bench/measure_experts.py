"""Measure a layer of experts, token by token, batched and by hand: `iep-bench moe`.

Experts are drawn uniformly; there is no gating network. The limit is the longer of two times: the time to read the
weights of the experts that have a token (in training twice, for the outputs and for the inputs' gradients, besides
writing gradients of the same size), and the time of the operations of all products.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, E experts, I O sizes of a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from iep.bench.compare import Case, Competitor, arithmetic_limit, seconds
from iep.bench.tables import Benchmark
from iep.runtime.devices import resolve_device
from iep.workloads.experts import Experts

ONE_BY_ONE, BATCHED, HAND = "token by token", "batched", "by hand: sort and loop"
ENOUGH_TOKENS = 1024
"""The most tokens that are run one by one; the time is scaled to the number of tokens."""
Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T, I) tokens, (T, K) experts, (T, K) gates -> (T, O) results."""


def uniform_experts(tokens: int, experts: int, k: int, seed: int) -> Tensor:
    """Return k different experts for each token, (T, K) int64, drawn uniformly."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(k).indices


def forwards(layer: Experts) -> dict[str, Forward]:
    """Return all ways to run the layer, by name; they share its weights."""

    def by_hand(x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Sort rows by expert, loop over the experts that have rows, and add up the results of each token."""
        expert_R, order_R = experts_TK.flatten().sort(stable=True)
        tokens_R = order_R // experts_TK.shape[1]
        hidden, output = layer.hidden_weights.unbind(), layer.output_weights.unbind()
        active, counts = expert_R.unique_consecutive(return_counts=True)
        pieces = zip(active.tolist(), x_TI[tokens_R].split(counts.tolist()), strict=True)
        results_RO = torch.cat([(rows @ hidden[expert]).relu() @ output[expert] for expert, rows in pieces])
        results_RO = results_RO * gates_TK.flatten()[order_R, None]
        return results_RO.new_zeros(len(x_TI), results_RO.shape[1]).index_add(0, tokens_R, results_RO)

    return {ONE_BY_ONE: layer.one_by_one, BATCHED: layer, HAND: by_hand}


def moe_case(layer: Experts, tokens: int, k: int, seed: int, phase: str) -> Case:
    """Return the comparison of all ways to run one minibatch through a layer."""
    device, (experts, inputs, hidden) = layer.hidden_weights.device, layer.hidden_weights.shape
    outputs = layer.output_weights.shape[2]
    training, generator = phase == "train", torch.Generator().manual_seed(seed)
    experts_TK = uniform_experts(tokens, experts, k, seed).to(device)
    sizes = ((tokens, inputs), (tokens, k), (tokens, outputs))
    x_TI, gates_TK, gradient_TO = (torch.randn(size, generator=generator).to(device) for size in sizes)

    def competitor(name: str, forward: Forward) -> Competitor:
        """Return one way to run the layer; a round is a forward pass and, in training, a backward pass."""
        count = min(tokens, ENOUGH_TOKENS) if name == ONE_BY_ONE else tokens
        x, gates = (each[:count].clone().requires_grad_(training) for each in (x_TI, gates_TK))

        def run() -> None:
            with torch.inference_mode(not training):
                results_TO = forward(x, experts_TK[:count], gates)
            if training:
                results_TO.backward(gradient_TO[:count])

        def measure() -> dict[str, float]:
            layer.zero_grad(set_to_none=True)
            x.grad = gates.grad = None
            return {"computation": tokens / count * seconds(run, device)}

        return Competitor(name, measure)

    active, numbers = experts_TK.unique().numel(), hidden * (inputs + outputs) * (3 if training else 1)
    limit = arithmetic_limit(2 * tokens * k * numbers, 4 * active * numbers, device)
    competitors = [*(competitor(name, forward) for name, forward in forwards(layer).items()), limit]
    setting = {"phase": phase, "experts": experts, "tokens": tokens}
    return Case(setting, tokens, competitors, ONE_BY_ONE, {"active": active})


def moe_benchmark(
    experts: Sequence[int],
    tokens: Sequence[int],
    k: int,
    width: tuple[int, int, int],
    phases: Sequence[str],
    device: str,
    seed: int,
) -> Benchmark:
    """Return the comparisons of every number of experts with every number of tokens.

    Raises:
        InputError: there is no such device.
    """
    on = resolve_device(device)

    def cases() -> Iterator[Case]:
        for phase, number in product(phases, sorted(experts)):
            torch.manual_seed(seed)
            layer = Experts(*width, number).to(on)
            yield from (moe_case(layer, size, k, seed, phase) for size in sorted(tokens))

    sizes = "-".join(map(str, width))
    description = f"experts {sizes}, k {k}, drawn uniformly with seed {seed}, float32, without gating"
    return Benchmark(description, cases(), "tokens", "token", on)
