"""Batch norm whose batch is that of all processes together, so that several train as one would (Ioffe & Szegedy 2015).

torch's own SyncBatchNorm does the same on GPUs alone. Weights, running statistics and their names are those of
`BatchNorm1d` and `BatchNorm2d`.

Shapes: B examples of this process, C channels, H W places.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional


def synchronize_norms(network: nn.Module, group: dist.ProcessGroup) -> None:
    """Put a `SyncNorm` over `group` in the place of every `BatchNorm1d` and `BatchNorm2d` within `network`, with its
    weights."""
    for name, child in network.named_children():
        if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d):
            setattr(network, name, SyncNorm(child, group))
        else:
            synchronize_norms(child, group)


class SyncNorm(nn.BatchNorm2d):
    """(B, C, H, W) or (B, C) -> the same, each channel normalised over the batches of all processes while training."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d, group: dist.ProcessGroup):
        """Take the settings and the very parameters and buffers of `norm`, which is affine and keeps statistics."""
        super().__init__(norm.num_features, norm.eps, norm.momentum, device="meta")
        self._parameters, self._buffers = norm._parameters, norm._buffers
        self.training = norm.training
        self.group = group

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Normalise; every process must, at the same time."""
        if x_BCHW.dim() == 2:
            return self(x_BCHW[:, :, None, None])[:, :, 0, 0]
        if not self.training:
            return super().forward(x_BCHW)
        y_BCHW, mean_C, variance_C, count = _Normalize.apply(x_BCHW, self.weight, self.bias, self.eps, self.group)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C, self.momentum)
            self.running_var.lerp_(variance_C * (count / (count - 1)), self.momentum)
        return y_BCHW


class _Normalize(Function):
    """The normalised values, and over all processes the mean, the variance and the number of values of a channel."""

    @staticmethod
    def forward(
        ctx: Any, x_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Normalise (B, C, H, W) by the mean and the biased variance, (C,) each, over all processes' batches."""
        variance_C, mean_C = (
            part.double() for part in torch.var_mean(x_BCHW.to(weight_C.dtype), dim=(0, 2, 3), correction=0)
        )
        values = x_BCHW.numel() // x_BCHW.shape[1]
        # Sums in float64, in which a mean far from zero leaves the variance its digits.
        sums = torch.stack([torch.ones_like(mean_C), mean_C, variance_C + mean_C**2]) * values
        dist.all_reduce(sums, group=group)
        count, mean_C = sums[0, 0].item(), sums[1] / sums[0]
        variance_C = (sums[2] / sums[0] - mean_C**2).clamp(min=0)
        mean_C, variance_C = mean_C.to(weight_C.dtype), variance_C.to(weight_C.dtype)
        ctx.save_for_backward(x_BCHW, weight_C, mean_C, (variance_C + eps).rsqrt())
        ctx.count, ctx.group = count, group
        ctx.mark_non_differentiable(mean_C, variance_C)
        return functional.batch_norm(x_BCHW, mean_C, variance_C, weight_C, bias_C, eps=eps), mean_C, variance_C, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_BCHW: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x_BCHW, weight_C, mean_C, scale_C = ctx.saved_tensors
        precise_BCHW = gradient_BCHW.to(weight_C.dtype)
        bias_gradient_C = precise_BCHW.sum(dim=(0, 2, 3))
        weight_gradient_C = ((precise_BCHW * x_BCHW).sum(dim=(0, 2, 3)) - bias_gradient_C * mean_C) * scale_C
        sums = torch.stack([bias_gradient_C, weight_gradient_C])
        dist.all_reduce(sums, group=ctx.group)
        # (dy - mean(dy) - x_hat mean(dy x_hat)) w / std, as one multiple of dy, one of x and a constant a channel.
        factor_C = weight_C * scale_C
        slope_C = -factor_C * scale_C * sums[1] / ctx.count
        constant_C = -factor_C * sums[0] / ctx.count - slope_C * mean_C
        factor, slope, constant = (part[:, None, None] for part in (factor_C, slope_C, constant_C))
        x_gradient_BCHW = (precise_BCHW * factor).add_(x_BCHW * slope).add_(constant)
        return x_gradient_BCHW.to(x_BCHW.dtype), weight_gradient_C, bias_gradient_C, None, None
