"""Batch norm of a module's calls: over all rows of a call, or over each row by itself.

The original toolkit runs one example at a time, so that the batch norm of its modules normalises one map per call. A
batched call has the maps of many examples. `ExampleNorm` computes the same for any batching. The setting `module_norm`
selects the norm.

Shapes: G rows of a call, C channels, H W places.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.choices import NORMS, check_choice


class ExampleNorm(nn.BatchNorm2d):
    """(G, C, H, W) -> the same, normalised as if every row were a call of its own.

    In training each row is normalised by its own mean and variance over H x W (Ulyanov et al. 2016, Instance
    normalization), and the running statistics are updated once for each row, in the rows' order. In evaluation rows are
    normalised by the running statistics, as in batch norm (Ioffe & Szegedy 2015). Weights and buffers are those of
    batch norm and have the same names.
    """

    def forward(self, x_GCHW: Tensor) -> Tensor:
        """Return the normalised maps.

        Raises:
            ValueError: the maps have a single place, in training.
        """
        if not self.training:
            return super().forward(x_GCHW)
        if x_GCHW.shape[2:].numel() == 1:
            raise ValueError(f"maps of a single place, {tuple(x_GCHW.shape)}, cannot be normalised each by itself")
        self._update(x_GCHW.detach())
        # Groups of one channel. On a CPU instance_norm has wrong gradients for a single row where its output's gradient
        # is channels last (PyTorch 2.8 to 2.15).
        return functional.group_norm(x_GCHW, self.num_features, self.weight, self.bias, self.eps)

    @torch.no_grad()
    def _update(self, x_GCHW: Tensor) -> None:
        variance_GC, mean_GC = torch.var_mean(x_GCHW.to(self.running_mean.dtype), dim=(2, 3))
        rows = len(x_GCHW)
        later_G = torch.arange(rows - 1, -1, -1, device=x_GCHW.device, dtype=mean_GC.dtype)
        share_G1 = (self.momentum * (1 - self.momentum) ** later_G)[:, None]
        kept = (1 - self.momentum) ** rows
        # Autocast would compute a matrix product in bfloat16.
        self.running_mean.mul_(kept).add_((share_G1 * mean_GC).sum(0))
        self.running_var.mul_(kept).add_((share_G1 * variance_GC).sum(0))
        self.num_batches_tracked += rows


def make_norm(kind: str, channels: int) -> nn.Module | None:
    """Return a norm of `NORMS` for maps of so many channels; None for 'none'.

    Raises:
        ValueError: the kind is unknown.
    """
    check_choice("module_norm", kind, NORMS)
    return {"none": lambda _: None, "batch": nn.BatchNorm2d, "example": ExampleNorm}[kind](channels)
