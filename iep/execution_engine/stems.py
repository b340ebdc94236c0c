"""Image features -> the maps that modules read: the engine's stem.

Johnson et al. 2017, Inferring and Executing Programs, section 3.2 and the supplementary material; the stem for pixels
is ours.

Shapes: B images, C H W feature maps.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def make_stem(
    in_dim: int,
    widths: Sequence[int],
    out_dim: int,
    strides: Sequence[int],
    norm: bool,
    bias: bool = False,
    first_kernel: int = 3,
) -> nn.Sequential:
    """3x3 convolutions to `widths` and then `out_dim` channels, each followed by batch norm if `norm`, and ReLU.

    Args:
        strides: one for each convolution.
        bias: convolutions have biases under batch norm too.
        first_kernel: side of the first convolution, where it is not 3.
    """
    layers: list[nn.Module] = []
    sides = [first_kernel, *[3] * len(widths)]
    for (before, after), stride, side in zip(pairwise([in_dim, *widths, out_dim]), strides, sides, strict=True):
        biased = bias or not norm
        layers.append(nn.Conv2d(before, after, kernel_size=side, padding=side // 2, stride=stride, bias=biased))
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
    bias: bool = False,
) -> nn.Sequential:
    """(B, feature_dim, H, W) features -> (B, out_dim, H / stride, W / stride), strided by the last layer."""
    return make_stem(feature_dim, widths, out_dim, [1] * len(widths) + [stride], norm, bias)


def make_pixel_stem(
    feature_dim: int,
    widths: Sequence[int],
    out_dim: int,
    stride: int = 1,
    norm: bool = False,
    bias: bool = False,
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
    convolutions = make_stem(3 * pixels * pixels, widths, out_dim, strides, norm, bias, first_kernel)
    return nn.Sequential(nn.PixelShuffle(patch // pixels), *convolutions)


def make_no_stem(feature_dim: int, out_dim: int, stride: int = 1) -> nn.Sequential:
    """(B, C, H, W) features as they are: the original toolkit's stem of no layer.

    Raises:
        ValueError: the features do not have the modules' channels, or are to be strided.
    """
    if feature_dim != out_dim:
        raise ValueError(
            f"features of {feature_dim} channels for modules of {out_dim}, which takes a stem between them"
        )
    if stride != 1:
        raise ValueError(f"stem_stride is {stride}, and there is no stem")
    return nn.Sequential()
