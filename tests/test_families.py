"""A call of a family computes what a loop over its functions computes, in one product for each layer."""

from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from device_cases import DEVICES
from hypothesis import given
from torch import nn

from iep.batching.execute import execute
from iep.batching.families import can_be_grouped, family_modules
from iep.batching.graph import Graph
from iep.batching.plan import Plan, make_plan
from iep.batching.schedulers import make_schedule
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_input", [partial(UnaryModule, residual=True, norm="none"), Mixed])
@pytest.mark.parametrize(
    ("dtype", "dim", "tolerance"), [(torch.float32, 8, 1e-4), (torch.float32, 3, 1e-4), (torch.float64, 8, 1e-9)]
)
@given(seed=st.integers(0, 2**16), num_functions=st.integers(1, 6), num_nodes=st.integers(1, 12))
@quick
def test_outputs_and_all_gradients_of_families_equal_those_of_a_loop_over_functions(
    device: str,
    one_input: Callable,
    dtype: torch.dtype,
    dim: int,
    tolerance: float,
    seed: int,
    num_functions: int,
    num_nodes: int,
):
    torch.manual_seed(seed)
    plan = plan_of(np.random.default_rng(seed), num_functions, num_nodes).to(device)
    kinds = [one_input, partial(BinaryModule, residual=True, norm="none")]
    modules = nn.ModuleList([kinds[op % 2](dim) for op in range(num_functions)]).to(device, dtype)
    x = torch.randn(3, dim, 4, 3, dtype=dtype).to(device, memory_format=torch.channels_last)
    by_op = dict(enumerate(modules))
    expected = results(lambda x: execute(plan, by_op, x), modules, x)
    found = results(lambda x: execute(plan, by_op | family_modules(plan, by_op), x), modules, x)
    assert_same(found, expected, tolerance, none_is_zero=True)  # some nodes lead to no output


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_as_exact_as_a_loop_in_bfloat16(device: str):
    torch.manual_seed(0)
    plan = plan_of(np.random.default_rng(0), 6, 30).to(device)
    modules = nn.ModuleList([(BinaryModule if op % 2 else UnaryModule)(16, True, "none") for op in range(6)]).to(device)
    by_op, x = dict(enumerate(modules)), torch.randn(3, 16, 5, 5).to(device)
    exact = results(lambda x: execute(plan, by_op, x), modules, x)

    def error(how):
        with torch.autocast(device, torch.bfloat16):
            found = results(lambda x: execute(plan, how, x.bfloat16()).float(), modules, x)
        return sum(
            (found[name] - value).norm() / value.norm()
            for name, value in exact.items()
            if value is not None and value.any()
        )

    assert error(by_op | family_modules(plan, by_op)) < 1.2 * error(by_op)


def test_functions_that_a_plan_does_not_call_have_no_gradient_and_others_that_lead_nowhere_neither():
    graph = Graph(1, np.array([0, 2, 2]), np.array([[0], [0], [1]]), np.zeros(3, dtype=np.int64), np.array([3]))
    plan = make_plan(graph, make_schedule(graph, "lookahead", dict.fromkeys(range(3), ONE_INPUT)))
    modules = nn.ModuleList([UnaryModule(4, True, "none") for _ in range(3)])
    by_op = dict(enumerate(modules))
    found = execute(plan, by_op | family_modules(plan, by_op), torch.randn(1, 4, 2, 2))
    found.sum().backward()
    assert [any(each.grad is not None for each in module.parameters()) for module in modules] == [True, False, True]


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
