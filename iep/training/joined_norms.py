"""Batch norm in training: over all processes' examples as one batch, and in an engine's modules.

A network that all processes call once a step gets `SyncNorm`s, which normalise by the batch of all processes together,
so that several train as one would (Ioffe & Szegedy 2015). torch's own SyncBatchNorm does the same on GPUs alone.
Weights, running statistics and their names are those of `BatchNorm1d` and `BatchNorm2d`.

An engine's module is called by some processes and not by others, and by each as often as its schedule says, so that its
norms cannot be synchronised so. `ExampleNorm` looks at each row by itself and needs no more than its running statistics
joined; batch norm over a call's rows is refused in several processes, and said to be another thing than one example at
a time.

Shapes: B examples of this process, C channels, H W places; P processes, N norms, S running statistics of all norms side
by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.norms import ExampleNorm
from iep.runtime.distributed import rank, total, world_size
from iep.training.freezing import is_trained


def synchronize_norms(network: nn.Module) -> None:
    """Put a `SyncNorm` in the place of every `BatchNorm1d` and `BatchNorm2d` within `network`, with its weights."""
    for name, child in network.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d):
            setattr(network, name, SyncNorm(child))
        else:
            synchronize_norms(child)


class SyncNorm(nn.BatchNorm2d):
    """(B, C, H, W) or (B, C) -> the same, each channel normalised over the batches of all processes while training."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d):
        """Take the settings and the very parameters and buffers of `norm`, which is affine and keeps statistics."""
        super().__init__(norm.num_features, norm.eps, norm.momentum, device="meta")
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self.training = norm.training

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise; every process must, at the same time."""
        if x_BCHW.dim() == 2:
            return self(x_BCHW[:, :, None, None])[:, :, 0, 0]
        if not self.training:
            return super().forward(x_BCHW)
        variance_C, mean_C = torch.var_mean(x_BCHW.to(self.weight.dtype), dim=(0, 2, 3), correction=0)
        # Sums in float64, in which a mean far from zero leaves the variance its digits.
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
    """The sum over all processes, through which each of them gets the gradients of all."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return total(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return total(gradient)


def parts_that_all_call(network: nn.Module) -> Iterator[nn.Module]:
    """What every process calls once a step: a network, or of an engine its stem and classifier."""
    yield from (network.stem, network.classifier) if isinstance(network, ExecutionEngine) else (network,)


def check_module_norm(networks: Mapping[str, nn.Module], batching: str, sharing: bool | None) -> str | None:
    """One line of warning where an engine's batch norm is batched, else None.

    Raises:
        InputError: an engine with batch norm in its modules is trained in several processes.
    """
    engines = [network for network in networks.values() if isinstance(network, ExecutionEngine)]
    if not any(is_trained(norm) for engine in engines for norm in _module_norms(engine, nn.BatchNorm2d)):
        return None
    if world_size() > 1:
        raise InputError(
            "engine.module_norm batch normalises over the examples of a call, and no process sees all of them: train "
            "in one process, or with engine.module_norm=example"
        )
    if batching == "vanilla" and not sharing:
        return None
    return (
        "engine.module_norm batch normalises over all examples of a call, not over one as the original toolkit does: "
        "engine.module_norm=example is exact, and so is --batching vanilla --no-sharing"
    )


class JoinedStatistics:
    """The running statistics of `ExampleNorm`s, kept equal in all processes: those of one process that has seen the
    rows of all, the first process's first."""

    def __init__(self, networks: Sequence[nn.Module]):
        """The norms of `networks`, which are equal in all processes now."""
        self._norms = [norm for network in networks for norm in _module_norms(network, ExampleNorm)]
        self._remember()

    @torch.no_grad()
    def join(self) -> None:
        """After a step: put what all processes' rows have made of them in each one's place; all must ask."""
        if not self._norms:
            return
        rows_PN = torch.zeros(world_size(), len(self._norms), dtype=torch.float64)
        rows_PN[rank()] = self._rows() - self._rows_before
        rows_PN = total(rows_PN)
        keeps_N = torch.tensor([1 - norm.momentum for norm in self._norms], dtype=torch.float64)
        sizes_N = torch.tensor([2 * norm.num_features for norm in self._norms])

        def kept(rows_N: Tensor) -> Tensor:
            """(S,) the share of a statistic that is left after so many rows of its norm."""
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
        """(S,) of each norm, its means and its variances."""
        return (
            torch.cat([part for norm in self._norms for part in (norm.running_mean, norm.running_var)]).double().cpu()
        )

    def _rows(self) -> Tensor:
        """(N,) how many rows each norm has seen."""
        return torch.stack([norm.num_batches_tracked for norm in self._norms]).double().cpu()


def _module_norms(network: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    """The norms of exactly that kind in an engine's modules; none in another network."""
    if not isinstance(network, ExecutionEngine):
        return []
    modules = [getattr(network, part) for part in network.parts[1:-1]]
    return [layer for module in modules for layer in module.modules() if type(layer) is kind]
