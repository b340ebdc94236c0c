"""Processes of one group: what they tell each other, batch norm over all of them, gradients as of one process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import environment, free_port, together
from torch import nn
from torch.nn import functional

from iep.data.ordering import deal, step_numbers, step_seed
from iep.runtime import distributed
from iep.training.joined_norms import synchronize_norms


def test_one_process_is_alone_and_waits_for_nobody():
    with distributed.joined():
        assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
        distributed.barrier()
        assert distributed.any_rank(True)
        assert not distributed.any_rank(False)
        assert distributed.gather("a") == ["a"]
        assert distributed.broadcast("b") == "b"
        assert distributed.total(torch.tensor([1, 2])).tolist() == [1, 2]


def _tell() -> tuple:
    rank = distributed.rank()
    values = torch.tensor([rank, 10.0])
    told = (
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
    return told


def test_processes_tell_each_other_what_they_have():
    first, second = together(_tell)
    assert first == (2, True, True, False, [{"rank": 0}, {"rank": 1}], "from 0", [1.0, 20.0])
    assert second == (2, False, True, False, None, "from 0", [1.0, 20.0])


def _leave_early() -> None:
    if distributed.rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError) as caught:
        distributed.barrier()
    assert distributed._is_lost_peer(caught.value), caught.value


def test_a_process_whose_peer_is_gone_knows_why_it_fails():
    code = "from test_distributed import _leave_early; from processes import _work; import pickle, sys\n"
    code += "class Sender:\n    def send_bytes(self, answer): print(pickle.loads(answer))\n"
    code += "_work(int(sys.argv[1]), 2, int(sys.argv[2]), Sender(), _leave_early, ())"
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port)],
            cwd=Path(__file__).parent,
            env=os.environ | environment(rank, 2, port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=120)[0].splitlines() for worker in workers]
    assert said[0][-1] == "('done', None)"  # gloo may have its own lines before
    assert not any("done" in line or "failed" in line for line in said[1])


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
    synchronize_norms(network, torch.distributed.new_group())
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


# Who gets which examples


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_a_minibatch_is_dealt_out_whole_and_evenly_and_images_stay_together(parts: int, seed: int):
    draw = np.random.default_rng(seed)
    images = draw.integers(0, 40, size=64)
    dealt = deal(images, parts)
    assert len(dealt) == parts
    assert sorted(np.concatenate(dealt).tolist()) == list(range(64))
    assert all((np.diff(part) > 0).all() for part in dealt)
    owners = [{int(images[n]) for n in part} for part in dealt]
    assert sum(map(len, owners)) == len(set().union(*owners))
    most = np.bincount(images).max()
    assert all(abs(len(part) - 64 / parts) <= most for part in dealt)


def test_where_one_image_has_most_questions_they_are_dealt_out_evenly_all_the_same():
    assert [len(part) for part in deal(np.zeros(9, int), 3)] == [3, 3, 3]
    assert [len(part) for part in deal(np.array([0, 1, 1, 1, 1, 1, 1, 1]), 4)] == [2, 2, 2, 2]
    assert [part.tolist() for part in deal(np.array([5, 4, 5]), 3)] == [[0], [2], [1]]


def test_a_minibatch_smaller_than_the_processes_is_refused():
    with pytest.raises(ValueError, match="2 examples for 3 processes"):
        deal(np.array([0, 1]), 3)


def test_chance_is_a_function_of_seed_step_and_process():
    seeds = {step_seed(seed, step, rank) for seed in range(3) for step in range(10) for rank in range(3)}
    assert len(seeds) == 90
    assert step_seed(1, 2, 0) == step_seed(1, 2)
    numbers = step_numbers(1, 2, (4, 5))
    assert numbers.shape == (4, 5)
    assert numbers.dtype == np.float32
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert np.array_equal(numbers, step_numbers(1, 2, (4, 5)))
    assert not np.array_equal(numbers, step_numbers(1, 3, (4, 5)))
    assert not np.array_equal(numbers, step_numbers(2, 2, (4, 5)))
