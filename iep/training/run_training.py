"""A resolved config -> a trained run: check the settings, open the data, build the networks and their trainer, fit.

`train_from` does these in order.
"""

import sys
from collections.abc import Collection
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from iep.config import (
    CONFIG,
    READING_FEATURES,
    Config,
    absolute,
    check_changes,
    check_used,
    saved_config,
    to_yaml,
    update,
)
from iep.data.datasets import Batches, ClevrDataset, sequential_batches, training_batches
from iep.data.loader import Loading
from iep.data.ordering import make_order
from iep.data.question_families import family_filter
from iep.data.question_file import Split, check_same_data, load_vocab, open_split, split_files
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_SCHEDULER, check_named, is_outside
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import NONE, Sample, check_options, main_device
from iep.models.build import (
    DESCRIPTIONS,
    FEATURE_SIDES,
    NETWORKS,
    PARTS_WITH_WORDS,
    Network,
    add_words,
    build,
    check_features,
    different_settings,
    fit_template,
    network_kwargs,
    place,
    place_engine,
    set_execution,
    warn_of_other_features,
    with_defaults,
)
from iep.models.checkpoint import (
    WEIGHTS,
    Saved,
    check_vocab,
    checkpoints,
    kwargs_of,
    load_checkpoint,
    load_network,
    load_newest,
    unpack,
    vocab_of,
)
from iep.preprocess.clevr_files import scenes_path
from iep.preprocess.labelled_scenes import open_scenes
from iep.program_generator.decode import greedy
from iep.program_generator.encoder import trim
from iep.program_generator.seq2seq import Seq2Seq
from iep.programs import program_lengths
from iep.runtime.devices import resolve_precision
from iep.runtime.distributed import attempt, by_main, is_main, rank, total, world_size
from iep.runtime.files import write_bytes
from iep.training.asynchronous import check_asynchronous, fit_asynchronously
from iep.training.freezing import freeze
from iep.training.loop import RunData, Trainer
from iep.training.parallel import check_norms
from iep.training.tasks import TASKS
from iep.vocab import Vocab, count_new_words


def load_start(out: Path) -> Saved | None:
    """Return the checkpoint that `load_newest` returns in the first process, in every process.

    Raises:
        InputError: the checkpoint is damaged, or is not that of a run.
    """
    return by_main(lambda: load_newest(out))


def train(config: Config, out: Path, resume: bool) -> bool:
    """Train into `out`, from its newest checkpoint if there is one and `resume` is set, and return whether the run was
    incomplete. Errors are those of `train_from`."""
    return train_from(load_start(out) if resume else None, absolute(config), out) is not None


def train_from(start: Saved | None, config: Config, out: Path, given: Collection[str] = ()) -> Trainer | None:
    """Train as `config` says into the run directory `out`; return the trainer, or None if the run was complete.

    Args:
        start: the checkpoint of the same run to resume from, None for a new run.
        config: all settings, with absolute paths.
        out: the run directory.
        given: dotted names of the settings that the user gave, even as the defaults: networks to start from must have
            them, and the model must use them.

    Raises:
        InputError: the config, the data or a checkpoint does not fit.
        Stopped: a signal has asked the run to stop; all finished steps are saved.
    """
    check_settings(start, config, given)
    _check_run(start, config, out)
    if start is not None and start.content["step"] >= config.iterations and not start.content["validation_due"]:
        return None
    if start is None:
        starts, config = _starts(config, given)
    else:
        starts = dict.fromkeys(NETWORKS[config.model], start)
    data = _open(config)
    torch.manual_seed(config.seed)
    networks = {name: _network(name, starts.get(name), start is None, config, data) for name in NETWORKS[config.model]}
    task = TASKS[config.model](config, {name: network.module for name, network in networks.items()})
    freeze(task.networks, config.freeze)
    if "engine" in networks:
        _place_and_set_execution(task.networks["engine"], config, data)
    check_norms(task.networks, data.device, config.batch_size)
    trainer = Trainer(task, config, data, out, networks)
    if start is not None:
        trainer.restore(start)
    batches, validation_batches = _batches(trainer)
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / CONFIG, to_yaml(config).encode())
        tqdm.write(_describe(trainer))
    trainer.fit(batches, validation_batches, fit_asynchronously if config.asynchronous else None)
    return trainer


# Settings


def check_settings(start: Saved | None, config: Config, given: Collection[str]) -> None:
    """Check that the model uses all settings, and that a run resumed from `start` may have them.

    Raises:
        InputError: a setting is not used, or cannot change.
    """
    if start is not None:  # before `check_used`, which would name other settings of another model
        check_changes(saved_config(start.content["config"], str(start.path)), config, start.path)
    check_used(config, given)


