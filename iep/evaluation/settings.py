"""The settings of the three kinds of evaluation: networks on a split, programs on found objects, a file of answers.

Importing this file does not import PyTorch, so that `--help` is fast.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from iep.config import Config
from iep.errors import InputError

EVALUATED = ("pg", "ee", "baseline")
"""The settings that name checkpoints."""
SYMBOLIC = "symbolic"
"""The execution engine that executes programs on the objects that a backbone finds, in place of a checkpoint."""


@dataclass(frozen=True)
class Selection:
    """The questions of a preprocessed split that are evaluated."""

    data: Path
    """The directory that `iep-preprocess` wrote."""
    split: str = "val"
    families: str | None = None
    """The question families to evaluate on, as in `iep.config.Config`."""
    skip_samples: int = 0
    """The number of questions of these families to skip at the start."""
    num_samples: int | None = None
    """The number of questions to evaluate on, from the first that is not skipped."""

    @property
    def text(self) -> str:
        """Which of the split's questions are evaluated; empty for all of them."""
        parts = [] if self.families is None else [f"families {self.families}"]
        return ", ".join([*parts, *_parts(self.skip_samples, self.num_samples)])


@dataclass(frozen=True)
class NetworkSettings:
    """An evaluation of networks; `pg`, `ee` and `baseline` are checkpoints or run directories.

    Raises:
        InputError: there is nothing to evaluate, or two settings contradict each other.
    """

    selection: Selection
    pg: Path | None = None
    ee: Path | None = None
    baseline: Path | None = None
    modules: str | None = None
    """The class of another package that the engine's set of modules is; None for a set of this package."""
    programs: str | None = None
    """`predicted`, `ground-truth`, or None for predicted programs if there is a `pg`."""
    batching: str = Config.batching
    sharing: bool | None = Config.sharing
    execution: str = Config.execution
    precision: str = Config.precision
    beam_size: int = 1
    max_program_length: int | None = None
    """None for the length that the checkpoint stores."""
    batch_size: int = 256
    workers: int = Config.workers
    features_in_memory: bool = Config.features_in_memory
    device: str = Config.device
    placement: str = Config.placement
    devices: tuple[str, ...] = Config.devices

    def __post_init__(self):
        if self.baseline is not None and any(each is not None for each in (self.pg, self.ee, self.programs)):
            raise InputError("--baseline answers alone; evaluate it without --pg, --ee and --programs")
        if self.baseline is None and self.pg is None and self.ee is None:
            raise InputError("nothing to evaluate: give --pg CKPT, --ee CKPT, both, or --baseline CKPT")
        _check_programs(self.programs, self.pg)
        if self.ee is None and self.programs == "ground-truth":
            raise InputError("--programs ground-truth needs an execution engine: give --ee CKPT")

    @property
    def runs_predicted(self) -> bool:
        """True if the programs that are run, if any, are predicted ones."""
        return self.pg is not None and self.programs != "ground-truth"


@dataclass(frozen=True)
class SymbolicSettings:
    """An evaluation of programs that are executed on the objects that a backbone finds in images.

    Raises:
        InputError: programs are to be predicted without a generator.
    """

    selection: Selection
    images: Path
    """A directory in CLEVR's layout with the images of the split."""
    pg: Path | None = None
    backbone: str = "default"
    """The backbone, as `iep.preprocess.backbones.Scenes` names it."""
    programs: str | None = None
    """`predicted`, `ground-truth`, or None for predicted programs if there is a `pg`."""
    beam_size: int = NetworkSettings.beam_size
    max_program_length: int | None = None
    batch_size: int = NetworkSettings.batch_size
    workers: int = Config.workers
    device: str = Config.device

    def __post_init__(self):
        _check_programs(self.programs, self.pg)

    @property
    def runs_predicted(self) -> bool:
        """True if the programs are predicted ones."""
        return self.pg is not None and self.programs != "ground-truth"


@dataclass(frozen=True)
class AnswerSettings:
    """An evaluation of a file with the answers of any model."""

    answers: Path
    selection: Selection | None = None
    """The questions that are answered; None if `questions` are."""
    questions: Path | None = None
    """A question file in CLEVR's format, in place of a selection."""
    skip_samples: int = 0
    """The number of questions of this file to skip at the start."""
    num_samples: int | None = None
    """The number of questions of this file to score, from the first that is not skipped."""

    @property
    def text(self) -> str:
        """Which of the questions are evaluated; empty for all of them."""
        if self.selection is not None:
            return self.selection.text
        return ", ".join(_parts(self.skip_samples, self.num_samples))


def shown(settings: NetworkSettings | SymbolicSettings | AnswerSettings) -> dict[str, object]:
    """Return the names and values of settings for a report."""
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    selection = values.pop("selection")
    if isinstance(settings, AnswerSettings):
        values = {name: value for name, value in values.items() if value is not None}
    return values if selection is None else {**vars(selection), **values}


def _parts(skip_samples: int, num_samples: int | None) -> list[str]:
    parts = [f"without the first {skip_samples}"] if skip_samples else []
    return parts if num_samples is None else [*parts, f"the first {num_samples}"]


def _check_programs(programs: str | None, pg: Path | None) -> None:
    if programs == "predicted" and pg is None:
        raise InputError("--programs predicted needs a program generator: give --pg CKPT")
