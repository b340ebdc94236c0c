"""A backbone on the images of a split whose scenes are known: how many objects it finds, and names right.

Shapes: B images, K scores of a cell, H W cells, M objects of an image at most, N objects of all images.
"""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from iep.backbone.network import SceneNetwork, named
from iep.data.datasets import Batch, ClevrDataset, sequential_batches
from iep.data.loader import on_device
from iep.preprocess.backbones import Scenes
from iep.preprocess.labelled_scenes import open_scenes
from iep.synth.world import ATTRIBUTES

NEAR = 1.5
"""Greatest distance, in cells, from an object's centre to the middle of the cell in which it is found."""
BATCH_SIZE = 64


def peaks(scores_BKHW: Tensor) -> Tensor:
    """Return the (B, H, W) cells in which an object is found: its presence has a logit above 0, and none of the four
    neighbours a greater one. (Without diagonal ones, since objects often lie in cells that touch at a corner.)"""
    presence_B1HW = scores_BKHW[:, :1]
    across_B1HW = F.max_pool2d(presence_B1HW, (1, 3), 1, (0, 1))
    down_B1HW = F.max_pool2d(presence_B1HW, (3, 1), 1, (1, 0))
    return ((presence_B1HW > 0) & (presence_B1HW == torch.maximum(across_B1HW, down_B1HW)))[:, 0]


def count_matches(peaks_HW: Tensor, objects_MF: Tensor) -> int:
    """Return how many objects are found: each object by one peak at most that is near, the nearest pair first."""
    height, width = peaks_HW.shape
    cells_P2 = peaks_HW.nonzero() + 0.5
    there_M2 = objects_MF[objects_MF[:, 0] >= 0][:, :2].flip(1) * torch.tensor([height, width])
    distance_PM = torch.cdist(cells_P2.double(), there_M2.double())
    count = 0
    while distance_PM.numel() and distance_PM.min() <= NEAR:
        peak, thing = divmod(int(distance_PM.argmin()), distance_PM.shape[1])
        distance_PM[peak], distance_PM[:, thing] = torch.inf, torch.inf
        count += 1
    return count


def evaluate_backbone(
    backbone: Scenes, clevr_dir: Path, split: str, num_samples: int | None, device: torch.device
) -> str:
    """Return a text with the scores of a backbone's network on a split of a CLEVR directory with scenes.

    Raises:
        InputError: as `open_scenes`, `Scenes.network` and reading images.
    """
    network = deepcopy(backbone.network).to(device)
    found = open_scenes(clevr_dir, split, network.image_size, num_samples)
    batches = sequential_batches(ClevrDataset(found.questions, found.features), BATCH_SIZE)
    scores = score_objects(network, on_device(batches, device))
    head = f"{clevr_dir}, {split}: {found.total:,} images, {scores.pop('objects'):,} objects"
    return "\n".join([head, *(f"{name:9}  {100 * share:5.1f}%" for name, share in scores.items())])


@torch.no_grad()
def score_objects(network: SceneNetwork, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the number of `objects`, the `precision` and `recall` with which they are found, and for each attribute
    the share of objects whose value is named right at the cell of their centre, from 0 to 1. Of objects that share a
    cell, only the nearest to the camera counts for attributes."""
    objects = found = matches = 0
    is_right = []
    for batch in batches:
        scores_BKHW, objects_BMF = network(batch.features[batch.image_rows]).cpu(), batch.answers.cpu()
        peaks_BHW = peaks(scores_BKHW)
        found += int(peaks_BHW.sum())
        objects += int((objects_BMF[..., 0] >= 0).sum())
        matches += sum(map(count_matches, peaks_BHW, objects_BMF))
        is_right.append(named(scores_BKHW, objects_BMF)[1])
    right_4 = torch.cat(is_right).float().mean(0)
    shares = {"precision": matches / max(1, found), "recall": matches / max(1, objects)}
    return {"objects": objects} | shares | dict(zip(ATTRIBUTES, right_4.tolist(), strict=True))
