"""Errors of the lazy scope, and its report: what was batched, what was not, and why."""

import re

import pytest
import torch
from batching_cases import Twice
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from iep.dynamic import scope


class Increments(nn.Module):
    def forward(self, x):
        x += 1
        return x * 2


class Gate(nn.Module):
    """Its control flow depends on values."""

    def forward(self, x_2):
        return x_2 * 2 if x_2.sum() > 0 else x_2 - 1


def iadd(h):
    h += 1


def assign(h):
    h[0] = 1


IN_PLACE = r"in place.*: write it out of place, as a = a \+ b for a \+= b$"
REFUSED = {
    "+=": (iadd, IN_PLACE),
    "an element": (assign, IN_PLACE),
    "a method": (lambda h: h.add_(1), IN_PLACE),
    "inplace=True": (lambda h: functional.relu(h, inplace=True), IN_PLACE),
    "out=": (lambda h: torch.add(h.detach(), 1, out=torch.zeros(2)), IN_PLACE),
    "a tensor by a future": (lambda h: torch.zeros(2).add_(h), IN_PLACE),
    "an argument of a module": (lambda h: Increments()(h), IN_PLACE),
    "backward": (lambda h: h.sum().backward(), "backward of a future inside its scope: call it after the scope"),
    "autograd.grad": (lambda h: torch.autograd.grad(h.sum(), [h]), "grad of a future inside its scope"),
    "register_hook": (lambda h: h.register_hook(print), "register_hook of a future inside its scope"),
    "autograd.Function": (Twice.apply, r"autograd\.Function was given a future.*batch\.wrap\(MyFunction\.apply\)"),
}


@pytest.mark.parametrize("granularity", ["module", "op"])
@pytest.mark.parametrize("what", REFUSED)
def test_changes_in_place_and_functions_that_need_a_computed_tensor_are_errors_of_one_line(what, granularity):
    (use, message), layer, x = REFUSED[what], nn.Linear(2, 2), torch.ones(2)
    with scope(granularity=granularity) as batch:
        h = layer(x)
        with pytest.raises(ValueError, match=message):
            (batch.wrap(use) if "argument" in what else use)(h)
    if what == "autograd.Function":
        with pytest.raises(ValueError, match=message):
            use(h)
    torch.testing.assert_close(h.value, layer(x))
    assert x.tolist() == [1, 1]
    h.sum().backward()
    assert layer.weight.grad is not None


def seen(layer):
    """Return the layer after a scope has observed its first call, so that later scopes record every call."""
    with scope(layer):
        layer(torch.ones(layer.in_features))
    return layer


def halve(layer):
    with torch.no_grad():
        layer.weight.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "granularity"),
    [
        (lambda layer, x: halve(layer), "module"),
        (lambda layer, x: halve(layer), "op"),
        (lambda layer, x: x.zero_(), "module"),
    ],
)
def test_a_tensor_that_is_changed_in_place_before_its_calls_run_is_an_error(change, granularity):
    def record_and_change():
        with scope(layer, granularity=granularity):
            kept.append(layer(x))
            change(layer, x)

    layer, x, kept = seen(nn.Linear(2, 2)), torch.ones(2), []
    with pytest.raises(ValueError, match=r"a tensor of shape \(.*2,?\) was changed in place after a call was"):
        record_and_change()
    with scope(layer, granularity=granularity):
        layer(x).sum().item()
        change(layer, x)  # what was recorded has run


KEPT = []


class Keeps(nn.Module):
    def forward(self, x):
        KEPT.append(x * 2)
        return x


class Fills(nn.Module):
    def forward(self, x, memo):
        memo.append(x * 2)
        return x


class Reads(nn.Module):
    """Reads a global tensor that is made after its calls."""

    def forward(self, x):
        return x + KEPT[-1] if KEPT else x


def toggle(layer, x):
    result = layer(x)
    layer.weight.requires_grad_(not layer.weight.requires_grad)
    return result


