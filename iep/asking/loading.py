"""Checkpoints and an image -> networks that are ready to be asked, with the image's features.

Features are computed as a checkpoint records that those of its training were, or else as they probably were.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path

import torch
from torch import nn

from iep.asking.answers import Asker
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.models.build import FEATURE_SIDES, check_features, check_vocab, features_shape, load_network, place, unpack
from iep.models.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.preprocess.backbones import GRID, Backbone, Patches, ResNet, Scenes, backbone_of
from iep.preprocess.compute_features import image_features
from iep.preprocess.images import open_image
from iep.runtime.devices import resolve_device
from iep.runtime.reading import reading
from iep.vocab import Vocab

DTYPES = ("float32", "float16")


@dataclass(frozen=True)
class Extraction:
    """How an image's features are computed: the backbone, and the dtype whose precision they have."""

    backbone: Backbone
    dtype: str = "float32"

    def __str__(self) -> str:
        made_by = self.backbone
        if isinstance(made_by, Patches):
            return f"{GRID}x{GRID} patches of {made_by.patch_size}x{made_by.patch_size} pixels"
        if isinstance(made_by, Scenes):
            return f"the backbone synth with {made_by.weights} weights"
        size = made_by.image_size
        return f"{made_by.name} to stage {made_by.stage}, {size}x{size} pixels, {made_by.weights} weights"


def make_asker(
    *,
    image: Path | None,
    device: str,
    beam_size: int,
    max_program_length: int,
    say: Callable[[str], None],
    ee: Path | None = None,
    pg: Path | None = None,
    baseline: Path | None = None,
    backbone: Backbone | None = None,
    weights: str | None = None,
    options: Sequence[str] = (),
) -> Asker:
    """Load the networks, an engine or a baseline, and compute the image's features.

    Args:
        image: None for a baseline that reads no image.
        say: receives a line for each assumption.
        ee: checkpoint or run of an execution engine; None for a baseline.
        pg: checkpoint or run of a program generator; None to run given programs only.
        baseline: checkpoint or run of a baseline.
        backbone: what computes features if the checkpoint does not record it; None for the likely one.
        weights: a file of a ResNet's weights, if what the checkpoint records needs one.
        options: the options of `backbone` that were given, besides `--weights`.

    Raises:
        InputError: a checkpoint, its vocabulary, its features or the image does not fit.
    """
    on = resolve_device(device)
    path = ee if baseline is None else baseline
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    vocab = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    lengths = {"beam_size": beam_size, "max_program_length": max_program_length}
    if baseline is None:
        answering = place(unpack(held, "engine", path), on).eval()
        networks = {"engine": answering}
    else:
        answering = load_network(path, "baseline", vocab, on)
        networks = {"baseline": answering}
        if not held["networks"].keys() & FEATURE_SIDES.keys():
            if given := [*options, *(["--weights"] if weights else [])]:
                raise InputError(f"{path}: reads no image; {given[0]} does not apply")
            if image is not None:
                say(f"{path}: does not read the image")
            return Asker(Predictor(**networks, **lengths), vocab, None, on)
    if pg is not None:
        networks["generator"], words = _load_generator(pg, vocab, path, on)
        vocab = Vocab(words, vocab.program, vocab.answer)
    if image is None:
        raise InputError(f"{path}: needs an image; give --image FILE")
    with reading(image, "an image"):
        open_image(image)  # so that an unusable file is named before weights are downloaded
    if answering.recipe:
        extraction = _recorded_extraction(answering.recipe, path, weights, options, say)
    else:
        extraction = _likely_extraction(answering, path, say) if backbone is None else Extraction(backbone)
    features_1CHW = image_features(image, extraction.backbone, extraction.dtype, on)
    check_features(answering, features_1CHW.shape[1:], f"{image}, by {extraction}")
    return Asker(Predictor(**networks, run_predicted=True, **lengths), vocab, features_1CHW.to(on), on)


def _load_generator(
    path: Path, engines: Vocab, engines_path: Path, device: torch.device
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a generator for an engine of some vocabulary, and the question tokens that it knows."""
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    generator = place(unpack(held, "generator", path), device).eval()
    own = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    together = Vocab(own.question, engines.program, engines.answer)
    check_vocab(own, together, "generator", path, source=engines_path)
    return generator, own.question


def _recorded_extraction(
    recipe: Mapping[str, object], path: Path, weights: str | None, options: Sequence[str], say: Callable[[str], None]
) -> Extraction:
    """Return how the features of a checkpoint's training were made, from the `recipe` that it records.

    Raises:
        InputError: the recipe cannot be followed, or contradicts the options.
    """
    if options:
        made_by = recipe.get("backbone")
        raise InputError(f"{path}: records how its features were made (by {made_by}); {options[0]} does not apply")
    dtype = str(recipe.get("dtype", "float32"))
    if dtype not in DTYPES:
        raise InputError(f"{path}: features of dtype {dtype}, expected {' or '.join(DTYPES)}")
    try:
        extraction = Extraction(backbone_of(recipe, weights), dtype)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if weights is not None and extraction.backbone.recipe()["weights"] != recipe.get("weights"):
        say(f"{path}: its features were made with {recipe.get('weights')}; {weights} is used in its place")
    return extraction


def _likely_extraction(network: nn.Module, path: Path, say: Callable[[str], None]) -> Extraction:
    """Return how a network's features were probably made: from patches if their shape is that of patches, else as in
    the original toolkit (Johnson et al. 2017, section 4.1)."""
    shape = features_shape(network)
    patch = isqrt(shape[0] // 3)
    is_patches = shape == (3 * patch * patch, GRID, GRID)[: len(shape)]
    extraction = Extraction(Patches(patch) if is_patches else ResNet())
    say(
        f"{path}: does not record how its features were made; they are assumed to be {extraction} (--backbone and the "
        "options after it change this)"
    )
    return extraction
