"""The modules of Johnson et al. 2017, Inferring and Executing Programs, section 3.2: the set `iep`.

The module of a function is a residual block, or, for two arguments, a projection and a residual block. All values are
maps.

Shapes: G rows of a module's call, N images, C H W feature maps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.choices import SCENES, check_choice
from iep.execution_engine.norms import make_norm
from iep.execution_engine.roles import MAP, Role
from iep.programs import SCENE, arity


class UnaryModule(nn.Module):
    """Residual block of two 3x3 convolutions: (G, C, H, W) -> (G, C, H, W).

    Args:
        dim: C.
        residual: add the block's input to its output before the last ReLU.
        norm: a name of `choices.NORMS`, the norm after each convolution.
    """

    def __init__(self, dim: int, residual: bool, norm: str):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.bn1, self.bn2 = make_norm(norm, dim), make_norm(norm, dim)
        self.residual = residual

    def forward(self, x_GCHW: Tensor) -> Tensor:
        """Return the block's output."""
        inner_GCHW = self.conv1(x_GCHW)
        inner_GCHW = functional.relu(inner_GCHW if self.bn1 is None else self.bn1(inner_GCHW))
        inner_GCHW = self.conv2(inner_GCHW)
        inner_GCHW = inner_GCHW if self.bn2 is None else self.bn2(inner_GCHW)
        return functional.relu(x_GCHW + inner_GCHW if self.residual else inner_GCHW)


class BinaryModule(nn.Module):
    """Two maps (G, C, H, W), in order, concatenated and projected to one, then a residual block.

    The arguments are those of the block.
    """

    def __init__(self, dim: int, residual: bool, norm: str):
        super().__init__()
        self.proj = nn.Conv2d(2 * dim, dim, kernel_size=1)
        self.res_block = UnaryModule(dim, residual, norm)

    def forward(self, first_GCHW: Tensor, second_GCHW: Tensor) -> Tensor:
        """Return the block's output."""
        both = torch.cat([first_GCHW, second_GCHW], dim=1)
        return self.res_block(functional.relu(self.proj(both)))


@dataclass(frozen=True)
class ResidualModules:
    """The set `iep`: a block for every function.

    With `scene='module'`, `scene` is a unary module on the stem's output (Johnson et al. 2017); with `scene='stem'` it
    is that output itself (Suarez & Zhu, section 1.2.2).

    Raises:
        ValueError: `scene` has another value.
    """

    dim: int
    residual: bool
    norm: str
    scene: str

    def __post_init__(self) -> None:
        check_choice("scene", self.scene, SCENES)

    def role(self, token: str) -> Role | None:
        """Return the role of a token: every value is a map."""
        if token == SCENE:
            return None if self.scene == "stem" else Role((), MAP, reads_stem=True)
        return Role((MAP,) * arity(token), MAP)

    def make(self, token: str) -> nn.Module:
        """Return the block of a token."""
        return (BinaryModule if arity(token) == 2 else UnaryModule)(self.dim, self.residual, self.norm)

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the stem's output."""
        return {MAP: stems_NCHW}
