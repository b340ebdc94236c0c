"""Compare ways to run a layer of experts: token by token, and batched (Suarez & Zhu 2017, figure 3).

All experts that a minibatch calls are known at once, so that batching them is the degenerate case of a topological sort
(Suarez & Zhu, section 3.2). Experts are drawn uniformly; there is no gating network.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, I inputs, H hidden, O outputs, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.bench.compare import Benchmark, Case, Competitor, seconds
from iep.errors import InputError
from iep.runtime.devices import resolve_device

ONE_BY_ONE, BATCHED = "token by token", "batched"
ENOUGH_TOKENS = 1024
"""The most tokens that are run one by one; the time is scaled to the number of tokens."""


class Experts(nn.Module):
    """A layer of E experts with one hidden layer each, relu(x W_hidden) W_output (Shazeer et al. 2017, without biases).

    Every way to run it maps (T, I) tokens, (T, K) experts and (T, K) gates to the gated sums of outputs, (T, O). The
    weights of one layer of all experts are one parameter.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int):
        super().__init__()
        self.hidden_weights = nn.Parameter(torch.empty(experts, inputs, hidden))
        self.output_weights = nn.Parameter(torch.empty(experts, hidden, outputs))
        for weights in self.parameters():  # the initialisation of PyTorch's linear layers
            nn.init.uniform_(weights, -(weights.shape[1] ** -0.5), weights.shape[1] ** -0.5)

    def forward(self, x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Sort the tokens by expert, run each layer as one grouped product, and add up the results of each token.

        Where PyTorch has no grouped product for rows of these sizes, each expert has a product of its own.
        """
        expert_R, order_R = experts_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(
            expert_R, torch.arange(len(self.hidden_weights), device=x_TI.device), right=True, out_int32=True
        )
        x_RI = x_TI.index_select(0, order_R // experts_TK.shape[1])
        hidden_RH = grouped_product(x_RI, self.hidden_weights, ends_E).relu()
        output_RO = grouped_product(hidden_RH, self.output_weights, ends_E)
        output_TKO = output_RO.index_select(0, order_R.argsort()).view(*experts_TK.shape, -1)
        return (output_TKO * gates_TK.unsqueeze(2)).sum(1)

    def one_by_one(self, x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Run one token after the other: the slow reference.

        The weights are divided into those of each expert once, since the backward pass of an index has the size of all.
        """
        hidden, output = self.hidden_weights.unbind(), self.output_weights.unbind()
        results = []
        for x_I, experts_K, gates_K in zip(x_TI, experts_TK.tolist(), gates_TK, strict=True):
            of_expert = [(x_I @ hidden[expert]).relu() @ output[expert] for expert in experts_K]
            results.append(sum(gate * result for gate, result in zip(gates_K, of_expert, strict=True)))
        return torch.stack(results)


def grouped_product(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Return the product of each row and the weight of its expert, (R, O); expert e has the rows before `ends_E[e]`.

    PyTorch's grouped product needs rows whose size is a multiple of 16 bytes.
    """
    if hasattr(functional, "grouped_mm") and all(width * x_RI.itemsize % 16 == 0 for width in weight_EIO.shape[1:]):
        return functional.grouped_mm(x_RI, weight_EIO, offs=ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = zip(x_RI.split(sizes), weight_EIO.unbind(), sizes, strict=True)
    return torch.cat([x_GI @ weight_IO for x_GI, weight_IO, size in parts if size])


def uniform_experts(tokens: int, experts: int, k: int, seed: int) -> Tensor:
    """Return k different experts for each token, (T, K) int64, drawn uniformly."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).topk(k).indices


def moe_case(layer: Experts, tokens: int, k: int, seed: int, phase: str) -> Case:
    """Return the comparison of all ways to run one minibatch through a layer.

    A round is a forward pass and, in training, a backward pass.
    """
    device, (experts, inputs, _) = layer.hidden_weights.device, layer.hidden_weights.shape
    outputs = layer.output_weights.shape[2]
    training, generator = phase == "train", torch.Generator().manual_seed(seed)
    experts_TK = uniform_experts(tokens, experts, k, seed).to(device)
    sizes = ((tokens, inputs), (tokens, k), (tokens, outputs))
    x_TI, gates_TK, gradient_TO = (torch.randn(size, generator=generator).to(device) for size in sizes)

    def competitor(name: str, forward: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Competitor:
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

    competitors = [competitor(ONE_BY_ONE, layer.one_by_one), competitor(BATCHED, layer)]
    setting = {"phase": phase, "experts": experts, "tokens": tokens, "active": experts_TK.unique().numel()}
    return Case(setting, tokens, competitors, ONE_BY_ONE)


def moe(
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
        InputError: there is no such device, or `k` exceeds a number of experts.
    """
    if k > min(experts):
        raise InputError(f"--k is {k}, expected at most {min(experts)}, the smallest of --experts")
    on = resolve_device(device)

    def cases() -> Iterator[Case]:
        for phase, number in product(phases, sorted(experts)):
            torch.manual_seed(seed)
            layer = Experts(*width, number).to(on)
            yield from (moe_case(layer, size, k, seed, phase) for size in sorted(tokens))

    sizes = "-".join(map(str, width))
    description = f"experts {sizes}, k {k}, drawn uniformly with seed {seed}, float32, without gating"
    return Benchmark(description, cases(), "token", on)
