"""Checkpoints -> a `Model`, and with an image, an `Asker`: the networks and the features of the image.

The features are computed in the way that the checkpoint records for its training data, or else in the likeliest way.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import torch
from PIL import Image
from torch import nn

from iep.asking.answers import Answer, Asker
from iep.config import Evaluation
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.evaluation.symbolic import scene_of
from iep.models.build import (
    BASELINES,
    FEATURE_SIDES,
    check_features,
    check_vocab,
    features_shape,
    name_of,
    pack,
    place,
    unpack,
)
from iep.models.checkpoint import PARTS_OF_A_MODEL, checkpoints, load_checkpoint
from iep.models.weights import WEIGHTS, save_weights
from iep.preprocess.backbones import GRID, Backbone, Patches, ResNet, Scenes, backbone_of
from iep.preprocess.compute_features import image_features
from iep.preprocess.images import open_image
from iep.runtime.devices import resolve_device
from iep.synth.world import ATTRIBUTES
from iep.vocab import Vocab

DTYPES = ("float32", "float16")
DEFAULT = Path(__file__).with_name("default.safetensors")
"""The networks that come with the package; docs/results.md says how they were trained."""


@dataclass(frozen=True)
class Model:
    """Networks that answer questions about images, and how the features of an image are computed."""

    path: Path
    """The checkpoint of the network that answers, for messages."""
    predictor: Predictor
    vocab: Vocab
    backbone: Backbone | None
    """None for a baseline that reads no image."""
    dtype: str
    """The dtype of the features."""
    device: torch.device

    @staticmethod
    def from_pretrained(name: Path | str, **options: Any) -> "Model":
        """Load networks as `iep.load` does; this is the name that other libraries of the Hub use."""
        return load(name, **options)

    def about(self, image: Path | str | Image.Image | None) -> Asker:
        """Return an `Asker` for one image, whose features are computed once; None for a baseline that reads no image.

        Args:
            image: a file, or an image of Pillow.

        Raises:
            InputError: the image cannot be used, is missing, or is neither a path nor an image of Pillow.
        """
        if self.backbone is None:
            return Asker(self.predictor, self.vocab, None, self.device)
        if image is None:
            raise InputError(f"{self.path}: needs an image, and there is none")
        source = _source(image)
        open_image(source)  # an unusable file is an error before weights are downloaded
        features_1CHW, found = image_features(source, self.backbone, self.dtype, self.device)
        network = self.predictor.baseline or self.predictor.engine
        check_features(network, features_1CHW.shape[1:], f"{image}, by {_describe(self.backbone)}")
        return Asker(self.predictor, self.vocab, features_1CHW.to(self.device), self.device, found)

    def objects(self, image: Path | str | Image.Image) -> list[dict[str, Any]]:
        """Return the objects that the backbone finds in an image.

        Args:
            image: a file, or an image of Pillow.

        Returns:
            the objects as in a scenes file of CLEVR: `size`, `color`, `material` and `shape`; `pixel_coords`, the
            centre's column and row in the image and its distance; and `3d_coords`, as seen by CLEVR's camera. In
            addition, `confidence` has the probability of each attribute's value.

        Raises:
            InputError: the image cannot be used, or the networks have another backbone, which finds no objects.
        """
        if not isinstance(self.backbone, Scenes):
            raise InputError(f"{self.path}: only the backbone synth finds objects, which these networks do not have")
        found = self.about(image).found
        objects = scene_of(found, open_image(_source(image)).size)["objects"]
        for each, confidence_A in zip(objects, found.confidence_NA.tolist(), strict=True):
            del each["rotation"]  # the backbone does not find it
            each["confidence"] = dict(zip(ATTRIBUTES, confidence_A, strict=True))
        return objects

    def ask(self, image: Path | str | Image.Image | None, question: str) -> Answer:
        """Return the answer to a question about an image. `print` shows it with its program and other answers.

        Raises:
            InputError: the image or the question cannot be used.
        """
        return self.about(image).ask([question])[0]

    def save(self, directory: Path | str, half: bool = False) -> None:
        """Write `best.safetensors` and `config.json` with all networks into a directory, from which `iep.load` reads.

        Args:
            half: store float16, which takes half the space. Computation is in float32 all the same.

        Raises:
            InputError: the directory holds a run, whose checkpoints `iep.load` would read.
            OSError: a file cannot be written.
        """
        if checkpoints(Path(directory)):
            raise InputError(f"{directory}: already holds a run; choose another directory")
        found = {"generator": self.predictor.generator, "engine": self.predictor.engine}
        networks = {name: network for name, network in found.items() if network is not None}
        if self.predictor.baseline is not None:
            networks = {name_of(self.predictor.baseline): self.predictor.baseline}
        recipe, packed = next(reversed(networks.values())).recipe, pack(networks)
        content = {"networks": packed, "features": recipe, "vocab": self.vocab.to_json()}
        save_weights(Path(directory), content, half)

    def push_to_hub(self, name: str, private: bool = False) -> str:
        """Upload the networks to a repository on the Hugging Face Hub, created if necessary, and return its address.

        `pip install 'iep[hub]'` installs what this needs, and `hf auth login` stores the token.

        Args:
            name: such as `user/name`.
            private: whether a new repository is private.

        Raises:
            InputError: the extra is not installed.
            HfHubHTTPError: the Hub refuses the upload.
        """
        hub = _hub(f"{name}:")
        with TemporaryDirectory() as directory:
            self.save(directory)
            (Path(directory) / "README.md").write_text(CARD.format(name=name))
            address = hub.create_repo(name, private=private, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload networks")
        return str(address)


def _source(image: Path | str | Image.Image) -> Path | Image.Image:
    """Return the path or the image of Pillow that a user gave.

    Raises:
        InputError: it is neither.
    """
    if not isinstance(image, str | PathLike | Image.Image):
        raise InputError(f"the image is of type {type(image).__name__}, expected a path or an image of Pillow")
    return Path(image) if isinstance(image, str) else image


CARD = """---
library_name: iep
tags: [clevr, visual-question-answering, neural-module-networks]
---
Networks of `iep`, a toolkit for CLEVR visual reasoning. They answer questions about images of CLEVR's world:

