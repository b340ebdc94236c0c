"""Processes of one group: their collectives, and batch norm over all of them."""

import os

import pytest
import torch
from processes import together
from torch import nn
from torch.nn import functional

from iep.runtime import distributed
from iep.training.joined_norms import synchronize_norms


def _exchange() -> tuple:
    rank = distributed.rank()
    values = torch.tensor([rank, 10.0])
    found = (
        distributed.world_size(),
        distributed.is_main(),
        distributed.any_rank(rank == 1),
        distributed.any_rank(False),
        distributed.gather({"rank": rank}),
        distributed.broadcast(f"from {rank}"),
        distributed.total(values).tolist(),
    )
    assert values.tolist() == [rank, 10.0]
    distributed.barrier()
    return found


def test_collectives_exchange_values_between_processes():
    with distributed.joined():
        assert _exchange() == (1, True, False, False, [{"rank": 0}], "from 0", [0.0, 10.0])
    first, second = together(_exchange)
    assert first == (2, True, True, False, [{"rank": 0}, {"rank": 1}], "from 0", [1.0, 20.0])
    assert second == (2, False, True, False, None, "from 0", [1.0, 20.0])


def _end_early() -> None:
    if distributed.rank() == 1:
        os._exit(0)
    distributed.barrier()


def test_a_process_whose_peer_has_ended_says_so():
    with pytest.raises(
        AssertionError, match="process 0 of 2: stopped, probably because another process of the job ended"
    ):
        together(_end_early)


# Batch norm


def _normalized(network: nn.Module, x_BCHW: torch.Tensor, weights_BCHW: torch.Tensor) -> list[torch.Tensor]:
    x_BCHW = x_BCHW.clone().requires_grad_()
    y_BCHW = network(x_BCHW)
    (y_BCHW * weights_BCHW).sum().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    return [y_BCHW.detach(), x_BCHW.grad, *gradients, *(buffer.clone() for buffer in network.buffers())]


def _norm(dtype: torch.dtype, kind: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Sequential(kind(3)), kind(3)).to(dtype)
    for parameter in network.parameters():
        nn.init.normal_(parameter, mean=1.0)
    return network


def _case(dtype: torch.dtype, kind: type[nn.Module] = nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and weights, (B, C, H, W) or (B, C)."""
    draw = torch.Generator().manual_seed(1)
    x_BCHW, weights_BCHW = (torch.randn(7, 3, 4, 2, generator=draw, dtype=dtype) for _ in range(2))
    x_BCHW = x_BCHW * 3 + torch.tensor([100.0, 0.0, -5.0], dtype=dtype)[:, None, None]
    return (x_BCHW, weights_BCHW) if kind is nn.BatchNorm2d else (x_BCHW[:, :, 0, 0], weights_BCHW[:, :, 0, 0])


def _synchronized(dtype: torch.dtype, kind: type[nn.Module]) -> tuple[list[torch.Tensor], list[str], torch.Tensor]:
    network, part = _norm(dtype, kind), (slice(0, 5), slice(5, 7))[distributed.rank()]
    names = list(network.state_dict())
    synchronize_norms(network)
    assert list(network.state_dict()) == names
    results = _normalized(network, *(values[part] for values in _case(dtype, kind)))
    return results, names, network.eval()(_case(dtype, kind)[0]).detach()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
def test_batch_norm_over_two_processes_is_that_over_the_whole_batch(dtype: torch.dtype, tolerance: float, kind):
    network = _norm(dtype, kind)
    whole = _normalized(network, *_case(dtype, kind))
    (first, names, tested), (second, _, _) = together(_synchronized, dtype, kind)
    close = {"rtol": tolerance, "atol": tolerance}
    for place in (0, 1):  # values and their gradients
        torch.testing.assert_close(torch.cat([first[place], second[place]]), whole[place], **close)
    for place in range(2, 6):  # gradients of weights
        torch.testing.assert_close(first[place] + second[place], whole[place], **close)
    for place in range(6, len(whole)):  # running statistics
        torch.testing.assert_close(first[place], whole[place], **close)
        assert torch.equal(first[place], second[place])
    assert len(names) == len(whole) - 2
    torch.testing.assert_close(tested, network.eval()(_case(dtype, kind)[0]), **close)


def test_batch_norm_without_the_group_is_torchs_own():
    x_BCHW, _ = _case(torch.float32)
    norm = _norm(torch.float32)
    expected = functional.batch_norm(x_BCHW, None, None, norm[0][0].weight, norm[0][0].bias, training=True)
    torch.testing.assert_close(norm[0](x_BCHW), expected)
