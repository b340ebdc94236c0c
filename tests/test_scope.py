"""The lazy scope against the same code run sample by sample."""

import warnings

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from iep.dynamic import Future, scope
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.trees import sick_like


class Cell(nn.Module):
    """Any number of states, each a vector and integers -> a new one. Its code is wrong for a batch."""

    def __init__(self):
        super().__init__()
        self.new, self.old = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x_3, states=(), scale=1.0):
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
        """A sample: for each vertex its input and the earlier vertices that it takes; vertices may be shared."""
        states = []
        for x_3, takes in sample:
            states.append(self.cell(x_3, [states[n] for n in takes], scale=1.0 + len(takes)))
        h_4, count = states[-1]
        return (self.head(h_4) * 2.0).tanh().sum() / count


@st.composite
def batches(draw):
    """Up to five graphs of up to six vertices, which take up to three earlier ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    batch = []
    for _ in range(draw(st.integers(0, 5))):
        sample = []
        for n in range(draw(st.integers(1, 6))):
            takes = draw(st.lists(st.integers(0, n - 1), max_size=3)) if n else []
            sample.append((torch.randn(3, generator=generator, dtype=torch.float64), takes))
        batch.append(sample)
    return batch


def outputs_and_gradients(network, batch, opened=None):
    """Every sample's output, and the gradients of an uneven sum of them."""
    network.zero_grad(set_to_none=True)
    inputs = [[(x.clone().requires_grad_(), takes) for x, takes in sample] for sample in batch]
    if opened is None:
        outputs = [network.one(sample) for sample in inputs]
    else:
        with opened:
            outputs = [network.one(sample) for sample in inputs]
        outputs = [output.value for output in outputs]
    found = {f"output {n}": output.detach() for n, output in enumerate(outputs)}
    if outputs:
        sum((n + 1) * output for n, output in enumerate(outputs)).backward()
    found |= {f"input {n} {m}": x.grad for n, sample in enumerate(inputs) for m, (x, _) in enumerate(sample)}
    return found | {name: parameter.grad for name, parameter in network.named_parameters()}


@settings(quick, max_examples=25)
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
    expected = outputs_and_gradients(network, batch)
    found = outputs_and_gradients(network, batch, opened)
    for name in found:  # what nothing leads to has no gradient, or one of zeros
        if expected[name] is None and found[name] is not None:
            assert not found[name].any()
            expected[name] = found[name]
        elif found[name] is None and expected[name] is not None:
            assert not expected[name].any()
            expected[name] = None
    assert_same(found, expected, 1e-9)


def test_child_sum_tree_lstms_equal_one_tree_after_the_other():
    torch.manual_seed(0)
    model = ChildSumTreeLSTM(words=20, word_width=6, width=4).double()
    pairs = sick_like(12, 20, np.random.default_rng(0))

    def found(scores):
        model.zero_grad(set_to_none=True)
        (scores * torch.arange(1.0, 6.0)).sum().backward()
        return {"scores": scores.detach()} | {name: p.grad for name, p in model.named_parameters()}

    assert_same(found(model(pairs)), found(torch.stack([model.one(pair) for pair in pairs])), 1e-9)


def test_reading_a_value_runs_only_what_it_needs():
    calls = []
    double = nn.Linear(2, 2)
    with scope(double) as batch:
        first, second = double(torch.ones(2)), double(torch.zeros(2))
        deeper = double(first)
        calls.append(first.sum().item())
        assert batch.report().nodes == 2  # the first call and its sum
        assert second._value is None
    assert batch.report().nodes == 4
    torch.testing.assert_close(deeper.value, double(double(torch.ones(2))))
    assert any("test_scope.py" in why for why in batch.report().flushes)
    assert calls[0] == pytest.approx(double(torch.ones(2)).sum().item(), rel=1e-5)


def test_what_nobody_holds_does_not_run():
    layer = nn.Linear(2, 2)
    with scope(layer) as batch:
        kept = layer(torch.ones(2))
        layer(torch.zeros(2))
    assert batch.report().nodes == 1
    assert kept.value.shape == (2,)


def test_the_report_counts_calls_and_graphs_of_one_shape_reuse_their_plan():
    layer = nn.Linear(3, 3)
    reports = []
    for _ in range(2):
        with scope(layer) as batch:
            kept = [layer(layer(torch.randn(3))) for _ in range(7)]
        reports.append(batch.report())
    assert len(kept) == 7
    (op,) = reports[1].ops
    assert (op.nodes, op.calls, op.largest, op.waits) == (14, 2, 7, 2)
    assert reports[1].batching_ratio == 7
    assert reports[1].plans_reused == 1
    assert "14 nodes in 2 calls" in str(reports[1])


