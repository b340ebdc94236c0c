"""Sources of networks -> networks that fit the data, on their devices and ready to run.

Training, evaluation, asking and benchmarks assemble their networks here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from iep.data.features import Features
from iep.execution_engine.assembly import Running, prepare
from iep.execution_engine.parts import ProgramSample
from iep.models.checkpoint import Checkpoint, read_checkpoint
from iep.models.network import BASELINES, Network
from iep.runtime.devices import place
from iep.vocab import Vocab


@dataclass(frozen=True)
class Sources:
    """The checkpoints or run directories of networks."""

    generator: Path | str | None = None
    engine: Path | str | None = None
    baseline: Path | str | None = None
    modules: str | None = None
    """The class of another package that the engine's set of modules is; None for a set of this package."""

    def checkpoints(self, names: Iterable[str]) -> dict[str, Checkpoint]:
        """Read the checkpoints of those of the networks `names` that have one; each file is read once.

        Raises:
            InputError: a checkpoint cannot be read.
        """
        read = cache(read_checkpoint)
        paths = {
            "generator": self.generator,
            "engine": self.engine,
            **dict.fromkeys(("baseline", *BASELINES), self.baseline),
        }
        return {name: read(path) for name in names if (path := paths.get(name)) is not None}

    def networks(self) -> dict[str, Network]:
        """Return the networks of all checkpoints, by name.

        Raises:
            InputError: a checkpoint cannot be read, or does not hold its network.
        """
        found = self.checkpoints(("generator", "engine", "baseline"))
        return {
            name: checkpoint.network(name, self.modules if name == "engine" else None)
            for name, checkpoint in found.items()
        }


def assemble(
    networks: Mapping[str, Network],
    vocab: Vocab,
    running: Running,
    features: Sequence[Features] = (),
    sample: ProgramSample | None = None,
) -> None:
    """Check that networks fit the data, and make them ready to run.

    Args:
        vocab: the vocabulary of the data.
        features: the features that the networks will read.
        sample: programs of the data, which a placement and CUDA graphs need.

    Raises:
        InputError: a network does not fit the vocabulary or the features, or cannot run as `running` says.
    """
    for network in networks.values():
        network.check_fits(vocab, features)
    for name, network in networks.items():
        if name == "engine":
            prepare(network.module, running, sample)
        else:
            place(network.module, running.main_device)
        network.module.train(running.training)
