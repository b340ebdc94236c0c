"""`iep-bench moe`: every way to run a layer of experts gives the same numbers; rows of small layers add up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bench_cases import iep_bench, report_of
from placement_cases import ONE_GPU
from tiny_data import assert_one_error

from iep.bench.moe import EXECUTIONS, GROUPED_MM, LOOP, ONE_BY_ONE, forwards, moe_case, uniform_experts
from iep.workloads.experts import Experts

WIDTH = (4, 8, 12)
QUICK = ("--width", *WIDTH, "--repeat", 2)
NAMES = [ONE_BY_ONE, *EXECUTIONS, LOOP, GROUPED_MM, "limit"]


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    """Little is read to measure memory, and steps are repeated seldom; one token after the other for a few alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iep.bench.compare.PROBE_BYTES", 1000)
        patch.setattr("iep.bench.moe.ENOUGH_TOKENS", 5)
        patch.setattr("iep.bench.moe.ROUND_STEPS", 2)
        yield


def test_every_number_of_experts_is_measured_with_every_minibatch_in_every_way(tmp_path: Path):
    threads = torch.get_num_threads()
    given = ("--experts", "3,1", "--tokens", "2,7", "--threads", "1,2")
    comparisons = report_of(iep_bench("moe", *given, *QUICK, "--out", tmp_path), tmp_path, "moe")
    assert torch.get_num_threads() == threads
    found = [(each["phase"], each["experts"], each["threads"], each["tokens"]) for each in comparisons]
    phases = ("train", "inference")
    assert found == [(p, e, t, size) for p in phases for e in (1, 3) for t in (1, 2) for size in (2, 7)]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == NAMES
        assert each["active"] == uniform_experts(each["tokens"], each["experts"], 1, seed=0).unique().numel()
        measured = {row["name"] for row in each["rows"] if row["seconds"]}
        assert {ONE_BY_ONE, "auto", "loop", LOOP, "limit"} <= measured


@pytest.mark.parametrize("k", [1, 3])
def test_every_way_gives_the_same_outputs_and_gradients(k: int):
    torch.manual_seed(0)
    layer = Experts(*WIDTH, 5)
    left_out = {each.name for each in moe_case(layer, 9, k, 0, phase="train").competitors if each.left_out}
    chosen = uniform_experts(9, 5, k, seed=1)
    results = []
    for name, forward in forwards(layer).items():
        if name in left_out:
            continue
        torch.manual_seed(0)
        x, gates = torch.randn(9, WIDTH[0], requires_grad=True), torch.rand(9, k, requires_grad=True)
        layer.zero_grad(set_to_none=True)
        outputs = forward(x, chosen, gates)
        (outputs**2).sum().backward()
        results.append([outputs, x.grad, gates.grad, *(weight.grad for weight in layer.parameters())])
    for other in results[1:]:
        for one, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def test_what_memory_does_not_allow_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("iep.bench.moe.available_memory", lambda device: 7000.0)
    given = ("--experts", "2,50", "--tokens", 2, "--threads", 1, "--phase", "inference")
    fits, does_not = report_of(iep_bench("moe", *given, *QUICK, "--out", tmp_path), tmp_path, "moe")
    assert (fits["experts"], does_not["experts"]) == (2, 50)
    assert any(row["seconds"] for row in fits["rows"])
    assert all("needs 2.56e-05 GB of memory" in row["left_out"] for row in does_not["rows"])


def test_experts_of_a_token_are_different_and_all_are_as_likely():
    chosen = uniform_experts(6000, 6, 3, seed=2)
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert chosen.unique().tolist() == [0, 1, 2, 3, 4, 5]
    for column in chosen.unbind(1):
        assert (column.bincount(minlength=6) - 1000).abs().max() < 150
    assert torch.equal(chosen, uniform_experts(6000, 6, 3, seed=2))
    assert not torch.equal(chosen, uniform_experts(6000, 6, 3, seed=3))


def test_there_is_no_device_of_that_name():
    assert_one_error(iep_bench("moe", "--device", "abacus"), "abacus")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--experts", "3,2", "--k", 3), "3 different experts of 2"),
        (("--experts", "many"), "'many'"),
        (("--tokens", "0"), "0"),
        (("--width", 4, 0, 4), "--width"),
        (("--threads", "some"), "'some'"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: tuple[object, ...], words: str):
    result = iep_bench("moe", *arguments)
    assert result.exit_code == 2
    assert words in result.output


@ONE_GPU
def test_a_gpu_is_measured_without_a_number_of_threads(tmp_path: Path):
    given = ("--experts", 4, "--tokens", 8, "--k", 2, "--device", "cuda")
    comparisons = report_of(iep_bench("moe", *given, *QUICK, "--out", tmp_path), tmp_path, "moe")
    assert [(each["phase"], "threads" in each) for each in comparisons] == [("train", False), ("inference", False)]
