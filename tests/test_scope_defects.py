"""The lazy scope where what is found out about a call could be wrong: each case equals plain code for one sample."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from iep.batching import scope


def samples_of(count=4, width=2):
    torch.manual_seed(0)
    return list(torch.randn(count, width))


def values_of(futures):
    return torch.stack([future.value for future in futures])


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
