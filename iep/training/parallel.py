"""A task in several processes: each takes a part of every minibatch, and DDP averages their gradients.

Most minibatches leave some of the engine's modules unused, and the parts of a minibatch differ in which. PyTorch's
`DistributedDataParallel` finds them: the weights that no process has used keep no gradient, so that the optimiser does
not change them, as in one process.
"""

import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from iep.data.datasets import Batch
from iep.runtime.distributed import total, world_size
from iep.runtime.signals import SIGNALS, Stopped, stop_signal
from iep.training.batch_norm import average_statistics, synchronize_norms
from iep.training.tasks import Metrics, Task


class Agreement(NamedTuple):
    """The values of a step that all processes know."""

    loss: float
    """The mean loss over the whole minibatch."""
    metrics: dict[str, float]
    """The means of the metrics over the whole minibatch."""
    stop: signal.Signals | None
    """The signal that has asked one of the processes to stop, or None."""


class Replicas:
    """The networks of a task, kept equal in all processes; a single process exchanges nothing."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]):
        """Copy the `parameters` of the first process to all, which must call this together."""
        self._task = task
        self.loss = task.loss
        """Returns the loss and the metrics of this process's part of a minibatch, as `Task.loss` does."""
        if world_size() == 1:
            return
        synchronize_norms(task.networks)
        self.loss = DistributedDataParallel(_Loss(task, parameters), find_unused_parameters=True)

    def backward(self, batch: Batch, loss: Tensor, metrics: Metrics) -> Agreement:
        """Compute the gradients of the whole minibatch's loss, which are None for weights that no process has used.

        Args:
            batch: this process's part of the minibatch.
            loss: the mean loss of that part, which `loss` has returned.
            metrics: the metrics of that part.
        """
        means, stop = torch.stack([loss.detach(), *metrics.values()]), None
        # The values are read after the backward pass is queued, because a GPU would otherwise wait for the host.
        if world_size() == 1:
            loss.backward()
            values = means.tolist()
        else:
            count = self._task.count(batch)
            counts, *stops = total(torch.tensor([count, *_stops()], dtype=torch.float64)).tolist()
            stop = _first(stops)
            (loss * (count * world_size() / counts)).backward()
            average_statistics(self._task.networks)
            values = (total(means.cpu().double() * count) / counts).tolist()
        return Agreement(values[0], dict(zip(metrics, values[1:], strict=True)), stop)


class _Loss(nn.Module):
    """The loss of a task as a module that has the trained parameters, and no buffers, which DDP would broadcast."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.task, self.trained = task, nn.ParameterList(parameters)
        self.always_used = nn.Parameter(torch.zeros((), device=parameters[0].device))
        """With this, a process whose part of a minibatch uses no trained weight has a backward pass, too."""
        self.never_used = nn.Parameter(torch.zeros((), device=parameters[0].device))
        """DDP warns of minibatches that use all weights."""

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = self.task.loss(batch)
        return loss + 0 * self.always_used, metrics


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
    return [stop_signal() == number for number in SIGNALS]


def _first(stops: Sequence[float]) -> signal.Signals | None:
    """Return the first of the signals that have asked some process to stop."""
    return next((number for number, asking in zip(SIGNALS, stops, strict=True) if asking), None)