def test_batch_norm_in_training_runs_singly_and_says_so():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def forward(self, x_52):
            return self.norm(x_52)

    torch.manual_seed(0)
    samples = torch.randn(4, 5, 2)
    alone, batched = Normed(), Normed()
    expected = [alone(x) for x in samples]
    with pytest.warns(UserWarning, match="singly.*running statistics"), scope(batched) as batch:
        found = [batched(x) for x in samples]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    torch.testing.assert_close(batched.norm.running_mean, alone.norm.running_mean)
    assert batched.norm.num_batches_tracked == 4
    (op,) = batch.report().ops
    assert op.how == "singly"
    with warnings.catch_warnings(), scope(batched.eval()) as batch:
        warnings.simplefilter("error")
        kept = [batched(x) for x in samples]
    assert len(kept) == 4
    assert batch.report().calls == 1


def test_control_flow_that_depends_on_values_runs_singly_and_says_so():
    class Gate(nn.Module):
        def forward(self, x_2):
            return x_2 * 2 if x_2.sum() > 0 else x_2 - 1

    gate = Gate()
    with pytest.warns(UserWarning, match="depends on values"), scope(gate) as batch:
        found = [gate(torch.tensor([value, value])) for value in (1.0, -1.0)]
    assert torch.stack(found).tolist() == [[2.0, 2.0], [-2.0, -2.0]]
    assert batch.report().ops[0].how == "singly"


def test_dropout_differs_from_row_to_row():
    drop = nn.Dropout(0.5)
    with scope(drop):
        found = [drop(torch.ones(64)) for _ in range(2)]
    first, second = (future.value for future in found)
    assert set(first.tolist()) == {0.0, 2.0}
    assert not torch.equal(first, second)


def test_functions_are_wrapped_and_backward_inside_is_put_off():
    layer = nn.Linear(3, 3).double()
    samples = [torch.randn(3, dtype=torch.float64) for _ in range(4)]
    for x in samples:
        functional.mse_loss(torch.cumsum(layer(x), 0), x).backward()
    expected = layer.weight.grad.clone()
    layer.weight.grad = None
    with scope(layer) as batch:
        total = batch.wrap(lambda y: torch.cumsum(y, 0))
        for x in samples:
            functional.mse_loss(total(layer(x)), x).backward()
        assert layer.weight.grad is None
    torch.testing.assert_close(layer.weight.grad, expected)
    assert batch.report().calls == 3


def test_an_exception_leaves_no_patch_behind():
    original, layer = nn.Module.__call__, nn.Linear(2, 2)
    futures = []

    def fail():
        with scope(layer):
            futures.append(layer(torch.ones(2)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert nn.Module.__call__ is original
    with pytest.raises(ValueError, match="ended with an exception"):
        _ = futures[0].value
    assert isinstance(layer(torch.ones(2)), torch.Tensor)


def test_a_mistake_in_the_sample_code_is_raised_at_its_call():
    layer = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="shape"), scope(layer):
        layer(torch.ones(3))


def test_calls_keep_the_modes_in_which_they_were_recorded():
    layer = nn.Linear(2, 2)
    with scope(layer):
        with torch.no_grad():
            frozen = layer(torch.ones(2))
        trained = layer(torch.ones(2))
        with torch.autocast("cpu", torch.bfloat16):
            low = layer(torch.ones(2))
    assert not frozen.value.requires_grad
    assert trained.value.requires_grad
    assert low.dtype == low.value.dtype == torch.bfloat16


def test_an_empty_scope_does_nothing():
    with scope(nn.Linear(2, 2)) as batch:
        pass
    assert batch.report().nodes == 0


def test_a_future_behaves_as_its_tensor():
    layer = nn.Linear(2, 2)
    with scope(layer):
        future = layer(torch.ones(2))
        assert isinstance(future, Future)
        assert (future.shape, future.dim(), future.size(0), len(future)) == ((2,), 1, 2, 2)
        first, second = future
    torch.testing.assert_close(torch.stack([first, second]), future.value)
    torch.testing.assert_close((1 - future) @ future, (1 - future.value) @ future.value)
    assert future.tolist() == future.value.tolist()


@pytest.mark.parametrize("change", [lambda f: f.add_(1), lambda f: f.__setitem__(0, 1)])
def test_changes_in_place_are_refused(change):
    layer = nn.Linear(2, 2)
    with scope(layer):
        future = layer(torch.ones(2))
        with pytest.raises(ValueError, match="in place"):
            change(future)


def test_an_input_changed_in_place_after_its_call_is_refused():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    futures = []

    def change():
        with scope(layer):
            futures.append(layer(x))
            x.zero_()

    with pytest.raises(ValueError, match="changed in place"):
        change()


@pytest.mark.parametrize("options", [{"granularity": "kernel"}, {"scheduler": "best"}])
def test_unknown_options_are_named(options):
    with pytest.raises(ValueError, match="expected one of"):
        scope(**options)
