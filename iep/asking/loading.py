"""Checkpoints and an image -> networks that have seen it, to be asked.

The image is seen as a checkpoint says that its features were made, or else as they probably were.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from math import isqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from iep.asking.answers import Asker
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.models.build import check_features, check_vocab, features_shape, load_baseline, looks, place, unpack
from iep.models.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.preprocess.backbones import GRID, Patches, ResNet, backbone_of
from iep.preprocess.compute_features import image_features
from iep.runtime.devices import resolve_device
from iep.vocab import Vocab

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
