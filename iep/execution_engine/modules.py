"""The modules of Johnson et al. 2017, Inferring and Executing Programs, section 3.2: the set `iep`.

The module of a function is a residual block, or, for two arguments, a projection and a residual block. All values are
maps. The original toolkit runs one example at a time, so that its batch norm normalises one map per call; with the
setting `module_norm=example`, `ExampleNorm` computes the same for calls with the maps of many examples. Two 3x3
convolutions reach two positions in each direction; with `context`, a block also reads the maxima of the whole map, for
example to compare an object with all others (after Hu et al. 2018, Squeeze-and-Excitation Networks, section 3).

Shapes: G rows of a module's call, N images, C channels, H W grid of a map.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.choices import NORMS, SCENES, check_choice
from iep.execution_engine.roles import MAP, Role
from iep.kernels.layers import Conv2d, ConvStep
from iep.programs import SCENE, arity


class ExampleNorm(nn.BatchNorm2d):
    """Batch norm of (G, C, H, W) maps that treats every row as a call of its own.

    In training, each row is normalised by its own mean and variance over H x W (Ulyanov et al. 2016, Instance
    normalization), and the running statistics are updated once for each row, in the order of the rows. In evaluation,
    rows are normalised by the running statistics, as in batch norm (Ioffe & Szegedy 2015). Weights and buffers have the
    same names as those of batch norm.
    """

    momentum: float
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x_GCHW: Tensor) -> Tensor:
        """Return the normalised maps, which in training must have more than one position."""
        if not self.training:
            return super().forward(x_GCHW)
        self._update(x_GCHW.detach())
        # Group norm with groups of one channel: on a CPU, instance_norm has wrong gradients for a single row if the
        # gradient of its output is in channels_last format (PyTorch 2.8 to 2.15).
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


class UnaryModule(nn.Module):
    """A residual block of two 3x3 convolutions, (G, C, H, W) -> (G, C, H, W).

    Args:
        dim: C.
        residual: add the block's input to its output before the last ReLU.
        norm: the class of the norm after each 3x3 convolution, `nn.Identity` for none.
        context: add a projection of the maxima of the first convolution's output to this output, at every position.
    """

    def __init__(self, dim: int, residual: bool, norm: type[nn.Module], context: bool = False):
        super().__init__()
        self.conv1 = Conv2d(dim, dim, kernel_size=3, padding=1)
        self.conv2 = Conv2d(dim, dim, kernel_size=3, padding=1)
        self.bn1, self.bn2 = norm(dim), norm(dim)
        self.context = Conv2d(dim, dim, kernel_size=1) if context else None
        self.residual = residual
        self.conv_steps = None
        if norm is nn.Identity and not context:
            self.conv_steps = (ConvStep("conv1", (0,)), ConvStep("conv2", (1,), residual=0 if residual else None))

    def forward(self, x_GCHW: Tensor) -> Tensor:
        """Convolve the maps twice, and add the input before the last ReLU if `residual` is set, (G, C, H, W)."""
        inner_GCHW = self.bn1(self.conv1(x_GCHW))
        if self.context is not None:
            inner_GCHW = inner_GCHW + self.context(functional.relu(inner_GCHW).amax(dim=(2, 3), keepdim=True))
        inner_GCHW = functional.relu(inner_GCHW)
        inner_GCHW = self.bn2(self.conv2(inner_GCHW))
        return functional.relu(x_GCHW + inner_GCHW if self.residual else inner_GCHW)


class BinaryModule(nn.Module):
    """A projection of two concatenated maps, (G, C, H, W) each, to one, and a residual block on it.

    The arguments are those of the block.
    """

    def __init__(self, dim: int, residual: bool, norm: type[nn.Module], context: bool = False):
        super().__init__()
        self.proj = Conv2d(2 * dim, dim, kernel_size=1)
        self.res_block = UnaryModule(dim, residual, norm, context)
        self.conv_steps = None
        if self.res_block.conv_steps is not None:
            block = (("res_block.conv1", (2,)), ("res_block.conv2", (3,), 2 if residual else None))
            self.conv_steps = (ConvStep("proj", (0, 1)), *(ConvStep(*each) for each in block))

    def forward(self, first_GCHW: Tensor, second_GCHW: Tensor) -> Tensor:
        """Project the concatenated maps to C channels and run the residual block on them, (G, C, H, W)."""
        both = torch.cat([first_GCHW, second_GCHW], dim=1)
        return self.res_block(functional.relu(self.proj(both)))


@dataclass(frozen=True)
class ResidualModules:
    """The set `iep`, which has a residual block for every function.

    With `scene='module'`, `scene` is a unary module on the stem's output (Johnson et al. 2017). With `scene='stem'`, it
    is the stem's output itself (Suarez & Zhu, section 1.2.2).

    Raises:
        ValueError: `norm` is not one of `choices.NORMS`, `scene` is not one of `choices.SCENES`, or `context` is not
            true or false.
    """

    dim: int
    residual: bool
    norm: str
    scene: str
    context: bool = False

    def __post_init__(self) -> None:
        check_choice("module_norm", self.norm, NORMS)
        check_choice("scene", self.scene, SCENES)
        if not isinstance(self.context, bool):
            raise ValueError(f"module_settings.context is {self.context!r}, expected true or false")

    def role(self, token: str) -> Role | None:
        """Return the role of a token, of which all arguments and the result are maps."""
        if token == SCENE:
            return None if self.scene == "stem" else Role((), MAP, reads_stem=True)
        return Role((MAP,) * arity(token), MAP)

    def make(self, token: str) -> nn.Module:
        """Return a new block for the function of a token: binary for two arguments, otherwise unary."""
        norm = ExampleNorm if self.norm == "example" else nn.Identity
        return (BinaryModule if arity(token) == 2 else UnaryModule)(self.dim, self.residual, norm, self.context)

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the stem's output, (N, C, H, W)."""
        return {MAP: stems_NCHW}
