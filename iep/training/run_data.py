"""A config -> the data that a run reads, and the batches of its training and validation."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from iep.config import READING_FEATURES, Config
from iep.data.datasets import Batches, ClevrDataset, sequential_batches, training_batches
from iep.data.features import Features
from iep.data.loader import Loading
from iep.data.ordering import make_order
from iep.data.question_families import family_filter
from iep.data.question_file import Split, check_same_data, load_vocab, open_split, split_files
from iep.errors import InputError
from iep.execution_engine.parts import ProgramSample
from iep.models.network import Network, different_settings
from iep.preprocess.clevr_files import scenes_path
from iep.preprocess.labelled_scenes import open_scenes
from iep.program_generator.decode import greedy
from iep.program_generator.encoder import trim
from iep.program_generator.seq2seq import Seq2Seq
from iep.programs import program_lengths
from iep.runtime.devices import place
from iep.runtime.distributed import attempt, is_main, rank, total, world_size
from iep.vocab import Vocab


@dataclass(frozen=True)
class RunData:
    """The data that a run reads, and the device that computes with it."""

    device: torch.device
    vocab: Vocab
    training: Split
    validation: Split | None = None

    @property
    def features(self) -> list[Features]:
        """The features of the splits; none for a model that reads no features."""
        splits = [split for split in (self.training, self.validation) if split is not None]
        return [split.features for split in splits if split.features is not None]

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """C, H and W of the features; nothing for a model that reads none."""
        return tuple(self.features[0].shape[1:]) if self.features else ()

    @property
    def sample(self) -> ProgramSample:
        """The programs of the training questions."""
        questions = self.training.questions
        return ProgramSample(questions.programs, questions.image_idxs, questions.path)


def open_data(config: Config, device: torch.device) -> RunData:
    """Open the data, which must be the same in all processes; each may read its own copy.

    Raises:
        InputError: a file is missing or damaged, a dataset is missing, or a file is not that of the first process
            (names the file and the process).
    """
    assert config.data is not None  # `check_run` requires it
    data = Path(config.data)
    vocab, training, validation = attempt(lambda: _open_splits(data, config))
    check_same_data(data, vocab, [training, validation])
    if config.features_in_memory:
        training, validation = training.in_memory(config.workers), validation and validation.in_memory(config.workers)
    return RunData(device, vocab, training, validation)


def _open_splits(data: Path, config: Config) -> tuple[Vocab, Split, Split | None]:
    """Return the vocabulary, the training split, and the validation split.

    The latter is None if no split is named and there is no `val`.

    Raises:
        InputError: a file is missing or damaged, a dataset that the model needs is missing, or the features of the two
            splits were computed differently.
    """
    needs_programs = config.model == "pg" or (config.model == "ee" and config.programs == "ground-truth")
    if config.model == "backbone":
        # A CLEVR directory has no vocabulary: a backbone names the attributes of CLEVR's.
        vocab, val_file = Vocab.clevr(), scenes_path(data, config.val_split)
        opened = partial(open_scenes, data, size=config.backbone.image_size)
    else:
        vocab, (val_file, _) = load_vocab(data), split_files(data, config.val_split)
        choose, sees = None, config.model in READING_FEATURES
        if config.families is not None:
            choose = family_filter(config.families, split_files(data, config.train_split)[0], vocab)
        opened = partial(open_split, data, vocab=vocab, with_features=sees, choose=choose)
    splits = [opened(split=config.train_split, num_samples=config.num_train_samples)]
    if config.val_split != Config.val_split or val_file.exists():
        samples, skip = config.num_val_samples, config.skip_val_samples
        splits.append(opened(split=config.val_split, num_samples=samples, skip=skip))
    for split in splits:
        questions, features, trained_on = split.questions, split.features, splits[0].features
        if needs_programs and questions.programs is None:
            hint = " (or train with --programs predicted)" if config.model == "ee" else ""
            raise InputError(f"{questions.path}: has no programs, which training {config.model} needs{hint}")
        if config.model not in ("pg", "backbone") and questions.answers is None:
            raise InputError(f"{questions.path}: has no answers, which training {config.model} needs")
        if features and trained_on and (found := different_settings(features, trained_on.recipe)):
            raise InputError(f"{features.path}: computed differently from {trained_on.path}: {found}")
    return vocab, splits[0], splits[1] if len(splits) > 1 else None


def make_batches(
    config: Config, data: RunData, networks: Mapping[str, Any], predictor: Network | None, step: int
) -> tuple[Batches, Batches | None]:
    """Return the training batches of a run from a step on, and the validation batches or None.

    Args:
        networks: the modules of the networks that are trained.
        predictor: the program generator whose programs the engine is trained on; None for true programs.

    Raises:
        InputError: the predictor does not fit the data.
    """
    training, validation = data.training, data.validation
    # A batch of the loader is a minibatch or, in asynchronous training, an instance.
    size = config.instance_size if config.asynchronous else config.batch_size
    batches_each = config.batch_size // size
    programs = training.questions.programs  # a curriculum is of the true programs
    lengths = None
    if config.curriculum and programs is not None:
        lengths = program_lengths(programs, data.vocab.program)
    order = make_order(
        lengths,
        training.questions.image_idxs,
        config.curriculum,
        size,
        config.seed,
        config.questions_per_image,
    )
    order.stages = [(batches_each * first, pool) for first, pool in order.stages]
    plan_training, plan_validation = None, None
    if config.model == "ee":
        planner = partial(networks["engine"].planner, config.batching, config.sharing)
        # In asynchronous training, stem and classifier are ops as well.
        plan_training = planner(training=True, attentions=config.attention_penalty > 0, whole=config.asynchronous)
        plan_validation = planner(training=False)
    if predictor is not None:
        predictor.check_fits(data.vocab)
        generator = place(predictor.module, data.device).eval()
        training = _with_predicted_programs(training, generator, config)
        validation = validation and _with_predicted_programs(validation, generator, config)
    draws = networks["generator"].max_program_length if config.model == "joint" else 0
    loading = Loading(config.workers, config.prefetch, pin=data.device.type == "cuda")
    training_set = ClevrDataset(training.questions, training.features, plan_training)
    batches = training_batches(
        training_set,
        order,
        range(batches_each * step, batches_each * config.iterations),
        loading,
        draws,
        rank=rank(),
        world_size=world_size(),
    )
    if validation is None:
        return batches, None
    validation_set = ClevrDataset(validation.questions, validation.features, plan_validation)
    return batches, sequential_batches(validation_set, config.val_batch_size, loading, rank(), world_size())


def _with_predicted_programs(split: Split, generator: Seq2Seq, config: Config) -> Split:
    """Return the split with the programs that the generator predicts; each process predicts a part of them."""
    questions, size = torch.from_numpy(split.questions.questions), config.val_batch_size
    device = next(generator.parameters()).device
    # Rows of other processes are 0, the index of <NULL>, so that the sum over the processes has all programs.
    max_length = config.max_program_length or generator.max_program_length
    programs = torch.zeros(len(questions), max_length, dtype=torch.long)
    firsts = range(size * rank(), len(questions), size * world_size())
    hidden = not (is_main() and sys.stderr.isatty())
    for first in tqdm(firsts, desc=f"predicting the programs of {split.questions.path.stem}", disable=hidden):
        rows = slice(first, first + size)
        found_BL = greedy(generator, trim(questions[rows]).to(device), max_length)
        programs[rows, : found_BL.shape[1]] = found_BL.cpu()
    return replace(split, questions=replace(split.questions, programs=total(programs).numpy()))
