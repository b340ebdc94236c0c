"""Questions about one image -> answers, through trained networks: the work of `iep-ask`.

The image's features are computed once; questions that are asked together run as one minibatch.

Shapes: B questions, T question tokens, L program tokens, C H W features, A answers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iep.asking.sight import Sight, likely_sight, see, sight_of
from iep.asking.words import Words, read_program, read_question
from iep.config import Config
from iep.datasets import Batch
from iep.devices import resolve_device
from iep.errors import InputError
from iep.evaluation.predict import Predictor
from iep.networks import check_vocab, place, unpack
from iep.preprocess.backbones import Patches, ResNet
from iep.program_tree import ProgramTree, program_tree
from iep.training.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.vocab import NULL, Vocab


@dataclass(frozen=True)
class Answer:
    """What the networks say to one question.

    Attributes:
        question: None where only a program was given.
        program: (L,) the tokens that were run, as indices.
        tree: the tree that they stand for.
        ranked: all answers and their probabilities, the likeliest first.
    """

    question: Words | None
    program: tuple[int, ...]
    tree: ProgramTree
    ranked: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Asker:
    """Networks that look at one image, and their vocabulary; `predictor` may be without a generator."""

    predictor: Predictor
    vocab: Vocab
    features: Tensor
    """(1, C, H, W)"""

    def ask(self, questions: Sequence[str]) -> list[Answer]:
        """Answer questions, each by the program that the generator predicts.

        Raises:
            InputError: a question is empty or not text.
        """
        words = [read_question(text, self.vocab) for text in questions]
        questions_BT = _padded([question.indices for question in words]).to(self.features.device)
        with torch.inference_mode():
            programs_BL = self.predictor.programs(self._batch(questions_BT))
        return self._run(words, programs_BL)

    def run(self, programs: Sequence[str], questions: Sequence[str] = ()) -> list[Answer]:
        """The answers of programs, prefix tokens with spaces between them; `questions`, if any, are what they ask.

        Raises:
            InputError: a token is not in the vocabulary, or a program is not one complete tree.
        """
        programs_BL = _padded([read_program(text, self.vocab) for text in programs]).to(self.features.device)
        words = [read_question(text, self.vocab) for text in questions] or [None] * len(programs)
        return self._run(words, programs_BL)

    @torch.inference_mode()
    def _run(self, questions: Sequence[Words | None], programs_BL: Tensor) -> list[Answer]:
        logits_BA = self.predictor.logits(self._batch(programs_BL), programs_BL)
        answers = []
        ranks_BA = logits_BA.float().softmax(1).sort(dim=1, descending=True, stable=True)
        for question, program_L, values_A, indices_A in zip(questions, programs_BL.tolist(), *ranks_BA, strict=True):
            ranked = zip(indices_A.tolist(), values_A.tolist(), strict=True)
            named = tuple((self.vocab.answer[index], value) for index, value in ranked)
            tree = program_tree([self.vocab.program[token] for token in program_L])
            answers.append(Answer(question, tuple(program_L), tree, named))
        return answers

    def _batch(self, questions_BT: Tensor) -> Batch:
        rows_B = torch.zeros(len(questions_BT), dtype=torch.long)
        return Batch(rows_B, questions_BT, None, None, self.features, rows_B.numpy())


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """(B, longest row) with `<NULL>` on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[NULL] * (width - len(row))] for row in rows])


@dataclass(frozen=True)
class Asking:
    """Whom to ask about which image.

    Attributes:
        pg: checkpoint or run of a program generator; None to run given programs only.
        ee: checkpoint or run of an execution engine.
        backbone: what makes features of images, where the checkpoint does not say; None for what is likely.
        weights: a file of a ResNet's weights, where the checkpoint's recipe needs one.
        options: names of the options that were given for `backbone`, besides `--weights`.
    """

    image: Path
    ee: Path
    pg: Path | None = None
    backbone: Patches | ResNet | None = None
    weights: str | None = None
    options: tuple[str, ...] = ()
    beam_size: int = 1
    max_program_length: int = Config.max_program_length
    device: str = Config.device


def make_asker(asking: Asking, say: Callable[[str], None]) -> Asker:
    """Load the networks and look at the image; `say` gets a line for what had to be assumed.

    Raises:
        InputError: a checkpoint, its vocabulary, its features or the image does not fit.
    """
    device = resolve_device(asking.device)
    held = load_checkpoint(asking.ee, PARTS_OF_A_MODEL)
    vocab = Vocab.from_json(held["vocab"], f"{asking.ee} (vocabulary)")
    networks = {"engine": place(unpack(held, "engine", asking.ee), device).eval()}
    if asking.pg is not None:
        generator = load_checkpoint(asking.pg, PARTS_OF_A_MODEL)
        networks["generator"] = place(unpack(generator, "generator", asking.pg), device).eval()
        its = Vocab.from_json(generator["vocab"], f"{asking.pg} (vocabulary)")
        vocab = Vocab(its.question, vocab.program, vocab.answer)
        check_vocab(its, vocab, "generator", asking.pg, source=asking.ee)
    features_1CHW = see(_sight(asking, held, networks["engine"], say), asking.image, networks["engine"], device)
    lengths = {"beam_size": asking.beam_size, "max_program_length": asking.max_program_length}
    return Asker(Predictor(**networks, run_predicted=True, **lengths), vocab, features_1CHW)


def _sight(asking: Asking, held: Mapping[str, Any], engine: nn.Module, say: Callable[[str], None]) -> Sight:
    recipe = held.get("features") or {}
    if not isinstance(recipe, Mapping):
        raise InputError(
            f"{asking.ee}: how its features were made is a {type(recipe).__name__}, expected names and values"
        )
    if recipe:
        return sight_of(recipe, asking.ee, asking.weights, asking.options, say)
    return likely_sight(engine, asking.ee, say) if asking.backbone is None else Sight(asking.backbone)
