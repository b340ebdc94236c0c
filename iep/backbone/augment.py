"""Random changes of images, so that a network trained on drawn images sees photographs and other renderers' images.

Draws from PyTorch's generator of the images' device. Shapes: B images, M objects, F numbers of an object.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from iep.backbone.network import ABSENT

SCALES, SHIFT = (0.8, 1.1), 0.05
"""The side of the part of the image that is shown, as a share of the image's, and how far it may reach outside."""
EXPOSURE, HUE, SATURATION, GAMMA, NOISE = 0.25, 0.06, 0.3, 0.25, 4.0
"""Greatest changes: factors 1 +- x, turns of the colour circle, and the noise's standard deviation of 255."""

CACHED = 4
"""The number of images that a CPU changes at a time. Their pixels stay in its cache, which halves the time."""


def augmented(pixels_BCHW: Tensor, objects_BMF: Tensor) -> tuple[Tensor, Tensor]:
    """Return images of pixels from 0 to 255 and their objects, each image changed by chance: mirrored, zoomed and
    shifted; in exposure, contrast, hue and saturation; blurred, and with noise."""
    size = CACHED if pixels_BCHW.device.type == "cpu" else len(pixels_BCHW)
    parts = zip(pixels_BCHW.split(size), objects_BMF.split(size), strict=True)
    changed = (_moved(_recoloured(pixels_NCHW.float()), objects_NMF) for pixels_NCHW, objects_NMF in parts)
    pixels, objects = zip(*changed, strict=True)
    return torch.cat(pixels), torch.cat(objects)


def _chance(pixels_BCHW: Tensor, low: float, high: float) -> Tensor:
    """Return a number from `low` to `high` for every image, (B, 1, 1, 1)."""
    return low + (high - low) * torch.rand(len(pixels_BCHW), 1, 1, 1, device=pixels_BCHW.device)


def _recoloured(pixels_BCHW: Tensor) -> Tensor:
    grey_33 = torch.full((3, 3), 1 / 3, device=pixels_BCHW.device)
    off_33 = torch.eye(3, device=pixels_BCHW.device) - grey_33
    across_33 = off_33.roll(1, 0) - off_33.roll(-1, 0)
    # A turn about the grey axis of the colour cube, a scale of the distance from it, and one of everything.
    angle = 2 * torch.pi * _chance(pixels_BCHW, -HUE, HUE).flatten(1)[..., None]
    turned_B33 = off_33 * angle.cos() + across_33 / 3**0.5 * angle.sin()
    scale, exposure = (
        _chance(pixels_BCHW, 1 - most, 1 + most).flatten(1)[..., None] for most in (SATURATION, EXPOSURE)
    )
    x = torch.bmm((grey_33 + turned_B33 * scale) * exposure / 255, pixels_BCHW.flatten(2)).view_as(pixels_BCHW)
    x = x.clamp_(1e-4, 1).pow_(_chance(x, 1 - GAMMA, 1 + GAMMA))
    x = x.lerp(F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), _chance(x, 0, 1))
    return torch.addcmul(255 * x, torch.randn_like(x), _chance(x, 0, NOISE))


def _moved(pixels_BCHW: Tensor, objects_BMF: Tensor) -> tuple[Tensor, Tensor]:
    """Map the point q of the new image to p = scale * q + offset of the old one, coordinates from -1 to 1."""
    count = len(pixels_BCHW)
    scale_B1 = _chance(pixels_BCHW, math.log(SCALES[0]), math.log(SCALES[1])).exp().view(count, 1)
    mirror_B1 = 1 - 2 * torch.randint(2, (count, 1), device=pixels_BCHW.device)
    scale_B2 = torch.cat([scale_B1 * mirror_B1, scale_B1], 1)
    reach_B1 = (1 - scale_B1).clamp(min=0) + 2 * SHIFT
    offset_B2 = reach_B1 * torch.cat([_chance(pixels_BCHW, -1, 1).view(count, 1) for _ in range(2)], 1)
    affine_B23 = torch.cat([torch.diag_embed(scale_B2), offset_B2[..., None]], 2)
    grid = F.affine_grid(affine_B23, list(pixels_BCHW.shape), align_corners=False)
    moved_BCHW = F.grid_sample(pixels_BCHW, grid, padding_mode="border", align_corners=False)
    points_BM2 = ((2 * objects_BMF[..., :2] - 1 - offset_B2[:, None]) / scale_B2[:, None] + 1) / 2
    is_inside = ((points_BM2 >= 0) & (points_BM2 < 1)).all(2, keepdim=True) & (objects_BMF[..., :1] >= 0)
    return moved_BCHW, torch.cat([torch.where(is_inside, points_BM2, ABSENT), objects_BMF[..., 2:]], 2)
