"""`iep-bench moe`: every execution of a layer of experts gives the same results, and each has its row."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_cases import iep_bench, report_of

from iep.bench.measure_experts import BATCHED, HAND, ONE_BY_ONE, forwards, uniform_experts
from iep.workloads.experts import Experts

WIDTH = (4, 8, 12)
QUICK = ("--width", *WIDTH, "--repeat", 2)


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    """One token after the other is measured for a few alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iep.bench.measure_experts.ENOUGH_TOKENS", 5)
        yield


def test_every_number_of_experts_and_minibatch_size_is_measured(tmp_path: Path):
    given = ("--experts", "3,1", "--tokens", "2,7")
    comparisons = report_of(iep_bench("moe", *given, *QUICK, "--out", tmp_path), tmp_path, "moe")
    found = [(each["phase"], each["experts"], each["tokens"]) for each in comparisons]
    assert found == [(p, e, size) for p in ("train", "inference") for e in (1, 3) for size in (2, 7)]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == [ONE_BY_ONE, BATCHED, HAND, "limit"]
        assert each["active"] == uniform_experts(each["tokens"], each["experts"], 1, seed=0).unique().numel()


@pytest.mark.parametrize("k", [1, 3])
def test_every_execution_gives_the_same_outputs_and_gradients(k: int):
    torch.manual_seed(0)
    layer = Experts(*WIDTH, 5)
    chosen = uniform_experts(9, 5, k, seed=1)
    results = []
    for forward in forwards(layer).values():
        torch.manual_seed(0)
        x, gates = torch.randn(9, WIDTH[0], requires_grad=True), torch.rand(9, k, requires_grad=True)
        layer.zero_grad(set_to_none=True)
        outputs = forward(x, chosen, gates)
        (outputs**2).sum().backward()
        results.append([outputs, x.grad, gates.grad, *(weight.grad for weight in layer.parameters())])
    for other in results[1:]:
        for one, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
