"""The networks that the execution engine is built from: stem, unary and binary modules, classifier.

Johnson et al. 2017, Inferring and Executing Programs, section 3.2 and the supplementary material; the stem for pixels
is ours. Which module runs when is `iep/batching/`.

Shapes: B examples, G rows of a module's call, C H W feature maps, A answers.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class UnaryModule(nn.Module):
    """Residual block of two 3x3 convolutions: (G, C, H, W) -> (G, C, H, W)."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, kernel_size=3, padding=1)

    def forward(self, x_GCHW: torch.Tensor) -> torch.Tensor:
        return functional.relu(x_GCHW + self.conv2(functional.relu(self.conv1(x_GCHW))))


class BinaryModule(nn.Module):
    """Two maps (G, C, H, W), in order, concatenated and projected to one, then a residual block."""

    def __init__(self, dim: int):
        super().__init__()
        self.proj = nn.Conv2d(2 * dim, dim, kernel_size=1)
        self.res_block = UnaryModule(dim)

    def forward(self, first_GCHW: torch.Tensor, second_GCHW: torch.Tensor) -> torch.Tensor:
        both = torch.cat([first_GCHW, second_GCHW], dim=1)
        return self.res_block(functional.relu(self.proj(both)))


def make_stem(
    in_dim: int,
    widths: Sequence[int],
    out_dim: int,
    strides: Sequence[int],
    norm: bool,
    first_kernel: int = 3,
) -> nn.Sequential:
    """3x3 convolutions to `widths` and then `out_dim` channels, each followed by batch norm if `norm`, and ReLU.

    Args:
        strides: one for each convolution.
        first_kernel: side of the first convolution, where it is not 3.
    """
    layers: list[nn.Module] = []
    sides = [first_kernel, *[3] * len(widths)]
    for (before, after), stride, side in zip(pairwise([in_dim, *widths, out_dim]), strides, sides, strict=True):
        layers.append(nn.Conv2d(before, after, kernel_size=side, padding=side // 2, stride=stride, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(after))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def make_conv_stem(
    feature_dim: int,
    widths: Sequence[int],
    out_dim: int,
    stride: int = 1,
    norm: bool = False,
) -> nn.Sequential:
    """(B, feature_dim, H, W) features -> (B, out_dim, H / stride, W / stride), strided by the last layer."""
    return make_stem(feature_dim, widths, out_dim, [1] * len(widths) + [stride], norm)


def make_pixel_stem(
    feature_dim: int,
    widths: Sequence[int],
    out_dim: int,
    stride: int = 1,
    norm: bool = False,
    pixels: int = 1,
) -> nn.Sequential:
    """(B, 3 * P * P, H, W) patches of P x P pixels -> (B, out_dim, H / stride, W / stride).

    Puts the picture together again, `pixels` x `pixels` pixels at a place as its channels, and halves it with its last
    convolutions to the grid; those before look at it whole. With `pixels` above 1 the first is 1x1: it embeds little
    patches (as Dosovitskiy et al. 2021, ViT, section 3.1).

    Raises:
        ValueError: `feature_dim` is not 3 * P * P, `pixels` does not divide P, P * stride / `pixels` is not a power of
            two, or there are too few convolutions.
    """
    patch = round((feature_dim / 3) ** 0.5)
    if 3 * patch * patch != feature_dim:
        raise ValueError(f"features have {feature_dim} channels, expected 3 * P * P for patches of P x P pixels")
    if patch % pixels:
        raise ValueError(f"stem_pixels is {pixels}, expected a divisor of the patches' {patch} pixels")
    shrink = patch // pixels * stride
    halvings = shrink.bit_length() - 1
    if shrink != 2**halvings:
        raise ValueError(f"patches of {patch} pixels and a stride of {stride} are not a power of two together")
    if len(widths) + 1 < halvings:
        raise ValueError(
            f"stem widths {list(widths)} and the module width make {len(widths) + 1} convolutions, expected "
            f"{halvings} or more to halve patches of {patch} pixels to a stride of {stride}"
        )
    strides = [1] * (len(widths) + 1 - halvings) + [2] * halvings
    first_kernel = 1 if pixels > 1 else 3
    convolutions = make_stem(3 * pixels * pixels, widths, out_dim, strides, norm, first_kernel)
    return nn.Sequential(nn.PixelShuffle(patch // pixels), *convolutions)


def make_classifier(
    in_dim: int, height: int, width: int, projection: int, pool: int, hidden: Sequence[int], num_answers: int
) -> nn.Sequential:
    """(B, in_dim, height, width) -> (B, A) logits: 1x1 convolution, ReLU, max-pool, linear layers.

    `pool` is the side of the pooling window; on a grid that it does not divide, the last windows are smaller.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(in_dim, projection, kernel_size=1),
        nn.ReLU(),
        nn.MaxPool2d(pool, ceil_mode=True),
        nn.Flatten(),
    ]
    dim = projection * -(-height // pool) * -(-width // pool)
    for hidden_dim in hidden:
        layers += [nn.Linear(dim, hidden_dim), nn.ReLU()]
        dim = hidden_dim
    return nn.Sequential(*layers, nn.Linear(dim, num_answers))


def kaiming_normal(module: nn.Module) -> None:
    """Kaiming normal weights for all convolutions and linear layers (He et al. 2015); biases stand."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight)
