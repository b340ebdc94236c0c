"""What changes between a call's recording in a lazy scope and its run, and what is changed in place."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from iep.dynamic import scope


def halved(layer):
    with torch.no_grad():
        layer.weight.mul_(0.5)


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("change", [halved, lambda layer: layer.register_buffer("more", torch.ones(1))])
def test_a_module_changed_before_its_calls_run_is_named(granularity, change):
    layer = nn.Linear(2, 2)
    kept = []

    def run():
        with scope(layer, granularity=granularity):
            kept.append(layer(torch.ones(2)))
            change(layer)

    if granularity == "op" and change is not halved:
        run()  # its functions take no buffer
        assert kept[0].shape == (2,)
        return
    with pytest.raises(ValueError, match=r"[Ll]inear was .* parameters or buffers after a call"):
        run()


def test_a_step_of_the_optimizer_between_calls_that_have_run_counts_for_those_after_it():
    torch.manual_seed(0)
    layer, x = nn.Linear(3, 1), torch.ones(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with scope(layer):
        dead, first = layer(2 * x), layer(x)
        first.value.backward()
        optimizer.step()
        del dead
        second = layer(x)
    torch.testing.assert_close(second.value, layer(x))
    torch.testing.assert_close(second.value, first.value - 0.5 * 4)


def test_calls_before_a_step_that_run_after_it_are_refused():
    layer, x = nn.Linear(3, 1), torch.ones(3)
    kept = []

    def run():
        with scope(layer):
            kept.extend(layer(n * x) for n in range(2))
            kept[0].item()
            halved(layer)
            kept.append(layer(x))

    with pytest.raises(ValueError, match="Linear was changed after a call"):
        run()


def test_evaluation_and_training_within_a_scope_are_not_mixed():
    drop, x = nn.Dropout(0.5), torch.ones(30)
    kept = []

    def run(reads):
        drop.train()
        with scope(drop):
            kept.append(drop(x))
            if reads:
                kept[-1].sum().item()
            drop.eval()
            kept.append(drop(x))
            if reads:
                kept[-1].sum().item()
            drop.train()

    run(reads=True)
    assert kept[1].value.tolist() == x.tolist()
    assert set(kept[0].value.tolist()) == {0.0, 2.0}
    with pytest.raises(ValueError, match="Dropout was switched between training and evaluation"):
        run(reads=False)


class Totals(nn.Module):
    """Has another buffer after every call."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x_52):
        self.total = self.total + x_52.detach().sum(0)
        return self.linear(x_52)


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Totals])
def test_a_module_that_changes_its_own_buffers_goes_on_after_a_value_is_read(kind, granularity):
    torch.manual_seed(0)
    samples, alone = torch.randn(4, 5, 2), kind(2)
    batched = copy.deepcopy(alone)
    expected = [alone(x) for x in samples]
    with warnings.catch_warnings(), scope(batched, granularity=granularity):
        warnings.simplefilter("ignore")  # it runs singly
        try:
            found = [batched(x) for x in samples]
        except TypeError as error:
            if "as buffer" not in str(error):
                raise
            pytest.skip("this PyTorch does not let a future be a buffer")
        found[0].sum().item()
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    for ours, theirs in zip(batched.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(getattr(ours, "value", ours), theirs)


def test_lists_among_the_arguments_count_as_they_were():
    class Scale(nn.Module):
        def forward(self, x, factors):
            return x * sum(factors)

    scale, factors = Scale(), [1, 2]
    with scope(scale):
        first = scale(torch.ones(()), factors)
        factors.append(4)
        second = scale(torch.ones(()), factors)
    assert (first.item(), second.item()) == (3, 7)


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize(
    "change",
    [
        lambda h: functional.relu(h, inplace=True),
        lambda h: functional.dropout(h, 0.0, True, True),
        nn.ReLU(inplace=True),
    ],
)
def test_functions_in_place_change_the_future_for_all_its_names(granularity, change):
    torch.manual_seed(0)
    layer, samples = nn.Linear(3, 3), torch.randn(6, 3)

    def one(x):
        h = layer(x)
        before, alias = h + 0, h
        result = change(h)
        return before, alias + 1, result * 2

    modules = (layer, *([change] if isinstance(change, nn.Module) else []))
    with scope(*modules, granularity=granularity):
        found = [one(x) for x in samples]
    for parts, x in zip(found, samples, strict=True):
        for part, expected in zip(parts, one(x), strict=True):
            torch.testing.assert_close(part.value, expected)


def test_adding_to_a_future_changes_it_for_all_its_names():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    with scope(layer):
        h = layer(x)
        alias, total = h, 0
        h += 1
        h *= h
        total += h.sum()
        with pytest.raises(ValueError, match="cannot hold"):
            h += torch.ones(3, 2)
    torch.testing.assert_close(alias.value, (layer(x) + 1) ** 2)
    assert total.item() == pytest.approx(alias.value.sum().item())
    later = h
    h -= 1  # and after the scope's end
    torch.testing.assert_close(later.value, (layer(x) + 1) ** 2 - 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.__iadd__(1),
        lambda h: functional.relu(h, inplace=True),
        nn.ReLU(inplace=True),
    ],
)
def test_a_future_changed_after_its_value_was_read_is_taken_as_changed(change):
    torch.manual_seed(0)
    layer, x, y = nn.Linear(3, 3), torch.randn(3), torch.randn(3)

    def one(read):
        h = layer(x)
        read(h)
        before, alias = layer(h), h
        for _ in range(2):
            h = change(h)
            read(h)
        total = h + layer(y)
        return before, alias, total, layer(h), layer(alias).sum()

    with scope(layer, *([change] if isinstance(change, nn.Module) else [])):
        found = one(lambda h: h.value)
    for ours, expected in zip(found, one(lambda h: None), strict=True):
        torch.testing.assert_close(ours.value, expected)


