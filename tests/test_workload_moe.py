"""Mixture of experts: every execution equals one token at a time, outputs and all gradients; gating and its losses
equal a naive loop."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from hypothesis import given
from torch._subclasses.fake_tensor import FakeTensorMode

from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.plan import make_plan
from iep.batching.schedulers import make_schedule
from iep.errors import InputError
from iep.workloads.experts import Experts, grouped_linear, grouped_refusal
from iep.workloads.moe import MixtureOfExperts, NoisyTopKGating, squared_variation

HAS_GROUPED = grouped_refusal(torch.device("cpu"), torch.float32) is None
counts = st.tuples(st.integers(1, 6), st.integers(0, 12), st.integers(1, 6), st.integers(0, 99))


def one_by_one(layer, x_TD, experts_TK, gates_TK):
    if len(x_TD):
        return layer.one_by_one(x_TD, experts_TK, gates_TK)
    return x_TD @ layer.hidden_weights[0] @ layer.output_weights[0] * 0


def results(layer, run, seed, tokens, k):
    """Outputs, those without gradients, and the gradients of tokens, gates and weights."""
    torch.manual_seed(seed)
    dtype = layer.hidden_weights.dtype
    x = torch.randn(tokens, layer.hidden_weights.shape[1], dtype=dtype, requires_grad=True)
    chosen = torch.rand(tokens, len(layer.hidden_weights)).argsort(1)[:, :k].contiguous()
    gates = torch.rand(tokens, k, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        without = run(x, chosen, gates)
    leaves = {"tokens": x, "gates": gates, **dict(layer.named_parameters())}
    return with_gradients({"outputs": run(x, chosen, gates), "outputs without gradients": without}, leaves)


EXECUTIONS = [("loop", torch.float64), ("auto", torch.float64), ("loop", torch.float32), ("auto", torch.float32)]


@pytest.mark.parametrize(("execution", "dtype"), [*EXECUTIONS, *([("grouped", torch.float32)] if HAS_GROUPED else [])])
@quick
@given(data=st.data(), counts=counts)
def test_every_execution_equals_one_token_at_a_time(execution, dtype, data, counts):
    """A grouped product needs float32 and widths that are multiples of 16 bytes; the loop takes any."""
    width, tolerance = (st.sampled_from([4, 8, 12]), 1e-4) if dtype == torch.float32 else (st.integers(1, 9), 1e-9)
    experts, tokens, k, seed = counts
    layer = Experts(*data.draw(st.tuples(width, width, width)), experts, execution).to(dtype)
    expected = results(layer, lambda *args: one_by_one(layer, *args), seed, tokens, min(k, experts))
    assert_same(results(layer, layer, seed, tokens, min(k, experts)), expected, tolerance, none_is_zero=True)


@pytest.mark.skipif(not HAS_GROUPED, reason="this PyTorch has no grouped matrix product on the CPU")
def test_where_there_is_no_grouped_product_auto_runs_the_loop_and_grouped_says_why():
    for inputs, dtype, why in ((3, torch.float32, "12 bytes, expected a multiple of 16"), (4, torch.float64, "")):
        layer = Experts(inputs, 4, 4, 2).to(dtype)
        given = torch.ones(1, inputs, dtype=dtype), torch.tensor([[1]]), torch.ones(1, 1, dtype=dtype)
        assert layer(*given).shape == (1, 4)
        layer.execution = "grouped"
        with pytest.raises(ValueError, match=f"execution 'grouped' is not available: .*{why}"):
            layer(*given)


@pytest.mark.parametrize("execution", ["loop", *(["grouped"] if HAS_GROUPED else [])])
def test_an_op_group_of_linear_layers_is_one_call_of_the_executor(execution):
    torch.manual_seed(0)
    weight_EIO, ops = torch.randn(3, 4, 4, requires_grad=True), [5, 7, 9]
    x = torch.randn(4, 4)
    graph = Graph(4, np.array([9, 5, 9, 5]), np.arange(4)[:, None], np.arange(4), 4 + np.arange(4))
    schedule = make_schedule(graph, "lookahead", dict.fromkeys(ops, 1))
    assert len(schedule) == 1

    def layer(functions, x_RI):
        return grouped_linear(x_RI, weight_EIO[[0, 2]], functions.ends, execution)  # function 7 has no rows

    found = execute(make_plan(graph, schedule), {1: layer}, x)
    expected = torch.stack([row @ weight_EIO[ops.index(op)] for row, op in zip(x, graph.op.tolist(), strict=True)])
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), weight_EIO)
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected.square().sum(), weight_EIO))
    with pytest.raises(ValueError, match="execution 'fast', expected one of auto, grouped, loop"):
        grouped_linear(x, weight_EIO, torch.tensor([4, 4, 4], dtype=torch.int32), "fast")


@pytest.mark.parametrize("execution", ["loop", "auto"])
def test_no_rows_have_an_empty_result_and_gradients_of_zero(execution):
    weight_EIO, x = torch.randn(2, 4, 8, requires_grad=True), torch.randn(0, 4, requires_grad=True)
    found = grouped_linear(x, weight_EIO, torch.zeros(2, dtype=torch.int32), execution)
    assert found.shape == (0, 8)
    of_x, of_weight = torch.autograd.grad(found.sum(), [x, weight_EIO])
    assert of_x.shape == (0, 4)
    assert of_weight.equal(torch.zeros(2, 4, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whether_there_is_a_grouped_product_does_not_depend_on_where_it_is_first_asked(dtype):
    expected = grouped_refusal(torch.device("cpu"), dtype)
    grouped_refusal.cache_clear()
    with FakeTensorMode():
        assert grouped_refusal(torch.device("cpu"), dtype) == expected
    assert grouped_refusal(torch.device("cpu"), dtype) == expected


def test_being_out_of_memory_is_not_taken_for_a_missing_product(monkeypatch):
    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory")

    grouped_refusal.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            grouped_refusal(torch.device("cpu"), torch.float32)
    assert (grouped_refusal(torch.device("cpu"), torch.float32) is None) == HAS_GROUPED


@pytest.mark.parametrize("execution", ["loop", "auto"])
def test_under_autocast_products_are_in_its_dtype_and_weights_keep_theirs(execution):
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(16, 16, 16, experts=3, k=2).eval(), torch.randn(9, 16)
    layer.experts.execution = execution
    layer(x)[0].sum().backward()
    exact = [weight.grad for weight in layer.experts.parameters()]
    layer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = layer(x)[0]
    outputs.sum().backward()
    assert outputs.dtype == torch.bfloat16
    torch.testing.assert_close(outputs.float(), layer(x)[0], rtol=0.05, atol=0.05)
    for weight, expected in zip(layer.experts.parameters(), exact, strict=True):
        torch.testing.assert_close(weight.grad, expected, rtol=0.1, atol=0.1)


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


def test_sums_over_many_tokens_in_low_precision_are_exact():
    torch.manual_seed(0)
    gates = NoisyTopKGating(4, 2, 1).to(torch.bfloat16).eval()(torch.randn(3000, 4, dtype=torch.bfloat16))
    assert gates.gates_TK.dtype == torch.bfloat16
    assert gates.importance_E.sum() == gates.load_E.sum() == 3000


def test_the_whole_layer_trains_and_equals_its_reference():
    torch.manual_seed(0)
    layer = MixtureOfExperts(5, 6, 3, experts=4, k=2)
    outputs, gates = layer(torch.randn(9, 5))
    (outputs.square().sum() + gates.importance_loss + gates.load_loss).backward()
    assert layer.gating.gate_weight.grad.abs().sum() > 0
    layer.eval()
    x = torch.randn(9, 5)
    torch.testing.assert_close(layer(x)[0], torch.stack([layer.one(x_D) for x_D in x]))


def ran(x=(1, 3), experts=((1,),), gates=(1, 1), integers=torch.int64):
    layer = Experts(3, 3, 3, 2)
    return layer(torch.zeros(x), torch.tensor(experts, dtype=integers), torch.ones(gates))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoisyTopKGating(3, 2, 3), "k is 3, expected 1 to 2, the number of experts"),
        (lambda: NoisyTopKGating(3, 2, 1)(torch.zeros(4, 2)), r"got \(4, 2\), expected \(tokens, 3\)"),
        (lambda: MixtureOfExperts(3, 3, 3, 0, 1), "k is 1, expected 1 to 0"),
        (lambda: MixtureOfExperts(0, 3, 3, 1, 1), "at least 1"),
        (lambda: Experts(3, 3, 3, 2, "fast"), "execution 'fast', expected one of auto, grouped, loop"),
        (lambda: Experts(0, 3, 3, 2), "2 experts of 0-3-3, expected at least 1"),
        (lambda: ran(experts=((2,),)), "experts 2 to 2, expected 0 to 1"),
        (lambda: ran(experts=((-1,),)), "experts -1 to -1, expected 0 to 1"),
        (lambda: ran(gates=(1, 2)), "for 1 tokens"),
        (lambda: ran(x=(1, 4)), r"inputs \(1, 4\), expected \(tokens, 3\)"),
        (lambda: ran(integers=torch.int32), "experts torch.int32, expected the weights"),
        (lambda: Experts(3, 3, 3, 2).double()(torch.zeros(1, 3), torch.tensor([[1]]), torch.ones(1, 1)), "float64"),
    ],
)
def test_invalid_sizes_and_inputs_are_errors(make, words):
    with pytest.raises(InputError, match=words):
        make()