def _check_run(start: Saved | None, config: Config, out: Path) -> None:
    """Check that a run can begin: what the settings need is there, and the directory holds no other run.

    Raises:
        InputError: something is missing, or would not be used, or the run directory holds another run.
    """
    if config.data is None:
        kind = "in CLEVR's layout with images and scenes" if config.model == "backbone" else "written by iep-preprocess"
        raise InputError(f"no data: give --data DIR, a directory {kind}")
    for part in ("pg", "ee") if config.model == "joint" else ():
        if getattr(config, part) is None:
            raise InputError(f"joint training starts from trained networks: give --{part} CKPT")
    if config.programs == "predicted" and config.pg is None:
        raise InputError("programs is predicted: give --pg CKPT, a trained program generator")
    if config.model == "ee" and config.programs != "predicted" and config.pg is not None:
        raise InputError(f"pg is {config.pg}, which training ee uses only with --programs predicted")
    check_asynchronous(config)
    check_options(config.placement, config.devices, config.device)
    if config.tracker is not None and is_main() and find_spec(config.tracker) is None:
        raise InputError(f"tracker {config.tracker} is not installed; pip install 'iep[{config.tracker}]'")
    if start is None and checkpoints(out):
        raise InputError(f"{out}: already holds a run; add --resume to continue it, or choose another --out")
    if start is None and (out / WEIGHTS).exists():
        raise InputError(f"{out}: already holds networks ({WEIGHTS}), which a run would replace; choose another --out")


def _starts(config: Config, given: Collection[str]) -> tuple[dict[str, Saved], Config]:
    """Return the checkpoints that networks of a new run start from, by network, and `config` with their settings.

    Raises:
        InputError: a checkpoint cannot be loaded or lacks the network, a setting that was given differs from the
            checkpoint's, or its modules are code of another package that the settings do not name.
    """
    starts, paths = {}, {"generator": config.pg, "engine": config.ee}
    for name in NETWORKS[config.model]:
        if (path := paths.get(name, config.baseline)) is None:
            continue
        saved = starts[name] = Saved(Path(path), load_checkpoint(path))
        section, kwargs = getattr(config, name), kwargs_of(saved.content, name, saved.path)
        held = {field.name: kwargs[field.name] for field in fields(section)}
        if name == "engine":
            check_named(held["modules"], section.modules if is_outside(section.modules) else None, saved.path)
        trained = update(section, held, f"{saved.path}: {DESCRIPTIONS[name]}")
        for key in held:
            wanted, has = getattr(section, key), getattr(trained, key)
            if wanted != has and f"{name}.{key}" in given:
                raise InputError(f"{saved.path}: was trained with {name}.{key} {has}, cannot start with {wanted}")
        config = replace(config, **{name: trained})
    return starts, config


# Data


def _open(config: Config) -> RunData:
    """Open the data, which must be the same in all processes; each may read its own copy.

    Raises:
        InputError: a file is missing or damaged, a dataset is missing, or a file is not that of the first process
            (names the file and the process).
    """
    device = main_device(config.placement, config.devices, config.device)
    assert config.data is not None  # `_check_run` requires it
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


# Networks


def _network(name: str, saved: Saved | None, is_new: bool, config: Config, data: RunData) -> Network:
    """Return a network on the device: that of the checkpoint `saved`, or a new one if this is None.

    Args:
        is_new: the run is new, and its networks may learn new words.

    Raises:
        InputError: the checkpoint does not fit the settings or the data.
    """
    vocab, features = data.vocab, data.training.features
    if saved is None:
        shape = None if features is None else features.shape[1:]
        kwargs = with_defaults(name, network_kwargs(name, getattr(config, name), vocab, shape))
        network, path = Network(name, build(name, kwargs), kwargs), None
    else:
        modules = config.engine.modules if is_outside(config.engine.modules) else None
        network = unpack(saved.content, name, saved.path, modules)
        trained, path = vocab_of(saved.content, saved.path), saved.path
        if is_new and name != "engine" and (count := count_new_words(trained, vocab)):
            if {name, *PARTS_WITH_WORDS} & set(config.freeze):
                raise InputError(f"{path}: {count} question words are new to it, and a frozen part cannot learn them")
            network, trained = add_words(network, count, config.seed), replace(trained, question=vocab.question)
            if is_main():
                tqdm.write(f"{path}: {count} new question words")
        check_vocab(trained, vocab, name, path)
    if name == "generator":
        network = _with_program_length(network, is_new, config, data)
    if name in FEATURE_SIDES:
        assert features is not None
        check_features(network, features.shape[1:], path or features.path)
        if data.validation is not None and data.validation.features is not None:
            check_features(network, data.validation.features.shape[1:], data.validation.features.path)
        warn_of_other_features(network, features)
    place(network.module, data.device)
    return network


def _with_program_length(generator: Network, is_new: bool, config: Config, data: RunData) -> Network:
    """Return a generator with the length of programs in the settings, or else one that the data's programs fit in."""
    module, programs = generator.module, data.training.questions.programs
    in_data = programs.shape[1] if is_new and programs is not None else 0
    module.max_program_length = config.max_program_length or max(module.max_program_length, in_data)
    return replace(generator, kwargs={**generator.kwargs, "max_program_length": module.max_program_length})


