import pytest
import torch
from batching_cases import assert_same, results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from iep.batching.deferred import DeferredWeightGrads


class CountWeightGrads(TorchDispatchMode):
    """Counts how often a weight's gradient is computed, by the convolutions' own op or by a product of its shape."""

    def __init__(self, weight):
        super().__init__()
        self.shape, self.count = weight.shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution_backward.default:
            self.count += args[-1][1]
        elif func is torch.ops.aten.mm.default:
            self.count += result.shape == self.shape
        return result


def recurrent(layer, times=4):
    """The same layer applied again and again."""

    def run(x):
        for _ in range(times):
            x = torch.tanh(layer(x))
        return x

    return run


def deferred(run):
    def run_deferred(x):
        with DeferredWeightGrads():
            return run(x)

    return run_deferred


CONVOLUTION = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1}


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Linear(4, 4), (5, 4)),
        (lambda: nn.Linear(4, 4), (4,)),
        (lambda: nn.Linear(4, 4, bias=False), (2, 3, 4)),
        (lambda: nn.Conv2d(**CONVOLUTION), (2, 4, 5, 3)),
        (lambda: nn.Conv2d(**CONVOLUTION), (4, 5, 3)),
        (lambda: nn.Conv2d(**CONVOLUTION, bias=False, groups=2), (2, 4, 5, 3)),
        (lambda: nn.Conv2d(**CONVOLUTION | {"padding": "same"}), (2, 4, 5, 3)),
        (lambda: nn.Conv2d(**CONVOLUTION, padding_mode="circular"), (2, 4, 5, 3)),
        (lambda: nn.Conv2d(**CONVOLUTION | {"padding": (2, 1), "dilation": (2, 1)}), (2, 4, 5, 3)),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4)), (5, 4)),
    ],
)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_deferred_gradients_equal_ordinary_ones(layer, shape, dtype, relative):
    torch.manual_seed(0)
    layer = layer().to(dtype)
    inputs = torch.randn(shape, dtype=dtype)
    expected = results(recurrent(layer), layer, inputs)
    assert_same(results(deferred(recurrent(layer)), layer, inputs), expected, relative)


@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: nn.Conv2d(**CONVOLUTION), (2, 4, 5, 5)), (lambda: nn.Linear(4, 4), (2, 4))]
)
@pytest.mark.parametrize("defer", [False, True])
def test_each_weight_gradient_is_computed_once_a_step(layer, shape, defer):
    layer = layer()
    run = recurrent(layer, times=7)
    output = (deferred(run) if defer else run)(torch.randn(shape))
    with CountWeightGrads(layer.weight) as counted:
        output.sum().backward()
    assert counted.count == (1 if defer else 7)


def test_gradients_of_the_inputs_alone_leave_nothing_for_a_later_backward_pass():
    layer, inputs = nn.Linear(3, 3).double(), torch.randn(2, 3, requires_grad=True, dtype=torch.float64)
    expected = torch.autograd.grad(recurrent(layer)(inputs).sum(), [inputs, layer.weight])
    loss = deferred(recurrent(layer))(inputs).sum()
    (of_inputs,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    loss.backward()
    torch.testing.assert_close([of_inputs, layer.weight.grad], list(expected))


def test_one_layer_may_be_called_on_inputs_of_several_sizes():
    torch.manual_seed(0)
    layer, inputs = nn.Conv2d(**CONVOLUTION).double(), torch.randn(2, 4, 6, 6, dtype=torch.float64)

    def run(x):
        return layer(x).sum() + (layer(layer(x[:, :, ::2, ::2])) ** 2).sum()

    assert_same(results(deferred(run), layer, inputs), results(run, layer, inputs), 1e-9)


def partly_without_gradients(first, second, x):
    with torch.no_grad():
        shift = first(x)
    return first(x) + shift


def partly_under_autocast(first, second, x):
    with torch.autocast("cpu", torch.bfloat16):
        inside = first(x)
    assert inside.dtype == torch.bfloat16
    return first(x) + inside.float()


def with_gradients_of_its_own(first, second, x):
    (steepest,) = torch.autograd.grad(first(x).pow(2).sum(), x, retain_graph=True)
    return first(x + steepest.detach())


def with_a_shared_weight(first, second, x):
    second.weight = first.weight
    return second(torch.tanh(first(torch.tanh(second(x)))))


def with_a_weight_computed_for_each_call(first, second, x):
    with torch.autocast("cpu", torch.bfloat16):  # whose copies are what the tape keeps, not the weights made
        for call in range(6):
            x = torch.tanh(nn.functional.linear(x, first.weight * (call + 1), first.bias))
        return x.float()


@pytest.mark.parametrize(
    ("run", "dtype", "relative"),
    [
        (partly_without_gradients, torch.float64, 1e-9),
        (partly_under_autocast, torch.float32, 0.03),
        (with_gradients_of_its_own, torch.float64, 1e-9),
        (with_a_shared_weight, torch.float64, 1e-9),
        (with_a_weight_computed_for_each_call, torch.float32, 0.03),
    ],
)
def test_deferred_gradients_equal_ordinary_ones_of_calls(run, dtype, relative):
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to(dtype)
    inputs = torch.randn(4, 3, dtype=dtype)
    expected = results(lambda x: run(*layers, x), layers, inputs)
    assert_same(results(deferred(lambda x: run(*layers, x)), layers, inputs), expected, relative)


def test_a_frozen_weight_gets_no_gradient_and_its_inputs_do():
    layer = nn.Linear(3, 3).double().requires_grad_(False)
    inputs = torch.randn(2, 3).double()
    expected = results(recurrent(layer), layer, inputs)
    assert expected["gradient of weight"] is None
    assert_same(results(deferred(recurrent(layer)), layer, inputs), expected, 1e-12)


def test_a_second_backward_pass_over_a_retained_graph_adds_the_same_gradient():
    layer = nn.Linear(3, 3).double()
    loss = deferred(recurrent(layer))(torch.randn(2, 3).double()).sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, 2 * once)


def test_deferred_gradients_under_autocast_equal_ordinary_ones_to_bfloat16s_precision():
    torch.manual_seed(0)
    layer = nn.Conv2d(**CONVOLUTION)
    inputs = torch.randn(3, 4, 5, 5)

    def run(x, way):
        with torch.autocast("cpu", torch.bfloat16):
            return way(x).float()

    ordinary = results(lambda x: run(x, recurrent(layer)), layer, inputs)
    actual = results(lambda x: run(x, deferred(recurrent(layer))), layer, inputs)
    assert actual["output"].equal(ordinary["output"])
    assert_same(actual, ordinary, 0.03)
