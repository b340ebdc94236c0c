"""The parts around an engine's modules: features -> maps, the stem, and a program's result -> logits, the classifier.

Johnson et al. 2017, Inferring and Executing Programs, section 3.2 and the supplementary material. The options are those
of the original toolkit, and `GlobalPool` is ours.

Shapes: B examples or images, C H W feature maps, A answers.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from iep.execution_engine.choices import STEMS, check_choice

CELLS = 8.0
"""The number of grid cells of an object, roughly, by which sums are divided, so that one object counts about 1."""


def make_stem(
    kind: str, feature_dim: int, widths: Sequence[int], out_dim: int, stride: int, norm: bool, bias: bool
) -> nn.Sequential:
    """Return a stem: (B, feature_dim, H, W) features -> (B, out_dim, H / stride, W / stride).

    A stem 'conv' has 3x3 convolutions to `widths` and then `out_dim` channels. Each is followed by batch norm, if
    `norm` is set, and ReLU; the last one has the stride. A stem 'none' has no layers: the features are used as maps.

    Args:
        widths: the channels of the convolutions before the last.
        bias: convolutions have biases even before batch norm.

    Raises:
        ValueError: the kind is unknown, or, for 'none', the features do not have `out_dim` channels or the stride is
            not 1.
    """
    check_choice("stem", kind, STEMS)
    if kind == "none":
        if feature_dim != out_dim:
            raise ValueError(f"features of {feature_dim} channels for modules of {out_dim}, but stem is none")
        if stride != 1:
            raise ValueError(f"stem_stride is {stride}, and there is no stem")
        return nn.Sequential()
    layers: list[nn.Module] = []
    strides = [1] * len(widths) + [stride]
    for (before, after), step in zip(pairwise([feature_dim, *widths, out_dim]), strides, strict=True):
        layers.append(nn.Conv2d(before, after, kernel_size=3, padding=1, stride=step, bias=bias or not norm))
        if norm:
            layers.append(nn.BatchNorm2d(after))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class GlobalPool(nn.Module):
    """Maps (B, C, H, W) -> their maxima and sums over all positions, (B, 2 C, 1, 1).

    What the classifier learns about an object in one place then holds in all places, and sums can count.
    """

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the maxima, and after them the sums divided by `CELLS`."""
        maxima_BC11 = x_BCHW.amax(dim=(2, 3), keepdim=True)
        return torch.cat([maxima_BC11, x_BCHW.sum(dim=(2, 3), keepdim=True) / CELLS], dim=1)


def make_classifier(
    map_shape: tuple[int, int, int],
    projection: int,
    hidden: Sequence[int],
    num_answers: int,
    pool: int,
    pool_rest: bool,
    norm: bool,
    dropout: float,
) -> nn.Sequential:
    """Return a classifier, (B, C, H, W) -> (B, A) logits: 1x1 convolution, ReLU, pooling, linear layers with ReLUs.

    Args:
        map_shape: (C, H, W).
        projection: the channels of the 1x1 convolution; 0 omits it and its ReLU.
        hidden: the widths of the linear layers before the last.
        pool: the side of the max pooling window; 1 omits pooling, and 0 is `GlobalPool`.
        pool_rest: if `pool` does not divide the grid, the last windows are smaller; otherwise they are omitted.
        norm: batch norm after the convolution and every linear layer but the last.
        dropout: the probability of dropping a unit after every linear layer but the last.

    Raises:
        ValueError: nothing of the grid is left after pooling.
    """
    channels, height, width = map_shape
    layers: list[nn.Module] = []
    if projection:
        layers.append(nn.Conv2d(channels, projection, kernel_size=1))
        if norm:
            layers.append(nn.BatchNorm2d(projection))
        layers.append(nn.ReLU())
        channels = projection
    if pool == 0:
        layers.append(GlobalPool())
        channels, height, width = 2 * channels, 1, 1
    elif pool > 1:
        layers.append(nn.MaxPool2d(pool, ceil_mode=pool_rest))
        height, width = (-(-side // pool) if pool_rest else side // pool for side in (height, width))
    if not height * width:
        raise ValueError(f"a pooling window of {pool} leaves nothing of a grid of {map_shape[1]}x{map_shape[2]}")
    layers.append(nn.Flatten())
    dim = channels * height * width
    for hidden_dim in hidden:
        layers.append(nn.Linear(dim, hidden_dim))
        if norm:
            layers.append(nn.BatchNorm1d(hidden_dim))
        layers.append(nn.ReLU())
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(dim, num_answers))
