"""Mixture of experts: batched and grouped execution equal the loop over tokens, outputs and every gradient; gating and
its losses equal a naive loop."""

import copy
import math
import os
import pickle
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import quick
from hypothesis import given

from iep.batching import Graph, execute, lay_out, make_schedule, native
from iep.errors import InputError
from iep.workloads import experts as experts_module
from iep.workloads.experts import Experts
from iep.workloads.gating import NoisyTopKGating, squared_variation
from iep.workloads.moe import MixtureOfExperts

needs_compiler = pytest.mark.skipif(native.library("experts") is None, reason="no C compiler")
sizes = st.tuples(
    *[st.integers(1, 9)] * 3, st.integers(1, 6), st.integers(0, 12), st.integers(1, 6), st.integers(0, 99)
)


def results(layer: Experts, execution: str, seed: int, tokens: int, k: int) -> list[torch.Tensor | None]:
    torch.manual_seed(seed)
    layer.execution, dtype = execution, layer.hidden_weights[0].dtype
    x = torch.randn(tokens, layer.sizes[0], dtype=dtype, requires_grad=True)
    chosen = torch.rand(tokens, len(layer.hidden_weights)).argsort(1)[:, :k].contiguous()
    gates = torch.rand(tokens, k, dtype=dtype, requires_grad=True)
    layer.zero_grad(set_to_none=True)
    outputs = layer(x, chosen, gates)
    outputs.sum().backward()  # an expanded gradient
    with torch.no_grad():
        no_grad = layer(x, chosen, gates)
    return [outputs, no_grad, x.grad, gates.grad, *(weight.grad for weight in layer.parameters())]


