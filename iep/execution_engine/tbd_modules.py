"""The modules of Transparency by Design: small networks that hand on where to look, or what is seen there.

Mascharka et al. 2018, Transparency by Design: Closing the Gap Between Performance and Interpretability in Visual
Reasoning, section 3 and table 1. An *attention* has one channel of numbers from 0 to 1 (but for `scene`'s, which is
ones); an *encoding* has as many as the features, which are the stem's output. Which module runs when is `tbd.py`'s.

Shapes: G rows of a call, C H W feature maps.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine.family import ATTENTION, MAP
from iep.programs import SCENE
from iep.vocab import SPECIAL_TOKENS

DILATIONS = (1, 2, 4, 8, 1)
"""Of `RelateModule`: its convolutions see the whole of a 14x14 grid."""


def _conv3x3(dim: int, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(dim, dim, kernel_size=3, padding=dilation, dilation=dilation)


class AttentionModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention: where in its part of the image something
    is, such as all that is red."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = _conv3x3(dim), _conv3x3(dim)
        self.conv3 = nn.Conv2d(dim, 1, kernel_size=1)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Look there."""
        x_GCHW = functional.relu(self.conv1(features_GCHW * attention_G1HW))
        return torch.sigmoid(self.conv3(functional.relu(self.conv2(x_GCHW))))


class QueryModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an encoding: what is there."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = _conv3x3(dim), _conv3x3(dim)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Look there."""
        x_GCHW = functional.relu(self.conv1(features_GCHW * attention_G1HW))
        return functional.relu(self.conv2(x_GCHW))


class RelateModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention: what is left of it, for instance.

    Dilated convolutions (Yu & Koltun 2016), so that it sees far.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2, self.conv3, self.conv4, self.conv5 = (_conv3x3(dim, each) for each in DILATIONS)
        self.conv6 = nn.Conv2d(dim, 1, kernel_size=1)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Look from there."""
        x_GCHW = features_GCHW * attention_G1HW
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4, self.conv5):
            x_GCHW = functional.relu(conv(x_GCHW))
        return torch.sigmoid(self.conv6(x_GCHW))


class SameModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention: what is like the thing attended to.

    The features of every place are multiplied with those where the row's own attention is greatest, the first such
    place row by row; other rows of the call have no part in it.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv = nn.Conv2d(dim + 1, 1, kernel_size=1)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Compare with what is there."""
        place_G11 = attention_G1HW.flatten(1).argmax(1)[:, None, None]
        thing_GC1 = features_GCHW.flatten(2).gather(2, place_G11.expand(-1, features_GCHW.shape[1], 1))
        alike_GCHW = features_GCHW * thing_GC1[..., None]
        return torch.sigmoid(self.conv(torch.cat([alike_GCHW, attention_G1HW], dim=1)))


class ComparisonModule(nn.Module):
    """Two encodings (G, C, H, W), in order -> an encoding: whether they say the same, or which one is more."""

    def __init__(self, dim: int):
        super().__init__()
        self.projection = nn.Conv2d(2 * dim, dim, kernel_size=1)
        self.conv1, self.conv2 = _conv3x3(dim), _conv3x3(dim)

    def forward(self, first_GCHW: Tensor, second_GCHW: Tensor) -> Tensor:
        """Compare."""
        x_GCHW = functional.relu(self.projection(torch.cat([first_GCHW, second_GCHW], dim=1)))
        return functional.relu(self.conv2(functional.relu(self.conv1(x_GCHW))))


class AndModule(nn.Module):
    """Two attentions (G, 1, H, W) -> the lesser at every place."""

    def forward(self, first_G1HW: Tensor, second_G1HW: Tensor) -> Tensor:
        """Intersect."""
        return torch.minimum(first_G1HW, second_G1HW)


class OrModule(nn.Module):
    """Two attentions (G, 1, H, W) -> the greater at every place."""

    def forward(self, first_G1HW: Tensor, second_G1HW: Tensor) -> Tensor:
        """Unite."""
        return torch.maximum(first_G1HW, second_G1HW)


class Role(NamedTuple):
    """What a function is run by."""

    make: Callable[[int], nn.Module]
    """C -> the module."""
    takes: tuple[int, ...]
    """Column of each argument: MAP for encodings and for the features, which come first where they are taken."""
    makes: int
    """Column of the result."""
    looks: bool
    """It takes the features, and then its function's argument."""
    is_penalized: bool = False
    """Its result is one of the attentions that the penalty counts: those that a network makes."""


_ATTENTION = Role(AttentionModule, (MAP, ATTENTION), ATTENTION, looks=True, is_penalized=True)
_RELATE = Role(RelateModule, (MAP, ATTENTION), ATTENTION, looks=True, is_penalized=True)
_SAME = Role(SameModule, (MAP, ATTENTION), ATTENTION, looks=True, is_penalized=True)
_QUERY = Role(QueryModule, (MAP, ATTENTION), MAP, looks=True)
_COMPARISON = Role(ComparisonModule, (MAP, MAP), MAP, looks=False)
_AND = Role(lambda _: AndModule(), (ATTENTION, ATTENTION), ATTENTION, looks=False)
_OR = Role(lambda _: OrModule(), (ATTENTION, ATTENTION), ATTENTION, looks=False)

_BY_NAME = {
    "intersect": _AND,
    "union": _OR,
    "exist": _QUERY,
    "count": _QUERY,
    "relate": _RELATE,
    "less_than": _COMPARISON,
    "greater_than": _COMPARISON,
}
_BY_PREFIX = {"filter_": _ATTENTION, "query_": _QUERY, "same_": _SAME, "equal_": _COMPARISON}
WITHOUT_MODULE = (SCENE, "unique", *SPECIAL_TOKENS)
"""`scene` is an attention of ones; the others hand on what they are given (`<NULL>` and `<START>` do not run)."""


def role_of(token: str) -> Role | None:
    """By its function's name, before any `[`; None for those `WITHOUT_MODULE`.

    Raises:
        ValueError: no module is made for it.
    """
    function = token.partition("[")[0]
    if function in WITHOUT_MODULE:
        return None
    if function in _BY_NAME:
        return _BY_NAME[function]
    for prefix, role in _BY_PREFIX.items():
        if function.startswith(prefix):
            return role
    known = ", ".join((*_BY_NAME, *(f"{prefix}*" for prefix in _BY_PREFIX), "scene", "unique"))
    raise ValueError(f"program token {token!r} has no module among tbd's, which are for {known}")