```python
import iep

print(iep.load("{name}").ask("image.png", "How many red things are there?"))
```
"""
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load(
    name: Path | str = DEFAULT, pg: Path | str | None = None, device: str = "auto", modules: str | None = None
) -> Model:
    """Load networks that answer questions about images: `iep.load("runs/joint").ask("image.png", "What color ...?")`.

    Args:
        name: a run directory, a checkpoint, or the name `user/name` of a repository on the Hugging Face Hub. It holds a
            baseline or an execution engine, and with it perhaps a program generator. The default are the networks
            that come with the package, which were trained on generated images of CLEVR's difficulty.
        pg: the same for the program generator, if `name` does not hold one.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        modules: the class of another package, such as `mypackage.modules:Gated`, that the engine's set of modules is.
            The checkpoint names it too, but its code is executed only if it is given here.

    Raises:
        InputError: a checkpoint cannot be used, two of them do not fit together, there is no generator, `pg` or
            `modules` is given for a baseline, or `modules` differs from the checkpoint's.
    """
    return load_model(_local(name), pg=None if pg is None else _local(pg), device=device, modules=modules)


def _local(name: Path | str) -> Path:
    """Return the path of networks: those of the package for `default`, a path, or a download from the Hub."""
    if not isinstance(name, str | PathLike):
        raise InputError(f"{name!r:.60}: expected a path, or a name on the Hugging Face Hub such as user/name")
    if str(name) == "default" and not Path(name).exists():
        return DEFAULT
    if Path(name).exists() or not HUB_NAME.fullmatch(str(name)):
        return Path(name)
    hub = _hub(f"{name}: not a run here, and")
    try:
        return Path(hub.hf_hub_download(str(name), WEIGHTS))
    except Exception as error:  # of requests and of the library, without a common class
        reason = shorten(str(error), 300, placeholder=" ...")
        raise InputError(f"{name}: no such run here, and the Hub has no {WEIGHTS} of this name ({reason})") from None


def _hub(before: str) -> Any:
    """Return the library of the Hub; without it, an error has the text `before` at its beginning."""
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{before} the Hugging Face Hub needs pip install 'iep[hub]'") from None
    return huggingface_hub


def load_model(
    path: Path,
    *,
    device: str,
    kind: str | None = None,
    pg: Path | None = None,
    predicts: bool = True,
    beam_size: int = Evaluation.beam_size,
    max_program_length: int = Evaluation.max_program_length,
    say: Callable[[str], None] = lambda _: None,
    modules: str | None = None,
    backbone: Callable[[], Backbone] | None = None,
    weights: str | None = None,
    options: Sequence[str] = (),
) -> Model:
    """Load the networks, an engine or a baseline, and choose the backbone of images.

    Args:
        path: the checkpoint or run of an execution engine or a baseline.
        kind: `engine` or `baseline`, if it must be one of them.
        pg: the checkpoint or run of a program generator; None for the one that `path` holds.
        predicts: whether programs are predicted. Without it, no generator is needed.
        say: a function that receives a line for each assumption.
        modules: the class of another package that the engine's set of modules is, as for `load`.
        backbone: returns the backbone to use if the checkpoint does not record one; None for the likeliest one.
        weights: a file with the weights of the recorded backbone, if it needs one.
        options: the options of `backbone` that were given, besides `--weights`.

    Raises:
        InputError: a checkpoint or an option cannot be used, or two of them do not fit together.
    """
    on = resolve_device(device)
    held = load_checkpoint(path, PARTS_OF_A_MODEL)
    vocab = Vocab.from_json(held["vocab"], f"{path} (vocabulary)")
    baseline = next((name for name in held["networks"] if name in BASELINES), None)
    kind = kind or ("engine" if "engine" in held["networks"] or baseline is None else "baseline")
    if kind == "baseline" and (pg is not None or modules is not None):
        raise InputError(f"{path}: a baseline runs no program; {'modules' if pg is None else 'pg'} does not apply")
    name = "engine" if kind == "engine" else baseline or kind
    answering = place(unpack(held, name, path, modules), on).eval()
    networks = {kind: answering}
    reads_image = name in FEATURE_SIDES
    if not reads_image and (given := [*options, *(["--weights"] if weights else [])]):
        raise InputError(f"{path}: reads no image; {given[0]} does not apply")
    if kind == "engine" and predicts:
        if pg is None and "generator" not in held["networks"]:
            raise InputError(f"{path}: holds no program generator; give that of another run as pg (--pg CKPT)")
        of_generator = held if pg in (None, path) else load_checkpoint(pg, PARTS_OF_A_MODEL)
        networks["generator"] = place(unpack(of_generator, "generator", pg or path), on).eval()
        own = Vocab.from_json(of_generator["vocab"], f"{pg or path} (vocabulary)")
        vocab = Vocab(own.question, vocab.program, vocab.answer)
        check_vocab(own, vocab, "generator", pg or path, engine=path)
    chosen, dtype = None, "float32"
    if reads_image and answering.recipe:
        chosen, dtype = _recorded_backbone(answering.recipe, path, weights, options, say)
    elif reads_image:
        chosen = backbone() if backbone else _likely_backbone(answering, path, say)
    predictor = Predictor(
        **networks, run_predicted=kind == "engine", beam_size=beam_size, max_program_length=max_program_length
    )
    return Model(path, predictor, vocab, chosen, dtype, on)


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
