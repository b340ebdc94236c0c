"""The lazy scope computes what plain code for one sample computes: values, gradients, side effects, modes."""

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from batching_cases import Twice, assert_same, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from iep.dynamic import Future, scope
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.trees import sick_like

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


def outputs_and_gradients(network, batch, opened=None):
    """Every sample's output, and the gradients of an uneven sum of them; None counts as zeros."""
    network.zero_grad(set_to_none=True)
    inputs = [[(x.clone().requires_grad_(), *rest) for x, *rest in sample] for sample in batch]
    if opened is None:
        outputs = [network.one(sample) for sample in inputs]
    else:
        with opened:
            outputs = [network.one(sample) for sample in inputs]
        outputs = [output.value for output in outputs]
    found = {f"output {n}": output.detach() for n, output in enumerate(outputs)}
    if outputs:
        sum((n + 1) * output for n, output in enumerate(outputs)).backward()
    leaves = {f"input {n} {m}": x for n, sample in enumerate(inputs) for m, (x, *_) in enumerate(sample)}
    leaves |= dict(network.named_parameters())
    return found | {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}


@settings(quick, max_examples=30)
@given(
    batches(),
    st.sampled_from(["module", "op"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["lookahead", "agenda", "vanilla"]),
)
def test_a_scope_equals_the_same_code_without_it(batch, granularity, listed, share, defer, scheduler):
    network = Network().double()
    modules = [network.cell, network.head] if listed else []
    opened = scope(*modules, granularity=granularity, share=share, defer_weight_grads=defer, scheduler=scheduler)
    assert_same(outputs_and_gradients(network, batch, opened), outputs_and_gradients(network, batch), 1e-9)


@GRANULARITIES
def test_child_sum_tree_lstms_equal_one_tree_after_the_other(granularity):
    torch.manual_seed(0)
    model = ChildSumTreeLSTM(words=20, word_width=6, width=4).double()
    pairs = sick_like(12, 20, np.random.default_rng(0))

    def found(scores):
        model.zero_grad(set_to_none=True)
        (scores * torch.arange(1.0, 6.0)).sum().backward()
        return {"scores": scores.detach()} | {name: p.grad for name, p in model.named_parameters()}

    expected = found(torch.stack([model.one(pair) for pair in pairs]))
    assert_same(found(model(pairs, granularity=granularity)), expected, 1e-9)


def layer_and_samples(count=6):
    torch.manual_seed(0)
    return nn.Linear(2, 2).double(), list(torch.randn(count, 2, dtype=torch.float64))


def assert_equal_to_plain(module, samples, **options):
    expected = torch.stack([module(x) for x in samples])
    with scope(module, **options):
        found = [module(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), expected)


class Pair(nn.Module):
    """Takes its tensors in a dict and by keyword; has no parameters."""

    def forward(self, parts, *, weight=1.0, bias=None):
        total = parts["left"] * weight + parts["right"][0]
        return {"total": total if bias is None else total + bias, "difference": (parts["left"] - parts["right"][0],)}


@GRANULARITIES
def test_arguments_and_results_may_be_nested(granularity):
    pair, (_, samples) = Pair(), layer_and_samples()

    def one(x, y, n):
        result = pair({"left": x, "right": [y]}, weight=float(n % 2), bias=y if n % 3 else None)
        return pair({"left": result["total"], "right": [result["difference"][0]]}, bias=x)["total"]

    pairs = [(x, y, n) for n, (x, y) in enumerate(pairwise(samples))]
    with scope(pair, granularity=granularity):
        found = [one(*each) for each in pairs]
    torch.testing.assert_close(torch.stack(found), torch.stack([one(*each) for each in pairs]))


def test_shapes_are_arguments_and_named_results_are_returned():
    layer, samples = nn.Linear(3, 4), torch.randn(5, 3)

    def run(x):
        h = layer(x).view(torch.Size([2, 2]))
        return functional.layer_norm(h, h.shape).max(0).values + h.topk(1, dim=0).indices.squeeze(0) + h[1, :].T[0:2]

    with scope(layer):
        found = [run(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), torch.stack([run(x) for x in samples]))


@pytest.mark.parametrize("function", [torch.mul, lambda x, y: torch.where(y > 0, x, y)])
def test_a_number_counts_for_as_little_in_a_results_dtype_as_in_one_sample(function):
    number, vector = torch.tensor(2.0, dtype=torch.float64), torch.ones(3)
    with scope() as batch:
        found = [batch.wrap(function)(number, vector) for _ in range(2)]
    assert found[0].dtype == found[0].value.dtype == torch.float32
    torch.testing.assert_close(found[0].value, function(number, vector))


@GRANULARITIES
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_scopes_without_gradients(granularity, mode):
    layer, samples = layer_and_samples()
    with mode(), scope(layer, granularity=granularity):
        found = [torch.tanh(layer(x)) for x in samples]
    assert not any(future.value.requires_grad for future in found)
    torch.testing.assert_close(torch.stack([f.value for f in found]), layer(torch.stack(samples)).tanh().detach())


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


class Notes(nn.Module):
    """Notes in a plain attribute what it saw."""

    def forward(self, x_2):
        self.seen = x_2 + 1
        return self.seen * 2


@pytest.mark.filterwarnings("ignore:.* runs singly")
def test_a_trial_leaves_no_trace_in_a_module():
    notes, norm, x = Notes(), nn.BatchNorm1d(2), torch.ones(3, 2)
    with scope(notes, norm):
        kept = notes(x), norm(x)
        assert not hasattr(notes, "seen")
        assert norm.num_batches_tracked == 0
    assert kept[0].tolist() == [[4, 4]] * 3
    assert norm.num_batches_tracked == 1


@pytest.mark.filterwarnings("ignore:.* runs singly")
def test_batch_norm_in_training_runs_singly_before_and_after_a_value_is_read():
    torch.manual_seed(0)
    samples, alone, batched = torch.randn(6, 5, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    expected = [alone(x) for x in samples]
    with scope(batched):
        found = [batched(x) for x in samples[:4]]
        found[0].sum().item()
        found += [batched(x) for x in samples[4:]]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    torch.testing.assert_close(list(batched.buffers()), list(alone.buffers()))


@pytest.mark.filterwarnings("ignore:.* runs singly")
@pytest.mark.parametrize("wrapped", [lambda norm: norm.forward, lambda norm: lambda x: norm(x)])
def test_a_wrapped_function_follows_the_modules_that_it_calls(wrapped):
    samples, alone, ours = list(torch.randn(4, 3, 2)), nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    for training, how in ((True, "singly"), (False, "batched by vmap"), (True, "singly")):
        expected = torch.stack([alone.train(training)(x) for x in samples])
        with scope() as batch:
            function = batch.wrap(wrapped(ours.train(training)))
            found = [function(x) for x in samples]
        torch.testing.assert_close(torch.stack(found), expected)
        torch.testing.assert_close(ours.running_mean, alone.running_mean)
        assert [op.how for op in batch.report().ops] == [how]


@GRANULARITIES
def test_hooks_see_one_sample_and_count_as_long_as_they_are_there(granularity):
    layer, samples = layer_and_samples()
    layer = nn.Sequential(layer, nn.Tanh())
    assert_equal_to_plain(layer, samples, granularity=granularity)
    for part in (layer, layer[1]):
        handle = part.register_forward_hook(lambda module, args, output: output / output.norm())
        assert_equal_to_plain(layer, samples, granularity=granularity)
        handle.remove()
    layer[0].forward = lambda x, first=layer[0]: functional.linear(x, first.weight) / x.norm()
    assert_equal_to_plain(layer, samples, granularity=granularity)


class Checkpointed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False).tanh()


@pytest.mark.filterwarnings("ignore:.* runs singly")
@GRANULARITIES
def test_checkpoints_within_a_module_keep_its_gradients(granularity):
    layer, samples = layer_and_samples()
    module = Checkpointed(layer)
    torch.stack([module(x) for x in samples]).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with scope(module, granularity=granularity) as batch:
        found = [module(x) for x in samples]
    torch.stack(found).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    for op in batch.report().ops:
        assert op.how == "batched" if granularity == "op" else 'checkpoint does; granularity="op" batches' in op.reason


@pytest.mark.filterwarnings("ignore:.* runs singly")
@GRANULARITIES
def test_wrapped_functions_with_gradients_of_their_own_keep_them(granularity):
    layer, samples = layer_and_samples()
    torch.stack([Twice.apply(layer(x)) for x in samples]).sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with scope(layer, granularity=granularity) as batch:
        twice = batch.wrap(Twice.apply)
        found = [twice(layer(x)) for x in samples]
    torch.stack(found).sum().backward()
    torch.testing.assert_close(layer.weight.grad, expected)
    assert {op.name: op.how for op in batch.report().ops}["Twice.apply"] == "singly"


def test_a_step_of_the_optimizer_between_calls_counts_for_those_after_it():
    layer, x = nn.Linear(3, 1), torch.ones(3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with scope(layer):
        first = layer(x)
        first.value.backward()
        optimizer.step()
        second = layer(x)
    torch.testing.assert_close(second.value, first.value - 0.5 * 4)


def test_a_scope_within_a_scope_takes_the_outer_ones_futures():
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
    together, found = threading.Barrier(3), {}

    def work(which, opened):
        with opened as batch:
            kept = []
            for x in samples:
                together.wait(timeout=30)
                kept.append(layer(layer(x)))
        found[which] = kept, batch.report().nodes if which else None

    threads = [threading.Thread(target=work, args=(n, scope(layer) if n else nullcontext())) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(found[n][0][0]) for n in range(3)] == [torch.Tensor, Future, Future]
    assert [found[n][1] for n in range(3)] == [None, 12, 12]
    torch.testing.assert_close(torch.stack(found[1][0]), torch.stack(found[0][0]))


def test_a_future_behaves_as_its_tensor():
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
def test_modules_are_freed(granularity):
    module, x = Cell(), [torch.ones(3)]
    dead = weakref.ref(module)
    with scope(module, granularity=granularity) as batch:
        kept = module(*x)
    del module, batch
    gc.collect()
    assert dead() is None
    assert kept[0].shape == (4,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_gpu_are_those_of_one_sample_after_the_other():
    layer, samples = nn.Linear(3, 3).cuda(), torch.randn(4, 3, device="cuda")
    with scope(layer):
        found = [layer(layer(x) + x) for x in samples]
    torch.testing.assert_close(torch.stack(found), torch.stack([layer(layer(x) + x) for x in samples]))


@pytest.mark.parametrize("granularity", ["module", "op"])
def test_modules_with_backward_hooks_run_singly_and_their_hooks_are_called(granularity):
    layer, called = nn.Linear(2, 2).double(), []
    layer.register_full_backward_hook(lambda module, given, received: (called.append(1), (3 * given[0],))[1])
    samples = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    with scope(layer, granularity=granularity) as batch:
        results = [layer(sample) for sample in samples]
    sum(result.value.sum() for result in results).backward()
    assert len(called) == 3
    assert all(sample.grad.allclose(3 * layer.weight.sum(0)) for sample in samples)
    assert "Linear has backward hooks" in str(batch.report())
