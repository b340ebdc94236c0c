"""A call of a family computes what a loop over its functions computes, in one product for each layer."""

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from device_cases import DEVICES, HAS_TRITON
from hypothesis import given, settings
from torch import nn

from iep.batching.execute import execute
from iep.batching.families import can_be_grouped, family_modules
from iep.batching.graph import Graph
from iep.batching.plan import Plan, make_plan
from iep.batching.schedulers import make_schedule
from iep.bench.measure_engine import Operators
from iep.execution_engine.modules import BinaryModule, UnaryModule

ONE_INPUT, TWO_INPUTS = 100, 200


class Mixed(nn.Module):
    """Convolutions of several sizes and dilations, of which one makes a single channel, and a call of one twice."""

    def __init__(self, dim: int):
        super().__init__()
        self.wide = nn.Conv2d(dim, dim, 5, padding=4, dilation=2)
        self.mask = nn.Conv2d(dim, 1, 1)

    def forward(self, x):
        x = torch.tanh(self.wide(x))
        return torch.tanh(self.wide(x)) * torch.sigmoid(self.mask(x))


def plan_of(rng: np.random.Generator, num_functions: int, num_nodes: int) -> Plan:
    """Return the plan of a random graph of functions of one input (even) and two inputs (odd), in two families."""
    op = rng.integers(0, num_functions, num_nodes)
    args = np.array([[rng.integers(0, 3 + n), rng.integers(0, 3 + n) if op[n] % 2 else -1] for n in range(num_nodes)])
    graph = Graph(3, op, args, np.zeros(num_nodes, dtype=np.int64), 3 + rng.integers(0, num_nodes, 4))
    members = {op: TWO_INPUTS if op % 2 else ONE_INPUT for op in range(num_functions)}
    return make_plan(graph, make_schedule(graph, "lookahead", members))


def grouped_by(triton: bool) -> Callable:
    """Return the function that returns the callables of families."""
    if not triton:
        return family_modules
    from iep.batching.fused import kernel_modules

    return kernel_modules


def assert_equal_to_a_loop(plan: Plan, one_input: Callable, dim: int, dtype: torch.dtype, device: str, triton: bool):
    kinds = [one_input, partial(BinaryModule, residual=True, norm="none")]
    num_functions = 1 + max(op for family in plan.families.values() for op in family.ops)
    modules = nn.ModuleList([kinds[op % 2](dim) for op in range(num_functions)]).to(device, dtype)
    x = torch.randn(3, dim, 2 if triton else 4, 3, dtype=dtype).to(device, memory_format=torch.channels_last)
    plan, by_op = plan.to(device), dict(enumerate(modules))
    grouped = grouped_by(triton)
    families = grouped(plan, by_op)
    assert families.keys() == plan.families.keys()
    expected = results(lambda x: execute(plan, by_op, x), modules, x)
    found = results(lambda x: execute(plan, by_op | grouped(plan, by_op), x), modules, x)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    assert_same(found, expected, tolerance, none_is_zero=True)  # some nodes lead to no output
    with torch.inference_mode():
        output = execute(plan, by_op | families, x)
    assert_same({"output": output}, {"output": expected["output"]}, tolerance)


RESIDUAL = partial(UnaryModule, residual=True, norm="none")
PLAIN = partial(UnaryModule, residual=False, norm="none")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_input", [RESIDUAL, Mixed])
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 8), (torch.float32, 3), (torch.float64, 8)])
@given(seed=st.integers(0, 2**16), num_functions=st.integers(1, 6), num_nodes=st.integers(1, 12))
@quick
def test_outputs_and_all_gradients_of_families_equal_those_of_a_loop_over_functions(
    device: str, one_input: Callable, dtype: torch.dtype, dim: int, seed: int, num_functions: int, num_nodes: int
):
    torch.manual_seed(seed)
    plan = plan_of(np.random.default_rng(seed), num_functions, num_nodes)
    assert_equal_to_a_loop(plan, one_input, dim, dtype, device, triton=False)


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_input", [RESIDUAL, PLAIN, Mixed])
@given(seed=st.integers(0, 2**16), num_functions=st.integers(1, 4), num_nodes=st.integers(1, 4))
@settings(quick, max_examples=3)
def test_outputs_and_all_gradients_of_tritons_kernels_equal_those_of_a_loop_over_functions(
    device: str, one_input: Callable, seed: int, num_functions: int, num_nodes: int
):
    torch.manual_seed(seed)
    plan = plan_of(np.random.default_rng(seed), num_functions, num_nodes)
    assert_equal_to_a_loop(plan, one_input, 3, torch.float32, device, triton=True)


