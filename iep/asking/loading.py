"""Checkpoints -> a `Model`, which answers questions about images in Python, for the command and for the page.

The features of an image are computed in the way that the checkpoint records for its training data, or else in the
likeliest way. Questions that are asked together run as one minibatch.

Shapes: B questions, T question tokens, L program tokens, C H W features, A answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, overload

import torch
from torch.nn.utils.rnn import pad_sequence

from iep.asking.answers import Answer, SeenImage, Words, read_each, read_program, read_question
from iep.data.datasets import Batch
from iep.errors import InputError
from iep.evaluation.predict import Predictor, ranked
from iep.evaluation.settings import NetworkSettings
from iep.evaluation.symbolic import scene_of
from iep.execution_engine.assembly import Running
from iep.execution_engine.roles import tree_run
from iep.models.assemble import assemble
from iep.models.checkpoint import DEFAULT, Checkpoint, checkpoints, read_checkpoint, write_weights
from iep.models.network import BASELINES, Network
from iep.preprocess.backbones import Backbone, ResNet, Scenes, backbone_of
from iep.preprocess.compute_features import image_features
from iep.preprocess.images import ImageLike, open_image
from iep.synth.world import ATTRIBUTES
from iep.vocab import NULL, Vocab


@dataclass(frozen=True, repr=False)
class Model:
    """Networks that answer questions about images, and how the features of an image are computed."""

    path: Path
    """The checkpoint of the network that answers, for messages."""
    answering: Network
    """An execution engine or a baseline."""
    generator: Network | None
    """The program generator; None for a baseline, or if programs must be given."""
    predictor: Predictor
    vocab: Vocab
    backbone: Backbone | None
    """None for a baseline that reads no image."""
    dtype: str
    """The dtype of the features."""
    device: torch.device

    def __repr__(self) -> str:
        names = [network.name for network in self._networks]
        return f"Model({str(self.path)!r}, networks={names}, backbone={self.backbone}, device={str(self.device)!r})"

    @property
    def _networks(self) -> list[Network]:
        return [network for network in (self.generator, self.answering) if network is not None]

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
        pixels = open_image(image)
        features_1CHW, found = image_features(pixels, self.backbone, self.dtype, self.device)
        name = image if isinstance(image, str | PathLike) else "the image"
        self.answering.check_shape(features_1CHW.shape[1:], f"{name}, by {_describe(self.backbone)}")
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
        read = partial(read_question, vocab=self.vocab, is_read=program is None)
        words = None if question is None else read_each("question", question, read)
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
            answers.append(Answer(given, probabilities, tuple(program_L), tree, seen, engine))
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
            InputError: the directory holds a run, whose checkpoints `iep.load` would read.
            OSError: a file cannot be written.
        """
        if checkpoints(Path(directory)):
            raise InputError(f"{directory}: already holds a run; choose another directory")
        packed = {network.name: network.packed() for network in self._networks}
        write_weights(Path(directory), Checkpoint(self.path, packed, self.vocab, self.answering.recipe), half)


def load(
    name: Path | str = DEFAULT,
    pg: Path | str | None = None,
    device: str = "auto",
    modules: str | None = None,
    *,
    backbone: Backbone | None = None,
    weights: str | None = None,
    beam_size: int = NetworkSettings.beam_size,
    max_program_length: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Model:
    """Load networks that answer questions about images: `iep.load("runs/joint").ask("image.png", "What color ...?")`.

    Args:
        name: a run directory or a checkpoint. It holds a baseline or an execution engine, and with it perhaps a program
            generator. `default` are the networks that come with the package, which were trained on generated images of
            CLEVR's difficulty.
        pg: the same for the program generator, if `name` does not hold one. Without any, programs can be run, but no
            questions answered.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        modules: the class of another package, such as `mypackage.modules:Gated`, that the engine's set of modules is.
            The checkpoint names it too, but its code is executed only if it is given here.
        backbone: the backbone of `iep.preprocess.backbones`, if the checkpoint does not record which one made its
            features; None for the likeliest one.
        weights: a file with the weights of the recorded or the likeliest backbone, if it needs one.
        beam_size: the beam size for decoding programs; 1 decodes greedily.
        max_program_length: the number of tokens after which decoding stops; None for what the checkpoint stores.
        say: a function that receives a line for each assumption about the backbone.

    Raises:
        InputError: a checkpoint cannot be used, two of them do not fit together, an argument does not apply to the
            networks, or `modules` differs from the checkpoint's.
    """
    running = Running(device)
    checkpoint = read_checkpoint(name)
    own = next((each for each in ("engine", *BASELINES) if each in checkpoint.networks), "engine")
    if own != "engine" and (pg is not None or modules is not None):
        option = "modules" if pg is None else "pg"
        raise InputError(f"{checkpoint.path}: a baseline runs no program; {option} does not apply")
    answering = checkpoint.network(own, modules)
    generator, vocab = None, answering.vocab
    if own == "engine" and (pg is not None or "generator" in checkpoint.networks):
        generator = (checkpoint if pg is None else read_checkpoint(pg)).network("generator")
        vocab = replace(vocab, question=generator.vocab.question)
        generator.check_fits(vocab, engine=checkpoint.path)
    networks = {network.name: network for network in (generator, answering) if network is not None}
    assemble(networks, vocab, running)
    predictor = Predictor.of(
        networks.values(),
        run_predicted=own == "engine",
        beam_size=beam_size,
        max_program_length=max_program_length,
    )
    backbone, dtype = _backbone_for(answering, backbone, weights, say)
    return Model(checkpoint.path, answering, generator, predictor, vocab, backbone, dtype, running.main_device)


def _backbone_for(
    network: Network, given: Backbone | None, weights: str | None, say: Callable[[str], None]
) -> tuple[Backbone | None, str]:
    """Return the backbone of the features that a network reads, None if it reads none, and the dtype of the features.

    Args:
        given: the backbone that the user named.
        weights: the file of weights that the user named.

    Raises:
        InputError: a backbone or weights were named that do not apply, or the checkpoint's recipe cannot be followed.
    """
    path, recipe = network.source, network.recipe
    if not network.reads_features:
        if given is not None or weights is not None:
            option = "weights" if given is None else "a backbone"
            raise InputError(f"{path}: reads no image; {option} does not apply")
        return None, "float32"
    if not recipe:
        backbone = given
        if backbone is None:
            backbone = ResNet(weights=weights or "default")  # that of Johnson et al. 2017, section 4.1
            assumed = f"they are assumed to be {_describe(backbone)} (--backbone and the options after it change this)"
            say(f"{path}: does not record how its features were made; {assumed}")
        return backbone, "float32"
    if given is not None:
        made = f"records how its features were made (by {recipe.get('backbone')})"
        raise InputError(f"{path}: {made}; another backbone does not apply")
    try:
        backbone = backbone_of(recipe, weights)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if weights is not None and backbone.recipe()["weights"] != recipe.get("weights"):
        say(f"{path}: its features were made with {recipe.get('weights')}; {weights} is used in its place")
    return backbone, str(recipe.get("dtype", "float32"))


def _describe(backbone: Backbone) -> str:
    """Return the settings of a backbone as text."""
    if isinstance(backbone, Scenes):
        return f"the backbone synth with {backbone.weights} weights"
    size = backbone.image_size
    return f"{backbone.name} to stage {backbone.stage}, {size}x{size} pixels, {backbone.weights} weights"
