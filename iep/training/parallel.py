"""A task in several processes: each takes a part of every minibatch, and their gradients are summed.

Most minibatches leave some of the engine's modules unused, and the parts of a minibatch differ in which. One flag for
each weight, summed over the processes, tells which weights any process has used. Their gradients are summed as one flat
tensor, with zeros for a process that has none. The other weights have no gradient at all, so that the optimiser does
not change them, as in one process. Batch norms are over all parts (`joined_norms.py`).
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from iep.data.datasets import Batch
from iep.runtime.distributed import total, world_size
from iep.runtime.signals import SIGNALS, Stopped, asked
from iep.training.joined_norms import JoinedStatistics, parts_that_all_call, synchronize_norms
from iep.training.tasks import Metrics, Task


class Agreement(NamedTuple):
    """The values of a step that all processes know."""

    loss: float
    """The mean loss over the whole minibatch."""
    weight: float
    """The factor of this process's loss that makes the mean over the processes the loss of the whole minibatch."""
    stop: signal.Signals | None
    """The signal that has asked one of the processes to stop, or None."""


class Replicas:
    """The networks of a task, kept equal in all processes; a single process exchanges nothing."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]):
        """Copy the trained `parameters` of the first process to all, which must call this together."""
        self._task, self._parameters = task, parameters
        if world_size() == 1:
            return
        _exchange([parameter.detach() for parameter in parameters], lambda flat: dist.broadcast(flat, 0))
        if task.config.asynchronous:  # a process runs its own parts, each on whole instances
            return
        for network in task.networks.values():
            for part in parts_that_all_call(network):
                synchronize_norms(part)
        self._statistics = JoinedStatistics(list(task.networks.values()))

    def backward(self, batch: Batch, loss: Tensor) -> Agreement:
        """Compute the gradients of the whole minibatch's loss, which are None for weights that no process has used.

        The running statistics of the modules' norms are joined as well.

        Args:
            batch: this process's part of the minibatch.
            loss: the mean loss of that part.
        """
        # The loss is read after the backward pass is queued, because a GPU would otherwise wait for the host.
        if world_size() == 1:
            loss.backward()
            return Agreement(loss.item(), 1.0, None)
        count = self._task.count(batch)
        counts, *stops = total(torch.tensor([count, *_stops()], dtype=torch.float64)).tolist()
        if loss.requires_grad:  # this process's part of the minibatch may use no trained weight
            (loss * (count / counts)).backward()
        is_used = [parameter.grad is not None for parameter in self._parameters]
        loss_sum, *used = total(torch.tensor([loss.item() * count, *is_used], dtype=torch.float64)).tolist()
        trained = [parameter for parameter, processes in zip(self._parameters, used, strict=True) if processes]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _exchange([parameter.grad for parameter in trained], dist.all_reduce)
        self._statistics.join()
        return Agreement(loss_sum / counts, count * world_size() / counts, _first(stops))

    def mean(self, metrics: Metrics, weight: float) -> dict[str, float]:
        """Return the metrics of the whole minibatch."""
        values = torch.tensor([value.item() for value in metrics.values()], dtype=torch.float64)
        return dict(zip(metrics, (total(values * weight) / world_size()).tolist(), strict=True))


def in_step(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield this process's `batches`, of which some processes have one more than others.

    Raises:
        Stopped: a signal has asked one of the processes to stop; raised in all of them at the same batch.
    """
    if world_size() == 1:
        yield from batches
        return
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        continues, *stops = total(torch.tensor([batch is not None, *_stops()], dtype=torch.int64)).tolist()
        if (stop := _first(stops)) is not None:
            raise Stopped(stop)
        if not continues:
            return
        if batch is not None:
            yield batch


def _stops() -> list[bool]:
    """Return for each signal whether it has asked this process to stop."""
    return [asked() == number for number in SIGNALS]


def _first(stops: Sequence[float]) -> signal.Signals | None:
    """Return the first of the signals that have asked some process to stop."""
    return next((number for number, asking in zip(SIGNALS, stops, strict=True) if asking), None)


def _exchange(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Apply a collective operation to all tensors at once, in place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    collective(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
