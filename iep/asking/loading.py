"""Checkpoints and an image -> an `Asker`: the networks and the features of the image.

The features are computed in the way that the checkpoint records for its training data, or else in the likeliest way.
"""

from collections.abc import Callable, Mapping, Sequence
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
from iep.vocab import Vocab

DTYPES = ("float32", "float16")


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
    backbone: Callable[[], Backbone] | None = None,
    weights: str | None = None,
    options: Sequence[str] = (),
) -> Asker:
    """Load the networks, an engine or a baseline, and compute the image's features.

    Args:
        image: the image; None for a baseline that reads no image.
        say: a function that receives a line for each assumption.
        ee: the checkpoint or run of an execution engine; None for a baseline.
        pg: the checkpoint or run of a program generator; None to run only given programs.
        baseline: the checkpoint or run of a baseline.
        backbone: returns the backbone to use if the checkpoint does not record one; None for the likeliest one.
        weights: a file with the weights of the recorded backbone, if it needs one.
        options: the options of `backbone` that were given, besides `--weights`.

    Raises:
        InputError: a checkpoint, the image or an option cannot be used, or two of them do not fit together.
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
    open_image(image)  # an unusable file is an error before weights are downloaded
    if answering.recipe:
        chosen, dtype = _recorded_backbone(answering.recipe, path, weights, options, say)
    else:
        chosen, dtype = backbone() if backbone else _likely_backbone(answering, path, say), "float32"
    features_1CHW = image_features(image, chosen, dtype, on)
    check_features(answering, features_1CHW.shape[1:], f"{image}, by {_describe(chosen)}")
    return Asker(Predictor(**networks, run_predicted=True, **lengths), vocab, features_1CHW.to(on), on)


def _load_generator(
    path: Path, engines: Vocab, engines_path: Path, device: torch.device
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a program generator that fits the vocabulary of an engine, and its question tokens."""
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    generator = place(unpack(held, "generator", path), device).eval()
    own = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    together = Vocab(own.question, engines.program, engines.answer)
    check_vocab(own, together, "generator", path, source=engines_path)
    return generator, own.question


def _describe(backbone: Backbone) -> str:
    """Return the settings of a backbone as text."""
    if isinstance(backbone, Patches):
        return f"{GRID}x{GRID} patches of {backbone.patch_size}x{backbone.patch_size} pixels"
    if isinstance(backbone, Scenes):
        return f"the backbone synth with {backbone.weights} weights"
    size = backbone.image_size
    return f"{backbone.name} to stage {backbone.stage}, {size}x{size} pixels, {backbone.weights} weights"


def _recorded_backbone(
    recipe: Mapping[str, object], path: Path, weights: str | None, options: Sequence[str], say: Callable[[str], None]
) -> tuple[Backbone, str]:
    """Return the backbone and the dtype of the features that the `recipe` of a checkpoint records.

    Raises:
        InputError: the recipe cannot be followed or contradicts the options.
    """
    if options:
        name = recipe.get("backbone")
        raise InputError(f"{path}: records how its features were made (by {name}); {options[0]} does not apply")
    dtype = str(recipe.get("dtype", "float32"))
    if dtype not in DTYPES:
        raise InputError(f"{path}: features of dtype {dtype}, expected {' or '.join(DTYPES)}")
    try:
        backbone = backbone_of(recipe, weights)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if weights is not None and backbone.recipe()["weights"] != recipe.get("weights"):
        say(f"{path}: its features were made with {recipe.get('weights')}; {weights} is used in its place")
    return backbone, dtype


def _likely_backbone(network: nn.Module, path: Path, say: Callable[[str], None]) -> Backbone:
    """Return patches if the network reads features of their shape, else the backbone of the original toolkit (Johnson
    et al. 2017, section 4.1)."""
    shape = features_shape(network)
    patch = isqrt(shape[0] // 3)
    is_patches = shape == (3 * patch * patch, GRID, GRID)[: len(shape)]
    backbone = Patches(patch) if is_patches else ResNet()
    say(
        f"{path}: does not record how its features were made; they are assumed to be {_describe(backbone)} (--backbone "
        "and the options after it change this)"
    )
    return backbone
