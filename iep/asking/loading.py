"""Checkpoints and an image -> networks that have seen it, to be asked."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import torch
from torch import nn

from iep.asking.answers import Asker
from iep.asking.sight import Sight, likely_sight, see, sight_of
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.models.build import check_vocab, load_baseline, looks, place, unpack
from iep.models.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.preprocess.backbones import Patches, ResNet
from iep.runtime.devices import resolve_device
from iep.vocab import Vocab

Say = Callable[[str], None]


@dataclass(frozen=True)
class Asking:
    """Whom to ask about which image: an engine, by a generator's programs or given ones, or a baseline.

    Attributes:
        image: may be None for a baseline that does not look.
        ee: checkpoint or run of an execution engine; None for a baseline.
        pg: checkpoint or run of a program generator; None to run given programs only.
        baseline: checkpoint or run of a baseline.
        backbone: what makes features of images, where the checkpoint does not say; None for what is likely.
        weights: a file of a ResNet's weights, where the checkpoint's recipe needs one.
        options: names of the options that were given for `backbone`, besides `--weights`.
    """

    image: Path | None
    ee: Path | None = None
    pg: Path | None = None
    baseline: Path | None = None
    backbone: Patches | ResNet | None = None
    weights: str | None = None
    options: tuple[str, ...] = ()
    _: KW_ONLY
    beam_size: int
    max_program_length: int
    device: str


def make_asker(asking: Asking, say: Say) -> Asker:
    """Load the networks and look at the image; `say` gets a line for what had to be assumed.

    Raises:
        InputError: a checkpoint, its vocabulary, its features or the image does not fit.
    """
    device = resolve_device(asking.device)
    path = asking.ee if asking.baseline is None else asking.baseline
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    vocab = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    lengths = {"beam_size": asking.beam_size, "max_program_length": asking.max_program_length}
    if asking.baseline is not None:
        networks = {"baseline": load_baseline(path, vocab, device)}
        if not looks(held["networks"]):
            _tell_blind(asking, path, say)
            return Asker(Predictor(**networks, **lengths), vocab, None, device)
    else:
        networks = {"engine": place(unpack(held, "engine", path), device).eval()}
    if asking.pg is not None:
        networks["generator"], words = _generator(asking.pg, vocab, path, device)
        vocab = Vocab(words, vocab.program, vocab.answer)
    if asking.image is None:
        raise InputError(f"{path}: looks at an image; give --image FILE")
    looking = next(iter(networks.values()))
    features_1CHW = see(_sight(asking, path, looking, say), asking.image, looking, device)
    return Asker(Predictor(**networks, run_predicted=True, **lengths), vocab, features_1CHW, device)


def _tell_blind(asking: Asking, path: Path, say: Say) -> None:
    """What there is to say of an image where the network at `path` does not look.

    Raises:
        InputError: an option says how it is to look.
    """
    if given := [*asking.options, *(["--weights"] if asking.weights else [])]:
        raise InputError(f"{path}: does not look at an image; give no {given[0]}")
    if asking.image is not None:
        say(f"{path}: does not look at the image")


def _generator(
    path: Path, engines: Vocab, engines_path: Path, device: torch.device
) -> tuple[nn.Module, tuple[str, ...]]:
    """A generator for an engine of some vocabulary, and the question tokens that it knows."""
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    generator = place(unpack(held, "generator", path), device).eval()
    own = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    together = Vocab(own.question, engines.program, engines.answer)
    check_vocab(own, together, "generator", path, source=engines_path)
    return generator, own.question


def _sight(asking: Asking, path: Path, looking: nn.Module, say: Say) -> Sight:
    if looking.recipe:
        return sight_of(looking.recipe, path, asking.weights, asking.options, say)
    return likely_sight(looking, path, say) if asking.backbone is None else Sight(asking.backbone)
