"""The lazy scope computes what plain code for one sample computes: values, gradients, side effects, modes."""

import copy
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from batching_cases import Twice, assert_same, quick, with_gradients
from device_cases import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from iep.dynamic import Future, scope

GRANULARITIES = pytest.mark.parametrize("granularity", ["module", "op"])


class Cell(nn.Module):
    """Any number of states, each a vector and integers -> a new one. Its code is wrong for a batch."""

    def __init__(self):
        super().__init__()
        self.new, self.old = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x_3, states=(), *, scale=1.0):
        h_4 = self.new(x_3)
        count = torch.ones((), dtype=torch.long)
        if states:
            h_4 = h_4 + self.old(torch.stack([h for h, _ in states])).mean(0).softmax(0)
            count = count + torch.stack([n for _, n in states]).sum(0)
        return torch.tanh(h_4 * scale), count


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = Cell(), nn.Linear(4, 1)

    def one(self, sample):
        """A sample: for each vertex its input, the earlier vertices that it takes, and whether a number is read."""
        states = []
        for x_3, takes, reads in sample:
            scale = 1.0 + len(takes)
            if reads and states:
                scale += float(states[-1][0].detach().sum()) > 0
            states.append(self.cell(x_3, [states[n] for n in takes], scale=scale))
        h_4, count = states[-1]
        return (self.head(h_4) * 2.0).tanh().sum() / count


