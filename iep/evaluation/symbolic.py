"""Programs and images -> answers, by executing the programs on the objects that a backbone finds in the images.

This is the engine of Yi et al. 2018 (Neural-Symbolic VQA, section 3): a scene parser, here the backbone, and an
executor of the functions' meanings. It learns nothing: an error comes from the objects found or from the program.
Positions on the ground follow from the pixels of the centres by CLEVR's camera, whose jitter is unknown.

Shapes: Q questions, L program tokens, N objects found in an image.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from iep.backbone.network import FoundObjects, find_objects
from iep.errors import InputError
from iep.preprocess.backbones import Scenes
from iep.preprocess.clevr_files import image_directories, image_paths
from iep.preprocess.images import image_batches
from iep.programs import prefix_to_json
from iep.runtime.distributed import is_main
from iep.synth.executor import Facts, IllPosedError, execute, facts_of
from iep.synth.scenes import CAMERA, Scene, Thing, camera_at, scene_json
from iep.synth.world import ATTRIBUTES, RADIUS, VALUES
from iep.vocab import content_tokens

NO_ANSWER = "(no answer)"
"""The answer of a program that is not well-formed, or whose `unique` gets no object or several."""
BATCH_SIZE = 64


def scene_of(found: FoundObjects, image_size: tuple[int, int]) -> dict:
    """Return the objects that a backbone found, seen by CLEVR's camera, as an entry of a CLEVR scenes file.

    Args:
        image_size: width and height of the image in pixels.
    """
    (width, height), camera, things = image_size, camera_at(CAMERA), []
    for x, y, *indices in found.objects_NF.tolist():
        values = {name: VALUES[name][int(index)] for name, index in zip(ATTRIBUTES, indices, strict=True)}
        center = camera.locate(x * width, y * height, width, height, RADIUS[values["size"]])
        things.append(Thing(**values, center=center, rotation=0.0))
    return scene_json(Scene(camera, tuple(things)), 0, "", width, height)


@torch.inference_mode()
def find_facts(
    backbone: Scenes, clevr_dir: Path, split: str, images: Iterable[int], device: torch.device, workers: int
) -> dict[int, Facts]:
    """Return what a backbone finds in some images of a CLEVR directory, by the images' indices.

    Raises:
        InputError: there are no images of the split, or too few, one cannot be read, or the backbone's weights cannot.
    """
    directory, images = image_directories(clevr_dir).get(split), sorted(set(images))
    if directory is None:
        raise InputError(f"{clevr_dir / 'images' / split}: no such directory, expected the split's images")
    paths = image_paths(directory)
    if images and images[-1] >= len(paths):
        raise InputError(f"{directory}: holds {len(paths)} images, but a question is about image {images[-1]}")
    network = deepcopy(backbone.network).to(device)
    found = []
    with tqdm(total=len(images), desc="find objects", unit="image", disable=not is_main()) as bar:
        for pixels_BCHW in image_batches([paths[i] for i in images], network.image_size, BATCH_SIZE, workers):
            found += find_objects(network(pixels_BCHW.to(device)))
            bar.update(len(pixels_BCHW))
    return {i: facts_of(scene_of(each, network.image_size)) for i, each in zip(images, found, strict=True)}


def execute_programs(
    programs_QL: np.ndarray, tokens: Sequence[str], image_idxs_Q: np.ndarray, facts: Mapping[int, Facts]
) -> list[str]:
    """Return the answer of each program on the image of its question, or `NO_ANSWER`."""
    answers = []
    for program_L, image in zip(programs_QL, image_idxs_Q.tolist(), strict=True):
        try:
            answers.append(execute(prefix_to_json(content_tokens(program_L, tokens)), facts[image]))
        except (InputError, IllPosedError, LookupError, TypeError):  # predicted programs may be malformed in any way
            answers.append(NO_ANSWER)
    return answers


def reason_to_doubt(tokens: Sequence[str], facts: Facts, answer: str) -> str:
    """Return the reason why found objects contradict the answer to a program; empty if they do not.

    Args:
        tokens: the program in prefix order. One that cannot be executed contradicts no answer.
    """
    try:
        expected = execute(prefix_to_json(tokens), facts)
    except IllPosedError as error:
        return str(error)
    except (InputError, LookupError, TypeError):
        return ""
    return "" if expected == answer else f"the objects found in the image give the answer {expected!r}"