@pytest.mark.parametrize(
    ("module", "call", "message"),
    [
        (Keeps(), lambda keeps, x: keeps(x), "Keeps keeps a tensor that it computes"),
        (Reads(), lambda reads, x: reads(x), "a recorded call reads a future that is not one of its arguments"),
        (
            Fills(),
            lambda fills, x: fills(x, []),
            "Fills changes a list or dict of its arguments, which cannot be recorded",
        ),
        (
            nn.Linear(2, 2),
            toggle,
            r"a tensor of shape \(2, 2\) was given another requires_grad after a call was recorded",
        ),
    ],
)
def test_what_a_call_does_besides_its_result_is_recorded_or_an_error_of_one_line(module, call, message):
    def run():
        with scope(module) as batch:
            found = [call(module, torch.ones(2)) for _ in range(4)]
            KEPT.append(batch.wrap(torch.tanh)(found[-1]))

    KEPT.clear()
    with pytest.raises(ValueError, match=f"^{message}.*$"):
        run()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((), {"granularity": "kernel"}, "granularity 'kernel', expected one of module, op"),
        ((torch.tanh,), {}, "is not a module; the scope's wrap records the calls of a function"),
    ],
)
def test_unknown_arguments_are_errors_that_name_the_known_ones(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        scope(*arguments, **options)


METHODS = [(nn.Module, "__call__"), (nn.Module, "__setattr__"), (nn.Module, "__delattr__"), (RemovableHandle, "remove")]


def test_an_exception_in_nested_scopes_restores_everything():
    originals = [vars(owner)[name] for owner, name in METHODS]
    layer, kept = seen(nn.Linear(2, 2)), []

    def fail():
        with scope(layer), scope(layer):
            kept.append(layer(torch.ones(2)))
            kept.append(kept[0] * 2)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [vars(owner)[name] for owner, name in METHODS] == originals
    assert isinstance(layer(torch.ones(2)), torch.Tensor)
    for use in (lambda: kept[0] + 1, lambda: layer(kept[0]), lambda: kept[1].value, lambda: kept[1].sum().backward()):
        with pytest.raises(ValueError, match="ended with an exception"):
            use()


def test_the_report_counts_calls_and_graphs_of_one_shape_reuse_their_plan():
    layer = seen(nn.Linear(3, 3))
    for _ in range(2):
        with scope(layer) as batch:
            kept = [layer(layer(torch.randn(3))) for _ in range(7)]
    assert len(kept) == 7
    report = batch.report()
    (op,) = report.ops
    assert (op.name, op.how, op.nodes, op.calls, op.largest) == ("Linear", "batched", 14, 2, 7)
    assert (report.batching_ratio, report.plans_reused) == (7, 1)
    for line in ("14 nodes in 2 calls, batching ratio 7.0", "ran 1 x: the scope's end", "1 of 1 plans reused"):
        assert line in str(report)


@pytest.mark.parametrize("share", [True, False])
def test_shared_nodes_run_once_unless_they_read_other_results(share):
    layer, x, y = seen(nn.Linear(4, 4)), torch.ones(4), torch.zeros(4)
    with scope(layer, share=share) as batch:
        found = [layer(half) for each in (x, x, y) for half in layer(each).chunk(2) for half in [half.repeat(2)]]
    expected = [layer(half.repeat(2)) for each in (x, x, y) for half in layer(each).chunk(2)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    assert sum(op.nodes for op in batch.report().ops if op.name == "Linear") == (2 + 4 if share else 3 + 6)


class Frequent(nn.Module):
    """A module that calls an embedding whose gradient counts the indices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 2))

    def forward(self, index):
        return functional.embedding(index, self.weight, scale_grad_by_freq=True)


def test_the_report_says_what_was_not_batched_and_why():
    gate, norm, frequent, layer = Gate(), nn.BatchNorm1d(2), Frequent(), seen(nn.Linear(2, 2))
    with scope(gate, norm, frequent, layer) as batch:
        found = [gate(torch.tensor([value, value])) for value in (1.0, -1.0)]
        h = norm(torch.randn(3, 2))
        kept = h, [frequent(torch.tensor(n)) for n in range(2)], torch.nonzero(h), layer(torch.ones(2)).sum().item()
    assert torch.stack(found).tolist() == [[2.0, 2.0], [-2.0, -2.0]]
    assert len(kept) == 4
    report = batch.report()
    assert report.ran_at_once == {
        ("Frequent", "scale_grad_by_freq counts the indices of all samples"): 2,
        ("Gate", "its control flow or a shape depends on values"): 2,
        ("BatchNorm1d", "it changes BatchNorm1d.num_batches_tracked"): 1,
        ("nonzero", "its control flow or a shape depends on values"): 1,
    }
    assert re.search(r"ran 1 x: a value is read at test_scope_report\.py:\d+", str(report))
    assert "nonzero was not recorded and ran at once 1 x: its control flow or a shape" in str(report)


class Step(nn.Module):
    """A module of the user's own around a cell for which vmap has no rule."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(2, 2)

    def forward(self, x, h):
        return torch.tanh(self.cell(x, h))


@pytest.mark.parametrize(("module", "how", "calls"), [(nn.GRUCell(2, 2), "batched", 1), (Step(), "looped by vmap", 4)])
def test_a_report_calls_batched_only_what_runs_as_one_call(module, how, calls):
    for _ in range(2):
        with scope(module) as batch:
            kept = [module(torch.randn(2), torch.zeros(2)) for _ in range(4)]
    (row,) = batch.report().ops
    assert (row.how, row.nodes, row.calls, len(kept)) == (how, 4, calls, 4)
