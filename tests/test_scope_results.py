"""What a lazy scope's results are besides their numbers: structure, shapes, gradients, and what is remembered."""

import gc
import weakref

import pytest
import torch
from torch import nn

from iep.dynamic import scope
from iep.dynamic import kernels


class Counted(nn.Module):
    """A tensor, and a number that the module has."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, x):
        return x * 2, self.count


class Same(nn.Module):
    def forward(self, x):
        return x


class Two(nn.Module):
    """A vector, and two others -> two new ones."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, states=(1.0, 2.0)):
        return torch.tanh(self.linear(x) + states[0]), x - states[1]


class Signed(nn.Module):
    def forward(self, x, sign):
        return torch.copysign(x, torch.tensor(sign))


class Scaled(nn.Module):
    def forward(self, x, factor):
        return x * getattr(factor, "number", 2)


class Factor:
    number = 3


def scaled(x, factor):
    return x * float(factor)


def in_scope(module, *args, **options):
    with scope(module, **options):
        return module(*args)


def test_numbers_among_the_results_are_those_of_each_scope():
    counted, count, x = Counted(1), [1], torch.ones(2)

    def function(x):
        return x + 1, count[0]

    found = []
    for n in (1, 2):
        counted.count = count[0] = n
        with scope(counted) as batch:
            found.append((counted(x)[1], batch.wrap(function)(x)[1]))
    assert found == [(1, 1), (2, 2)]


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), nn.Tanh, Two])
def test_modules_are_freed(make, granularity):
    module = make()
    dead = weakref.ref(module)
    in_scope(module, torch.ones(3), granularity=granularity)
    del module
    gc.collect()
    assert dead() is None


def test_objects_among_the_arguments_are_freed_and_known_again_while_they_live():
    module, factors = Scaled(), [Factor(), Factor()]
    dead = list(map(weakref.ref, factors))
    for _ in range(3):
        assert [in_scope(module, torch.ones(2), factor).tolist() for factor in factors] == [[3, 3]] * 2
    assert len(kernels.known(module).kernels) == 2
    factors.clear()
    gc.collect()
    assert [reference() for reference in dead] == [None, None]


def test_numbers_that_differ_from_scope_to_scope_are_forgotten(monkeypatch):
    monkeypatch.setattr(kernels, "MOST_KERNELS", 5)
    for n in range(20):
        with scope() as batch:
            found = batch.wrap(scaled)(torch.ones(2), n / 7)
        torch.testing.assert_close(found.value, torch.full((2,), n / 7))
    assert len(kernels.known(scaled).kernels) == 5


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_weights_of_another_shape_give_results_of_another_shape(granularity):
    layer = nn.Linear(2, 3)
    first = in_scope(layer, torch.ones(2), granularity=granularity)
    layer.weight, layer.bias = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(5))
    second = in_scope(layer, torch.ones(2), granularity=granularity)
    assert (first.shape, second.shape) == ((3,), (5,))
    assert second.tolist() == [3.0] * 5


def test_a_function_whose_result_changes_its_shape_is_named_and_runs_in_the_next_scope():
    weight = [torch.ones(2, 3)]

    def function(x):
        return x @ weight[0]

    def run():
        with scope() as batch:
            return batch.wrap(function)(torch.ones(2))

    assert run().shape == (3,)
    weight[0] = torch.ones(2, 5)
    with pytest.raises(ValueError, match=r"function returned tensors of .* shape \(5,\), after .* \(3,\)"):
        run()
    assert run().shape == (5,)


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_a_module_may_return_what_it_takes(granularity):
    same, x = Same(), torch.ones(2)
    with scope(same, granularity=granularity):
        found = same(x)
        more = found + 1
    assert found.tolist() == [1, 1]
    assert more.tolist() == [2, 2]


def test_a_future_of_an_input_says_that_its_scope_failed():
    same, kept = Same(), []

    def run():
        with scope(same, granularity="op"):
            kept.append(same(torch.ones(2)))
            raise KeyError

    with pytest.raises(KeyError):
        run()
    with pytest.raises(ValueError, match="ended with an exception"):
        _ = kept[0].value