class Counted:
    """A kernel that only counts its launches."""

    launches = 0

    def __getitem__(self, grid):
        self.launches += 1
        return lambda *args, **kwargs: None


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_a_level_of_residual_blocks_is_two_or_three_kernels(device: str, monkeypatch: pytest.MonkeyPatch):
    """Besides the copies of inputs and roots, and the stacking of weights, which do not depend on the depth."""
    from iep.batching import fused, triton_conv

    kernel = Counted()
    monkeypatch.setattr(triton_conv, "conv_kernel", kernel)
    modules = nn.ModuleList([RESIDUAL(3), BinaryModule(3, True, "none"), RESIDUAL(3)]).to(device)
    by_op, found = dict(enumerate(modules)), {}
    for depth in (1, 3):  # each level is a call of two unary functions, and one of a binary function
        op, args = [], []
        for first in range(0, 3 * depth, 3):
            op += [0, 2, 1]
            args += [[first, -1], [first + 1, -1], [2 + first, 3 + first]]
        count = len(op)
        graph = Graph(2, np.array(op), np.array(args), np.zeros(count, dtype=np.int64), np.array([count + 1]))
        plan = make_plan(graph, make_schedule(graph, "lookahead", {0: ONE_INPUT, 2: ONE_INPUT, 1: TWO_INPUTS}))
        assert len(plan.calls) == 2 * depth
        x = torch.randn(2, 3, 2, 2, device=device).to(memory_format=torch.channels_last)
        kernel.launches = 0
        with torch.no_grad(), Operators() as operators:
            execute(plan.to(device), by_op | fused.kernel_modules(plan.to(device), by_op), x)
        assert kernel.launches == 5 * depth
        found[depth] = operators.count
    assert found[3] == found[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=HAS_TRITON)])
def test_bfloat16_is_as_exact_as_a_loop_in_bfloat16(triton: bool, device: str):
    torch.manual_seed(0)
    plan = plan_of(np.random.default_rng(0), 4, 10).to(device)
    modules = nn.ModuleList([(BinaryModule if op % 2 else UnaryModule)(16, True, "none") for op in range(4)]).to(device)
    by_op, x = dict(enumerate(modules)), torch.randn(3, 16, 3, 3, device=device).to(memory_format=torch.channels_last)
    exact = results(lambda x: execute(plan, by_op, x), modules, x)

    def error(how):
        with torch.autocast(device, torch.bfloat16):
            found = results(lambda x: execute(plan, how, x.bfloat16()).float(), modules, x)
        return sum(
            (found[name] - value).norm() / value.norm()
            for name, value in exact.items()
            if value is not None and value.any()
        )

    # Triton's interpreter does not round to bfloat16, but truncates.
    least = 2.5 if triton and device == "cpu" else 1.2
    assert error(by_op | grouped_by(triton)(plan, by_op)) < least * error(by_op)


def test_functions_that_a_plan_does_not_call_have_no_gradient_and_others_that_lead_nowhere_neither():
    graph = Graph(1, np.array([0, 2, 2]), np.array([[0], [0], [1]]), np.zeros(3, dtype=np.int64), np.array([3]))
    plan = make_plan(graph, make_schedule(graph, "lookahead", dict.fromkeys(range(3), ONE_INPUT)))
    modules = nn.ModuleList([UnaryModule(4, True, "none") for _ in range(3)])
    by_op = dict(enumerate(modules))
    found = execute(plan, by_op | family_modules(plan, by_op), torch.randn(1, 4, 2, 2))
    found.sum().backward()
    assert [any(each.grad is not None for each in module.parameters()) for module in modules] == [True, False, True]


class WithoutBias(nn.Module):
    """A convolution whose bias is not used."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        return nn.functional.conv2d(x, self.conv.weight)


def test_a_convolution_that_is_not_called_as_such_is_an_error():
    graph = Graph(1, np.array([0]), np.array([[0]]), np.zeros(1, dtype=np.int64), np.array([1]))
    plan, modules = make_plan(graph, make_schedule(graph, "lookahead", {0: ONE_INPUT})), {0: WithoutBias(2)}
    with pytest.raises(ValueError, match="a module calls conv2d directly"):
        execute(plan, modules | family_modules(plan, modules), torch.randn(1, 2, 2, 2))


@HAS_TRITON
def test_modules_that_run_in_place_need_maps_in_channels_last_format():
    graph = Graph(1, np.array([0]), np.array([[0]]), np.zeros(1, dtype=np.int64), np.array([1]))
    plan, modules = make_plan(graph, make_schedule(graph, "lookahead", {0: ONE_INPUT})), {0: RESIDUAL(3)}
    with pytest.raises(ValueError, match="need channels-last format"):
        execute(plan, modules | grouped_by(triton=True)(plan, modules), torch.randn(1, 3, 2, 2))


@pytest.mark.parametrize(
    "module",
    [
        UnaryModule(4, True, "batch"),
        UnaryModule(4, True, "example"),
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 2, padding=1),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 1, bias=False),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4)),
        nn.ReLU(),
    ],
)
def test_modules_with_other_parameters_than_those_of_plain_convolutions_are_not_grouped(module: nn.Module):
    assert not can_be_grouped(module)
    assert can_be_grouped(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()))
