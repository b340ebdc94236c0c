"""A resolved config -> a trained run: open the data, build the task and its trainer, fit.

`train_from` does these three in order. A task itself checks the data and the checkpoints that it needs (`tasks.py`).
"""

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from iep.config import (
    CONFIG,
    PLACES,
    READING_FEATURES,
    SECTIONS,
    Config,
    absolute,
    check_used,
    flat,
    only_used,
    settings_of,
    to_yaml,
    update,
)
from iep.data.datasets import Batches, ClevrDataset, sequential_batches, training_batches
from iep.data.loader import Loading
from iep.data.ordering import Order, make_order
from iep.data.question_families import family_filter
from iep.data.question_file import Split, check_same_data, load_vocab, open_split, split_files
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_EXECUTION, DEFAULT_SCHEDULER, is_outside
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import NONE, Sample, check_options, main_device
from iep.models.build import (
    DESCRIPTIONS,
    FEATURE_SIDES,
    NETWORKS,
    PARTS_WITH_WORDS,
    add_words,
    build,
    check_features,
    check_vocab,
    describe_difference,
    describe_other_features,
    fit_template,
    load_network,
    network_kwargs,
    place,
    place_engine,
    set_execution,
    unpack,
    with_module_norm,
)
from iep.models.checkpoint import Saved, checkpoints, load_newest
from iep.models.weights import WEIGHTS
from iep.preprocess.clevr_files import scenes_path
from iep.preprocess.labelled_scenes import open_scenes
from iep.program_generator.decode import greedy
from iep.program_generator.encoder import trim
from iep.program_generator.seq2seq import Seq2Seq
from iep.programs import program_lengths
from iep.runtime.distributed import attempt, by_main, is_main, rank, total, world_size
from iep.runtime.files import write_bytes
from iep.runtime.reading import reading
from iep.training.asynchronous import check_asynchronous, fit_asynchronously
from iep.training.batch_norm import check_norms
from iep.training.freezing import check_freeze, freeze, is_trained
from iep.training.loop import RunData, Trainer
from iep.training.tasks import TASKS, Task
from iep.vocab import Vocab

FIXED = ("model", "freeze", "pg", "ee", "baseline")
"""Settings that are fixed on resume, as are network settings; `pg` may change when it only supplies programs."""


def train(config: Config, out: Path, resume: bool) -> bool:
    """Train into `out`, from its newest checkpoint if there is one and `resume` is set, and return whether the run was
    incomplete. Errors are those of `train_from`."""
    return train_from(load_start(out) if resume else None, absolute(config), out) is not None


def load_start(out: Path) -> Saved | None:
    """Return the checkpoint that `load_newest` returns in the first process, in every process.

    Raises:
        InputError: the checkpoint is damaged, or is not that of a run.
    """
    return by_main(lambda: load_newest(out))


def config_of(start: Saved) -> Config:
    """Return the settings of the run of the checkpoint `start`, which an earlier version may have saved.

    Raises:
        InputError: a setting is unknown or invalid.
    """
    return absolute(only_used(update(Config(), start.content["config"], str(start.path))))


def changes(start: Saved, config: Config) -> list[str]:
    """Return a text for each setting in which `config` differs from the run of the checkpoint `start`.

    Raises:
        InputError: such a setting may not change during a run (names all of them).
    """
    saved = config_of(start)
    if saved.model != config.model:
        raise InputError(f"{start.path}: holds a run of model {saved.model}, cannot resume it as {config.model}")
    before, now = flat(settings_of(saved)), flat(settings_of(config))
    for settings in (before, now):
        settings["freeze"] = ", ".join(sorted(settings["freeze"])) or "nothing"
    fixed = {*SECTIONS, *FIXED} - ({"pg"} if config.model == "ee" else set())
    changed = [name for name in before if name in now and before[name] != now[name] and name not in PLACES]
    refused = [name for name in changed if name.partition(".")[0] in fixed]
    if refused:
        held, wanted = (", ".join(f"{name} {settings[name]}" for name in refused) for settings in (before, now))
        raise InputError(f"{start.path}: was trained with {held}, cannot resume with {wanted}")
    return [f"{name} {now[name]} instead of {before[name]}" for name in changed]


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
    changed = _check(start, config, out, given)
    if start is not None and start.content["step"] >= config.iterations and not start.content["validation_due"]:
        return None
    if changed and is_main():
        tqdm.write(f"{out}: resumes with {', '.join(changed)}")
    trainer = _build(start, config, out, given, _open(config))
    _fit(trainer)
    return trainer


