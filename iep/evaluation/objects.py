"""A backbone and images whose scenes are known -> precision and recall of objects, and accuracy of their attributes.

Shapes: P pairs of a found and a true object, A attributes.
"""

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path

import torch

from iep.backbone.network import SceneNetwork, compare, find_objects
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
    total = count = 0
    are_right = []
    for batch in batches:
        found = find_objects(network(batch.features[batch.image_rows]))
        total += int((batch.answers[..., 0] >= 0).sum())
        count += sum(len(each.objects_NF) for each in found)
        are_right.append(compare(found, batch.answers, network.image_size))
    right_PA = torch.cat(are_right)
    pairs = len(right_PA)
    shares = {"precision": pairs / max(1, count), "recall": pairs / max(1, total)}
    return {"objects": total} | shares | dict(zip(ATTRIBUTES, (right_PA.sum(0) / max(1, pairs)).tolist(), strict=True))
