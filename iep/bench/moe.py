"""What `iep-bench moe` compares: a layer of experts token by token, in its own executions, and by hand.

Experts are drawn uniformly; gating, which would choose them, is not run. The limit is the longer of two times: to read
the weights of the experts that have a token (in training twice, for the outputs and for the inputs' gradients, besides
writing gradients of the same size), and to do the operations of all products. Both speeds are the fastest seen.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, E experts, I O sizes of a layer.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional

from iep.bench.compare import Case, Competitor, arithmetic_limit, seconds
from iep.bench.report import Benchmark
from iep.devices import resolve_device
from iep.workloads.experts import Experts

ONE_BY_ONE, LOOP, GROUPED_MM = "token by token", "by hand: sort and loop", "by hand: grouped_mm"
EXECUTIONS = ("auto", "loop", "grouped")
ENOUGH_TOKENS = 1024
"""Where one token runs after the other no more are run; the time is scaled by their number."""
ROUND_SECONDS, ROUND_STEPS = 0.02, 200
"""Short steps are repeated within a round, for so long or so often."""

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(T, I) tokens, (T, K) experts, (T, K) gates -> (T, O) results."""


def uniform_experts(tokens: int, experts: int, k: int, seed: int) -> Tensor:
    """Return (T, K) int64: every token's k different experts, of at least k, each choice as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    chosen_TK = torch.empty(tokens, 0, dtype=torch.int64)
    for already in range(k):
        drawn_T1 = torch.randint(experts - already, (tokens, 1), generator=generator)
        for earlier_T in chosen_TK.sort(dim=1).values.unbind(1):  # step over those that are taken, the least first
            drawn_T1 += drawn_T1 >= earlier_T[:, None]
        chosen_TK = torch.cat([chosen_TK, drawn_T1], dim=1)
    return chosen_TK


def forwards(layer: Experts) -> dict[str, Forward]:
    """Return every way to run the layer by its name, all with the same weights."""

    def one_by_one(x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        tokens = zip(x_TI, experts_TK.tolist(), gates_TK, strict=True)
        return torch.stack([layer.one(*token) for token in tokens])

    def executed(execution: str) -> Forward:
        def forward(x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
            layer.execution = execution
            return layer(x_TI, experts_TK, gates_TK)

        return forward

    def by_hand(multiply: Callable[[Tensor, Tensor], Tensor]) -> Forward:
        """Sort rows by expert, multiply, and add each token's results up."""

        def forward(x_TI: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
            flat_R = experts_TK.flatten()
            order_R = flat_R.argsort(stable=True)
            tokens_R = order_R // experts_TK.shape[1]
            results_RO = multiply(x_TI[tokens_R], flat_R[order_R]) * gates_TK.flatten()[order_R, None]
            return results_RO.new_zeros(len(x_TI), results_RO.shape[1]).index_add(0, tokens_R, results_RO)

        return forward

    def loop(rows_RI: Tensor, experts_R: Tensor) -> Tensor:
        hidden, output = layer.hidden_weights.unbind(), layer.output_weights.unbind()
        active, counts = experts_R.unique_consecutive(return_counts=True)
        pieces = zip(active.tolist(), rows_RI.split(counts.tolist()), strict=True)
        return torch.cat([(rows @ hidden[expert]).relu() @ output[expert] for expert, rows in pieces])

    def grouped(rows_RI: Tensor, experts_R: Tensor) -> Tensor:
        grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
        ends_E = experts_R.bincount(minlength=len(layer.hidden_weights)).cumsum(0).int()
        hidden_RH = grouped_mm(rows_RI, layer.hidden_weights, offs=ends_E).relu()
        return grouped_mm(hidden_RH, layer.output_weights, offs=ends_E)

    executions = {execution: executed(execution) for execution in EXECUTIONS}
    return {ONE_BY_ONE: one_by_one, **executions, LOOP: by_hand(loop), GROUPED_MM: by_hand(grouped)}


def moe_case(layer: Experts, tokens: int, k: int, seed: int, **setting: str | int) -> Case:
    """Return the ways to run one minibatch through a layer."""
    device, experts, (inputs, hidden, outputs) = layer.hidden_weights.device, len(layer.hidden_weights), layer.sizes
    training, generator = setting["phase"] == "train", torch.Generator().manual_seed(seed)
    experts_TK = uniform_experts(tokens, experts, k, seed).to(device)
    sizes = ((tokens, inputs), (tokens, k), (tokens, outputs))
    x_TI, gates_TK, gradient_TO = (torch.randn(size, generator=generator).to(device) for size in sizes)
    left_out = dict.fromkeys(("grouped", GROUPED_MM), layer.grouped_refusal())

    def competitor(name: str, forward: Forward) -> Competitor:
        count = min(tokens, ENOUGH_TOKENS) if name == ONE_BY_ONE else tokens
        x, gates = (each[:count].clone().requires_grad_(training) for each in (x_TI, gates_TK))

        def run() -> None:
            with torch.inference_mode(not training):
                results_TO = forward(x, experts_TK[:count], gates)
            if training:
                results_TO.backward(gradient_TO[:count])

        def measure() -> dict[str, float]:
            times: list[float] = []
            while not times or (sum(times) < ROUND_SECONDS and len(times) < ROUND_STEPS):
                times.append(seconds(run, device))
                layer.zero_grad(set_to_none=True)
                x.grad = gates.grad = None
            return {"computation": tokens / count * mean(times)}

        return Competitor(name, measure, left_out=left_out.get(name))

    active, numbers = experts_TK.unique().numel(), hidden * (inputs + outputs) * (3 if training else 1)
    limit = arithmetic_limit(2 * tokens * k * numbers, 4 * active * numbers, device)
    competitors = [*(competitor(name, forward) for name, forward in forwards(layer).items()), limit]
    return Case({**setting, "experts": experts, "tokens": tokens}, tokens, competitors, ONE_BY_ONE, {"active": active})


def available_memory(device: torch.device) -> float:
    """Return the bytes that a process may still take; infinity where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2] if Path("/proc/meminfo").exists() else ""
    return 1024.0 * int(found.split()[0]) if found else float("inf")


def moe_benchmark(
    experts: Sequence[int],
    tokens: Sequence[int],
    k: int,
    width: tuple[int, int, int],
    phases: Sequence[str],
    threads: Sequence[int],
    device: str,
    seed: int,
) -> Benchmark:
    """Return the comparison of every number of experts with every minibatch, as memory allows.

    Raises:
        InputError: there is no such device.
    """
    on = resolve_device(device)
    counts = [{"threads": count} for count in threads] if on.type == "cpu" else [{}]

    def cases() -> Iterator[Case]:
        for phase, number, count in product(phases, sorted(experts), counts):
            setting = {"phase": phase, **count}
            needed = 4.0 * number * width[1] * (width[0] + width[2]) * (2 if phase == "train" else 1)  # and gradients
            if needed > 0.9 * (available := available_memory(on)):
                reason = f"needs {needed / 1e9:.3g} GB of memory, {available / 1e9:.3g} GB are available"
                left_out = [Competitor(name, left_out=reason) for name in EXECUTIONS]
                yield Case({**setting, "experts": number, "tokens": min(tokens)}, min(tokens), left_out)
                continue
            torch.manual_seed(seed)
            layer = Experts(*width, number).to(on)
            yield from (moe_case(layer, size, k, seed, **setting) for size in sorted(tokens))

    sizes = "-".join(map(str, width))
    description = f"experts {sizes}, k {k}, drawn uniformly with seed {seed}, float32; the whole layer, no gating"
    return Benchmark(description, cases(), "tokens", "token", on)
