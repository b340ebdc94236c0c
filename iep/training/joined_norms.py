"""Batch norm in training with several processes, and in an engine's modules.

A network that all processes call once a step gets `SyncNorm`s, which normalise over the batches of all processes
together, so that several processes train as one would (Ioffe & Szegedy 2015). PyTorch's SyncBatchNorm needs GPUs.

The norms of an engine's modules cannot be synchronised in this way, because each process calls a module as often as its
own schedule says. `ExampleNorm` normalises each row by itself, so that only its running statistics have to be joined.
Batch norm over a call's rows is an error in several processes, and gives a warning in one process that batches calls.

Shapes: B examples of this process, C channels, H W positions; P processes, N norms, S running statistics of all norms
side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.modules import ExampleNorm
from iep.runtime.distributed import rank, total, world_size
from iep.training.freezing import is_trained


def synchronize_norms(network: nn.Module) -> None:
    """Replace every `BatchNorm1d` and `BatchNorm2d` within `network` by a `SyncNorm` with its weights."""
    for name, child in network.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d):
            setattr(network, name, SyncNorm(child))
        else:
            synchronize_norms(child)


class SyncNorm(nn.BatchNorm2d):
    """Batch norm of (B, C, H, W) or (B, C) values that, in training, is over the batches of all processes."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d):
        """Take over the settings, parameters and buffers of `norm`, which is affine and keeps running statistics."""
        super().__init__(norm.num_features, norm.eps, norm.momentum, device="meta")
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self.training = norm.training

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the normalised values; in training, all processes must call this together."""
        if x_BCHW.dim() == 2:
            return self(x_BCHW[:, :, None, None])[:, :, 0, 0]
        if not self.training:
            return super().forward(x_BCHW)
        variance_C, mean_C = torch.var_mean(x_BCHW.to(self.weight.dtype), dim=(0, 2, 3), correction=0)
        # In float64, the variance keeps its digits where the mean is far from zero.
        variance_C, mean_C = variance_C.double(), mean_C.double()
        sums = torch.stack([torch.ones_like(mean_C), mean_C, variance_C + mean_C**2])
        counts_C, sums_C, squares_C = _Total.apply(sums * (x_BCHW.numel() // self.num_features))
        mean_C = sums_C / counts_C
        variance_C = (squares_C / counts_C - mean_C**2).clamp(min=0)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C.to(self.running_mean.dtype), self.momentum)
            unbiased_C = variance_C * (counts_C / (counts_C - 1))
            self.running_var.lerp_(unbiased_C.to(self.running_var.dtype), self.momentum)
        scale_C = self.weight * (variance_C + self.eps).rsqrt()
        mean_C11, scale_C11 = (part.to(self.weight.dtype)[:, None, None] for part in (mean_C, scale_C))
        return ((x_BCHW - mean_C11) * scale_C11 + self.bias[:, None, None]).to(x_BCHW.dtype)


class _Total(Function):
    """The sum over all processes; its gradient is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


def parts_that_all_call(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts that every process calls once a step: a whole network, or an engine's stem and classifier."""
    yield from (network.stem, network.classifier) if isinstance(network, ExecutionEngine) else (network,)


def check_module_norm(networks: Mapping[str, nn.Module], batching: str, sharing: bool | None) -> str | None:
    """Return a warning if an engine's batch norm is over several examples, or None.

    Raises:
        InputError: an engine with batch norm in its modules is trained in several processes.
    """
    engines = [network for network in networks.values() if isinstance(network, ExecutionEngine)]
    if not any(is_trained(norm) for engine in engines for norm in _module_norms(engine, nn.BatchNorm2d)):
        return None
    if world_size() > 1:
        raise InputError(
            "engine.module_norm=batch normalises over the examples of a call, and no process sees all of them: train "
            "in one process, or with engine.module_norm=example"
        )
    if batching == "vanilla" and not sharing:
        return None
    return (
        "engine.module_norm=batch normalises over all examples of a call, not over one as the original toolkit does: "
        "engine.module_norm=example is exact, and so is --batching vanilla --no-sharing"
    )


class JoinedStatistics:
    """The running statistics of `ExampleNorm`s, kept equal in all processes.

    They are the statistics of one process that has seen the rows of all processes in the order of the ranks.
    """

    def __init__(self, networks: Sequence[nn.Module]):
        """Take the norms of `networks`, which are equal in all processes at this time."""
        self._norms = [norm for network in networks for norm in _module_norms(network, ExampleNorm)]
        self._remember()

    @torch.no_grad()
    def join(self) -> None:
        """Join the statistics after a step; all processes must call this together."""
        if not self._norms:
            return
        rows_PN = torch.zeros(world_size(), len(self._norms), dtype=torch.float64)
        rows_PN[rank()] = self._rows() - self._rows_before
        rows_PN = total(rows_PN)
        keeps_N = torch.tensor([1 - norm.momentum for norm in self._norms], dtype=torch.float64)
        sizes_N = torch.tensor([2 * norm.num_features for norm in self._norms])

        def kept(rows_N: Tensor) -> Tensor:
            """Return (S,) the share of each statistic that is left after (N,) further rows of its norm."""
            return (keeps_N**rows_N).repeat_interleave(sizes_N)

        added_S = self._statistics() - self._before * kept(rows_PN[rank()])
        joined_S = total(added_S * kept(rows_PN[rank() + 1 :].sum(0))) + self._before * kept(rows_PN.sum(0))
        rows_N = self._rows_before + rows_PN.sum(0)
        for norm, values, count in zip(self._norms, joined_S.split(sizes_N.tolist()), rows_N.tolist(), strict=True):
            norm.running_mean.copy_(values[: norm.num_features])
            norm.running_var.copy_(values[norm.num_features :])
            norm.num_batches_tracked.fill_(int(count))
        self._remember()

    def _remember(self) -> None:
        if self._norms:
            self._before, self._rows_before = self._statistics(), self._rows()

    def _statistics(self) -> Tensor:
        """Return (S,) the means and then the variances of each norm."""
        return (
            torch.cat([part for norm in self._norms for part in (norm.running_mean, norm.running_var)]).double().cpu()
        )

    def _rows(self) -> Tensor:
        """Return (N,) the number of rows that each norm has seen."""
        return torch.stack([norm.num_batches_tracked for norm in self._norms]).double().cpu()


def _module_norms(network: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """Return the norms of exactly this kind in an engine's modules; another network has none."""
    if not isinstance(network, ExecutionEngine):
        return []
    modules = [getattr(network, part) for part in network.parts[1:-1]]
    return [layer for module in modules for layer in module.modules() if type(layer) is kind]