def assert_same(found: list[torch.Tensor | None], expected: list[torch.Tensor | None], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None or not one.numel():
            assert one is other is None or (one is None or not one.numel()) == (other is None or not other.numel())
        else:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@quick
@given(sizes)
def test_batched_outputs_and_every_gradient_equal_the_loop_over_tokens(case: tuple[int, ...]):
    inputs, hidden, outputs, experts, tokens, k, seed = case
    layer = Experts(inputs, hidden, outputs, experts).double()
    expected = results(layer, "vanilla", seed, tokens, min(k, experts))
    assert_same(results(layer, "batched", seed, tokens, min(k, experts)), expected, 1e-9)


@quick
@given(sizes)
def test_grouped_outputs_and_every_gradient_equal_the_loop_over_tokens_at_any_width(case: tuple[int, ...]):
    inputs, hidden, outputs, experts, tokens, k, seed = case
    layer = Experts(inputs, hidden, outputs, experts)
    expected = results(layer, "vanilla", seed, tokens, min(k, experts))
    assert_same(results(layer, "grouped", seed, tokens, min(k, experts)), expected, 1e-4)


widths = st.sampled_from([32, 64, 96])


@needs_compiler
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
@quick
@given(
    case=st.tuples(widths, widths, widths, st.integers(1, 6), st.integers(0, 60), st.integers(1, 6), st.integers(0, 99))
)
def test_compiled_products_equal_the_loop_over_tokens(dtype: torch.dtype, tolerance: float, case: tuple[int, ...]):
    inputs, hidden, outputs, experts, tokens, k, seed = case
    layer = Experts(inputs, hidden, outputs, experts).to(dtype)
    expected = results(layer, "vanilla", seed, tokens, min(k, experts))
    assert_same(results(layer, "batched", seed, tokens, min(k, experts)), expected, tolerance)


@needs_compiler
@pytest.mark.parametrize("shape", [(256, 256, 256), (384, 416, 32), (32, 64, 512)])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_compiled_experts_equal_pytorchs_with_few_rows_many_and_none(
    shape: tuple[int, int, int], threads: int, monkeypatch: pytest.MonkeyPatch
):
    layer, before = Experts(*shape, 20), torch.get_num_threads()
    torch.manual_seed(0)
    x, chosen = torch.randn(900, shape[0], requires_grad=True), torch.randint(2, 20, (900, 2))
    chosen[:600, 0], chosen[:40, 1] = 3, 1  # chunks, and as many rows as are worth packing
    gates = torch.rand(900, 2, requires_grad=True)

    def run() -> list[torch.Tensor | None]:
        layer.zero_grad(set_to_none=True)
        x.grad = gates.grad = None
        outputs = layer(x, chosen, gates)
        outputs.square().mean().backward()
        return [outputs, x.grad, gates.grad, *(weight.grad for weight in layer.parameters())]

    calls = []
    over_rows = native.over_rows
    monkeypatch.setattr(native, "over_rows", lambda *args: (calls.append(args[1]), over_rows(*args)))
    try:
        torch.set_num_threads(threads)
        found = run()
    finally:
        torch.set_num_threads(before)
    assert calls == [1800] * 3  # forward, backward and weights
    monkeypatch.setattr(native, "function", lambda *args: None)
    assert_same(found, run(), 1e-4)
    assert len(calls) == 3
    assert found[3] is None  # expert 0 has no token


@needs_compiler
def test_compiled_experts_pass_on_what_is_not_a_number():
    layer, x = Experts(32, 32, 32, 2), torch.randn(4, 32)
    x[1, 5], x[2, 5] = math.nan, math.inf
    result = layer(x, torch.tensor([[0], [0], [1], [1]]), torch.ones(4, 1))
    assert [bool(row.isfinite().all()) for row in result] == [True, False, False, True]
    assert result[1].isnan().all()


@needs_compiler
@pytest.mark.parametrize("wanted", ["x", "gates", "weights"])
def test_compiled_experts_give_only_the_gradients_that_are_wanted(wanted: str):
    torch.manual_seed(0)
    layer, x, gates = Experts(32, 64, 32, 3), torch.randn(9, 32), torch.rand(9, 2)
    layer.requires_grad_(wanted == "weights")
    x.requires_grad_(wanted == "x")
    gates.requires_grad_(wanted == "gates")
    chosen = torch.rand(9, 3).argsort(1)[:, :2].contiguous()
    found = []
    for execution in ("batched", "vanilla"):
        layer.execution = execution
        layer.zero_grad(set_to_none=True)
        x.grad = gates.grad = None
        layer(x, chosen, gates).square().sum().backward()
        found.append([x.grad, gates.grad, *(weight.grad for weight in layer.parameters())])
    assert_same(*found, 1e-4)
    assert any(gradient is not None for gradient in found[0])


@pytest.mark.parametrize("openmp", [True, False])
def test_threads_share_out_every_row_once_and_pass_on_errors(openmp: bool, monkeypatch: pytest.MonkeyPatch):
    if not openmp:
        monkeypatch.setattr(native, "_openmp", lambda: None)
    before, done = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        native.over_rows(lambda start, end, name: done.append((start, end, name)), 7, 1 << 20, ("rows",))
        assert sorted(done) == [(0, 2, "rows"), (2, 4, "rows"), (4, 7, "rows")]
        with pytest.raises(ZeroDivisionError):
            native.over_rows(lambda start, end: start // 0, 7, 1 << 20, ())
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        native.over_rows(lambda start, end: None, 2, 1 << 20, ())
        child = os.fork()
        if not child:
            done = []
            native.over_rows(lambda start, end: done.append(end), 2, 1 << 20, ())
            os._exit(0 if sorted(done) == [1, 2] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)


def test_under_autocast_it_computes_in_autocasts_dtype_and_weights_keep_theirs():
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(16, 16, 16, experts=3, k=2).eval(), torch.randn(9, 16)
    for execution in ("vanilla", "batched", "grouped"):
        layer.experts.execution = execution
        layer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = layer(x)[0]
        outputs.sum().backward()
        assert outputs.dtype == torch.bfloat16
        assert {weight.grad.dtype for weight in layer.experts.parameters() if weight.grad is not None} == {
            torch.float32
        }
        torch.testing.assert_close(outputs.float(), layer(x)[0], rtol=0.05, atol=0.05)


def test_copies_pickles_and_loaded_states_compute_the_same_with_weights_of_their_own():
    torch.manual_seed(0)
    layer, x, chosen = Experts(4, 4, 4, 3), torch.randn(6, 4), torch.randint(3, (6, 2))
    loaded = Experts(4, 4, 4, 3)
    loaded.load_state_dict(layer.state_dict())
    others = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded]
    expected = layer(x, chosen, torch.ones(6, 2)).detach()
    with torch.no_grad():
        layer.hidden_weights[0].zero_()
    for other in others:
        for execution in ("vanilla", "batched", "grouped"):
            other.execution = execution
            torch.testing.assert_close(other(x, chosen, torch.ones(6, 2)).detach(), expected)
        starts = [weight.data_ptr() for weight in other.hidden_weights]
        assert [start - starts[0] for start in starts] == [0, 64, 128]  # side by side, as a grouped product wants them


def test_results_and_gradients_that_are_kept_are_never_overwritten():
    layer = Experts(256, 256, 256, 4)
    torch.manual_seed(0)
    kept = []
    for _ in range(3):
        x, chosen = torch.randn(600, 256), torch.randint(4, (600, 1))
        layer.zero_grad(set_to_none=True)
        outputs = layer(x, chosen, torch.ones(600, 1))
        outputs.square().sum().backward()
        tensors = [outputs.detach(), *(weight.grad for weight in layer.parameters())]
        kept.append((tensors, [tensor.clone() for tensor in tensors]))
    assert all(torch.equal(one, copy) for tensors, copies in kept for one, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("scheduler", ["vanilla", "standard", "lookahead"])
def test_the_layer_equals_the_cores_executor_with_an_expert_as_an_op(scheduler: str):
    torch.manual_seed(0)
    layer, (tokens, k) = Experts(4, 6, 4, 5).double(), (7, 2)
    x, gates = torch.randn(tokens, 4, dtype=torch.float64), torch.rand(tokens, k, dtype=torch.float64)
    chosen = torch.rand(tokens, 5).argsort(1)[:, :k].contiguous()
    token = np.repeat(np.arange(tokens), k)
    graph = Graph(tokens, chosen.flatten().numpy(), token[:, None], token, tokens + np.arange(tokens * k))

    def expert(e: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda rows: (rows @ layer.hidden_weights[e]).relu() @ layer.output_weights[e]

    every = execute(lay_out(graph, make_schedule(graph, scheduler)), {e: expert(e) for e in range(5)}, x)
    torch.testing.assert_close(layer(x, chosen, gates), (every.view(tokens, k, 4) * gates[..., None]).sum(1))


def test_where_there_is_no_grouped_product_the_reason_is_said_and_execution_is_batched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experts_module, "grouped_refusal", lambda device, dtype: "none here")
    layer = Experts(4, 4, 4, 3)
    assert layer.grouped_refusal() == "none here"
    assert_same(results(layer, "grouped", 0, 5, 2), results(layer, "vanilla", 0, 5, 2), 1e-5)


def test_noisy_gates_and_losses_equal_a_naive_loop():
    torch.manual_seed(0)
    gating = NoisyTopKGating(4, 5, 2).double()
    torch.nn.init.normal_(gating.gate_weight)
    torch.nn.init.normal_(gating.noise_weight)
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.manual_seed(1)
    gates = gating(x)
    torch.manual_seed(1)
    noise = torch.randn(6, 5, dtype=torch.float64)
    importance, load = [0.0] * 5, [0.0] * 5
    for t in range(6):
        clean = [float(x[t] @ gating.gate_weight.detach()[:, e]) for e in range(5)]
        deviation = [math.log1p(math.exp(float(x[t] @ gating.noise_weight.detach()[:, e]))) for e in range(5)]
        noisy = [clean[e] + float(noise[t, e]) * deviation[e] for e in range(5)]
        best = sorted(range(5), key=lambda e: -noisy[e])[:2]
        assert gates.experts_TK[t].tolist() == best
        total = sum(math.exp(noisy[e]) for e in best)
        for place, e in enumerate(best):
            assert float(gates.gates_TK[t, place].detach()) == pytest.approx(math.exp(noisy[e]) / total)
            importance[e] += math.exp(noisy[e]) / total
        for e in range(5):
            kth = sorted((noisy[other] for other in range(5) if other != e), reverse=True)[1]
            load[e] += 0.5 * (1 + math.erf((clean[e] - kth) / deviation[e] / math.sqrt(2)))
    for values, loss in ((importance, gates.importance_loss), (load, gates.load_loss)):
        mean = sum(values) / 5
        assert float(loss.detach()) == pytest.approx(sum((v - mean) ** 2 for v in values) / 5 / mean**2)


def test_without_training_there_is_no_noise_and_equal_loads_lose_nothing():
    gating = NoisyTopKGating(3, 4, 4).eval()
    x = torch.randn(7, 3)
    assert torch.equal(gating(x).gates_TK, gating(x).gates_TK)
    assert float(gating(x).load_loss) == 0
    assert float(squared_variation(torch.zeros(3))) == 0


def test_the_whole_layer_trains_and_equals_its_reference():
    torch.manual_seed(0)
    layer = MixtureOfExperts(5, 6, 3, experts=4, k=2)
    outputs, gates = layer(torch.randn(9, 5))
    (outputs.square().sum() + gates.importance_loss + gates.load_loss).backward()
    assert layer.gating.gate_weight.grad.abs().sum() > 0
    layer.eval()
    x = torch.randn(9, 5)
    torch.testing.assert_close(layer(x)[0], torch.stack([layer.one(x_D) for x_D in x]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoisyTopKGating(3, 2, 3), "k is 3, expected at most the number of experts, 2"),
        (lambda: MixtureOfExperts(3, 3, 3, 0, 1), "at least 1"),
        (lambda: Experts(3, 3, 3, 2, "fast"), "execution 'fast'"),
        (lambda: NoisyTopKGating(3, 2, 1)(torch.zeros(4, 2)), r"got \(4, 2\), expected \(tokens, 3\)"),
        (lambda: Experts(3, 3, 3, 2)(torch.zeros(1, 3), torch.tensor([[2]]), torch.ones(1, 1)), "expected 0 to 1"),
        (lambda: Experts(3, 3, 3, 2)(torch.zeros(1, 3), torch.tensor([[1]]), torch.ones(1, 2)), "for 1 tokens"),
    ],
)
def test_what_does_not_fit_is_named(make, words: str):
    with pytest.raises(InputError, match=words):
        make()


def test_importance_and_load_of_many_tokens_in_low_precision_are_not_cut_off():
    torch.manual_seed(0)
    gating = NoisyTopKGating(4, 2, 1).to(torch.bfloat16).eval()
    gates = gating(torch.randn(3000, 4, dtype=torch.bfloat16))
    assert gates.gates_TK.dtype == torch.bfloat16
    assert gates.importance_E.sum() == 3000
    assert gates.load_E.sum() == 3000


@pytest.mark.parametrize("wrong", ["inputs", "gates", "experts", "weights"])
def test_what_lies_on_another_device_is_refused_before_memory_is_read(wrong):
    layer = Experts(32, 32, 32, 3)
    given = {"inputs": torch.zeros(4, 32), "experts": torch.zeros(4, 1, dtype=torch.int64), "gates": torch.ones(4, 1)}
    if wrong == "weights":
        layer.to("meta")
    else:
        given[wrong] = given[wrong].to("meta")
    with pytest.raises((InputError, RuntimeError), match=r"device|meta"):
        layer(given["inputs"], given["experts"], given["gates"])


def test_a_default_device_does_not_matter_to_compiled_code():
    torch.manual_seed(0)
    layer, x_TD = Experts(32, 32, 32, 3), torch.randn(6, 32)
    experts_TK, gates_TK = torch.tensor([[0], [2], [1], [0], [2], [2]]), torch.rand(6, 1)
    expected = layer(x_TD, experts_TK, gates_TK)
    with torch.device("meta"):
        assert torch.equal(layer(x_TD, experts_TK, gates_TK), expected)


def test_weights_that_move_before_the_way_back_are_read_where_they_are():
    torch.manual_seed(0)
    experts_TK, gates_TK = torch.tensor([[0], [2], [1], [0]]), torch.rand(4, 1)
    found = []
    for moves in (False, True):
        torch.manual_seed(1)
        layer = Experts(32, 32, 32, 3)
        x_TD = torch.ones(4, 32, requires_grad=True)
        result = layer(x_TD, experts_TK, gates_TK)
        if moves:
            for weight in layer.parameters():
                weight.data = weight.data.clone()
        result.sum().backward()
        found.append(x_TD.grad)
    assert torch.equal(*found)


def test_a_layer_of_another_dtype_than_its_inputs_is_refused():
    with pytest.raises(InputError, match=r"gating got torch.float32, expected the weights' torch.float64"):
        MixtureOfExperts(4, 4, 4, 2, 1).double()(torch.randn(3, 4))