def _check(start: Saved | None, config: Config, out: Path, given: Collection[str]) -> list[str]:
    """Check the settings and the run directory, and return the settings that differ from those of the checkpoint.

    Raises:
        InputError: a setting cannot be used, or the run directory holds another run.
    """
    changed = [] if start is None else changes(start, config)  # before `check_used`, which would name other settings
    check_used(config, given)
    if config.data is None:
        kind = "in CLEVR's layout with images and scenes" if config.model == "backbone" else "written by iep-preprocess"
        raise InputError(f"no data: give --data DIR, a directory {kind}")
    check_freeze(config.model, config.freeze)
    TASKS[config.model].check_starts(config)
    check_asynchronous(config)
    check_options(config.placement, config.devices, config.device)
    if config.tracker is not None and is_main() and find_spec(config.tracker) is None:
        raise InputError(f"tracker {config.tracker} is not installed; pip install 'iep[{config.tracker}]'")
    if start is None and checkpoints(out):
        raise InputError(f"{out}: already holds a run; add --resume to continue it, or choose another --out")
    if start is None and (out / WEIGHTS).exists():
        raise InputError(f"{out}: already holds networks ({WEIGHTS}), which a run would replace; choose another --out")
    return changed


def _open(config: Config) -> RunData:
    """Open the data, which must be the same in all processes; each may read its own copy.

    Raises:
        InputError: a file is missing or damaged, a dataset is missing, or a file is not that of the first process
            (names the file and the process).
    """
    device = main_device(config.placement, config.devices, config.device)
    assert config.data is not None  # `_check` requires it
    data = Path(config.data)
    vocab, training, validation = attempt(lambda: _open_splits(data, config))
    check_same_data(data, vocab, [training, validation])
    for split in filter(None, (training, validation)):
        TASKS[config.model].check_questions(config, split.questions)
    training, validation = _in_memory(training, config), validation and _in_memory(validation, config)
    return RunData(device, vocab, training, validation)


def _open_splits(data: Path, config: Config) -> tuple[Vocab, Split, Split | None]:
    """Return the vocabulary, the training split, and the validation split.

    The latter is None if no split is named and there is no `val`.

    Raises:
        InputError: a file is missing or damaged, or the features of the two were computed differently.
    """
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
    training = opened(split=config.train_split, num_samples=config.num_train_samples)
    if config.val_split == Config.val_split and not val_file.exists():
        return vocab, training, None
    validation = opened(split=config.val_split, num_samples=config.num_val_samples, skip=config.skip_val_samples)
    if training.features is not None and validation.features is not None:
        found = describe_difference(validation.features, training.features.recipe, str(training.features.path))
        if found is not None:
            raise InputError(found)
    return vocab, training, validation


def _in_memory(split: Split, config: Config) -> Split:
    """Return a split with its features in memory, if the config says so."""
    if split.features is None or not config.features_in_memory:
        return split
    workers = (config.workers,) if config.model == "backbone" else ()
    return replace(split, features=split.features.in_memory(*workers))


# Build


def _build(start: Saved | None, config: Config, out: Path, given: Collection[str], data: RunData) -> Trainer:
    """Build or load the networks, and make the trainer of the task on them."""
    torch.manual_seed(config.seed)
    networks: dict[str, Any] = {name: _network(name, start, config, data) for name in NETWORKS[config.model]}
    config = _with_networks_settings(config, networks, given, resumed=start is not None)
    task = TASKS[config.model](config, networks)
    freeze(task.networks, config.freeze)
    if "engine" in networks:
        _place_and_set_execution(networks["engine"], config, data)
    if (warning := check_norms(networks, config, data.device)) is not None:
        tqdm.write(warning)
    trainer = Trainer(task, config, data, out)
    if start is not None:
        trainer.restore(start)
    return trainer


