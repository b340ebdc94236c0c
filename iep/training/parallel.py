"""A task in several processes: each takes a part of every minibatch, and their gradients are averaged by torch's
DistributedDataParallel (DDP), batch norms counting all parts.

Most minibatches leave some of the engine's modules out, and other ones in each process. DDP waits for a gradient of
every weight; its own remedy (`find_unused_parameters`) walks the whole autograd graph at every step to see which will
not come, some tens of thousands of nodes here. Instead, the loss is made to depend on every weight by one node more,
which on the way back gives none of them a gradient. A weight that nothing else uses is then reached at once, without
one, and DDP counts it as a zero. What no process has used is told by a flag for each weight, summed over processes,
and keeps no gradient at all, so that the optimiser leaves it alone as it would in one process.
"""

import signal
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from iep.data.datasets import Batch
from iep.runtime.distributed import total, world_size
from iep.runtime.signals import SIGNALS, Stopped, asked
from iep.training.joined_norms import JoinedStatistics, parts_that_all_call, synchronize_norms
from iep.training.tasks import Metrics, Task


class Agreement(NamedTuple):
    """What the processes know together of a step, once each has its own part's loss."""

    loss: float
    """Over the whole minibatch."""
    weight: float
    """What this process's loss counts for, so that the mean over processes is the loss over the whole minibatch."""
    stop: signal.Signals | None
    """A signal has asked one of them to stop."""


class Replicas:
    """The networks of a task, equal in all processes and kept so. In a process by itself, the task as it is."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]):
        """`parameters` are those that are trained. All processes must make theirs at the same time."""
        self._task, self._parameters = task, parameters
        self._step = task.loss
        if world_size() == 1:
            return
        norms = dist.new_group()  # of their own: DDP's messages may come between theirs in any order
        for network in task.networks.values():
            for part in parts_that_all_call(network):
                synchronize_norms(part, norms)
        self._step = DistributedDataParallel(_Step(task, parameters), gradient_as_bucket_view=True)
        self._statistics = JoinedStatistics(list(task.networks.values()))
        self._is_used = torch.zeros(len(parameters), dtype=torch.int32)
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._mark, number))

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """As the task's `loss`, on this process's part of a minibatch."""
        return self._step(batch)

    def agree(self, batch: Batch, loss: float) -> Agreement:
        """What the processes know together, each of its own `batch` and `loss`."""
        if world_size() == 1:
            return Agreement(loss, 1.0, None)
        count = self._task.count(batch)
        loss_sum, counts, *stops = total(torch.tensor([loss * count, count, *_stops()], dtype=torch.float64)).tolist()
        return Agreement(loss_sum / counts, count * world_size() / counts, _first(stops))

    def backward(self, loss: Tensor, weight: float) -> None:
        """Leave the gradients of the whole minibatch's loss; None for what no process has used. Norms whose rows are
        examples of some processes have seen those of all then."""
        if world_size() == 1:
            loss.backward()
            return
        self._is_used.zero_()
        (loss * weight).backward()
        for parameter, used in zip(self._parameters, total(self._is_used).tolist(), strict=True):
            if not used:
                parameter.grad = None
        self._statistics.join()

    def mean(self, metrics: Metrics, weight: float) -> dict[str, float]:
        """The metrics of the whole minibatch."""
        values = torch.tensor([value.item() for value in metrics.values()], dtype=torch.float64)
        return dict(zip(metrics, (total(values * weight) / world_size()).tolist(), strict=True))

    def _mark(self, number: int, parameter: Tensor) -> None:
        self._is_used[number] = parameter.grad is not None  # DDP has not yet put its zeros there


def in_step(batches: Iterable[Batch]) -> Iterator[Batch]:
    """This process's `batches`, some processes having one more than others.

    Raises:
        Stopped: in all processes at the same time, where a signal has asked one of them to stop.
    """
    if world_size() == 1:
        yield from batches
        return
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        going_on, *stops = total(torch.tensor([batch is not None, *_stops()], dtype=torch.int64)).tolist()
        if (stop := _first(stops)) is not None:
            raise Stopped(stop)
        if not going_on:
            return
        if batch is not None:
            yield batch


def _stops() -> list[bool]:
    """For each signal, has it asked this process to stop?"""
    return [asked() == number for number in SIGNALS]


def _first(stops: Sequence[float]) -> signal.Signals | None:
    """The first of the signals that have asked some process to stop."""
    return next((number for number, asking in zip(SIGNALS, stops, strict=True) if asking), None)


class _Step(nn.Module):
    """A task's loss as the forward pass of one module, which is what DDP wraps."""

    def __init__(self, task: Task, parameters: Sequence[nn.Parameter]):
        super().__init__()
        self.networks = nn.ModuleDict(task.networks)
        self._task, self._trained = task, list(parameters)

    def forward(self, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = self._task.loss(batch)
        return _Reach.apply(loss, *self._trained), metrics


class _Reach(Function):
    """The loss as it is; on the way back every weight is reached, without a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *weights: Tensor) -> Tensor:
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *[None] * (len(ctx.needs_input_grad) - 1)