@st.composite
def batches(draw):
    """Up to five graphs of up to six vertices, which take up to three earlier ones; some numbers are read."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    batch, reads = [], draw(st.booleans())
    for _ in range(draw(st.integers(0, 5))):
        sample = []
        for n in range(draw(st.integers(1, 6))):
            takes = draw(st.lists(st.integers(0, n - 1), max_size=3)) if n else []
            x_3 = torch.randn(3, generator=generator, dtype=torch.float64)
            sample.append((x_3, takes, reads and draw(st.booleans())))
        batch.append(sample)
    return batch


def results_of(outputs, leaves):
    """Return the tensors that `outputs`, tensors or futures, stand for, and the gradients of the leaves."""
    values = {f"output {n}": getattr(output, "value", output) for n, output in enumerate(outputs)}
    return with_gradients(values, leaves)


def outputs_and_gradients(network, batch, mode, opened=None):
    inputs = [[(x.clone().requires_grad_(), *rest) for x, *rest in sample] for sample in batch]
    with mode(), opened or nullcontext():
        outputs = [network.one(sample) for sample in inputs]
    leaves = {f"input {n} {m}": x for n, sample in enumerate(inputs) for m, (x, *_) in enumerate(sample)}
    return results_of(outputs, leaves | dict(network.named_parameters()))


@settings(quick, max_examples=40)
@given(
    batches(),
    st.sampled_from(["module", "op"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["lookahead", "agenda", "vanilla"]),
    st.sampled_from([nullcontext, nullcontext, torch.no_grad, torch.inference_mode]),
)
def test_a_scope_equals_the_same_code_without_it(batch, granularity, listed, share, defer, scheduler, mode):
    network = Network().double()
    modules = [network.cell, network.head] if listed else []
    opened = scope(*modules, granularity=granularity, share=share, defer_weight_grads=defer, scheduler=scheduler)
    expected = outputs_and_gradients(network, batch, mode)
    assert_same(outputs_and_gradients(network, batch, mode, opened), expected, 1e-9, none_is_zero=True)


# Modules of all kinds


class Pair(nn.Module):
    """Takes its tensors in a dict and by keyword; has no parameters."""

    def forward(self, parts, *, weight=1.0, bias=None):
        total = parts["left"] * weight + parts["right"][0]
        return {"total": total if bias is None else total + bias, "difference": (parts["left"] - parts["right"][0],)}


def hooked(register, hook):
    def make():
        network = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        for part in (network, network[1]):
            getattr(part, register)(hook)
        return network

    return make


def nested(pair, wrap, x, n):
    result = pair({"left": x, "right": [x * 2]}, weight=float(n % 2), bias=x if n % 3 else None)
    return pair({"left": result["total"], "right": [result["difference"][0]]}, bias=x)["total"]


def shaped(layer, wrap, x, n):
    h = layer(x).view(torch.Size([2, 2]))
    return functional.layer_norm(h, h.shape).max(0).values + h.topk(1, dim=0).indices.squeeze(0) + h[1, :].T[0:2]


def plain(module, wrap, x, n):
    return module(x).tanh()


def read_between(norm, wrap, x, n):
    found = norm(torch.stack([x, x * x, -x]))
    if n == 3:
        found.sum().item()
    return found


LIKE_PLAIN_CODE = {
    "nested arguments and results": (Pair, nested, None),
    "shapes and named results": (lambda: nn.Linear(2, 4), shaped, None),
    "forward hooks": (
        hooked("register_forward_hook", lambda module, args, output: output / output.norm()),
        plain,
        None,
    ),
    "backward hooks": (
        hooked("register_full_backward_hook", lambda module, given, received: (given[0] / (1 + given[0].norm()),)),
        plain,
        None,
    ),
    "a gradient of its own": (lambda: nn.Linear(2, 2), lambda m, wrap, x, n: wrap(Twice.apply)(m(x)), "autograd"),
    "batch norm": (lambda: nn.BatchNorm1d(2), read_between, None),
}
"""By name: a module, what is run on each sample, and why it runs singly if it does."""


def outcome(make, run, granularity=None, device="cpu"):
    torch.manual_seed(0)
    module = make().double().to(device)
    samples = [torch.randn(2, dtype=torch.float64, device=device, requires_grad=True) for _ in range(6)]
    with scope(module, granularity=granularity) if granularity else nullcontext() as batch:
        wrap = batch.wrap if batch else lambda function: function
        outputs = [run(module, wrap, x, n) for n, x in enumerate(samples)]
    leaves = {f"input {n}": x for n, x in enumerate(samples)} | dict(module.named_parameters())
    return results_of(outputs, leaves) | dict(module.named_buffers()), batch


@pytest.mark.filterwarnings("ignore:.* runs singly")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("what", LIKE_PLAIN_CODE)
@GRANULARITIES
def test_outputs_gradients_and_buffers_are_those_of_plain_code(granularity, what, device):
    make, run, why_singly = LIKE_PLAIN_CODE[what]
    (expected, _), (found, batch) = outcome(make, run, None, device), outcome(make, run, granularity, device)
    assert_same(found, expected, 1e-9)
    reasons = [op.reason for op in batch.report().ops if op.how == "singly"]
    assert reasons if why_singly else not reasons
    assert all(why_singly in reason for reason in reasons), reasons


def layer_and_samples(count=6):
    torch.manual_seed(0)
    return nn.Linear(2, 2).double(), list(torch.randn(count, 2, dtype=torch.float64))


def test_calls_keep_the_modes_in_which_they_were_recorded():
    layer = nn.Linear(2, 2)
    with scope(layer):
        with torch.no_grad():
            frozen = layer(torch.ones(2))
        trained = layer(torch.ones(2))
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(torch.ones(2))
        with torch.inference_mode():
            assert trained.sum().item() == pytest.approx(layer(torch.ones(2)).value.sum().item())
    assert not frozen.value.requires_grad
    assert trained.value.requires_grad
    assert not trained.detach().requires_grad
    assert low.dtype == low.value.dtype == torch.bfloat16


@GRANULARITIES
def test_gradients_under_autocast_equal_those_without_a_scope(granularity):
    layer, samples = nn.Linear(2, 2), list(torch.randn(6, 2))

    def gradients(scores):
        layer.weight.grad = layer.bias.grad = None
        torch.stack(scores).float().pow(2).sum().backward()
        return [layer.weight.grad, layer.bias.grad]

    with torch.autocast("cpu", torch.bfloat16):
        with scope(layer, granularity=granularity):
            found = [layer(layer(x)).sum() for x in samples]
        # Autocast remembers the cast weights; the scope must not leave it one of another kind.
        expected = gradients([layer(layer(x)).sum() for x in samples])
        assert found[0].dtype == layer(layer(samples[0])).sum().dtype
    torch.testing.assert_close(gradients([future.value for future in found]), expected, rtol=0.05, atol=0.05)


def test_dropout_differs_from_sample_to_sample():
    drop = nn.Dropout(0.5)
    with scope(drop):
        found = [drop(torch.ones(64)) for _ in range(2)]
    first, second = (future.value for future in found)
    assert set(first.tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)


@pytest.mark.parametrize("wrapped", [lambda norm: norm.forward, lambda norm: lambda x: norm(x)])
def test_a_wrapped_function_follows_the_modules_that_it_calls(wrapped):
    samples, alone, ours = list(torch.randn(4, 3, 2)), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for training, hows in ((True, []), (False, ["batched by vmap"]), (True, [])):
        expected = torch.stack([alone.train(training)(x) for x in samples])
        with scope() as batch:
            function = batch.wrap(wrapped(ours.train(training)))
            found = [function(x) for x in samples]
        torch.testing.assert_close(torch.stack(found), expected)
        torch.testing.assert_close(ours.running_mean, alone.running_mean)
        assert [op.how for op in batch.report().ops] == hows


def test_a_nested_scope_reads_futures_of_the_outer_one():
    layer, samples = layer_and_samples()
    with scope(layer) as outer:
        first = [layer(x) for x in samples]
        with scope(layer) as inner:
            second = [layer(x) for x in first]
        third = [layer(x) for x in second]
    torch.testing.assert_close(torch.stack(third), layer(layer(layer(torch.stack(samples)))))
    assert (outer.report().nodes, inner.report().nodes) == (12, 6)


def test_every_thread_records_its_own_calls():
    layer, samples = layer_and_samples()
    together = threading.Barrier(3)

    def work(opened):
        with opened as batch:
            kept = []
            for x in samples:
                together.wait(timeout=30)
                kept.append(layer(layer(x)))
        return type(kept[0]), torch.stack(kept), batch and batch.report().nodes

    with ThreadPoolExecutor(3) as pool:
        plain, *scoped = pool.map(work, (nullcontext(), scope(layer), scope(layer)))
    assert (plain[0], plain[2]) == (torch.Tensor, None)
    for kind, values, nodes in scoped:
        assert (kind, nodes) == (Future, 12)
        torch.testing.assert_close(values, plain[1])


def test_a_future_behaves_like_its_tensor():
    layer, samples = layer_and_samples()
    with scope(layer):
        kept = [layer(x) for x in samples]
        future = kept[0]
        assert isinstance(future, Future)
        assert (future.shape, future.dim(), future.size(0), len(future), future.numel()) == ((2,), 1, 2, 2, 2)
        first, second = future
        inside = (1 - future) @ future
    torch.testing.assert_close(torch.stack([first, second]), future.value)
    torch.testing.assert_close((1 - future) @ future, inside.value)
    assert future.tolist() == future.value.tolist()
    assert type(copy.deepcopy(future.detach())) is torch.Tensor
    with scope(layer):  # and another scope takes it
        again = [layer(each) for each in kept]
    torch.testing.assert_close(torch.stack(again), layer(layer(torch.stack(samples))))
    future.sum().backward(retain_graph=True)
    kept[1].value.sum().backward()
    torch.testing.assert_close(layer.weight.grad, (samples[0] + samples[1]).expand(2, 2))


@GRANULARITIES
def test_modules_are_freed_after_the_scope(granularity):
    module, x = Cell(), [torch.ones(3)]
    dead = weakref.ref(module)
    with scope(module, granularity=granularity) as batch:
        kept = module(*x)
    del module, batch
    gc.collect()
    assert dead() is None
    assert kept[0].shape == (4,)
