"""A resolved config -> a trained run: check the settings, open the data, assemble the networks, make a trainer, fit.

`train_from` does these in order.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from iep.config import CONFIG, Config, absolute, check_changes, check_used, saved_config, to_yaml, update
from iep.errors import InputError
from iep.execution_engine.assembly import Running
from iep.execution_engine.choices import DEFAULT_SCHEDULER, check_named, is_outside
from iep.models.assemble import Sources, assemble
from iep.models.checkpoint import WEIGHTS, Checkpoint, checkpoints, read_checkpoint, read_newest
from iep.models.network import DESCRIPTIONS, NETWORKS, PARTS_WITH_WORDS, Network
from iep.runtime.devices import resolve_precision
from iep.runtime.distributed import by_main, is_main, world_size
from iep.runtime.files import write_bytes
from iep.training.asynchronous import check_asynchronous, fit_asynchronously
from iep.training.freezing import freeze
from iep.training.loop import Trainer
from iep.training.parallel import check_norms
from iep.training.run_data import RunData, make_batches, open_data
from iep.training.tasks import TASKS
from iep.vocab import count_new_words


def load_start(out: Path) -> Checkpoint | None:
    """Return the checkpoint that `read_newest` returns in the first process, in every process.

    Raises:
        InputError: the checkpoint is damaged, or is not that of a run.
    """
    return by_main(lambda: read_newest(out))


def train(config: Config, out: Path, resume: bool) -> bool:
    """Train into `out`, from its newest checkpoint if there is one and `resume` is set, and return whether the run was
    incomplete. Errors are those of `train_from`."""
    return train_from(load_start(out) if resume else None, absolute(config), out) is not None


def train_from(start: Checkpoint | None, config: Config, out: Path, given: Collection[str] = ()) -> Trainer | None:
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
    check_run(start, config, out)
    if start is not None and start.state.step >= config.iterations and not start.state.validation_due:
        return None
    running = running_of(config)
    if start is None:
        starts, config = open_starts(config, given)
    else:
        starts = dict.fromkeys(NETWORKS[config.model], start)
    predictor = None
    if config.programs == "predicted":
        assert config.pg is not None  # `check_run` requires it
        predictor = read_checkpoint(config.pg).network("generator")
    data = open_data(config, running.main_device)
    torch.manual_seed(config.seed)
    networks = make_networks(starts, start is None, config, data)
    freeze({name: network.module for name, network in networks.items()}, config.freeze)
    assemble(networks, data.vocab, running, data.features, data.sample)
    task = TASKS[config.model](config, {name: network.module for name, network in networks.items()})
    check_norms(task.networks, data.device, config.batch_size)
    trainer = Trainer(task, config, data, out, networks)
    if start is not None:
        trainer.restore(start)
    batches, validation_batches = make_batches(config, data, task.networks, predictor, trainer.step)
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / CONFIG, to_yaml(config).encode())
        tqdm.write(_describe(trainer))
    trainer.fit(batches, validation_batches, fit_asynchronously if config.asynchronous else None)
    return trainer


# Settings


def check_settings(start: Checkpoint | None, config: Config, given: Collection[str]) -> None:
    """Check that the model uses all settings, and that a run resumed from `start` may have them.

    Raises:
        InputError: a setting is not used, or cannot change.
    """
    if start is not None:  # before `check_used`, which would name other settings of another model
        check_changes(saved_config(start.state.config, str(start.path)), config, start.path)
    check_used(config, given)


def check_run(start: Checkpoint | None, config: Config, out: Path) -> None:
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
    if config.execution == "cuda_graph" and config.batching != DEFAULT_SCHEDULER:
        raise InputError(f"batching is {config.batching}, which execution cuda_graph does not use; leave it out")
    if config.tracker is not None and is_main() and find_spec(config.tracker) is None:
        raise InputError(f"tracker {config.tracker} is not installed; pip install 'iep[{config.tracker}]'")
    if start is None and checkpoints(out):
        raise InputError(f"{out}: already holds a run; add --resume to continue it, or choose another --out")
    if start is None and (out / WEIGHTS).exists():
        raise InputError(f"{out}: already holds networks ({WEIGHTS}), which a run would replace; choose another --out")


def running_of(config: Config) -> Running:
    """Return where and how the networks of a run are run.

    Raises:
        InputError: the devices are invalid, or do not fit the placement.
    """
    return Running(
        device=config.device,
        placement=config.placement,
        devices=config.devices,
        execution=config.execution,
        precision=config.precision,
        training=True,
        defer_weight_grads=config.defer_weight_grads,
        batch_size=-(-config.batch_size // world_size()),
        sharing=config.sharing,
    )


# Networks


def open_starts(config: Config, given: Collection[str]) -> tuple[dict[str, Checkpoint], Config]:
    """Return the checkpoints that networks of a new run start from, by network, and `config` with their settings.

    Raises:
        InputError: a checkpoint cannot be read or lacks the network, a setting that was given differs from the
            checkpoint's, or its modules are code of another package that the settings do not name.
    """
    sources = Sources(generator=config.pg, engine=config.ee, baseline=config.baseline)
    starts = sources.checkpoints(NETWORKS[config.model])
    for name, checkpoint in starts.items():
        section, settings = getattr(config, name), checkpoint.packed(name).settings
        wanted = {field.name: getattr(section, field.name) for field in fields(section)}
        if name == "engine":
            check_named(settings.get("modules"), outside_modules(config), checkpoint.path)
        known = {key: value for key, value in settings.items() if key in wanted}
        trained = update(section, known, f"{checkpoint.path}: {DESCRIPTIONS[name]}")
        for key, value in wanted.items():
            has = getattr(trained, key)
            if value != has and f"{name}.{key}" in given:
                raise InputError(f"{checkpoint.path}: was trained with {name}.{key} {has}, cannot start with {value}")
        config = replace(config, **{name: trained})
    return starts, config


def outside_modules(config: Config) -> str | None:
    """Return the class of another package that the settings name as the engine's set of modules, or None."""
    return config.engine.modules if is_outside(config.engine.modules) else None


def make_networks(starts: Mapping[str, Checkpoint], is_new: bool, config: Config, data: RunData) -> dict[str, Network]:
    """Return the networks of a run: those of the checkpoints `starts`, and new ones.

    Args:
        is_new: the run is new, so that its networks may learn new words.

    Raises:
        InputError: a network cannot be built from its settings or its checkpoint, or is frozen and has to learn words.
    """
    networks = {}
    for name in NETWORKS[config.model]:
        if name in starts:
            network = starts[name].network(name, outside_modules(config) if name == "engine" else None)
        else:
            network = Network.new(name, getattr(config, name), data.vocab, data.feature_shape)
        if is_new and (count := count_new_words(network.vocab, data.vocab)) and name != "engine":
            if {name, *PARTS_WITH_WORDS} & set(config.freeze):
                what = f"{count} question words are new to it, and a frozen part cannot learn them"
                raise InputError(f"{network.source}: {what}")
            network = network.with_words(data.vocab, config.seed)
            if is_main():
                tqdm.write(f"{network.source}: {count} new question words")
        if name == "generator":
            network = network.with_program_length(program_length(network, is_new, config, data))
        networks[name] = network
    return networks


def program_length(generator: Network, is_new: bool, config: Config, data: RunData) -> int:
    """Return the length of programs in the settings, or else one that the data's programs fit in."""
    programs = data.training.questions.programs
    in_data = programs.shape[1] if is_new and programs is not None else 0
    return config.max_program_length or max(generator.module.max_program_length, in_data)


# The first lines of a run


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
