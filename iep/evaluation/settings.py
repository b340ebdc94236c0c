"""What an evaluation is told: the one home of its defaults besides those that it shares with training (`config.py`).

Nothing here waits for torch, so that help texts can name the defaults.
"""

from dataclasses import dataclass
from pathlib import Path

from iep.config import Config

PARTS = ("pg", "ee", "baseline")


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate and how. Of `PARTS`, checkpoints or run directories, None where not asked for."""

    data: Path
    split: str = "val"
    pg: Path | None = None
    ee: Path | None = None
    baseline: Path | None = None
    programs: str | None = None
    """`predicted` or `ground-truth`; None is predicted where there is a `pg`."""
    batching: str = Config.batching
    sharing: bool | None = Config.sharing
    beam_size: int = 1
    max_program_length: int = Config.max_program_length
    precision: str = Config.precision
    batch_size: int = 256
    order_by_image: bool = False
    families: str | None = None
    """Evaluate on the questions of these families only, as `Config.families`."""
    skip_samples: int = 0
    """How many of these to skip at the start."""
    num_samples: int | None = None
    """How many of what is left to evaluate on, from the start."""
    workers: int = Config.workers
    features_in_memory: bool = Config.features_in_memory
    device: str = Config.device
    placement: str = Config.placement
    devices: tuple[str, ...] = Config.devices
