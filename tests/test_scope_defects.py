"""The lazy scope where what is found out about a call could be wrong: each case equals plain code for one sample."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from iep.dynamic import scope


class Double(torch.autograd.Function):
    """Its gradient is its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class DoubleInTwoSteps(torch.autograd.Function):
    """As `Double`, with the context set up apart; can be batched."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Doubles(nn.Module):
    """A function with a gradient of its own within a module."""

    def __init__(self, function):
        super().__init__()
        self.function, self.layer = function, nn.Linear(2, 2)

    def forward(self, x):
        return self.function.apply(self.layer(x)).sum()


def samples_of(count=4, width=2):
    torch.manual_seed(0)
    return list(torch.randn(count, width))


def values_of(futures):
    return torch.stack([future.value for future in futures])


def assert_equal_to_plain(module, samples):
    """The values in a scope are those without it."""
    expected = torch.stack([module(x) for x in samples])
    with scope(module) as batch:
        found = [module(x) for x in samples]
    torch.testing.assert_close(values_of(found), expected)
    return batch.report()


@pytest.mark.parametrize("where", ["layer", "part", "all"])
def test_hooks_added_after_a_scope_see_one_sample(where):
    samples, layer = samples_of(), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    layer = layer if where == "part" else layer[0]
    assert assert_equal_to_plain(layer, samples).ops[0].how == "batched"
    register = {
        "layer": layer.register_forward_hook,
        "part": layer[1].register_forward_hook if where == "part" else None,
        "all": nn.modules.module.register_module_forward_hook,
    }[where]
    handle = register(lambda module, args, output: output / output.norm())
    try:
        assert_equal_to_plain(layer, samples)
    finally:
        handle.remove()
    assert assert_equal_to_plain(layer, samples).ops[0].how == "batched"


def test_a_hook_added_before_calls_have_run_is_refused():
    layer, samples = nn.Linear(2, 2), samples_of()

    def record():
        with scope(layer):
            found = [layer(x) for x in samples]
            layer.register_forward_hook(lambda module, args, output: output * 2)
            return found

    with pytest.raises(ValueError, match="Linear was given other hooks"):
        record()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_of_the_layers_own_sees_one_sample(when):
    layer, samples = nn.Linear(2, 2), samples_of()
    if when == "after":
        assert assert_equal_to_plain(layer, samples).ops[0].how == "batched"
    layer.forward = lambda x: functional.linear(x, layer.weight) / x.norm()
    assert_equal_to_plain(layer, samples)


def test_a_part_put_in_another_ones_place_is_run():
    class Normed(nn.Module):
        def forward(self, x):
            return x / x.norm()

    layer, samples = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), samples_of()
    assert_equal_to_plain(layer, samples)
    layer[1] = Normed()
    assert_equal_to_plain(layer, samples)


def test_a_bound_method_follows_its_module():
    layer, samples = nn.Linear(2, 2), samples_of()
    method = layer.forward

    def gradient():
        batch = scope()
        wrapped = batch.wrap(method)
        with batch:
            found = [wrapped(x) for x in samples]
        return values_of(found).requires_grad

    layer.requires_grad_(False)
    assert not gradient()
    layer.requires_grad_(True)
    assert gradient()


def test_the_report_counts_each_call_of_what_runs_singly():
    layer, samples = nn.BatchNorm1d(2), list(torch.randn(4, 3, 2))
    with warnings.catch_warnings(), scope(layer) as batch:
        warnings.simplefilter("ignore")
        found = [layer(x) for x in samples]
    assert len(found) == 4
    (op,) = batch.report().ops
    assert (op.how, op.nodes, op.calls, op.largest) == ("singly", 4, 4, 1)
    assert batch.report().batching_ratio == 1


def test_autocast_remembers_no_weight_of_a_trial():
    layer, samples = nn.Linear(2, 2), samples_of()
    with torch.autocast("cpu", torch.bfloat16):
        with scope(layer):
            found = [layer(x) for x in samples]
        loss = layer(values_of(found)).float().square().mean()
        assert type(loss) is torch.Tensor
        expected = layer(torch.stack([layer(x) for x in samples])).float().square().mean()
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("how", ["function", "method"])
def test_batch_norm_within_a_function_sees_each_sample_once(how):
    samples, norms = list(torch.randn(4, 3, 2)), [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    expected = torch.stack([norms[0](x) for x in samples])
    batch = scope()
    wrapped = batch.wrap(norms[1].forward if how == "method" else lambda x: norms[1](x))
    with warnings.catch_warnings(record=True) as caught, batch:
        warnings.simplefilter("always")
        found = [wrapped(x) for x in samples]
    torch.testing.assert_close(values_of(found), expected)
    assert norms[1].num_batches_tracked == norms[0].num_batches_tracked == 4
    torch.testing.assert_close(norms[1].running_mean, norms[0].running_mean)
    assert "running statistics" in str(caught[0].message)


@pytest.mark.filterwarnings("ignore:.* is run singly")
def test_a_function_follows_the_modules_that_it_calls():
    norm, samples = nn.BatchNorm1d(2), list(torch.randn(4, 3, 2))

    def function(x):
        return norm(x)

    for training, how in ((False, "batched by vmap"), (True, "singly"), (False, "batched by vmap")):
        norm.train(training)
        batch = scope()
        wrapped = batch.wrap(function)
        with batch:
            found = [wrapped(x) for x in samples]
        assert len(found) == 4
        assert [op.how for op in batch.report().ops] == [how]
    assert norm.num_batches_tracked == 4


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 0.5}])
@pytest.mark.parametrize("how", ["module", "op", "function"])
def test_embeddings_that_see_all_indices_of_a_call_run_singly(option, how):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, **option)
    other = nn.Embedding(5, 3, **option)
    other.load_state_dict(table.state_dict())
    samples = [torch.tensor(indices) for indices in ([0, 0, 1], [0, 2, 2], [3, 0, 1])]
    torch.stack([table(x) for x in samples]).sum().backward()
    batch = scope(other, granularity="op" if how == "op" else "module")
    call = batch.wrap(lambda x: functional.embedding(x, other.weight, **option)) if how == "function" else other
    with warnings.catch_warnings(), batch:
        warnings.simplefilter("ignore")
        found = [call(x) for x in samples]
    values_of(found).sum().backward()
    torch.testing.assert_close(other.weight, table.weight)
    torch.testing.assert_close(other.weight.grad, table.weight.grad)
    assert [op.how for op in batch.report().ops] == ["singly"]
    assert next(iter(option)) in batch.report().ops[0].reason


def test_a_wrong_shape_writes_no_log(caplog):
    layer = nn.Linear(2, 2)
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError), scope(layer):
        layer(torch.ones(3))
    assert caplog.text == ""


@pytest.mark.filterwarnings("ignore:.* is run singly")
@pytest.mark.parametrize("function", [Double, DoubleInTwoSteps])
@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("within", [True, False])
def test_functions_with_gradients_of_their_own_keep_them(function, granularity, within):
    module, samples = Doubles(function), samples_of()
    torch.stack([module(x) for x in samples]).sum().backward()
    expected, module.layer.weight.grad = module.layer.weight.grad, None
    apply_before = torch.autograd.Function.apply
    with scope(module if within else module.layer, granularity=granularity) as batch:
        found = [module(x) for x in samples]
    values_of(found).sum().backward()
    torch.testing.assert_close(module.layer.weight.grad, expected)
    assert torch.autograd.Function.apply == apply_before
    names = {op.name: op.how for op in batch.report().ops}
    if granularity == "op" or not within:
        assert names[f"{function.__name__}.apply"] == ("singly" if function is Double else "batched by vmap")


def test_a_function_with_a_gradient_of_its_own_that_cannot_keep_it_is_refused():
    layer, samples, apply = nn.Linear(2, 2), samples_of(), Double.apply
    with pytest.raises(ValueError, match=r"autograd\.Function was given a future"), scope(layer):
        apply(layer(samples[0]))
    with scope(layer):
        found = layer(samples[0])
    with pytest.raises(ValueError, match=r"autograd\.Function was given a future"):
        apply(found)
    assert Double.apply(found.value).requires_grad


def test_a_scope_in_a_forward_runs():
    layer, samples = nn.Linear(2, 2), samples_of()

    class Run(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with scope(layer):
                found = [layer(row) for row in x]
            return values_of(found)

    x = torch.stack(samples)
    torch.testing.assert_close(Run.apply(x), layer(x))


def test_a_report_before_the_scope_is_refused():
    with pytest.raises(ValueError, match="enter it first"):
        scope().report()


@pytest.mark.parametrize("method", ["register_hook", "retain_grad"])
def test_hooks_on_a_future_are_refused(method):
    layer, samples = nn.Linear(2, 2), samples_of()
    with scope(layer):
        found = layer(samples[0])
        with pytest.raises(ValueError, match=f"{method} of a future"):
            getattr(found, method)()
    assert callable(getattr(found, method))


def test_two_losses_of_a_scope_share_its_graph():
    layer, samples = nn.Linear(2, 2), samples_of()
    with scope(layer):
        found = [layer(x).sum() for x in samples]
    found[0].value.backward(retain_graph=True)
    found[1].value.backward()
    once = layer.weight.grad
    layer.weight.grad = None
    (layer(samples[0]).sum() + layer(samples[1]).sum()).backward()
    torch.testing.assert_close(once, layer.weight.grad)
