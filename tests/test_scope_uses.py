"""The lazy scope in the places where code for one sample is used: threads, modes, hooks, containers, mistakes."""

import copy
import gc
import os
import pickle
import threading
import warnings
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional

from iep import batching
from iep.dynamic import scope


class Pair(nn.Module):
    """Takes its tensors in a dict and by keyword; has no parameters."""

    def forward(self, parts, *, weight=1.0, bias=None):
        total = parts["left"] * weight + parts["right"][0]
        return {"total": total if bias is None else total + bias, "difference": (parts["left"] - parts["right"][0],)}


class Fails(nn.Module):
    """Fails where it has numbers to compute with."""

    def forward(self, x_2):
        if x_2.sum() > 0:
            raise ArithmeticError("a sum above zero")
        return x_2 * 2


def layer_and_samples(count=6):
    torch.manual_seed(0)
    return nn.Linear(2, 2).double(), list(torch.randn(count, 2, dtype=torch.float64))


def test_threads_have_scopes_of_their_own():
    layer, samples = layer_and_samples()
    together, found, nodes = threading.Barrier(2), {}, {}

    def work(which):
        with scope(layer) as batch:
            kept = []
            for x in samples[which::2]:
                together.wait(timeout=30)
                kept.append(layer(layer(x)))
        found[which], nodes[which] = [future.value for future in kept], batch.report().nodes

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nodes == {0: 6, 1: 6}
    for which in (0, 1):
        torch.testing.assert_close(torch.stack(found[which]), layer(layer(torch.stack(samples[which::2]))))


def test_another_threads_calls_are_not_recorded():
    layer, samples = layer_and_samples()
    found = []
    with scope(layer) as batch:
        thread = threading.Thread(target=lambda: found.append(layer(samples[0])))
        thread.start()
        thread.join()
    assert type(found[0]) is torch.Tensor
    assert batch.report().nodes == 0


def test_a_scope_within_a_scope_takes_the_outer_ones_futures():
    layer, samples = layer_and_samples()
    with scope(layer) as outer:
        first = [layer(x) for x in samples]
        with scope(layer) as inner:
            second = [layer(x) for x in first]
        third = [layer(x) for x in second]
    expected = layer(layer(layer(torch.stack(samples))))
    torch.testing.assert_close(torch.stack(third), expected)
    assert (outer.report().nodes, inner.report().nodes) == (12, 6)


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_as_it_was_after_nested_scopes_and_exceptions(was_on):
    layer, _ = layer_and_samples()
    before, original = gc.isenabled(), nn.Module.__call__

    def fail():
        with scope(layer), scope(layer):
            assert not gc.isenabled()
            raise KeyError

    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() == was_on
        assert nn.Module.__call__ is original
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_hooks_run_once_for_a_group_and_their_results_count(granularity):
    layer, samples = layer_and_samples()
    handle = layer.register_forward_hook(lambda module, args, output: output * 3)
    expected = torch.stack([layer(x) for x in samples])
    with scope(layer, granularity=granularity):
        found = [layer(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), expected)
    handle.remove()
    with scope(layer, granularity=granularity):  # what was found out with the hook does not hold without it
        found = [layer(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), layer(torch.stack(samples)))


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_gradients_under_autocast_equal_those_without_a_scope(granularity):
    layer, samples = layer_and_samples()
    layer, samples = layer.float(), [x.float() for x in samples]

    def gradients(scores):
        layer.weight.grad = layer.bias.grad = None
        torch.stack(scores).float().pow(2).sum().backward()
        return [layer.weight.grad, layer.bias.grad]

    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients([layer(layer(x)).sum() for x in samples])
        with scope(layer, granularity=granularity):
            found = [layer(layer(x)).sum() for x in samples]
        assert found[0].dtype == layer(layer(samples[0])).sum().dtype
    torch.testing.assert_close(gradients([future.value for future in found]), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_modules_without_parameters_take_dicts_and_keywords(granularity):
    pair, (_, samples) = Pair(), layer_and_samples()

    def one(x, y, n):
        result = pair({"left": x, "right": [y]}, weight=float(n % 2), bias=y if n % 3 else None)
        return pair({"left": result["total"], "right": [result["difference"][0]]}, bias=x)["total"]

    pairs = [(x, y, n) for n, (x, y) in enumerate(pairwise(samples))]
    with scope(pair, granularity=granularity):
        found = [one(*each) for each in pairs]
    torch.testing.assert_close(torch.stack(found), torch.stack([one(*each) for each in pairs]))


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scopes_without_gradients(granularity, mode):
    layer, samples = layer_and_samples()
    with mode(), scope(layer, granularity=granularity):
        found = [torch.tanh(layer(x)) for x in samples]
    assert not any(future.value.requires_grad for future in found)
    torch.testing.assert_close(torch.stack([f.value for f in found]), layer(torch.stack(samples)).tanh().detach())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_a_value_without_gradients_keeps_those_of_what_was_recorded_with_them(mode):
    layer, samples = layer_and_samples()
    with scope(layer):
        kept = [layer(x) for x in samples]
        with mode():
            assert kept[0].sum().item() == pytest.approx(layer(samples[0]).sum().item())
        total = torch.stack(kept).sum()
    total.backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, torch.stack(samples).sum(0).expand(2, 2))


