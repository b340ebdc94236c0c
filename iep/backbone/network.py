"""Pixels -> features on a grid, and from them the objects of an image.

The network is trained to classify shape, size, material and colour of every object at the cells around its centre.
Program-conditioned networks then read its features in place of those of a ResNet (Johnson et al. 2017).

Shapes: B images, C H W features, M objects of an image at most, N objects found in it, P pairs of these, K scores of a
cell, R cells near objects, A = 4 attributes, V values of one, F = 6 numbers of an object: x and y of its centre, from 0
to below 1, and the index of each attribute's value.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iep.synth.world import ATTRIBUTES, VALUES

SIZES = [len(VALUES[attribute]) for attribute in ATTRIBUTES]
NUM_SCORES = 3 + sum(SIZES)
"""The scores of a cell: a logit of presence, the centre's distance from the cell's middle to the right and downwards,
in cells, and the logits of each attribute's values in the order of `ATTRIBUTES`."""
STRIDE = 16
"""Pixels to a side of a cell of the features. Objects are found on a grid that is twice as fine."""
ABSENT = -1.0
"""The coordinates of absent objects, which fill up the rows of images with fewer objects than others."""
PRESENCE_BIAS = -5.0
"""The initial bias of presence: most cells hold no centre (Lin et al. 2017, Focal Loss, section 3.3)."""
NEAR = 16
"""The greatest distance in pixels, after resizing, between the true and the found centre of an object."""
PRESENCE_WEIGHT = 8.0
"""The weight of cells with a centre in the loss of presence; about one cell in two hundred has one."""
FEWEST, MOST = 2, 10
"""The numbers of objects in familiar images: CLEVR's have 3 to 10, and those of the smaller presets of `iep-synth` 2 or
3."""
SURE = 0.95
"""The least probability of an attribute's value that is not in doubt. None of 2,500 generated and 41 real images of
CLEVR's world has more than half of its objects in doubt; every photograph in which 2 to 10 were found did, of 130."""


