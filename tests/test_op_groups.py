"""A call of an op group computes what a loop over its functions computes, by Triton's kernels or by `grouped`."""

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
from iep.batching.graph import Graph
from iep.batching.plan import Plan, make_plan
from iep.batching.schedulers import make_schedule
from iep.execution_engine.modules import BinaryModule, UnaryModule
from iep.kernels.layers import Conv2d
from iep.kernels.op_groups import architecture, grouped_modules

ONE_INPUT, TWO_INPUTS = 100, 200
RESIDUAL = partial(UnaryModule, residual=True, norm=nn.Identity)
PLAIN = partial(UnaryModule, residual=False, norm=nn.Identity)
BINARY = partial(BinaryModule, residual=True, norm=nn.Identity)


class Mixed(nn.Module):
    """Convolutions of several sizes and dilations, of which one makes a single channel, and a call of one twice."""

    def __init__(self, dim: int):
        super().__init__()
        self.wide = Conv2d(dim, dim, 3, padding=2, dilation=2)
        self.mask = Conv2d(dim, 1, 1)
        self.after = nn.ReLU(inplace=True)

    def forward(self, x):
        x = torch.tanh(self.wide(x))
        return self.after(self.wide(x)) * torch.sigmoid(self.mask(x))


def plan_of(rng: np.random.Generator, num_functions: int, num_nodes: int) -> Plan:
    """Return the plan of a random graph of functions of one input (even) and two inputs (odd), in two op groups."""
    op = rng.integers(0, num_functions, num_nodes)
    args = np.array([[rng.integers(0, 3 + n), rng.integers(0, 3 + n) if op[n] % 2 else -1] for n in range(num_nodes)])
    graph = Graph(3, op, args, np.zeros(num_nodes, dtype=np.int64), 3 + rng.integers(0, num_nodes, 4))
    members = {op: TWO_INPUTS if op % 2 else ONE_INPUT for op in range(num_functions)}
    return make_plan(graph, make_schedule(graph, "lookahead", members))


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_input", [RESIDUAL, Mixed])
@given(seed=st.integers(0, 2**16), num_functions=st.integers(1, 4), num_nodes=st.integers(1, 4))
@settings(quick, max_examples=2)
def test_outputs_and_all_gradients_of_tritons_kernels_equal_those_of_a_loop_over_functions(
    device: str, one_input: Callable, seed: int, num_functions: int, num_nodes: int
):
    from iep.kernels.fused import kernel_modules

    torch.manual_seed(seed)
    plan = plan_of(np.random.default_rng(seed), num_functions, num_nodes).to(device)
    kinds = [one_input, BINARY]
    modules = nn.ModuleList([kinds[op % 2](3) for op in range(num_functions)]).to(device)
    x, by_op = torch.randn(3, 3, 2, 3).to(device, memory_format=torch.channels_last), dict(enumerate(modules))
    together = kernel_modules(plan, by_op)
    assert together.keys() == plan.op_groups.keys()
    expected = results(lambda x: execute(plan, by_op, x), modules, x)
    found = results(lambda x: execute(plan, by_op | kernel_modules(plan, by_op), x), modules, x)
    assert_same(found, expected, 1e-4, none_is_zero=True)  # some nodes lead to no output
    with torch.inference_mode():
        output = execute(plan, by_op | together, x)
    assert_same({"output": output}, {"output": expected["output"]}, 1e-4)


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_as_exact_as_a_loop_in_bfloat16(device: str):
    from iep.kernels.fused import kernel_modules

    torch.manual_seed(0)
    plan = plan_of(np.random.default_rng(0), 4, 10).to(device)
    modules = nn.ModuleList([(BINARY if op % 2 else RESIDUAL)(16) for op in range(4)]).to(device)
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
    assert error(by_op | kernel_modules(plan, by_op)) < (2.5 if device == "cpu" else 1.2) * error(by_op)


@HAS_TRITON
def test_modules_that_run_in_place_need_maps_in_channels_last_format():
    from iep.kernels.fused import kernel_modules

    plan = plan_of(np.random.default_rng(0), 1, 1)
    with pytest.raises(ValueError, match="need channels-last format"):
        execute(plan, kernel_modules(plan, {0: RESIDUAL(3)}), torch.randn(3, 3, 2, 2))


class Scaled(nn.Module):
    """A module whose functions run together by its own method."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x):
        return self.scale * x

    @staticmethod
    def grouped(members):
        scales_F = torch.stack([each.scale for each in members])
        return lambda functions, x: scales_F[functions.index][:, None] * x


def test_functions_run_together_by_their_method_grouped_except_with_hooks():
    graph = Graph(2, np.array([5, 7]), np.array([[0], [1]]), np.arange(2), np.array([2, 3]))
    plan = make_plan(graph, make_schedule(graph, "lookahead", {5: ONE_INPUT, 7: ONE_INPUT}))
    modules, x, seen = {5: Scaled(2.0), 7: Scaled(3.0)}, torch.ones(2, 1), []
    assert len(plan.calls) == 1
    for hook in (None, lambda module, arguments, result: seen.append(result.item())):
        if hook is not None:
            modules[7].register_forward_hook(hook)
        together = grouped_modules(plan, modules)
        assert together.keys() == ({ONE_INPUT} if hook is None else set())
        out = execute(plan, modules | together, x)
        assert out.tolist() == [[2.0], [3.0]]
    assert seen == [3.0]


@pytest.mark.parametrize(
    "module",
    [
        UnaryModule(4, True, nn.BatchNorm2d),
        Conv2d(4, 4, 3),
        Conv2d(4, 4, 3, padding=1, stride=2),
        Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(Conv2d(4, 4, 1)),
        nn.Sequential(Conv2d(4, 4, 1), nn.Linear(4, 4)),
    ],
)
def test_modules_with_other_parameters_than_those_of_convolutions_for_kernels_have_calls_of_their_own(module):
    assert architecture(module, by_kernels=True) is None


def test_modules_of_one_class_and_shape_have_one_architecture_and_none_without_kernels():
    def make(*sizes: int) -> nn.Module:
        return nn.Sequential(*(Conv2d(4, size, 3, padding=1) for size in sizes))

    assert architecture(make(4, 4), True) == architecture(make(4, 4), True) is not None
    others = (make(4, 2), make(4), Conv2d(4, 4, 3, padding=2, dilation=2), RESIDUAL(4), PLAIN(4), BINARY(4))
    assert len({architecture(module, True) for module in (make(4, 4), *others)}) == 7
    assert architecture(make(4, 4)) is None
    assert architecture(Scaled(1.0)) == architecture(Scaled(2.0), True) == Scaled
