"""What a checkpoint says of the features that it was trained on -> the backbone that makes the same of an image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from iep.errors import InputError
from iep.models.build import check_features, features_shape
from iep.preprocess.backbones import GRID, Patches, ResNet, backbone_of
from iep.preprocess.compute_features import image_features

DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Sight:
    """How images are to be seen: by which backbone, in the precision of which dtype."""

    backbone: Patches | ResNet
    dtype: str = "float32"

    def __str__(self) -> str:
        eyes = self.backbone
        if isinstance(eyes, Patches):
            return f"{GRID}x{GRID} patches of {eyes.patch_size}x{eyes.patch_size} pixels"
        return f"{eyes.name} to stage {eyes.stage}, {eyes.image_size}x{eyes.image_size} pixels, {eyes.weights} weights"


def sight_of(
    recipe: Mapping[str, object], path: Path, weights: str | None, options: Sequence[str], say: Callable[[str], None]
) -> Sight:
    """How the features were made that a checkpoint was trained on, of what it records.

    Args:
        recipe: what the checkpoint records, not empty.
        path: of the checkpoint.
        weights: a file, where the recipe asks for one; or to take for torchvision's.
        options: names of other options of a backbone that were given.
        say: gets a line where `weights` cannot be compared with the recipe.

    Raises:
        InputError: the recipe cannot be followed, or leaves nothing for `options` to say.
    """
    if options:
        made = recipe.get("backbone")
        raise InputError(f"{path}: says itself how its features were made (by {made}); give no {options[0]}")
    dtype = str(recipe.get("dtype", "float32"))
    if dtype not in DTYPES:
        raise InputError(f"{path}: features of dtype {dtype}, expected {' or '.join(DTYPES)}")
    try:
        sight = Sight(backbone_of(recipe, weights), dtype)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if weights is not None and sight.backbone.recipe()["weights"] != recipe.get("weights"):
        say(f"{path}: its features were made with {recipe.get('weights')}, for which {weights} is taken")
    return sight


def likely_sight(network: nn.Module, path: Path, say: Callable[[str], None]) -> Sight:
    """How the features were probably made that a network takes, where its checkpoint does not say: patches where their
    shape is one of patches, else as the original toolkit made them (Johnson et al. 2017, section 4.1).

    Args:
        say: gets the line that this was not known.
    """
    shape = features_shape(network)
    patch = isqrt(shape[0] // 3)
    is_patches = shape == (3 * patch * patch, GRID, GRID)[: len(shape)]
    sight = Sight(Patches(patch) if is_patches else ResNet())
    say(f"{path}: does not say how its features were made; taken for {sight} (--backbone and others say otherwise)")
    return sight


def see(sight: Sight, image: Path, network: nn.Module, device: torch.device) -> Tensor:
    """(1, C, H, W) features of the image for the network, on the device.

    Raises:
        InputError: the image cannot be read, or its features are not those that the network is made for.
    """
    features_1CHW = image_features(image, sight.backbone, sight.dtype, device)
    check_features(network, features_1CHW.shape[1:], f"{image}, by {sight}")
    return features_1CHW.to(device)
