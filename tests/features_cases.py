"""What the tests of features files share: the command, and what it wrote."""

from pathlib import Path

import h5py
import numpy as np
from click.testing import CliRunner

from iep.cli.preprocess import main

PATCHES = ("--backbone", "patches", "--patch-size", 2)
RESNET = ("--backbone", "resnet18", "--image-size", 64)


def run(*arguments, code=0) -> str:
    """The lines that `iep-preprocess --only features` writes, besides the progress bar; it must end with `code`."""
    flags = ("--only", "features", "--workers", 0, "--device", "cpu", "--batch-size", 2)
    result = CliRunner().invoke(main, [str(argument) for argument in (*arguments, *flags)])
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
