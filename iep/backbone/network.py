"""Pixels -> features on a grid, and from them the object, if any, in each cell of the grid.

The network is trained to name shape, size, material and colour of every object at the cell in which its centre lies.
Program-conditioned networks then read the features of its trunk, as Johnson et al. 2017 read those of a ResNet.

Shapes: B images, C H W features, M objects of an image at most, K scores of a cell.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iep.synth.world import ATTRIBUTES, VALUES

SIZES = [len(VALUES[attribute]) for attribute in ATTRIBUTES]
STRIDE = 16
"""Pixels to a side of a cell."""
ABSENT = -1.0
"""Stands in place of the coordinates of an object that is not there, where images have different numbers of them."""
PRESENCE_WEIGHT = 8.0
"""Weight in the loss of a cell with an object; about one cell in thirty has one."""


def _layer(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    padding = kernel // 2 if kernel % 2 else 0
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class SceneNetwork(nn.Module):
    """A convolutional network in three stages, of strides 4, 8 and 16, with a linear head in every cell.

    A stage is a convolution that halves the grid (the first one reads patches of 4x4 pixels) and 3x3 convolutions;
    each is followed by batch norm and ReLU (He et al. 2016 without its shortcuts).
    """

    def __init__(self, widths: Sequence[int], depths: Sequence[int], image_size: int):
        """
        Args:
            widths: channels of the three stages; the last is the number of channels of the features.
            depths: number of 3x3 convolutions of each stage besides its first one.
            image_size: pixels to a side of the images, a multiple of 16.

        Raises:
            ValueError: there are not three widths and three depths, or the size is not a multiple of 16.
        """
        super().__init__()
        if len(widths) != 3 or len(depths) != 3:
            raise ValueError(f"widths {tuple(widths)} and depths {tuple(depths)}, expected three numbers each")
        if image_size < STRIDE or image_size % STRIDE:
            raise ValueError(f"image_size is {image_size}, expected a multiple of {STRIDE}")
        self.image_size = image_size
        stages, before = [], 3
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            first = _layer(before, width, 3, 2) if number else _layer(before, width, 4, 4)
            stages.append(nn.Sequential(first, *(_layer(width, width, 3, 1) for _ in range(depth))))
            before = width
        self.trunk = nn.Sequential(*stages)
        self.head = nn.Conv2d(before, 1 + sum(SIZES), 1)

    def features(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the (B, C, H, W) features, 0 or more, of (B, 3, image_size, image_size) pixels from 0 to 255."""
        return self.trunk(pixels_BCHW.float() / 127.5 - 1)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the (B, K, H, W) scores: the logit that a cell holds an object's centre, then those of the values of
        each attribute, in the order of `ATTRIBUTES`."""
        return self.head(self.features(pixels_BCHW))

    def refine(self, factor: int) -> None:
        """Make the grid `factor` times as fine, by a stride of the last stage that is as many times smaller and
        convolutions that are dilated as much (Chen et al. 2015, DeepLab, section 3.1).

        Every `factor`-th cell, from the first one on, has the features of the coarser grid.

        Args:
            factor: 1 or 2.
        """
        first, *rest = (layer[0] for layer in self.trunk[-1])
        first.stride = (2 // factor, 2 // factor)
        for conv in rest:
            conv.dilation = conv.padding = (factor, factor)


def label_cells(objects_BMF: Tensor, height: int, width: int) -> Tensor:
    """Return the (B, 4, height, width) attributes of the object whose centre lies in each cell, -1 where there is none.

    Args:
        objects_BMF: the objects of each image as x and y, both from 0 to below 1, and the index of each attribute's
            value. Where two share a cell, the later one counts: it is nearer to the camera.
    """
    labels = objects_BMF.new_full((len(objects_BMF), len(ATTRIBUTES), height, width), -1, dtype=torch.long)
    for object_BF in objects_BMF.unbind(1):
        rows = (object_BF[:, 0] >= 0).nonzero().squeeze(1)
        there = object_BF[rows]
        labels[rows, :, (there[:, 1] * height).long(), (there[:, 0] * width).long()] = there[:, 2:].long()
    return labels


def scene_loss(scores_BKHW: Tensor, objects_BMF: Tensor) -> Tensor:
    """Return the binary cross entropy of objects' presence, a mean over cells, plus the cross entropy of each
    attribute, means over objects."""
    labels = label_cells(objects_BMF, *scores_BKHW.shape[2:])
    is_there = labels[:, 0] >= 0
    weight = torch.tensor(PRESENCE_WEIGHT, device=labels.device)
    loss = F.binary_cross_entropy_with_logits(scores_BKHW[:, 0].float(), is_there.float(), pos_weight=weight)
    if not is_there.any():
        return loss
    for k, part in enumerate(scores_BKHW[:, 1:].float().split(SIZES, dim=1)):
        loss = loss + F.cross_entropy(part.movedim(1, -1)[is_there], labels[:, k][is_there])
    return loss


def named(scores_BKHW: Tensor, objects_BMF: Tensor) -> tuple[Tensor, Tensor]:
    """Return for the N objects of all images whether each was found, (N,), and which of its attributes were named
    right, (N, 4), at the cell of its centre."""
    labels = label_cells(objects_BMF, *scores_BKHW.shape[2:]).movedim(1, -1)
    is_there = labels[..., 0] >= 0
    parts = scores_BKHW[:, 1:].split(SIZES, dim=1)
    guesses = torch.stack([part.argmax(1)[is_there] for part in parts], dim=1)
    return scores_BKHW[:, 0][is_there] > 0, guesses == labels[is_there]