def test_what_fails_in_a_module_at_the_end_names_it():
    fails, samples = Fails(), [torch.tensor([-1.0, value]) for value in (0.0, 5.0)]

    def run():
        with pytest.warns(UserWarning, match="Fails is run singly"), scope(fails):
            return [fails(x) for x in samples]

    with pytest.raises(ArithmeticError, match="a sum above zero") as failure:
        run()
    assert any("Fails" in note for note in failure.value.__notes__)


def test_a_future_of_a_scope_that_failed_says_so():
    layer, samples = layer_and_samples()
    kept = []

    def run():
        with scope(layer):
            kept.append(layer(samples[0]))
            kept.append(kept[0] * 2)
            kept.append(kept[1].sum())
            raise KeyError

    with pytest.raises(KeyError):
        run()
    uses = (lambda: kept[0] + 1, lambda: layer(kept[0]), lambda: float(kept[0].sum()), lambda: kept[1].value)
    for use in (*uses, kept[2].backward):
        with pytest.raises(ValueError, match="ended with an exception"):
            use()


def test_a_future_kept_after_its_scope_is_its_tensor():
    layer, samples = layer_and_samples()
    with scope(layer):
        kept = [layer(x) for x in samples]
    gc.collect()
    expected = layer(torch.stack(samples))
    torch.testing.assert_close(torch.stack(kept), expected)
    with scope(layer):  # and another scope takes it
        again = [layer(future) for future in kept]
    torch.testing.assert_close(torch.stack(again), layer(expected))
    assert type(copy.deepcopy(kept[0].detach())) is torch.Tensor
    torch.testing.assert_close(pickle.loads(pickle.dumps(kept[0].detach())), expected[0].detach())


def test_a_model_is_copied_and_pickled_after_its_use_in_a_scope():
    layer, samples = layer_and_samples()
    model = nn.Sequential(layer, nn.Tanh())
    with scope(model):
        kept = [model(x) for x in samples]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with scope(twin):
            found = [twin(x) for x in samples]
        torch.testing.assert_close(torch.stack(found), torch.stack(kept))


def test_a_function_takes_hundreds_of_futures():
    layer, samples = layer_and_samples(300)
    with scope(layer):
        loss = torch.stack([layer(x).pow(2).sum() for x in samples]).mean()
    loss.backward()
    found, layer.weight.grad = layer.weight.grad, None
    layer(torch.stack(samples)).pow(2).sum(1).mean().backward()
    torch.testing.assert_close(found, layer.weight.grad)


def test_scripted_modules_run():
    layer, samples = layer_and_samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.trace(layer, samples[0])
        with scope(scripted):
            found = [scripted(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), layer(torch.stack(samples)))


def test_what_a_module_notes_of_itself_is_numbers():
    class Notes(nn.Module):
        def forward(self, x_2):
            self.seen = x_2 + 1
            return self.seen * 2

    notes, (_, samples) = Notes(), layer_and_samples()
    with scope(notes):
        kept = notes(samples[0])
        assert not hasattr(notes, "seen")
    assert kept.value.tolist() == ((samples[0] + 1) * 2).tolist()


def test_a_report_names_the_users_line_that_reads_a_value():
    layer, samples = layer_and_samples()
    within = {}
    path = os.path.join(os.path.dirname(batching.__file__), "some.py")
    exec(compile("def read(future):\n    return future.value", path, "exec"), within)
    with scope(layer) as batch:
        within["read"](layer(samples[0]))
    assert [why.split(":")[0] for why in batch.report().flushes] == ["a value is read at test_scope_uses.py"]


def test_a_hook_on_a_sequence_of_layers_sees_one_sample():
    layers = nn.Sequential(nn.Linear(3, 3))
    layers.register_forward_hook(lambda _, inputs, output: output - output.mean())
    samples = torch.randn(4, 3)
    with scope(layers):
        together = [layers(x) for x in samples]
    for ours, x in zip(together, samples, strict=True):
        torch.testing.assert_close(ours.value, layers(x))


def test_shapes_are_arguments_and_results_have_names():
    layer = nn.Linear(3, 4)
    samples = torch.randn(5, 3)

    def run(x):
        h = layer(x).view(torch.Size([2, 2]))
        return functional.layer_norm(h, h.shape).max(0).values + h.topk(1, dim=0).indices.squeeze(0)

    with scope(layer):
        together = [run(x) for x in samples]
    for ours, x in zip(together, samples, strict=True):
        torch.testing.assert_close(ours.value, run(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_values_are_those_of_one_sample_after_the_other():
    layer, samples = nn.Linear(3, 3).cuda(), torch.randn(4, 3, device="cuda")
    with scope(layer):
        together = [layer(layer(x) + x) for x in samples]
    for ours, x in zip(together, samples, strict=True):
        torch.testing.assert_close(ours.value, layer(layer(x) + x))


def test_tensors_of_several_devices_are_refused():
    here, there = nn.Linear(3, 3), nn.Linear(3, 3, device="meta")

    def run():
        with scope(here, there):
            return here(torch.ones(3)), there(torch.ones(3, device="meta"))

    with pytest.raises(ValueError, match="a scope's tensors are on cpu and meta, expected one device"):
        run()
