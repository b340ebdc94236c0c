"""`iep-train` run in this process, and what its tests read of a run."""

import json
from pathlib import Path

from click.testing import CliRunner, Result
from killing import MEASURED
from torch import Tensor

from iep.cli.train import main
from iep.models.checkpoint import load_checkpoint
from iep.runtime.records import METRICS


def iep_train(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def weights(checkpoint: Path, network: str) -> dict[str, Tensor]:
    """Return the weights of a network of a checkpoint."""
    return load_checkpoint(checkpoint)["networks"][network]["weights"]


def rows(out: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.jsonl, without speed and memory, which differ from run to run."""
    recorded = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in recorded]
