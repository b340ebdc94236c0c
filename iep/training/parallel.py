"""A task in several processes: each takes a part of every minibatch, and DDP averages their gradients.

Most minibatches leave some of the engine's modules unused, and the parts of a minibatch differ in which. PyTorch's
`DistributedDataParallel` finds them: the weights that no process has used keep no gradient, so that the optimiser does
not change them, as in one process.

On GPUs, the batch norms that every process runs once a step are over the batches of all processes (`SyncBatchNorm`).
PyTorch has no such norm for CPUs, where a batch norm is over the process's own part of the minibatch. The norms of an
engine's modules are over each example by itself. Norms that are not synchronised have the mean running statistics of
all processes.
"""

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from iep.data.datasets import Batch
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.runtime.distributed import total, world_size
from iep.runtime.signals import SIGNALS, stop_signal
from iep.training.freezing import is_trained
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
            mine = [count, *(stop_signal() == number for number in SIGNALS)]
            counts, *asking = total(torch.tensor(mine, dtype=torch.float64)).tolist()
            stop = next((number for number, processes in zip(SIGNALS, asking, strict=True) if processes), None)
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


# Batch norm


def check_norms(networks: Mapping[str, nn.Module], device: torch.device, batch_size: int) -> None:
    """Check that the batch norms of the networks can be trained, by several processes together if there are several.

    Raises:
        InputError: batch norm would be over a single question, or on CPUs over a part of the questions of a minibatch.
    """
    layers = [layer for network in networks.values() for layer in network.modules()]
    if not any(isinstance(layer, nn.BatchNorm1d) and is_trained(layer) for layer in layers):
        return
    if batch_size == 1:
        raise InputError("batch_size is 1, but classifier_norm is over the questions of a minibatch; expected more")
    if world_size() > 1 and device.type == "cpu":
        raise InputError(
            "classifier_norm is over all questions of a minibatch, of which each process on a CPU has a part: train "
            "in one process, or without classifier_norm"
        )


def synchronize_norms(networks: Mapping[str, nn.Module]) -> None:
    """Replace the batch norms on GPUs by `SyncBatchNorm`, except those in an engine's modules."""
    for network in networks.values():
        parts = (network.stem, network.classifier) if isinstance(network, ExecutionEngine) else (network,)
        for part in parts:
            if next(network.parameters()).is_cuda:
                nn.SyncBatchNorm.convert_sync_batchnorm(part)


@torch.no_grad()
def average_statistics(networks: Mapping[str, nn.Module]) -> None:
    """Replace the running statistics of norms in training mode that are not synchronised by their means over the
    processes, which must call this together."""
    layers = (layer for network in networks.values() for layer in network.modules())
    norms = [layer for layer in layers if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)) and layer.training]
    statistics = [each for norm in norms for each in (norm.running_mean, norm.running_var) if each is not None]
    if statistics:
        means = total(torch.cat(statistics)) / world_size()
        for each, mean in zip(statistics, means.split([len(each) for each in statistics]), strict=True):
            each.copy_(mean)
