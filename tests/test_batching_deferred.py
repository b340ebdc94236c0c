"""Weight gradients computed once a step equal ordinary ones, for every kind of call that reaches a layer."""

import pytest
import torch
from batching_cases import assert_same, results
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from iep.dynamic import scope
from iep.kernels.deferred import DeferredWeightGrads
from iep.kernels.layers import Conv2d, Linear, computed_by, linear


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


def recurrent(layer, x, times=4):
    for _ in range(times):
        x = torch.tanh(layer(x))
    return x


def deferred(run):
    def run_deferred(*arguments):
        with computed_by(DeferredWeightGrads()):
            return run(*arguments)

    return run_deferred


def under_autocast(layer, x):
    with torch.autocast("cpu", torch.bfloat16):
        return recurrent(layer, x).float()


def of_several_sizes(layer, x):
    return layer(x).sum() + (layer(layer(x[:, :, ::2, ::2])) ** 2).sum()


def of_a_frozen_weight(layer, x):
    return recurrent(layer.requires_grad_(False), x)


def partly_without_gradients(layers, x):
    with torch.no_grad():
        shift = layers[0](x)
    return layers[0](x) + shift


def partly_under_autocast(layers, x):
    with torch.autocast("cpu", torch.bfloat16):
        inside = layers[0](x)
    assert inside.dtype == torch.bfloat16
    return layers[0](x) + inside.float()


def with_gradients_of_its_own(layers, x):
    (steepest,) = torch.autograd.grad(layers[0](x).pow(2).sum(), x, retain_graph=True)
    return layers[0](x + steepest.detach())


def with_a_shared_weight(layers, x):
    layers[1].weight = layers[0].weight
    return layers[1](torch.tanh(layers[0](torch.tanh(layers[1](x)))))


def with_a_weight_computed_for_each_call(layers, x):
    with torch.autocast("cpu", torch.bfloat16):  # whose copies are what the tape keeps, not the weights made
        for call in range(6):
            x = torch.tanh(linear(x, layers[0].weight * (call + 1), layers[0].bias))
        return x.float()


CONVOLUTION = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, "padding": 1}


@pytest.mark.parametrize(
    ("run", "layer", "shape"),
    [
        (recurrent, lambda: Linear(4, 4), (5, 4)),
        (recurrent, lambda: nn.Sequential(nn.Linear(4, 4), Linear(4, 4)), (5, 4)),  # whose first layer is PyTorch's
        (recurrent, lambda: Linear(4, 4, bias=False), (2, 3, 4)),
        (recurrent, lambda: Conv2d(**CONVOLUTION), (2, 4, 5, 3)),
        (recurrent, lambda: Conv2d(**CONVOLUTION, bias=False, groups=2), (2, 4, 5, 3)),
        (recurrent, lambda: Conv2d(**CONVOLUTION, padding_mode="circular"), (2, 4, 5, 3)),
        (recurrent, lambda: Conv2d(**CONVOLUTION | {"padding": (2, 1), "dilation": (2, 1)}), (2, 4, 5, 3)),
        (under_autocast, lambda: Conv2d(**CONVOLUTION), (3, 4, 5, 5)),
        (of_several_sizes, lambda: Conv2d(**CONVOLUTION), (2, 4, 6, 6)),
        (of_a_frozen_weight, lambda: Linear(4, 4), (2, 4)),
        *(
            (run, lambda: nn.ModuleList([Linear(3, 3), Linear(3, 3)]), (4, 3))
            for run in (
                partly_without_gradients,
                partly_under_autocast,
                with_gradients_of_its_own,
                with_a_shared_weight,
                with_a_weight_computed_for_each_call,
            )
        ),
    ],
)
def test_deferred_gradients_equal_ordinary_ones(run, layer, shape):
    torch.manual_seed(0)
    layer, inputs, relative = layer().double(), torch.randn(shape, dtype=torch.float64), 1e-9
    if run in (under_autocast, partly_under_autocast, with_a_weight_computed_for_each_call):
        layer, inputs, relative = layer.float(), inputs.float(), 0.03
    expected = results(lambda x: run(layer, x), layer, inputs)
    assert_same(results(deferred(lambda x: run(layer, x)), layer, inputs), expected, relative)


@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: Conv2d(**CONVOLUTION), (2, 4, 5, 5)), (lambda: Linear(4, 4), (2, 4))]
)
@pytest.mark.parametrize("defer", [False, True])
def test_each_weight_gradient_is_computed_once_a_step(layer, shape, defer):
    layer = layer()
    output = (deferred(recurrent) if defer else recurrent)(layer, torch.randn(shape), 7)
    with CountWeightGrads(layer.weight) as counted:
        output.sum().backward()
    assert counted.count == (1 if defer else 7)


@pytest.mark.parametrize("defer", [False, True])
def test_a_scope_defers_the_gradients_of_layers_of_pytorch_that_it_runs_directly(defer):
    layer = nn.Linear(4, 4)
    with scope(layer):
        layer(torch.randn(4))  # the first call, which is observed
    with scope(layer, defer_weight_grads=defer):
        output = recurrent(layer, torch.randn(4), 7)
    with CountWeightGrads(layer.weight) as counted:
        output.value.sum().backward()
    assert counted.count == (1 if defer else 7)


def test_several_backward_passes_and_one_of_the_inputs_alone_leave_nothing_for_later_ones():
    layer, inputs = Linear(3, 3).double(), torch.randn(2, 3, requires_grad=True, dtype=torch.float64)
    expected = torch.autograd.grad(recurrent(layer, inputs).sum(), [inputs, layer.weight])
    loss = deferred(recurrent)(layer, inputs).sum()
    (of_inputs,) = torch.autograd.grad(loss, inputs, retain_graph=True)
    for passes in (1, 2):
        loss.backward(retain_graph=True)
        torch.testing.assert_close([of_inputs, layer.weight.grad], [expected[0], passes * expected[1]])


@pytest.mark.parametrize(
    ("layer", "shape"), [(lambda: Conv2d(**CONVOLUTION), (2, 4, 5, 5)), (lambda: Linear(4, 4), (2, 4))]
)
@pytest.mark.parametrize("run", [recurrent, deferred(recurrent)])
def test_a_weight_that_is_changed_in_place_before_the_backward_pass_is_an_error(layer, shape, run):
    layer, inputs = layer(), torch.randn(shape, requires_grad=True)
    loss = run(layer, inputs).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, inputs)
