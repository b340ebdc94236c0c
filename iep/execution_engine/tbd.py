"""The modules of Transparency by Design: the set `tbd`.

They are those of Mascharka et al. 2018 (Transparency by Design: Closing the Gap Between Performance and
Interpretability in Visual Reasoning, section 3 and table 1). An *attention* has one channel of numbers from 0 to 1. An
*encoding* has as many channels as the features, which are the stem's output. As an attention, `scene` is 1 everywhere.

Shapes: G rows of a call, N images, C H W feature maps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.choices import check_fixed
from iep.execution_engine.roles import ATTENTION, MAP, Role
from iep.kernels.layers import Conv2d
from iep.programs import SCENE
from iep.vocab import SPECIAL_TOKENS

DILATIONS = (1, 2, 4, 8, 1)
"""The dilations of the convolutions of `RelateModule`. Their receptive field is a whole 14x14 grid."""
ATTENTION_BIAS = -2.0
"""The initial bias of attentions, which begin near 0.1: most positions hold no object (Lin et al. 2017, Focal Loss,
section 3.3)."""


def conv3x3(dim: int, dilation: int = 1) -> Conv2d:
    """Return a convolution that keeps the channels and the grid."""
    return Conv2d(dim, dim, kernel_size=3, padding=dilation, dilation=dilation)


class QueryModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an encoding of the attended part."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = conv3x3(dim), conv3x3(dim)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Convolve the attended features twice, (G, C, H, W)."""
        x_GCHW = functional.relu(self.conv1(features_GCHW * attention_G1HW))
        return functional.relu(self.conv2(x_GCHW))


class AttentionModule(QueryModule):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention, for example to the red objects in it."""

    def __init__(self, dim: int):
        super().__init__(dim)
        self.conv3 = Conv2d(dim, 1, kernel_size=1)
        nn.init.constant_(self.conv3.bias, ATTENTION_BIAS)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Map an encoding of the attended features to an attention, (G, 1, H, W)."""
        return torch.sigmoid(self.conv3(super().forward(features_GCHW, attention_G1HW)))


class RelateModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention, for example to the region left of it.

    The convolutions are dilated (Yu & Koltun 2016), so that their receptive field is large.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.conv4, self.conv5 = (conv3x3(dim, each) for each in DILATIONS)
        self.conv6 = Conv2d(dim, 1, kernel_size=1)
        nn.init.constant_(self.conv6.bias, ATTENTION_BIAS)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Run dilated convolutions over the attended features and map the result to an attention, (G, 1, H, W)."""
        x_GCHW = features_GCHW * attention_G1HW
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv5):
            x_GCHW = functional.relu(conv(x_GCHW))
        return torch.sigmoid(self.conv6(x_GCHW))


class SameModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention to what is like the attended object.

    The features at every position are multiplied by those at the first position where the row's own attention is
    greatest. Other rows of the call have no influence.

    Its initial weights make it an attention to positions that are similar and not attended. With weights of random
    signs, training takes several times as many iterations.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv = Conv2d(dim + 1, 1, kernel_size=1)

    @torch.no_grad()
    def adjust_initial_weights(self) -> None:
        """Make the weights of the products positive, and those of the attention and the bias negative."""
        self.conv.weight.abs_()
        self.conv.weight[:, -1] = -2 * (self.conv.in_channels - 1) ** 0.5  # as products, for ReLU features of unit size
        self.conv.bias.fill_(-3)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Multiply all features by the most attended ones and map the products to an attention, (G, 1, H, W)."""
        place_G11 = attention_G1HW.flatten(1).argmax(1)[:, None, None]
        object_GC1 = features_GCHW.flatten(2).gather(2, place_G11.expand(-1, features_GCHW.shape[1], 1))
        alike_GCHW = features_GCHW * object_GC1[..., None]
        return torch.sigmoid(self.conv(torch.cat([alike_GCHW, attention_G1HW], dim=1)))


