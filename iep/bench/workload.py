"""Where the questions of a benchmark come from: made as `iep-synth` asks them, or preprocessed data.

Made programs have CLEVR's shapes and vocabulary; they stay in memory, and no image is rendered: features are random
numbers and answers arbitrary, which cost as much to compute with as others.

Shapes: Q questions, B questions of a minibatch, N distinct images of it, L program tokens, C H W feature maps.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from iep.bench.compare import MIN_SAMPLES
from iep.data.datasets import ClevrDataset
from iep.data.question_file import Questions, open_split
from iep.errors import InputError
from iep.programs import json_to_prefix
from iep.synth.presets import PRESETS
from iep.synth.synthesize import make_image
from iep.synth.world import ANSWERS, FUNCTIONS
from iep.vocab import END, NULL, START, Vocab, index_tokens


class Minibatch(NamedTuple):
    """What one step of the engine computes with; `image_rows_B` is the row of each question's image."""

    programs_BL: np.ndarray
    image_rows_B: np.ndarray
    features_NCHW: torch.Tensor
    answers_B: torch.Tensor


@dataclass(frozen=True, eq=False)
class Workload:
    """Questions to measure with: their programs, and which of them are about the same image.

    Attributes:
        vocab: of programs and answers; the engine needs no words of questions.
        features: image indices (N,) -> (N, C, H, W) float32.
    """

    description: str
    vocab: Vocab
    programs_QL: np.ndarray
    image_idxs_Q: np.ndarray
    feature_shape: tuple[int, int, int]
    features: Callable[[np.ndarray], torch.Tensor]

    def minibatch(self, start: int, size: int, device: torch.device) -> Minibatch:
        """Return the questions `start` to `start + size - 1` as a data loader would batch them.

        Raises:
            InputError: their features cannot be read.
        """
        rows = slice(start, start + size)
        images_N, image_rows_B = np.unique(self.image_idxs_Q[rows], return_inverse=True)
        answers_B = torch.arange(size, device=device) % len(self.vocab.answer)
        return Minibatch(self.programs_QL[rows], image_rows_B, self.features(images_N).to(device), answers_B)


def clevr_vocab() -> Vocab:
    """Return CLEVR's functions and answers, without the words of its questions."""
    return Vocab((), index_tokens(FUNCTIONS), index_tokens(ANSWERS))


def generated(
    count: int, questions_per_image: int, feature_shape: tuple[int, int, int], largest: int, seed: int = 0
) -> Workload:
    """Return `count` questions as `iep-synth --preset clevr` asks them, `questions_per_image` about each image.

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
    description = f"programs of iep-synth's questions, {questions_per_image} an image, seed {seed}"
    columns = encode(programs, vocab), np.arange(count) // questions_per_image, feature_shape
    return Workload(description, vocab, *columns, lambda images_N: features_NCHW[: len(images_N)])


def read_workload(largest: int, data: Path, split: str) -> Workload:
    """Return enough questions for minibatches of `largest`, of a directory that `iep-preprocess` wrote.

    Raises:
        InputError: a file is missing or damaged, or the split has too few questions or no programs.
    """
    vocab = Vocab.load(data / "vocab.json")
    opened = open_split(data, split, vocab, with_features=True, num_samples=max(largest, MIN_SAMPLES))
    questions, features = opened.questions, opened.features
    ClevrDataset(questions, features)  # checks that every question's image is there
    programs_QL = programs_of(questions)
    if len(questions) < largest:
        found = f"split {split} has {len(questions)} questions"
        raise InputError(f"{data}: {found}, expected at least {largest} for the largest of --batch-sizes")
    description = f"programs and features of {data}, split {split}"
    columns = programs_QL, questions.image_idxs, features.shape[1:]
    return Workload(description, vocab, *columns, lambda images_N: features.read(images_N).float())


def encode(programs: Sequence[Sequence[str]], vocab: Vocab) -> np.ndarray:
    """Return the (Q, L) indices of programs' tokens, all of them in the vocabulary, padded with `<NULL>`."""
    matrix = np.full((len(programs), max(map(len, programs))), NULL)
    for row, program in zip(matrix, programs, strict=True):
        row[: len(program)] = [vocab.program_index[token] for token in program]
    return matrix


def programs_of(questions: Questions) -> np.ndarray:
    """Return the (Q, L) programs of a split's questions.

    Raises:
        InputError: it has none.
    """
    if questions.programs is None:
        raise InputError(f"{questions.path}: has no programs; choose another --split")
    return questions.programs
