"""The command that writes features files, its output, and a backbone that is watched, for the tests of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from click.testing import CliRunner

from iep.cli.preprocess import main
from iep.preprocess.backbones import ResNet

SMALL = ("--backbone", "resnet18", "--stage", 1, "--image-size", 32, "--weights", "random")
"""Features of 8x8 cells and 64 channels, which need no file of weights."""
SMALL_RESNET = ResNet("resnet18", 1, "random", 0, 32)
RESNET = ("--backbone", "resnet18", "--image-size", 64)
FILE, PARTIAL = "val_features.h5", "val_features.h5.partial"


@dataclass(frozen=True)
class Watched(ResNet):
    """A `SMALL_RESNET` that calls `before` at the start of each batch, the first of which only tells the shape."""

    name: str = SMALL_RESNET.name
    stage: int = SMALL_RESNET.stage
    weights: str = SMALL_RESNET.weights
    image_size: int = SMALL_RESNET.image_size
    before: Callable[[], object] = tuple

    def extractor(self, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        extract = super().extractor(device)
        return lambda pixels_BCHW: (self.before(), extract(pixels_BCHW))[1]


def run(*arguments: object, only: str | None = "features", code: int = 0) -> str:
    """Return the lines that `iep-preprocess` writes, or its error; it must end with `code`."""
    flags = ("--workers", 0, "--device", "cpu", "--batch-size", 2, *(() if only is None else ("--only", only)))
    result = CliRunner().invoke(main, [str(argument) for argument in (*flags, *arguments)])
    assert result.exit_code == code, result.output
    if code == 1:
        errors = [line for line in result.stderr.splitlines() if line and "image/s" not in line]
        assert len(errors) == 1, result.stderr
        assert errors[0].startswith("Error: ")
        return errors[0]
    return result.output


def features(path: Path) -> np.ndarray:
    with h5py.File(path) as file:
        return file["features"][()]
