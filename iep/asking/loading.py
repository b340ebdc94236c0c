"""Checkpoints -> a `Model`, which answers questions about images in Python, for the command and for the page.

The features of an image are computed in the way that the checkpoint records for its training data, or else in the
likeliest way. Questions that are asked together run as one minibatch.

Shapes: B questions, T question tokens, L program tokens, C H W features, A answers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from iep.asking.answers import Answer, SeenImage, Words, read_each, read_program, read_question
from iep.config import Evaluation
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.evaluation.predict import Predictor, ranked
from iep.evaluation.symbolic import scene_of
from iep.execution_engine.roles import tree_run
from iep.models.build import BASELINES, FEATURE_SIDES, Network, check_features, place
from iep.models.checkpoint import (
    DEFAULT,
    SAFETENSORS,
    WEIGHTS,
    check_vocab,
    checkpoints,
    load_checkpoint,
    save_weights,
    unpack,
    vocab_of,
)
from iep.preprocess.backbones import GRID, Backbone, Patches, ResNet, Scenes, backbone_of
from iep.preprocess.compute_features import image_features
from iep.preprocess.images import open_image
from iep.runtime.devices import resolve_device
from iep.synth.world import ATTRIBUTES
from iep.vocab import NULL, Vocab

DTYPES = ("float32", "float16")
ImageLike = Path | str | Image.Image | np.ndarray | Tensor


@dataclass(frozen=True, repr=False)
class Model:
    """Networks that answer questions about images, and how the features of an image are computed."""

    path: Path
    """The checkpoint of the network that answers, for messages."""
    networks: Mapping[str, Network]
    """The networks by name; the one that answers is the last."""
    predictor: Predictor
    vocab: Vocab
    backbone: Backbone | None
    """None for a baseline that reads no image."""
    dtype: str
    """The dtype of the features."""
    device: torch.device

    def __repr__(self) -> str:
        found = f"{str(self.path)!r}, networks={[*self.networks]}, backbone={self.backbone}"
        return f"Model({found}, device={str(self.device)!r})"

    @property
    def _answering(self) -> Network:
        return [*self.networks.values()][-1]

    @staticmethod
    def from_pretrained(name: Path | str, **options: Any) -> "Model":
        """Load networks as `iep.load` does; this is the name that other libraries of the Hub use."""
        return load(name, **options)

    def see(self, image: ImageLike | None) -> SeenImage:
        """Compute the features of an image, which `ask` and `objects` take in place of the image.

        Args:
            image: a file; an image of Pillow; an array (H, W, 3) of uint8; or a tensor (3, H, W) of uint8, or of
                numbers from 0 to 1. None for a baseline that reads no image.

        Raises:
            InputError: the image cannot be used, is missing, or is of another type.
        """
        if self.backbone is None:
            return SeenImage(None, None, None)
        if image is None:
            raise InputError(f"{self.path}: needs an image, and there is none")
        pixels = _opened(image)
        features_1CHW, found = image_features(pixels, self.backbone, self.dtype, self.device)
        name = image if isinstance(image, str | PathLike) else "the image"
        check_features(self._answering, features_1CHW.shape[1:], f"{name}, by {_describe(self.backbone)}")
        return SeenImage(pixels, features_1CHW.to(self.device), found)

    @overload
    def ask(self, image: ImageLike | SeenImage | None, question: str, *, program: str | None = None) -> Answer: ...
    @overload
    def ask(self, image: ImageLike | SeenImage | None, question: None = None, *, program: str) -> Answer: ...
    @overload
    def ask(
        self,
        image: ImageLike | SeenImage | None,
        question: list[str] | tuple[str, ...] | None = None,
        *,
        program: list[str] | tuple[str, ...] | None = None,
    ) -> list[Answer]: ...
    def ask(
        self,
        image: ImageLike | SeenImage | None,
        question: str | Sequence[str] | None = None,
        *,
        program: str | Sequence[str] | None = None,
    ) -> Answer | list[Answer]:
        """Answer a question about an image, or a list of questions, which run as one minibatch.

        Args:
            image: an image as for `see`, or the result of `see`, whose features are not computed again.
            question: a question or a list of questions.
            program: a program to run as it is in place of a predicted one, or a list of programs: prefix tokens
                separated by spaces, such as "count filter_color[red] scene". Its question need not be given.

        Returns:
            the answer; of a list of questions or programs, a list of answers.

        Raises:
            InputError: the image, a question or a program cannot be used; there is neither a question nor a program, or
                another number of questions than of programs; or there is no generator and no program, or a program for
                a baseline.
        """
        words = None if question is None else read_each("question", question, lambda text: self._words(text, program))
        if program is None:
            if words is None:
                raise InputError("there is neither a question nor a program; give one of them")
            self.check_answers()
            rows, is_one = [each.indices for each in words], isinstance(question, str)
        else:
            if self.predictor.engine is None:
                raise InputError(f"{self.path}: a baseline runs no program")
            own = self.predictor.engine.module_set
            rows = read_each("program", program, lambda text: read_program(text, self.vocab, own))
            if words is not None and len(words) != len(rows):
                raise InputError(f"{len(words)} questions for {len(rows)} programs: give as many, or none")
            is_one = isinstance(program, str)
        seen = image if isinstance(image, SeenImage) else self.see(image)
        answers = self._answers(seen, words or [None] * len(rows), rows, program is not None) if rows else []
        return answers[0] if is_one else answers

    def check_answers(self) -> None:
        """Check that questions can be answered without programs.

        Raises:
            InputError: there is an engine without a program generator.
        """
        if self.predictor.baseline is None and self.predictor.generator is None:
            raise InputError(f"{self.path}: holds no program generator; give that of another run as pg (--pg CKPT)")

    def _words(self, text: str, program: object) -> Words:
        """Return a question as tokens; a question that is asked without its program needs a known word."""
        words = read_question(text, self.vocab)
        if program is None and not words.is_known:
            raise InputError(f"the question {words.text!r} has no word of the vocabulary")
        return words

    @torch.inference_mode()
    def _answers(
        self, seen: SeenImage, words: Sequence[Words | None], rows: Sequence[Sequence[int]], are_programs: bool
    ) -> list[Answer]:
        """Return the answers of `rows`, tokens of questions or of programs, about one image."""
        rows_BT = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=NULL)
        rows_BT, image_rows_B = rows_BT.to(self.device), torch.zeros(len(rows), dtype=torch.long)
        batch = Batch(image_rows_B, rows_BT, None, None, seen.features_1CHW, image_rows_B.numpy())
        programs_BL = rows_BT if are_programs else self.predictor.programs(batch)
        logits_BA = self.predictor.logits(batch, programs_BL)
        assert logits_BA is not None  # an engine or a baseline answers
        names = [f"question {given.text!r}" if given else f"program {n}" for n, given in enumerate(words, start=1)]
        programs = [()] * len(rows) if programs_BL is None else programs_BL.tolist()
        answers, engine = [], self.predictor.engine
        for given, program_L, shares_A, indices_A in zip(
            words, programs, *(each.tolist() for each in ranked(logits_BA, names.__getitem__)), strict=True
        ):
            probabilities = {self.vocab.answer[index]: share for index, share in zip(indices_A, shares_A, strict=True)}
            tokens = [self.vocab.program[token] for token in program_L]
            tree = None if engine is None else tree_run(tokens, engine.module_set)
            text, unknown = (None, ()) if given is None else (given.text, given.unknown)
            answers.append(Answer(text, unknown, probabilities, tuple(program_L), tree, seen, engine))
        return answers

    def objects(self, image: ImageLike | SeenImage) -> list[dict[str, Any]]:
        """Return the objects that the backbone finds in an image, which is as for `ask`.

        Returns:
            the objects as in a scenes file of CLEVR: `size`, `color`, `material` and `shape`; `pixel_coords`, the
            centre's column and row in the image and its distance; and `3d_coords`, as seen by CLEVR's camera. In
            addition, `confidence` has the probability of each attribute's value.

        Raises:
            InputError: the image cannot be used, or the networks have another backbone, which finds no objects.
        """
        if not isinstance(self.backbone, Scenes):
            raise InputError(f"{self.path}: only the backbone synth finds objects, which these networks do not have")
        seen = image if isinstance(image, SeenImage) else self.see(image)
        assert seen.pixels is not None
        assert seen.found is not None  # this backbone finds objects
        objects = scene_of(seen.found, seen.pixels.size)["objects"]
        for each, confidence_A in zip(objects, seen.found.confidence_NA.tolist(), strict=True):
            del each["rotation"]  # the backbone does not find it
            each["confidence"] = dict(zip(ATTRIBUTES, confidence_A, strict=True))
        return objects

    def save(self, directory: Path | str, half: bool = False) -> None:
        """Write `best.safetensors` and `config.json` with all networks into a directory, from which `iep.load` reads.

        Args:
            half: store float16, which takes half the space. Computation is in float32 all the same.

        Raises:
            InputError: the directory holds a run, whose checkpoints `iep.load` would read, or `directory` is not a
                path.
            OSError: a file cannot be written.
        """
        if not isinstance(directory, str | PathLike):
            raise InputError(f"the directory is {directory!r:.60}, expected a path")
        if checkpoints(Path(directory)):
            raise InputError(f"{directory}: already holds a run; choose another directory")
        packed = {name: network.packed() for name, network in self.networks.items()}
        content = {"networks": packed, "features": self._answering.recipe, "vocab": self.vocab.to_json()}
        save_weights(Path(directory), content, half)

    def push_to_hub(self, name: str, private: bool = False) -> str:
        """Upload the networks to a repository on the Hugging Face Hub, created if necessary, and return its address.

        `pip install 'iep[hub]'` installs what this needs, and `hf auth login` stores the token.

        Args:
            name: such as `user/name`.
            private: whether a new repository is private.

        Raises:
            InputError: the extra is not installed, or `name` is not a repository name.
            HfHubHTTPError: the Hub refuses the upload.
        """
        if not isinstance(name, str) or not HUB_NAME.fullmatch(name):
            raise InputError(f"{name!r:.60}: expected a name on the Hugging Face Hub such as user/name")
        hub = _hub(f"{name}:")
        with TemporaryDirectory() as directory:
            self.save(directory)
            (Path(directory) / "README.md").write_text(CARD.format(name=name))
            address = hub.create_repo(name, private=private, exist_ok=True)
            hub.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload networks")
        return str(address)


def _opened(image: ImageLike) -> Image.Image:
    """Return an image as RGB.

    Raises:
        InputError: the file cannot be read, or the image is of another type than `Model.see` takes.
    """
    if isinstance(image, str | PathLike | Image.Image):
        return open_image(Path(image) if isinstance(image, str) else image)
    kind, pixels_HWC = type(image).__name__, image
    if isinstance(image, Tensor) and image.ndim == 3 and (image.dtype == torch.uint8 or image.is_floating_point()):
        pixels_CHW = image.detach().cpu()
        if image.is_floating_point() and pixels_CHW.numel() and 0 <= pixels_CHW.min() <= pixels_CHW.max() <= 1:
            pixels_CHW = (255 * pixels_CHW.float()).round().to(torch.uint8)
        pixels_HWC = pixels_CHW.permute(1, 2, 0).numpy()
    if isinstance(image, Tensor | np.ndarray):
        kind = f"{kind} {tuple(image.shape)} of {str(image.dtype).removeprefix('torch.')}"
    if not isinstance(pixels_HWC, np.ndarray) or pixels_HWC.dtype != np.uint8 or pixels_HWC.shape[2:] != (3,):
        raise InputError(
            f"the image is of type {kind}, expected a path, an image of Pillow, an array (H, W, 3) of uint8, or a "
            "tensor (3, H, W) of uint8 or of numbers from 0 to 1"
        )
    if not pixels_HWC.size:
        raise InputError(f"the image has no pixels: it is of type {kind}")
    return Image.fromarray(pixels_HWC)


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
HUB_NAME = re.compile(r"(\w[\w.-]*)/\w[\w.-]*")
"""The name of a repository, such as `user/name`; no part begins with a dot, as in a path."""
HUB_TIMEOUT = 5.0
"""The seconds that the Hub has to answer whether a repository exists."""
RUNS = "runs"
"""The usual directory of runs, which is never looked up on the Hub."""


def load(
    name: Path | str = DEFAULT,
    pg: Path | str | None = None,
    device: str = "auto",
    modules: str | None = None,
    *,
    backbone: Backbone | None = None,
    weights: str | None = None,
    beam_size: int = Evaluation.beam_size,
    max_program_length: int = Evaluation.max_program_length,
    say: Callable[[str], None] = lambda _: None,
) -> Model:
    """Load networks that answer questions about images: `iep.load("runs/joint").ask("image.png", "What color ...?")`.

    Args:
        name: a run directory, a checkpoint, or the name `user/name` of a repository on the Hugging Face Hub. It holds a
            baseline or an execution engine, and with it perhaps a program generator. `default` are the networks that
            come with the package, which were trained on generated images of CLEVR's difficulty.
        pg: the same for the program generator, if `name` does not hold one. Without any, programs can be run, but no
            questions answered.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        modules: the class of another package, such as `mypackage.modules:Gated`, that the engine's set of modules is.
            The checkpoint names it too, but its code is executed only if it is given here.
        backbone: the backbone of `iep.preprocess.backbones`, if the checkpoint does not record which one made its
            features; None for the likeliest one.
        weights: a file with the weights of the recorded or the likeliest backbone, if it needs one.
        beam_size: the beam size for decoding programs; 1 decodes greedily.
        max_program_length: the number of tokens after which decoding stops.
        say: a function that receives a line for each assumption about the backbone.

    Raises:
        InputError: a checkpoint cannot be used, two of them do not fit together, an argument does not apply to the
            networks, or `modules` differs from the checkpoint's.
    """
    path, of_pg, on = _local(name), None if pg is None else _local(pg), resolve_device(device)
    held = load_checkpoint(path)
    vocab = vocab_of(held, path)
    own = next((each for each in ("engine", *BASELINES) if each in held["networks"]), "engine")
    if own != "engine" and (pg is not None or modules is not None):
        raise InputError(f"{path}: a baseline runs no program; {'modules' if pg is None else 'pg'} does not apply")
    answering = unpack(held, own, path, modules)
    networks = {own: answering}
    if own == "engine" and (of_pg is not None or "generator" in held["networks"]):
        source = of_pg or path
        of_generator = held if source == path else load_checkpoint(source)
        networks = {"generator": unpack(of_generator, "generator", source)} | networks
        trained = vocab_of(of_generator, source)
        vocab = Vocab(trained.question, vocab.program, vocab.answer)
        check_vocab(trained, vocab, "generator", source, engine=path)
    dtype = "float32"
    if own not in FEATURE_SIDES:
        if backbone is not None or weights is not None:
            raise InputError(
                f"{path}: reads no image; {'weights' if backbone is None else 'a backbone'} does not apply"
            )
    elif answering.recipe:
        if backbone is not None:
            made = f"records how its features were made (by {answering.recipe.get('backbone')})"
            raise InputError(f"{path}: {made}; another backbone does not apply")
        backbone, dtype = _recorded_backbone(answering.recipe, path, weights, say)
    elif backbone is None:
        backbone = _likely_backbone(answering, path, weights, say)
    modules_of = {
        name if name in ("generator", "engine") else "baseline": place(network.module, on).eval()
        for name, network in networks.items()
    }
    predictor = Predictor(
        **modules_of, run_predicted=own == "engine", beam_size=beam_size, max_program_length=max_program_length
    )
    return Model(path, networks, predictor, vocab, backbone, dtype, on)


def _local(name: Path | str) -> Path:
    """Return the path of networks, after a download if `name` is that of a repository on the Hub.

    What looks like a path is not looked up on the Hub: a `Path`, a checkpoint's ending, and `runs` or an existing
    directory before the slash.
    """
    if not isinstance(name, str | PathLike):
        raise InputError(f"{name!r:.60}: expected a path, or a name on the Hugging Face Hub such as user/name")
    path, is_hub_name = Path(name), HUB_NAME.fullmatch(name) if isinstance(name, str) else None
    if not is_hub_name or path.parent.exists() or path.parts[0] == RUNS or path.suffix in (SAFETENSORS, ".pt"):
        return path
    hub = _hub(f"{name}: not a run here, and")
    try:
        if hub.try_to_load_from_cache(name, WEIGHTS) is None:
            # This makes one attempt. Without a connection, a download makes six, which take 23 seconds.
            hub.get_hf_file_metadata(hub.hf_hub_url(name, WEIGHTS), timeout=HUB_TIMEOUT)
        return Path(hub.hf_hub_download(name, WEIGHTS))
    except Exception as error:  # of requests and of the library, without a common class
        reason = shorten(str(error), 300, placeholder=" ...")
        what = f"no such run here, and no {WEIGHTS} of a repository of this name on the Hugging Face Hub"
        raise InputError(f"{name}: {what} ({reason})") from None


def _hub(before: str) -> Any:
    """Return the library of the Hub; without it, an error has the text `before` at its beginning."""
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f"{before} the Hugging Face Hub needs pip install 'iep[hub]'") from None
    return huggingface_hub


def _describe(backbone: Backbone) -> str:
    """Return the settings of a backbone as text."""
    if isinstance(backbone, Patches):
        return f"{GRID}x{GRID} patches of {backbone.patch_size}x{backbone.patch_size} pixels"
    if isinstance(backbone, Scenes):
        return f"the backbone synth with {backbone.weights} weights"
    size = backbone.image_size
    return f"{backbone.name} to stage {backbone.stage}, {size}x{size} pixels, {backbone.weights} weights"


def _recorded_backbone(
    recipe: Mapping[str, object], path: Path, weights: str | None, say: Callable[[str], None]
) -> tuple[Backbone, str]:
    """Return the backbone and the dtype of the features that the `recipe` of a checkpoint records.

    Raises:
        InputError: the recipe cannot be followed.
    """
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


def _likely_backbone(network: Network, path: Path, weights: str | None, say: Callable[[str], None]) -> Backbone:
    """Return patches if the network reads features of their shape, else the backbone of the original toolkit (Johnson
    et al. 2017, section 4.1), perhaps with the weights of a file."""
    shape = network.feature_shape
    patch = isqrt(shape[0] // 3)
    is_patches = shape == (3 * patch * patch, GRID, GRID)[: len(shape)]
    backbone = Patches(patch) if is_patches and weights is None else ResNet(weights=weights or "default")
    say(
        f"{path}: does not record how its features were made; they are assumed to be {_describe(backbone)} (--backbone "
        "and the options after it change this)"
    )
    return backbone
