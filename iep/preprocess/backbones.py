"""Pixels -> features: a torchvision ResNet up to a stage, or the scene network.

A backbone is plain data: its kind and settings. Its `extractor` is a function of pixels. Its `recipe` is recorded in
features files and in the checkpoints of models trained on them; `backbone_of` returns the backbone of a recipe.

Shapes: B images, C H W features.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from iep.backbone.network import SceneNetwork
from iep.errors import InputError
from iep.models.checkpoint import checkpoint_file, read_checkpoint
from iep.preprocess.backbone_choices import RESNET, RESNET_IMAGE_SIZE, RESNET_STAGE, RESNETS
from iep.preprocess.recipe import Recipe, file_digest
from iep.runtime.devices import place
from iep.runtime.reading import reading

DEFAULT_WEIGHTS = "torchvision IMAGENET1K_V1"
RANDOM_WEIGHTS = "random, outputs of order 1"
"""The recorded name of the weights of `randomize`, which the seed follows."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


SHIPPED_WEIGHTS = Path(__file__).parents[1] / "backbone" / "synth.safetensors"
"""A scene network trained on what `iep-synth` draws; docs/backbone.md describes it."""


@dataclass(frozen=True)
class Scenes:
    """The trunk of a scene network (`iep.backbone.network`): features (C, height / 16, width / 16), 0 or more.

    Args:
        weights: `default` (those that ship with the package), a safetensors file, or a checkpoint or run directory of
            `iep-train --model backbone`.
    """

    weights: str = "default"

    def recipe(self) -> Recipe:
        """Return the recipe, with a digest in place of the weights.

        Raises:
            InputError: there is no such file.
        """
        return {
            "backbone": "synth",
            "weights": f"file {file_digest(self._path)}",
            "normalisation": "x / 127.5 - 1",
        }

    @cached_property
    def network(self) -> SceneNetwork:
        """The network in evaluation mode, on the CPU; loaded once.

        Raises:
            InputError: the file is missing or damaged, or holds the weights of another network.
        """
        return read_checkpoint(self._path).network("backbone").module.eval()

    @property
    def input_size(self) -> tuple[int, int]:
        """The width and height of the images in pixels.

        Raises:
            InputError: the weights cannot be loaded.
        """
        return self.network.image_size

    def extractor(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of pixels: (B, 3, H, W) uint8 -> (B, C, H / 16, W / 16) float32.

        Raises:
            InputError: the weights cannot be loaded.
        """
        view = self.viewer(device)
        return lambda pixels_BCHW: view(pixels_BCHW)[0]

    def viewer(self, device: torch.device) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function of pixels, as `extractor` does, that returns the scores of `SceneNetwork` besides features.

        Raises:
            InputError: the weights cannot be loaded.
        """
        network = place(deepcopy(self.network), device)

        def view(pixels_BCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                features_BCHW, scores_BKHW = network.view(pixels_BCHW.to(device))
                return features_BCHW.contiguous(), scores_BKHW

        return view

    @property
    def _path(self) -> Path:
        return SHIPPED_WEIGHTS if self.weights == "default" else checkpoint_file(Path(self.weights))


@dataclass(frozen=True)
class ResNet:
    """A torchvision ResNet to the end of one of its stages (He et al. 2016, table 1), on ImageNet-normalised pixels.

    The features in Johnson et al. 2017 (section 4.1) are the output of stage 3 of a resnet101: (1024, 14, 14).

    Args:
        name: torchvision's name, one of `RESNETS`.
        stage: 1 to 4, torchvision's layer1 to layer4.
        weights: `default` (torchvision's ImageNet weights, version 1, which the original toolkit used), `random`
            (`randomize`), or a file with a state dict of this ResNet.
        seed: the seed of random weights.
        image_size: number of pixels to a side, which stage 3 divides by 16.
    """

    name: str = RESNET
    stage: int = RESNET_STAGE
    weights: str = "default"
    seed: int = 0
    image_size: int = RESNET_IMAGE_SIZE

    def recipe(self) -> Recipe:
        weights = {"default": DEFAULT_WEIGHTS, "random": f"{RANDOM_WEIGHTS}, seed {self.seed}"}
        return {
            "backbone": self.name,
            "stage": self.stage,
            "weights": weights.get(self.weights) or f"file {file_digest(Path(self.weights))}",
            "image_size": self.image_size,
            "normalisation": "ImageNet mean and standard deviation",
        }

    @property
    def input_size(self) -> tuple[int, int]:
        """The width and height of the images in pixels."""
        return (self.image_size,) * 2

    def extractor(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function of pixels: (B, 3, H, W) uint8 -> (B, C, H', W') float32.

        Raises:
            InputError: torchvision cannot be imported, the weights cannot be downloaded, or their file does not fit.
        """
        trunk = _trunk(self._model(), self.stage).to(device).eval()
        mean = torch.tensor(IMAGENET_MEAN, device=device).view(3, 1, 1)
        std = torch.tensor(IMAGENET_STD, device=device).view(3, 1, 1)

        def extract(pixels_BCHW: torch.Tensor) -> torch.Tensor:
            # With full float32 products and repeatable kernels, files made on different devices agree closely.
            with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                return trunk((pixels_BCHW.to(device) / 255 - mean) / std)

        return extract

    def _model(self) -> nn.Module:
        try:
            from torchvision import models  # the scene network does not need torchvision
        except (ImportError, RuntimeError) as error:  # a RuntimeError if torchvision was built for another torch
            remedy = f"install the version that belongs to torch {torch.__version__}"
            raise InputError(f"torchvision cannot be imported ({error}); {remedy}") from None
        if self.weights == "default":
            try:
                return models.get_model(self.name, weights="IMAGENET1K_V1")
            except (OSError, RuntimeError) as error:
                raise InputError(
                    f"the weights of {self.name} cannot be downloaded ({error}); give a state dict with --weights FILE"
                ) from None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = models.get_model(self.name, weights=None)
            if self.weights == "random":
                randomize(model)
        if self.weights != "random":
            _load_weights(model, Path(self.weights), self.name, self.stage)
        return model


Backbone = Scenes | ResNet


def backbone_of(recipe: Mapping[str, Any], weights: str | None = None) -> Backbone:
    """Return the backbone that made the features with a recorded recipe.

    Args:
        recipe: the recipe that a features file or a checkpoint records.
        weights: a file with the weights of a ResNet or a scene network. It is needed if the recipe names another file
            than the package's by its digest, and it otherwise replaces torchvision's weights.

    Raises:
        InputError: the recipe is not that of a backbone, needs a file of weights, or was made with another file.
    """
    name, recorded = recipe.get("backbone"), str(recipe.get("weights"))
    if name == "synth":
        backbone: Backbone = Scenes(weights or "default")
    elif name in RESNETS:
        seed = re.fullmatch(RANDOM_WEIGHTS + r", seed (\d+)", recorded)
        chosen = weights or ("random" if seed else "default")
        backbone = ResNet(name, recipe["stage"], chosen, int(seed[1]) if seed else 0, recipe["image_size"])
    else:
        raise InputError(f"the features were made by the backbone {name!r}, which this version does not know")
    own = backbone.recipe()
    if weights is None and recorded.startswith("file ") and recorded != own["weights"]:
        raise InputError(f"the weights of {name} were those of a {recorded} (its SHA-256): give --weights FILE")
    trusted = {"weights"} if recorded == DEFAULT_WEIGHTS and weights is not None else set()
    for key, value in own.items():
        if key not in trusted and recipe.get(key) != value:
            raise InputError(f"the features were made with {key} {recipe.get(key)}, not with {value}")
    return backbone


@torch.no_grad()
def randomize(model: Any) -> None:
    """Initialise a torchvision ResNet at random, so that its features are about as large as with pretrained weights.

    torchvision's own random weights are for training, where batch norms use the statistics of the batch. Here batch
    norms do nothing, so features would grow with every block, to millions in resnet152. Two things keep them of order
    1. Convolutions preserve the variance of their input (He et al. 2015, equation 10: `fan_in`), where torchvision's
    preserve that of gradients. The last batch norm's weight scales a residual branch by 1 / sqrt(2 n) in a stage of n
    blocks, so that the sum over the stage grows at most e-fold.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            last = block.bn3 if hasattr(block, "bn3") else block.bn2
            nn.init.constant_(last.weight, (2 * len(stage)) ** -0.5)


def _trunk(model: nn.Module, stage: int) -> nn.Sequential:
    """Return the layers of a ResNet to the end of a stage, under their names in the ResNet."""
    parts = ("conv1", "bn1", "relu", "maxpool", *(f"layer{number}" for number in range(1, stage + 1)))
    return nn.Sequential(OrderedDict((part, model.get_submodule(part)) for part in parts))


def _load_weights(model: nn.Module, path: Path, name: str, stage: int) -> None:
    """Load a state dict, which must hold the weights of `model` up to `stage`, and no others than this model's.

    Raises:
        InputError: the file is missing or not a state dict, or it is the state dict of another network.
    """
    with reading(path, f"a state dict of {name}"):
        found = torch.load(path, map_location="cpu", weights_only=True)
        differences = model.load_state_dict(found, strict=False)
        missing = sorted(_trunk(model, stage).state_dict().keys() & set(differences.missing_keys))
        if differences.unexpected_keys or missing:
            what = f"{missing[0]!r} is missing" if missing else f"{differences.unexpected_keys[0]!r} is not part of it"
            raise InputError(f"not a state dict of {name}: {what}")