def _network(name: str, start: Saved | None, config: Config, data: RunData) -> nn.Module:
    """Return the network of the run, of the checkpoint to start from, or a new one, on the device."""
    vocab, training = data.vocab, data.training
    path = _start_of(name, config)
    modules = config.engine.modules if is_outside(config.engine.modules) else None
    if start is not None:
        with reading(start.path, "a checkpoint of this run"):
            check_vocab(Vocab.from_json(start.content["vocab"], str(start.path)), vocab, name, start.path)
            network = unpack(start.content, name, start.path, modules)
    elif path is None:
        shape = None if training.features is None else training.features.shape[1:]
        network = build(name, network_kwargs(name, getattr(config, name), vocab, shape))
    else:
        learn = None if name == "engine" else partial(_learn_words, config, name, path)
        network = load_network(path, name, vocab, torch.device("cpu"), learn, modules)
        if name == "engine":
            network = with_module_norm(network, config.engine.module_norm)
    if name in FEATURE_SIDES:
        assert training.features is not None
        check_features(network, training.features.shape[1:], start.path if start else path or training.features.path)
        if data.validation is not None and data.validation.features is not None:
            check_features(network, data.validation.features.shape[1:], data.validation.features.path)
        if is_main() and (warning := describe_other_features(network, training.features)) is not None:
            tqdm.write(warning)
    return place(network, data.device)


def _start_of(name: str, config: Config) -> str | None:
    """Return the checkpoint that the network `name` starts from, or None."""
    return {"generator": config.pg, "engine": config.ee}.get(name, config.baseline)


def _learn_words(config: Config, name: str, start: str, network: nn.Module, count: int) -> None:
    """Add `count` new question words to a network to start from, and print their number.

    Raises:
        InputError: the embeddings of words are frozen.
    """
    if {name, *PARTS_WITH_WORDS} & set(config.freeze):
        raise InputError(f"{start}: {count} question words are new to it, and a frozen part cannot learn them")
    add_words(network, name, count, config.seed)
    if is_main():
        tqdm.write(f"{start}: {count} new question words")


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


def _with_networks_settings(
    config: Config, networks: Mapping[str, Any], given: Collection[str], resumed: bool
) -> Config:
    """Return `config` with the settings of its networks, which a checkpoint to start from determines.

    Raises:
        InputError: a setting that was given differs from the checkpoint's.
    """
    sections = {}
    for name, network in networks.items():
        section, start = getattr(config, name), None if resumed else _start_of(name, config)
        held = {f.name: network.kwargs[f.name] for f in fields(section)}
        what = DESCRIPTIONS[name] if start is None else f"{start}: {DESCRIPTIONS[name]}"
        sections[name] = update(section, held, source=what)
        for key in held if start is not None else ():
            wanted, has = (getattr(each, key) for each in (section, sections[name]))
            if wanted != has and f"{name}.{key}" in given:
                raise InputError(f"{start}: was trained with {name}.{key} {has}, cannot start with {wanted}")
    return replace(config, **sections)


# Fit


def _fit(trainer: Trainer) -> None:
    """Write the run directory's settings and train."""
    config, out = trainer.config, trainer.out
    batches, validation_batches = _batches(trainer)
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / CONFIG, to_yaml(config).encode())
        tqdm.write(_describe(trainer))
    trainer.fit(batches, validation_batches, fit_asynchronously if config.asynchronous else None)


