"""Triton's kernels compute what PyTorch's convolutions compute, one function after the other.

Without a GPU, Triton's interpreter runs them.
"""

import json
import os
import subprocess
import sys

import pytest
import torch
from batching_cases import assert_same
from device_cases import HAS_TRITON, ONE_GPU
from torch.nn import functional

pytest.importorskip("triton")
from iep.kernels import triton_conv
from iep.kernels.triton_conv import Maps, conv, weight_gradient

pytestmark = HAS_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FULL_SIZE = (9, 1, 128, 128, 14, [0, 1, 7, 64, 3] * 8)
SMALL = [
    (9, 1, 20, 18, 3, [3, 0, 1, 4]),
    (9, 2, 16, 16, 5, [2]),
    (25, 1, 3, 5, 4, [0, 0, 2, 0]),
    (1, 1, 33, 1, 1, [1, 1, 1, 1, 1]),
]
"""Taps, dilation, input and output channels, width of the grid, and rows of each function."""


def expected_of(x, weight_FTIO, bias_FO, sizes, dilation):
    """Return the convolutions of rows that are sorted by function, (G, H, W, O)."""
    side = round(weight_FTIO.shape[1] ** 0.5)
    weight_FOIhw = weight_FTIO.unflatten(1, (side, side)).permute(0, 4, 3, 1, 2)
    parts = zip(x.permute(0, 3, 1, 2).split(sizes), weight_FOIhw, bias_FO, strict=True)
    how = {"padding": side // 2 * dilation, "dilation": dilation}
    return torch.cat([functional.conv2d(*part, **how) for part in parts]).permute(0, 2, 3, 1)


def draw(taps, inputs, outputs, width, sizes, dtype):
    """Return a buffer of random maps, row numbers, weights, biases and ends, and the gradient of a result."""
    torch.manual_seed(0)
    x_MHWI = torch.randn(max(sizes) + 3, width + 1, width, inputs)
    rows_G = torch.randint(len(x_MHWI), (sum(sizes),))
    weight_FTIO = torch.randn(len(sizes), taps, inputs, outputs) / (taps * inputs) ** 0.5
    bias_FO = torch.randn(len(sizes), outputs)
    gradient_GHWO = torch.randn(len(rows_G), width + 1, width, outputs)
    values = [each.to(DEVICE, dtype) for each in (x_MHWI, weight_FTIO, bias_FO, gradient_GHWO)]
    return *values, rows_G.to(DEVICE), torch.tensor(sizes).cumsum(0).int().to(DEVICE)


@pytest.mark.parametrize("case", [*SMALL, pytest.param(FULL_SIZE, marks=ONE_GPU)])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "programs"),
    [(torch.float32, 1e-5, 20), (torch.bfloat16, 1e-2, 1)],
)
def test_convolutions_and_their_gradients_equal_those_of_one_function_after_the_other(
    case, dtype, tolerance, programs, monkeypatch
):
    monkeypatch.setattr(triton_conv, "WEIGHT_PROGRAMS", programs)  # one pair each, some, or all pairs of a function
    taps, dilation, inputs, outputs, width, sizes = case
    x, weight, bias, gradient, rows, ends = draw(taps, inputs, outputs, width, sizes, dtype)
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    expected = expected_of(exact[0][rows], *exact[1:], sizes, dilation)
    of_x, of_weight, of_bias = torch.autograd.grad(expected, exact, gradient.double())

    numbers, out, of_rows = torch.arange(len(rows), device=DEVICE), torch.empty_like(gradient), x[rows]
    conv((Maps(x, rows),), weight, bias, ends, out, dilation)
    flipped = weight.flip(1).transpose(2, 3).contiguous()
    conv((Maps(gradient, numbers),), flipped, None, ends, of_rows, dilation)
    found = weight_gradient(Maps(x, rows), Maps(gradient, numbers), ends, taps, dilation)
    pairs = {"output": out, "x": torch.zeros_like(of_x).index_add_(0, rows, of_rows.double()), "weight": found[0]}
    assert_same(
        pairs | {"bias": found[1]}, {"output": expected, "x": of_x, "weight": of_weight, "bias": of_bias}, tolerance
    )


@pytest.mark.parametrize(("taps", "inputs", "outputs"), [(1, (5, 20), 18), (9, (6,), 6)])
def test_two_arguments_a_residual_a_relu_and_a_mask_are_applied_in_the_same_kernel(taps, inputs, outputs):
    sizes = [2, 0, 3]
    x, weight, bias, mask, rows, ends = draw(taps, sum(inputs), outputs, 3, sizes, torch.float32)
    residual, others = torch.randn(4, 4, 3, outputs, device=DEVICE), torch.tensor([3, 0, 3, 1, 2], device=DEVICE)
    parts = [Maps(each.contiguous(), rows) for each in x.split(inputs, dim=3)]
    out = torch.full_like(mask, torch.nan)
    conv(tuple(parts), weight, bias, ends, out, 1, Maps(residual, others), relu=True, mask_GHWO=mask)
    expected = expected_of(x[rows], weight, bias, sizes, 1) + residual[others]
    torch.testing.assert_close(out, expected.relu() * (mask > 0), rtol=1e-5, atol=1e-5)


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from iep.kernels import triton_conv

sizes = {"H": 14, "W": 14, "FIRST": 128, "SECOND": 0, "INPUTS": 128, "OUTPUTS": 128, "TAPS": 9, "SIDE": 3}
how = {"DILATION": 1, "FUNCTIONS": 64, "HAS_BIAS": True, "HAS_RESIDUAL": True, "HAS_MASK": True, "RELU": True}
found = []
for tuner in (triton_conv.conv_kernel, triton_conv.weight_gradient_kernel):
    names = tuner.fn.arg_names
    for config in tuner.configs:
        given = sizes | how | config.kwargs
        kinds = {"ends_ptr": "*i32", "of_weight_ptr": "*fp32", "of_bias_ptr": "*fp32"}
        kind = lambda name: "*i64" if name.endswith("rows_ptr") else "*bf16" if name.endswith("_ptr") else "i32"
        signature = {name: "constexpr" if name in given else kinds.get(name, kind(name)) for name in names}
        constants = {(names.index(name),): given[name] for name in names if name in given}
        attributes = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names) if name.endswith("_ptr")}
        source = ASTSource(fn=tuner.fn, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        products = kernel.asm["ptx"].count("mma.sync") + kernel.asm["ptx"].count("wgmma.mma_async")
        found.append((tuner.fn.__name__, kernel.metadata.shared, products))
print(json.dumps(found))
"""


def test_all_tiles_compile_for_a_hopper_gpu_with_its_matrix_units_and_memory():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 4
    for name, shared, products in found:
        assert shared <= 227 * 1024, name
        assert products > 0, name
