"""A backbone on the images of a split whose scenes are known: how many objects it finds, and names right.

Shapes: B images, M objects of an image at most, P pairs of a found and a true object, F numbers of an object.
"""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch

from iep.backbone.network import SceneNetwork, find_objects, match
from iep.data.datasets import Batch, ClevrDataset, sequential_batches
from iep.data.loader import on_device
from iep.preprocess.backbones import Scenes
from iep.preprocess.labelled_scenes import open_scenes
from iep.synth.world import ATTRIBUTES

BATCH_SIZE = 64


def evaluate_backbone(
    backbone: Scenes, clevr_dir: Path, split: str, num_samples: int | None, device: torch.device
) -> str:
    """Return a text with the scores of a backbone's network on a split of a CLEVR directory with scenes.

    Raises:
        InputError: the scenes or images cannot be read, as for `open_scenes`, or the backbone's weights.
    """
    network = deepcopy(backbone.network).to(device)
    opened = open_scenes(clevr_dir, split, network.image_size, num_samples)
    batches = sequential_batches(ClevrDataset(opened.questions, opened.features), BATCH_SIZE)
    scores = score_objects(network, on_device(batches, device))
    head = f"{clevr_dir}, {split}: {opened.total:,} images, {scores.pop('objects'):,} objects"
    return "\n".join([head, *(f"{name:9}  {100 * share:5.1f}%" for name, share in scores.items())])


@torch.no_grad()
def score_objects(network: SceneNetwork, batches: Iterable[Batch]) -> dict[str, float]:
    """Return the number of `objects`, the `precision` and `recall` with which they are found, and for each attribute
    the share of the found objects whose value is right, from 0 to 1."""
    total = found = 0
    is_right = []
    for batch in batches:
        objects_BMF = batch.answers.cpu()
        total += int((objects_BMF[..., 0] >= 0).sum())
        for each, objects_MF in zip(find_objects(network(batch.features[batch.image_rows])), objects_BMF, strict=True):
            ours_P, theirs_P = match(each.objects_NF, objects_MF, network.image_size)
            found += len(each.objects_NF)
            is_right.append(each.objects_NF[ours_P, 2:] == objects_MF[theirs_P, 2:])
    right_P4 = torch.cat(is_right)
    pairs = len(right_P4)
    shares = {"precision": pairs / max(1, found), "recall": pairs / max(1, total)}
    return {"objects": total} | shares | dict(zip(ATTRIBUTES, (right_P4.sum(0) / max(1, pairs)).tolist(), strict=True))