def _describe(trainer: Trainer) -> str:
    """Return four lines on the run: model, processes and parameters; memory; data; steps."""
    config, data = trainer.config, trainer.data
    held = [p for net in trainer.task.networks.values() for p in net.parameters()]
    count, trained = (sum(p.numel() for p in parameters) for parameters in (held, trainer.parameters))
    execution = getattr(trainer.task.networks.get("engine"), "execution", DEFAULT_EXECUTION)
    threads = torch.get_num_threads()
    model = (
        f"{config.model} on {trainer.device}",
        *([f"execution {execution}"] if execution != DEFAULT_EXECUTION else []),
        *([f"asynchronous with {len(config.devices)} workers"] if config.asynchronous else []),
        *([f"{world_size()} processes"] if world_size() > 1 else []),
        f"{threads} thread{'s' if threads > 1 else ''}" + (" each" if world_size() > 1 else ""),
        f"{count:,} parameters",
        *([f"{trained:,} of them trained"] if trained != count else []),
    )
    # The gradient and the two averages of AdamW are as large as the trained parameters.
    networks = sum(p.nbytes for p in held) + 3 * sum(p.nbytes for p in trainer.parameters)
    unit = "images" if config.model == "backbone" else "questions"
    splits = []
    for name, split in ((config.train_split, data.training), (config.val_split, data.validation)):
        if split is not None:
            images = f"{len(set(split.questions.image_idxs.tolist())):,} images of {name}"
            splits.append(images if unit == "images" else f"{len(split.questions):,} questions about {images}")
    return (
        f"{trainer.out}: {', '.join(model)}\n"
        f"memory: {networks / 1e6:,.1f} MB for parameters, gradients and optimiser state; "
        "minibatches and activations need more\n"
        f"{config.data}: {' and '.join(splits)}\n"
        f"iterations {trainer.step + 1:,} to {config.iterations:,}, {config.batch_size:,} {unit} each"
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
    _check_enough(order, trainer.task)
    plan_training, plan_validation = None, None
    if config.model == "ee":
        engine = trainer.task.networks["engine"]
        planner = partial(engine.planner, config.batching, config.sharing)
        # In asynchronous training, stem and classifier are ops as well.
        plan_training = planner(training=True, attentions=config.attention_penalty > 0, whole=config.asynchronous)
        plan_validation = planner(training=False)
    if config.programs == "predicted":
        assert config.pg is not None  # the task requires it
        generator: Any = load_network(config.pg, "generator", trainer.data.vocab, trainer.device)
        training = _with_predicted_programs(training, generator, config)
        validation = validation and _with_predicted_programs(validation, generator, config)
    loading = Loading(config.workers, config.prefetch, pin=trainer.device.type == "cuda")
    steps = range(batches_each * trainer.step, batches_each * config.iterations)
    draws = config.max_program_length if config.model == "joint" else 0
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
    programs = torch.zeros(len(questions), config.max_program_length, dtype=torch.long)
    firsts = range(size * rank(), len(questions), size * world_size())
    hidden = not (is_main() and sys.stderr.isatty())
    for first in tqdm(firsts, desc=f"predicting the programs of {split.questions.path.stem}", disable=hidden):
        rows = slice(first, first + size)
        found_BL = greedy(generator, trim(questions[rows]).to(device), config.max_program_length)
        programs[rows, : found_BL.shape[1]] = found_BL.cpu()
    return replace(split, questions=replace(split.questions, programs=total(programs).numpy()))


def _check_enough(order: Order, task: Task) -> None:
    """Check that every process gets an example of each minibatch, and batch norm over questions at least two.

    Raises:
        InputError: a minibatch has too few examples.
    """
    fewest = min(order.batch_size, *(len(pool) for _, pool in order.stages))
    if fewest < world_size():
        count = f"{fewest} {task.examples} for {world_size()} processes"
        raise InputError(f"a minibatch has {count}, expected at least one each")
    layers = (layer for network in task.networks.values() for layer in network.modules())
    if fewest < 2 and any(isinstance(layer, nn.BatchNorm1d) and is_trained(layer) for layer in layers):
        unit = "an instance" if task.config.asynchronous else "a minibatch"
        raise InputError(f"{unit} has 1 question, expected at least 2 for the batch norm of classifier_norm")