def test_backward_is_of_what_a_future_stood_for_when_it_was_called():
    torch.manual_seed(0)
    layer, x = nn.Linear(2, 2), torch.ones(2)

    def gradient(call):
        layer.zero_grad()
        call()
        return layer.weight.grad.clone()

    def put_off():
        with scope(layer):
            loss, factor, h = layer(x).sum(), layer(2 * x)[0], layer(x)
            loss.backward()
            loss *= 3
            loss.backward(gradient=factor)
            loss += factor
            factor *= 5
            inputs = [layer.weight]
            h.sum().backward(inputs=inputs)
            inputs.append(layer.bias)
            h += 1

    def at_once():
        layer(x).sum().backward()
        (3 * layer(x).sum()).backward(gradient=layer(2 * x)[0].detach())
        layer(x).sum().backward(inputs=[layer.weight])

    torch.testing.assert_close(gradient(put_off), gradient(at_once))


def test_a_gradient_changed_before_backward_runs_is_refused():
    layer, factor = nn.Linear(2, 2), torch.ones(())

    def run():
        with scope(layer):
            layer(torch.ones(2)).sum().backward(factor)
            factor.mul_(5)

    with pytest.raises(ValueError, match=r"a gradient of shape \(\) was changed in place after backward"):
        run()
    assert layer.weight.grad is None


class Increments(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


class CountsAndDoubles(nn.Module):
    """Runs singly, for its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x.mul_(2)


class DoublesAndAdds(nn.Module):
    """Runs singly, because vmap fails at it half-way."""

    def forward(self, x):
        x.mul_(2)
        total = torch.zeros(3)
        total += x
        return x.add_(total)


class IncrementsByValue(nn.Module):
    def forward(self, x):
        return x.add_(1) * 2 if x.sum() > -100 else x


class DoublesAtOnce(nn.Module):
    def forward(self, x):
        return torch.nonzero(x.mul_(2))


@torch.no_grad()
def test_a_module_that_runs_at_once_does_not_change_what_it_takes():
    layer, change, x = nn.Linear(3, 3), DoublesAtOnce(), torch.ones(3)
    with scope(layer, change):
        h = layer(x)
        _ = h + 1  # takes it as it is
        with pytest.raises(ValueError, match="DoublesAtOnce changes in place a tensor that it takes"):
            change(h)


@pytest.mark.filterwarnings("ignore:.* is run singly")
@pytest.mark.parametrize("change", [CountsAndDoubles(), DoublesAndAdds()])
@pytest.mark.parametrize("grad", [True, False])
def test_modules_that_run_singly_change_their_first_argument_too(change, grad):
    torch.manual_seed(0)
    layer, samples = nn.Linear(3, 3), torch.randn(4, 3)

    def results():
        layer.zero_grad()
        found = []
        for x in samples:
            h = layer(x)
            before, alias = h + 0, h
            found += [before, change(h) * h, alias]
        return found

    with torch.set_grad_enabled(grad):
        with scope(layer, change):
            found = results()
        expected = results()
    torch.testing.assert_close([future.value for future in found], expected)
    if grad:
        torch.stack(expected).sum().backward()
        gradient = layer.weight.grad.clone()
        layer.zero_grad()
        torch.stack(found).sum().backward()
        torch.testing.assert_close(layer.weight.grad, gradient)


@pytest.mark.parametrize(
    "change",
    [
        torch.relu_,
        functional.relu_,
        lambda h: h.add_(1),
        lambda h: torch.add(h.detach(), 1, out=torch.zeros(2)),
        lambda h: torch.zeros(2).add_(h),
        lambda h: torch.zeros(2, 2).__setitem__(0, h),
        lambda h: nn.ReLU(inplace=True)(torch.ones(2)),  # from outside
    ],
)
def test_other_changes_in_place_are_refused_in_one_line(change):
    layer = nn.Linear(2, 2)
    with scope():
        h = layer(torch.ones(2))
        with pytest.raises(ValueError, match=r"in place.* out of place") as failure:
            change(h)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("module", [Increments(), nn.Sequential(nn.ReLU(inplace=True)), IncrementsByValue()])
@pytest.mark.parametrize("reads", [False, True])
def test_functions_that_a_module_calls_do_not_change_tensors_from_outside(module, reads):
    x = torch.full((2,), -1.0)
    with scope(module, granularity="op") as batch:
        if reads:
            batch.wrap(lambda x: x.value)(x)
        with pytest.raises(ValueError, match=r"in place.* out of place"):
            module(x)
        future = batch.wrap(lambda x: x)(x)
        with pytest.raises(ValueError, match=r"iadd.* changes in place a tensor from outside"):
            future += 1
    assert x.tolist() == future.tolist() == [-1, -1]


@pytest.mark.parametrize("module", [Increments(), IncrementsByValue()])
def test_modules_that_change_what_they_take_are_refused_and_leave_it(module):
    x = torch.ones(2)
    with scope(module), pytest.raises(ValueError, match="changes in place a tensor that it takes"):
        module(x)
    assert x.tolist() == [1, 1]