def _place_and_set_execution(engine: ExecutionEngine, config: Config, data: RunData) -> None:
    """Place the engine's parts, and set its execution and, for CUDA graphs, the calls of a minibatch of this process.

    Raises:
        InputError: the placement or the execution is not possible for this engine.
    """
    questions = data.training.questions
    sample = Sample(questions.programs, questions.image_idxs, questions.path)
    if config.placement != NONE:
        description = place_engine(engine, config.placement, config.devices, sample)
        if is_main():
            tqdm.write(description)
    if config.asynchronous:
        return
    set_execution(engine, config.execution, data.device, config.precision, config.defer_weight_grads, training=True)
    if engine.execution == "cuda_graph":
        if config.batching != DEFAULT_SCHEDULER:
            raise InputError(f"batching is {config.batching}, which execution cuda_graph does not use; leave it out")
        fit_template(engine, sample, -(-config.batch_size // world_size()), config.sharing)


# Batches


def _describe(trainer: Trainer) -> str:
    """Return three lines on the run: model, processes and parameters; data; steps."""
    config, data = trainer.config, trainer.data
    held = [p for network in trainer.task.networks.values() for p in network.parameters()]
    parameters, trained = (sum(p.numel() for p in each) for each in (held, trainer.parameters))
    # The gradient and the two averages of AdamW are as large as the trained parameters.
    memory = sum(p.nbytes for p in held) + 3 * sum(p.nbytes for p in trainer.parameters)
    threads = torch.get_num_threads()
    processes = f"{world_size()} processes of " if world_size() > 1 else ""
    splits = []
    for name, split in ((config.train_split, data.training), (config.val_split, data.validation)):
        if split is not None:
            questions = "" if config.model == "backbone" else f"{len(split.questions):,} questions about "
            splits.append(f"{questions}{len(set(split.questions.image_idxs.tolist())):,} images of {name}")
    precision = "float32" if config.model == "pg" else resolve_precision(config.precision, trainer.device)
    return (
        f"{trainer.out}: {config.model} in {precision} on {trainer.device}, "
        f"{processes}{threads} thread{'s' if threads > 1 else ''}, "
        f"{parameters:,} parameters{f', {trained:,} of them trained' if trained != parameters else ''}; "
        f"{memory / 1e6:,.1f} MB with gradients and optimiser state\n"
        f"{config.data}: {' and '.join(splits)}\n"
        f"iterations {trainer.step + 1:,} to {config.iterations:,}, {config.batch_size:,} {trainer.task.examples} each"
    )


def _batches(trainer: Trainer) -> tuple[Batches, Batches | None]:
    """Return the training batches from the trainer's step on, and the validation batches or None."""
    config, training, validation = trainer.config, trainer.data.training, trainer.data.validation
    # A batch of the loader is a minibatch or, in asynchronous training, an instance.
    size = config.instance_size if config.asynchronous else config.batch_size
    batches_each = config.batch_size // size
    programs = training.questions.programs  # a curriculum is of the true programs
    order = make_order(
        program_lengths(programs, trainer.data.vocab.program) if config.curriculum and programs is not None else None,
        training.questions.image_idxs,
        config.curriculum,
        size,
        config.seed,
        config.questions_per_image,
    )
    order.stages = [(batches_each * first, pool) for first, pool in order.stages]
    plan_training, plan_validation = None, None
    if config.model == "ee":
        engine = trainer.task.networks["engine"]
        planner = partial(engine.planner, config.batching, config.sharing)
        # In asynchronous training, stem and classifier are ops as well.
        plan_training = planner(training=True, attentions=config.attention_penalty > 0, whole=config.asynchronous)
        plan_validation = planner(training=False)
    if config.programs == "predicted":
        assert config.pg is not None  # `_check_run` requires it
        generator = load_network(config.pg, "generator", trainer.data.vocab, trainer.device).module
        training = _with_predicted_programs(training, generator, config)
        validation = validation and _with_predicted_programs(validation, generator, config)
    loading = Loading(config.workers, config.prefetch, pin=trainer.device.type == "cuda")
    steps = range(batches_each * trainer.step, batches_each * config.iterations)
    draws = trainer.task.networks["generator"].max_program_length if config.model == "joint" else 0
    ranks: dict[str, Any] = {"rank": rank(), "world_size": world_size()}
    dataset = ClevrDataset(training.questions, training.features, plan_training)
    batches = training_batches(dataset, order, steps, loading, draws, **ranks)
    if validation is None:
        return batches, None
    dataset = ClevrDataset(validation.questions, validation.features, plan_validation)
    return batches, sequential_batches(dataset, config.val_batch_size, loading, **ranks)


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