@pytest.mark.parametrize("function", [torch.mul, lambda x, y: torch.where(y > 0, x, y), torch.addcmul])
def test_a_number_of_another_dtype_weighs_as_little_as_in_one_sample(function):
    number, vector = torch.tensor(2.0, dtype=torch.float64), torch.ones(3)
    arguments = (number, vector) if function is not torch.addcmul else (vector, number, number)
    with scope() as batch:
        found = [batch.wrap(function)(*arguments) for _ in range(2)]
    assert found[0].dtype == found[0].value.dtype == torch.float32
    torch.testing.assert_close(found[0].value, function(*arguments))


def test_zeros_of_both_signs_are_different_arguments():
    signed, x = Signed(), torch.ones(1)
    with scope(signed):
        found = [signed(x, 0.0), signed(x, -0.0)]
    assert [future.item() for future in found] == [1, -1]


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_values_require_gradients_where_they_would_without_a_scope(granularity):
    torch.manual_seed(0)
    layer, frozen, same = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Tanh()
    leaf = torch.ones(2, requires_grad=True)

    def values():
        trained = layer(torch.ones(2))
        plain = same(frozen(torch.ones(2)))
        return [trained, plain, same(plain), same(leaf), plain + trained, frozen(trained), plain * 2, trained.detach()]

    expected = values()
    with scope(layer, frozen, same, granularity=granularity):
        found = values()
    torch.testing.assert_close([future.value for future in found], expected)
    wanted = [value.requires_grad for value in expected[:-1]]
    assert [future.value.requires_grad for future in found[:-1]] == wanted
    assert wanted == [True, False, False, True, True, True, False]
    frozen.requires_grad_()  # what was found out without a gradient does not hold any more
    with scope(layer, frozen, same, granularity=granularity):
        found = values()
    found[1].sum().backward()
    assert frozen.weight.grad.abs().sum() > 0


def test_a_node_takes_more_tensors_from_outside_than_there_are_results():
    layer, others = nn.Linear(2, 2), list(torch.randn(9, 2))
    with scope(layer):
        found = torch.stack([layer(others[0]), *others, others[0]]).sum(0)
    torch.testing.assert_close(found.value, layer(others[0]) + torch.stack(others).sum(0) + others[0])


@pytest.mark.parametrize("share", [False, True])
def test_results_are_taken_in_any_order_and_twice(share):
    torch.manual_seed(0)
    layer, samples = Two(), torch.randn(6, 3)

    def one(n, x):
        h, c = layer(x)
        taken = {0: (h, c), 1: (c, h), 2: (h, h)}[n % 3]
        for _ in range(n):
            h, c = layer(x, taken)
            taken = (h, c)
        return torch.cat(taken) * torch.cat([h, h])

    with scope(layer, share=share):
        found = [one(n, x) for n, x in enumerate(samples)]
        mixed = [one(n, x) for n, x in enumerate(samples[:1])]  # all nodes of an op take their tensors alike
    for future, n in zip([*found, *mixed], [*range(6), 0], strict=True):
        torch.testing.assert_close(future.value, one(n, samples[n]))


def test_backward_takes_what_a_tensors_takes():
    layer, other, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(2)

    def gradients(at_end):
        layer.zero_grad(set_to_none=True)
        other.zero_grad(set_to_none=True)
        with scope(layer, other):
            first, second = layer(x).sum(), other(layer(x)).sum()
            if not at_end:
                first.backward(retain_graph=True)
                second.backward(inputs=[other.weight])
                second.backward(gradient=torch.tensor(2.0), inputs=other.weight, retain_graph=True)
        if at_end:
            first.backward(retain_graph=True)
            second.backward(inputs=[other.weight], retain_graph=True)
            second.backward(gradient=torch.tensor(2.0), inputs=other.weight)
        return [layer.weight.grad, other.weight.grad, other.bias.grad]

    put_off, at_once = gradients(at_end=False), gradients(at_end=True)
    assert all(bias is None or not bias.any() for bias in (put_off[2], at_once[2]))
    torch.testing.assert_close(put_off[:2], at_once[:2])
    torch.testing.assert_close(at_once[0], torch.ones(2, 2))
    torch.testing.assert_close(at_once[1], 3 * layer(x).detach().expand(2, 2))
    with scope(layer), pytest.raises(ValueError, match="create_graph"):
        layer(x).sum().backward(create_graph=True)
