"""A task in several processes: each takes a part of every minibatch, and their gradients are averaged by torch's
DistributedDataParallel (DDP), batch norms counting all parts.

Most minibatches leave some of the engine's modules out, and other ones in each process. DDP waits for a gradient of
every weight; its own remedy (`find_unused_parameters`) walks the whole autograd graph at every step to see which will
not come, some tens of thousands of nodes here. Instead, the loss is made to depend on every weight by one node more,
which on the way back gives none of them a gradient. A weight that nothing else uses is then reached at once, without
one, and DDP counts it as a zero. What no process has used is told by a flag for each weight, summed over processes,
and keeps no gradient at all, so that the optimiser leaves it alone as it would in one process.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from iep.datasets import Batch
from iep.distributed import total
from iep.training.sync_norm import synchronize_norms
from iep.training.tasks import Metrics


class Replicas:
    """The networks of a task, equal in all processes and kept so."""

    def __init__(self, task: Any, parameters: Sequence[nn.Parameter]):
        """`parameters` are those that are trained. All processes must make theirs at the same time."""
        norms = dist.new_group()  # of their own: DDP's messages may come between theirs in any order
        for network in task.networks.values():
            synchronize_norms(network, norms)
        self._parameters = parameters
        self._step = DistributedDataParallel(
            _Step(task, parameters), broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self._is_used = torch.zeros(len(parameters), dtype=torch.int32)
        for number, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(partial(self._mark, number))

    def loss(self, batch: Batch) -> tuple[Tensor, Metrics]:
        """As the task's `loss` on this process's part; its gradients come averaged over processes."""
        self._is_used.zero_()
        return self._step(batch)

    def drop_unused(self) -> None:
        """After the way back: take the zero gradients from what no process has used."""
        for parameter, used in zip(self._parameters, total(self._is_used).tolist(), strict=True):
            if not used:
                parameter.grad = None

    def _mark(self, number: int, _: Tensor) -> None:
        self._is_used[number] = 1


class _Step(nn.Module):
    """A task's loss as the forward pass of one module, which is what DDP wraps."""

    def __init__(self, task: Any, parameters: Sequence[nn.Parameter]):
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
