"""Where a benchmark's programs and features come from: questions made by `iep-synth`'s generator, or preprocessed data.

Made programs are CLEVR's in shape and vocabulary; they stay in memory, and no image is rendered: features and answers
are random numbers, which cost as much to compute with as others. Does not run anything.

Shapes: Q questions, B questions of a minibatch, N distinct images of it, L program tokens, C H W feature maps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from iep.data_files import Questions, open_split
from iep.datasets import ClevrDataset
from iep.errors import InputError
from iep.programs import json_to_prefix
from iep.synth.dataset import make_image
from iep.synth.options import PRESETS
from iep.synth.world import ATTRIBUTES, RELATIONS, VALUES
from iep.vocab import END, NULL, START, Vocab, index_tokens


@dataclass(frozen=True, eq=False)
class Minibatch:
    """What one step of the engine takes."""

    programs_BL: np.ndarray
    image_rows_B: np.ndarray
    """Row in `features_NCHW` of each question's image."""
    features_NCHW: torch.Tensor
    answers_B: torch.Tensor

    @cached_property
    def features_of_questions(self) -> torch.Tensor:
        """(B, C, H, W) features of every question's image; the same memory where each has one of its own."""
        if len(self.features_NCHW) == len(self.image_rows_B):
            return self.features_NCHW
        return self.features_NCHW[torch.from_numpy(self.image_rows_B).to(self.features_NCHW.device)]

    def to(self, device: torch.device) -> "Minibatch":
        """The same minibatch with its tensors on `device`."""
        return replace(self, features_NCHW=self.features_NCHW.to(device), answers_B=self.answers_B.to(device))


@dataclass(frozen=True, eq=False)
class Workload:
    """Questions to measure with: their programs, and which of them are about the same image."""

    description: str
    vocab: Vocab
    """Of programs and answers; the engine does not ask for the questions' words."""
    programs_QL: np.ndarray
    image_idxs_Q: np.ndarray
    feature_shape: tuple[int, int, int]
    features: Callable[[np.ndarray], torch.Tensor]
    """Image indices (N,) -> (N, C, H, W) float32."""
    seed: int = 0

    def __len__(self) -> int:
        return len(self.programs_QL)

    def minibatch(self, start: int, size: int) -> Minibatch:
        """The questions `start` to `start + size - 1`, as a data loader would batch them.

        Raises:
            InputError: their features cannot be read.
        """
        rows = slice(start, start + size)
        images_N, image_rows_B = np.unique(self.image_idxs_Q[rows], return_inverse=True)
        generator = torch.Generator().manual_seed(self.seed)
        return Minibatch(
            programs_BL=self.programs_QL[rows],
            image_rows_B=image_rows_B,
            features_NCHW=self.features(images_N),
            answers_B=torch.randint(len(self.vocab.answer), (size,), generator=generator),
        )


def clevr_vocab() -> Vocab:
    """CLEVR's functions and answers, without its questions' words."""
    values = [value for attribute in ATTRIBUTES for value in VALUES[attribute]]
    functions = [
        *("scene", "unique", "count", "exist", "union", "intersect", "less_than", "greater_than", "equal_integer"),
        *(f"relate[{relation}]" for relation in RELATIONS),
        *(f"filter_{attribute}[{value}]" for attribute in ATTRIBUTES for value in VALUES[attribute]),
        *(f"{kind}_{attribute}" for kind in ("query", "same", "equal") for attribute in ATTRIBUTES),
    ]
    return Vocab((), index_tokens(functions), index_tokens(["yes", "no", *map(str, range(11)), *values]))


def generated(
    count: int, questions_per_image: int, feature_shape: tuple[int, int, int], largest: int, seed: int = 0
) -> Workload:
    """`count` questions as `iep-synth --preset clevr` asks them, `questions_per_image` about each image.

    No minibatch of it may have more than `largest` questions: at full size, features are hundreds of megabytes.

    Raises:
        InputError: no scene allows that many different questions.
    """
    options = replace(PRESETS["clevr"], questions_per_image=questions_per_image, seed=seed)
    balance: Counter = Counter()
    images = range(-(-count // questions_per_image))
    asked = [question for image in images for question in make_image(options, "val", image, balance)[2]][:count]
    vocab = clevr_vocab()
    start, end = vocab.program[START], vocab.program[END]
    programs = [[start, *json_to_prefix(list(question.program)), end] for question in asked]
    most_images = min(len(images), 1 + -(-largest // questions_per_image))
    features_NCHW = torch.rand(most_images, *feature_shape, generator=torch.Generator().manual_seed(seed))
    return Workload(
        description=f"programs of iep-synth's questions, {questions_per_image} an image, seed {seed}",
        vocab=vocab,
        programs_QL=encode(programs, vocab.program),
        image_idxs_Q=np.arange(count) // questions_per_image,
        feature_shape=feature_shape,
        features=lambda images_N: features_NCHW[: len(images_N)],
        seed=seed,
    )


def encode(programs: Sequence[Sequence[str]], program_tokens: Sequence[str]) -> np.ndarray:
    """(Q, L) indices of programs' tokens, all of them among `program_tokens`, padded with `<NULL>`."""
    index = {token: place for place, token in enumerate(program_tokens)}
    matrix = np.full((len(programs), max(map(len, programs))), NULL)
    for row, program in zip(matrix, programs, strict=True):
        row[: len(program)] = [index[token] for token in program]
    return matrix


def preprocessed(data: Path, split: str, num_samples: int | None = None, seed: int = 0) -> Workload:
    """The first questions of a split that `iep-preprocess` wrote, with its features.

    Raises:
        InputError: a file is missing or damaged, or the split has no question or no programs.
    """
    vocab = Vocab.load(data / "vocab.json")
    opened = open_split(data, split, vocab, with_features=True, num_samples=num_samples)
    ClevrDataset(opened.questions, opened.features)  # every question's image is there
    return Workload(
        description=f"programs and features of {data}, split {split}",
        vocab=vocab,
        programs_QL=programs_of(opened.questions),
        image_idxs_Q=opened.questions.image_idxs,
        feature_shape=opened.features.shape[1:],
        features=lambda images_N: opened.features.read(images_N).float(),
        seed=seed,
    )


def programs_of(questions: Questions) -> np.ndarray:
    """(Q, L) the programs of a split's questions.

    Raises:
        InputError: it has none.
    """
    if questions.programs is None:
        raise InputError(f"{questions.path}: has no programs; choose another --split")
    return questions.programs