def _layer(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    padding = kernel // 2 if kernel % 2 else 0
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class SceneNetwork(nn.Module):
    """A feature pyramid: three stages of strides 4, 8 and 16, whose last one gives context to the second.

    Each stage is a convolution that halves the grid (the first one reads patches of 4x4 pixels) and 3x3 convolutions.
    The output of the last stage is resized to the grid of the second (Lin et al. 2017, Feature Pyramid Networks,
    section 3), and two 3x3 convolutions read both. Each convolution is followed by batch norm and ReLU. A linear head
    gives the scores of every cell of this grid. The features are the grid's maxima over 2x2 cells.
    """

    def __init__(self, widths: Sequence[int], depths: Sequence[int], image_size: Sequence[int]):
        """
        Args:
            widths: channels of the three stages. The features have as many channels as the second.
            depths: number of 3x3 convolutions of each stage besides its first one.
            image_size: width and height of the images in pixels, multiples of 16.

        Raises:
            ValueError: there are not three widths, three depths and two sizes, or a size is not a multiple of 16.
        """
        super().__init__()
        if len(widths) != 3 or len(depths) != 3:
            raise ValueError(f"widths {tuple(widths)} and depths {tuple(depths)}, expected three numbers each")
        if len(image_size) != 2 or any(side < STRIDE or side % STRIDE for side in image_size):
            raise ValueError(f"image_size is {tuple(image_size)}, expected width and height, multiples of {STRIDE}")
        self.image_size = image_size[0], image_size[1]
        stages, inputs = [], 3
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            first = _layer(inputs, width, 3, 2) if number else _layer(inputs, width, 4, 4)
            stages.append(nn.Sequential(first, *(_layer(width, width) for _ in range(depth))))
            inputs = width
        _, middle, last = widths
        joint = nn.Sequential(_layer(middle + last, middle), _layer(middle, middle))
        self.trunk = nn.ModuleList([*stages, joint])
        self.head = nn.Conv2d(middle, NUM_SCORES, 1)
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias[0] = PRESENCE_BIAS

    def grid(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the (B, C, height / 8, width / 8) maps, 0 or more, of (B, 3, height, width) pixels from 0 to 255."""
        first, second, third, joint = self.trunk
        fine_BCHW = second(first(pixels_BCHW.float() / 127.5 - 1))
        context_BCHW = F.interpolate(third(fine_BCHW), scale_factor=2)
        return joint(torch.cat([fine_BCHW, context_BCHW], dim=1))

    def view(self, pixels_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the (B, C, height / 16, width / 16) features, 0 or more, of pixels from 0 to 255, and their scores."""
        grid_BCHW = self.grid(pixels_BCHW)
        return F.max_pool2d(grid_BCHW, 2), self.head(grid_BCHW)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        """Return the (B, K, height / 8, width / 8) scores of pixels from 0 to 255, in the order of `NUM_SCORES`."""
        return self.head(self.grid(pixels_BCHW))


class FoundObjects(NamedTuple):
    """The objects that a network finds in one image."""

    objects_NF: Tensor
    """The centre and the values of each object, on the CPU in float32."""
    confidence_NA: Tensor
    """The probability of each of these values."""

    @property
    def warning(self) -> str:
        """The reason why the image is unlike CLEVR's; empty if there is none."""
        number, doubtful = len(self.objects_NF), int((self.confidence_NA < SURE).any(1).sum())
        if not FEWEST <= number <= MOST:
            problem = "and CLEVR's images have 3 to 10"
        elif 2 * doubtful > number:
            problem = f"{doubtful} of them with doubtful attributes"
        else:
            return ""
        return f"{number} object{'' if number == 1 else 's'} found, {problem}; the answer is unreliable"


def peaks(presence_BHW: Tensor) -> Tensor:
    """Return (B, H, W) booleans: the cell has a presence above 0, and none of its eight neighbours a greater one."""
    greatest_BHW = F.max_pool2d(presence_BHW[:, None], 3, 1, 1)[:, 0]
    return (presence_BHW > 0) & (presence_BHW == greatest_BHW)


def find_objects(scores_BKHW: Tensor) -> list[FoundObjects]:
    """Return the objects of each image, given the network's scores."""
    scores_BKHW = scores_BKHW.float().cpu()
    height, width = scores_BKHW.shape[2:]
    found = []
    for scores_KHW, peaks_HW in zip(scores_BKHW, peaks(scores_BKHW[:, 0]), strict=True):
        rows_N, columns_N = peaks_HW.nonzero().unbind(1)
        scores_NK = scores_KHW[:, rows_N, columns_N].T
        x_N = (columns_N + 0.5 + scores_NK[:, 1]) / width
        y_N = (rows_N + 0.5 + scores_NK[:, 2]) / height
        best = [part_NV.softmax(1).max(1) for part_NV in scores_NK[:, 3:].split(SIZES, dim=1)]
        confidence_NA, values_NA = (torch.stack(each, 1) for each in zip(*best, strict=True))
        found.append(FoundObjects(torch.cat([x_N[:, None], y_N[:, None], values_NA], 1), confidence_NA))
    return found


def match(found_NF: Tensor, objects_MF: Tensor, image_size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Pair found objects with true ones that are near, the nearest pair first, each at most once.

    Args:
        image_size: width and height of the image in pixels.

    Returns:
        The (P,) indices of the found objects, and those of the true ones; absent objects are not among them.
    """
    size_2 = torch.tensor(image_size)
    distance_NM = torch.cdist(found_NF[:, :2].double() * size_2, objects_MF[:, :2].double() * size_2)
    distance_NM[:, objects_MF[:, 0] < 0] = torch.inf
    pairs = []
    while distance_NM.numel() and distance_NM.min() <= NEAR:
        pairs.append(divmod(int(distance_NM.argmin()), distance_NM.shape[1]))
        distance_NM[pairs[-1][0]], distance_NM[:, pairs[-1][1]] = torch.inf, torch.inf
    found_P, true_P = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(1)
    return found_P, true_P


def compare(found: Sequence[FoundObjects], objects_BMF: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Return (P, A) booleans: for each pair of a found and a true object of an image, which attributes are equal."""
    are_equal = []
    for each, objects_MF in zip(found, objects_BMF.cpu(), strict=True):
        ours_P, theirs_P = match(each.objects_NF, objects_MF, image_size)
        are_equal.append(each.objects_NF[ours_P, 2:] == objects_MF[theirs_P, 2:])
    return torch.cat(are_equal)


def label_cells(objects_BMF: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the labels of each cell.

    Args:
        objects_BMF: the objects of each image, the farthest first: where two claim a cell, the nearer one gets it.

    Returns:
        (B, H, W) booleans: the centre of an object lies in the cell.
        (B, H, W) booleans: the cell is one of the four whose middles are nearest to the centre of an object. The
            greatest presence may be in any of these.
        (B, F, H, W) numbers. In these cells: the distance of the object's centre to the right and downwards in cells,
            and the object's values.
    """
    labels_BFHW = objects_BMF.new_zeros(len(objects_BMF), objects_BMF.shape[2], height, width)
    is_near_BHW, is_centre_BHW = torch.zeros_like(labels_BFHW[:, :2], dtype=torch.bool).unbind(1)
    around = ((0.5, 0.5), (-0.5, 0.5), (0.5, -0.5), (-0.5, -0.5))
    for of_cell_BHW, shifts in ((is_near_BHW, around), (is_centre_BHW, ((0.0, 0.0),))):
        for object_BF, (left, up) in product(objects_BMF.unbind(1), shifts):  # later writes replace earlier ones
            images = (object_BF[:, 0] >= 0).nonzero().squeeze(1)
            x, y, values = object_BF[images, 0] * width, object_BF[images, 1] * height, object_BF[images, 2:]
            row, column = (y - up).floor().clamp(0, height - 1), (x - left).floor().clamp(0, width - 1)
            of_cell_BHW[images, row.long(), column.long()] = True
            distance = torch.stack([x - column - 0.5, y - row - 0.5], 1)
            labels_BFHW[images, :, row.long(), column.long()] = torch.cat([distance, values], 1)
    return is_centre_BHW, is_near_BHW | is_centre_BHW, labels_BFHW


def scene_loss(scores_BKHW: Tensor, objects_BMF: Tensor) -> Tensor:
    """Return the loss of scores: the binary cross entropy of presence, a sum over cells divided by the number of
    objects, plus the cross entropy of each attribute and the absolute error of the centre in cells, means over the
    cells near objects."""
    is_centre, is_near, labels = label_cells(objects_BMF, *scores_BKHW.shape[2:])
    scores_BKHW = scores_BKHW.float()
    weight = torch.tensor(PRESENCE_WEIGHT, device=labels.device)
    presence = F.binary_cross_entropy_with_logits(
        scores_BKHW[:, 0], is_centre.float(), pos_weight=weight, reduction="sum"
    )
    loss = presence / is_centre.sum().clamp(min=1)
    if not is_near.any():
        return loss
    scores_RK, labels_RF = scores_BKHW.movedim(1, -1)[is_near], labels.movedim(1, -1)[is_near]
    loss = loss + F.l1_loss(scores_RK[:, 1:3], labels_RF[:, :2])
    for part_RV, value_R in zip(scores_RK[:, 3:].split(SIZES, dim=1), labels_RF[:, 2:].long().unbind(1), strict=True):
        loss = loss + F.cross_entropy(part_RV, value_R)
    return loss
