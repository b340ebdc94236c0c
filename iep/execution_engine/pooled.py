"""Attention modules whose encodings are vectors: the set `pooled`.

The functions are those of the set `tbd`, and attentions are the same: one channel of numbers from 0 to 1. What a query
or a comparison returns is a vector, which is pooled from the attended features, as in the networks of Hu et al. 2017
(Learning to Reason: End-to-End Module Networks for Visual Question Answering, table 1). There, functions share
weights and receive text; here, each function has weights of its own, as everywhere in CLEVR's programs.

None of these modules remains without attention, as some of `tbd` do (docs/results.md, "What makes every module learn").
A filter multiplies the attention by a gate that reads the features alone; a vector is the same
wherever its object is; and a relation reads where positions lie relative to the attended one.

Shapes: G rows of a call, N images, C H W feature maps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.execution_engine import tbd
from iep.execution_engine.roles import ATTENTION, KINDS, VECTOR, Role
from iep.execution_engine.stem_and_classifier import CELLS
from iep.execution_engine.vector import coordinates
from iep.kernels.layers import Conv2d
from iep.programs import SCENE

NEAR_ZERO = 1e-3
"""An attention whose sum is far below this has no position and no features."""


class FilterModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> the part of the attention that the features let pass."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = tbd.conv3x3(dim), tbd.conv3x3(dim)
        self.conv3 = Conv2d(dim, 1, kernel_size=1)
        nn.init.zeros_(self.conv3.bias)  # half of the attention passes at first

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Multiply the attention by a gate from 0 to 1 that reads the features alone, (G, 1, H, W)."""
        x_GCHW = functional.relu(self.conv2(functional.relu(self.conv1(features_GCHW))))
        return attention_G1HW * torch.sigmoid(self.conv3(x_GCHW))


class RelativePositionModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention, for example to the region left of it.

    Every position reads its own features and its coordinates, those of the attention's centre, and their difference.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = Conv2d(dim + 6, dim, kernel_size=1), Conv2d(dim, dim, kernel_size=1)
        self.conv3 = Conv2d(dim, 1, kernel_size=1)
        nn.init.zeros_(self.conv3.bias)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Map features and positions relative to the attended centre to an attention, (G, 1, H, W)."""
        at_G2HW = coordinates(features_GCHW)
        centre_G2HW = attended(at_G2HW, attention_G1HW).expand_as(at_G2HW)
        offset_G2HW = 4 * (at_G2HW - centre_G2HW)  # neighbouring positions differ by about as much as features do
        x_GCHW = torch.cat([features_GCHW, offset_G2HW, at_G2HW, centre_G2HW], dim=1)
        return torch.sigmoid(self.conv3(functional.relu(self.conv2(functional.relu(self.conv1(x_GCHW))))))


class SimilarityModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> an attention to what is like the attended object.

    Every position compares an embedding of its features with that of the attended ones, by products and differences.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.embedding = Conv2d(dim, dim, kernel_size=1)
        self.conv1 = Conv2d(3 * dim + 1, dim, kernel_size=1)
        self.conv2 = Conv2d(dim, 1, kernel_size=1)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Compare every position with the attended features and map the result to an attention, (G, 1, H, W)."""
        own_GCHW = self.embedding(features_GCHW)
        other_GC11 = attended(own_GCHW, attention_G1HW)
        compared = [own_GCHW * other_GC11, (own_GCHW - other_GC11).abs(), own_GCHW, attention_G1HW]
        return torch.sigmoid(self.conv2(functional.relu(self.conv1(torch.cat(compared, dim=1)))))


class DescribeModule(nn.Module):
    """Features (G, C, H, W) and an attention (G, 1, H, W) -> a vector (G, C, 1, 1) of the attended part.

    Half of its numbers are maxima over all positions, and half are sums, which can count.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = tbd.conv3x3(dim), tbd.conv3x3(dim)

    def forward(self, features_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
        """Max-pool half of the attended region's channels and sum the other half, (G, C, 1, 1)."""
        x_GCHW = functional.relu(self.conv1(features_GCHW * attention_G1HW))
        first_GCHW, second_GCHW = functional.relu(self.conv2(x_GCHW)).tensor_split(2, dim=1)
        sums_GC11 = second_GCHW.sum(dim=(2, 3), keepdim=True, dtype=second_GCHW.dtype) / CELLS
        return torch.cat([first_GCHW.amax(dim=(2, 3), keepdim=True), sums_GC11], dim=1)


class CompareModule(nn.Module):
    """Two vectors (G, C, 1, 1), in order -> a vector of their comparison, for example whether they are equal."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1, self.conv2 = (Conv2d(2 * dim, width, kernel_size=1) for width in (2 * dim, dim))

    def forward(self, first_GC11: Tensor, second_GC11: Tensor) -> Tensor:
        """Run a perceptron with one hidden layer on the concatenated vectors, (G, C, 1, 1)."""
        x_GC11 = functional.relu(self.conv1(torch.cat([first_GC11, second_GC11], dim=1)))
        return functional.relu(self.conv2(x_GC11))


class NoDescription(nn.Module):
    """Features (G, C, H, W) -> zeros (G, C, 1, 1), which the classifier reads if a program queries nothing."""

    def forward(self, features_GCHW: Tensor) -> Tensor:
        """Return zeros for any features, (G, C, 1, 1)."""
        return features_GCHW.new_zeros(*features_GCHW.shape[:2], 1, 1)


def attended(values_GCHW: Tensor, attention_G1HW: Tensor) -> Tensor:
    """Return the mean of values (G, C, H, W) over all positions, weighted by attentions, (G, C, 1, 1).

    The dtypes are given because autocast would make sums float32 on a GPU, but not on a CPU.
    """
    total_G111 = attention_G1HW.sum(dim=(2, 3), keepdim=True, dtype=attention_G1HW.dtype) + NEAR_ZERO
    return (values_GCHW * (attention_G1HW / total_G111)).sum(dim=(2, 3), keepdim=True, dtype=values_GCHW.dtype)


_DESCRIBE = Role((ATTENTION,), VECTOR, reads_stem=True)
_COMPARE = Role((VECTOR, VECTOR), VECTOR)


class PooledModules(tbd.AttentionModules):
    """The set `pooled`. The classifier reads vectors. The penalty counts the attentions that networks return.

    Raises:
        ValueError: a setting has a value that only the set `iep` supports.
    """

    name = "pooled"
    kinds = KINDS | {VECTOR: "a vector"}
    functions = tbd.FUNCTIONS | {
        SCENE: (lambda _: NoDescription(), Role((), VECTOR, reads_stem=True)),
        "exist": (DescribeModule, _DESCRIBE),
        "count": (DescribeModule, _DESCRIBE),
        "relate": (RelativePositionModule, tbd.LOOK),
        "less_than": (CompareModule, _COMPARE),
        "greater_than": (CompareModule, _COMPARE),
        "filter_*": (FilterModule, tbd.LOOK),
        "query_*": (DescribeModule, _DESCRIBE),
        "same_*": (SimilarityModule, tbd.LOOK),
        "equal_*": (CompareModule, _COMPARE),
    }

    def scene_values(self, stems_NCHW: Tensor) -> dict[int, Tensor]:
        """Return the values of the set `tbd` and a vector of zeros, (1, C, 1, 1)."""
        return super().scene_values(stems_NCHW) | {VECTOR: stems_NCHW.new_zeros(1, self.dim, 1, 1)}