class ComparisonModule(nn.Module):
    """Two encodings (G, C, H, W), in order -> an encoding of their comparison, for example whether they are equal."""

    def __init__(self, dim: int):
        super().__init__()
        self.projection = Conv2d(2 * dim, dim, kernel_size=1)
        self.conv1, self.conv2 = conv3x3(dim), conv3x3(dim)

    def forward(self, first_GCHW: Tensor, second_GCHW: Tensor) -> Tensor:
        """Project the concatenated encodings to C channels and convolve them twice, (G, C, H, W)."""
        x_GCHW = functional.relu(self.projection(torch.cat([first_GCHW, second_GCHW], dim=1)))
        return functional.relu(self.conv2(functional.relu(self.conv1(x_GCHW))))


class AndModule(nn.Module):
    """Two attentions (G, 1, H, W) -> their minimum at every position."""

    def forward(self, first_G1HW: Tensor, second_G1HW: Tensor) -> Tensor:
        """Keep the smaller number at every position, (G, 1, H, W)."""
        return torch.minimum(first_G1HW, second_G1HW)


class OrModule(nn.Module):
    """Two attentions (G, 1, H, W) -> their maximum at every position."""

    def forward(self, first_G1HW: Tensor, second_G1HW: Tensor) -> Tensor:
        """Keep the greater number at every position, (G, 1, H, W)."""
        return torch.maximum(first_G1HW, second_G1HW)


LOOK = Role((ATTENTION,), ATTENTION, reads_stem=True, is_penalized=True)
_DESCRIBE = Role((ATTENTION,), MAP, reads_stem=True)
_COMPARE = Role((MAP, MAP), MAP)
_COMBINE = Role((ATTENTION, ATTENTION), ATTENTION)
FUNCTIONS: dict[str, tuple[Callable[[int], nn.Module], Role]] = {
    "intersect": (lambda _: AndModule(), _COMBINE),
    "union": (lambda _: OrModule(), _COMBINE),
    "exist": (QueryModule, _DESCRIBE),
    "count": (QueryModule, _DESCRIBE),
    "relate": (RelateModule, LOOK),
    "less_than": (ComparisonModule, _COMPARE),
    "greater_than": (ComparisonModule, _COMPARE),
    "filter_*": (AttentionModule, LOOK),
    "query_*": (QueryModule, _DESCRIBE),
    "same_*": (SameModule, LOOK),
    "equal_*": (ComparisonModule, _COMPARE),
}
"""The module and the role of each function; `*` stands for an attribute."""
WITHOUT_MODULE = (SCENE, "unique", *SPECIAL_TOKENS)


@dataclass(frozen=True)
class AttentionModules:
    """The set `tbd`. The penalty counts the attentions that networks return, but not minima and maxima of these.

    Raises:
        ValueError: a setting has a value that only the set `iep` supports.
    """

    name: ClassVar[str] = "tbd"
    functions: ClassVar[Mapping[str, tuple[Callable[[int], nn.Module], Role]]] = FUNCTIONS

    dim: int
    residual: bool
    norm: str
    scene: str

    def __post_init__(self) -> None:
        check_fixed(self.name, self.residual, self.norm, self.scene)

    def role(self, token: str) -> Role | None:
        """Return the role of a token; None for `unique`, special tokens, and a `scene` that has no module.

        Raises:
            ValueError: the set has no module for the token.
        """
        function = token.partition("[")[0]
        return None if function in {*WITHOUT_MODULE} - self.functions.keys() else self._entry(token)[1]

    def make(self, token: str) -> nn.Module:
        """Return a new module with `dim` channels for the function of a token."""
        return self._entry(token)[0](self.dim)

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the stem's output, (N, C, H, W), and an attention of ones, (1, 1, H, W)."""
        return {MAP: stems_NCHW, ATTENTION: stems_NCHW.new_ones(1, 1, *stems_NCHW.shape[2:])}

    def _entry(self, token: str) -> tuple[Callable[[int], nn.Module], Role]:
        function = token.partition("[")[0]
        for name in (function, f"{function.partition('_')[0]}_*"):
            if name in self.functions:
                return self.functions[name]
        known = ", ".join(dict.fromkeys((*self.functions, *WITHOUT_MODULE[:2])))
        raise ValueError(f"program token {token!r} has no module among {self.name}'s, which are for {known}")
