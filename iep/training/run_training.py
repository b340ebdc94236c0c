"""A resolved config -> a trained run: opens the data, builds or loads the networks, picks the task, runs the loop."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from iep.config import BASELINES, CONFIG, Config, EngineConfig, to_dict, to_yaml, update
from iep.data.datasets import Batches, ClevrDataset, sequential_batches, training_batches
from iep.data.loader import Loading
from iep.data.ordering import Order, make_order
from iep.data.question_families import family_filter, listed
from iep.data.question_file import Questions, Split, open_split, split_files
from iep.errors import InputError
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import NONE, PLACEMENT_FILE, Sample, check_options, describe_engine, main_device
from iep.models.build import (
    DESCRIPTIONS,
    FEATURE_SIDES,
    NETWORKS,
    PARTS_WITH_WORDS,
    add_words,
    baseline_kwargs,
    build,
    check_features,
    check_vocab,
    describe_other_features,
    engine_kwargs,
    generator_kwargs,
    load_network,
    looks,
    place,
    place_engine,
    unpack,
    with_module_norm,
)
from iep.models.checkpoint import PARTS_OF_A_RUN, Saved, checkpoints, load_checkpoint, load_newest
from iep.programs import program_lengths
from iep.runtime.distributed import attempt, broadcast, is_main, raise_any, rank, torchrun_identity, world_size
from iep.runtime.files import write_bytes
from iep.training.freezing import check_freeze, freeze, is_trained
from iep.training.joined_norms import check_module_norm
from iep.training.loop import Trainer
from iep.training.tasks import BaselineTask, EngineTask, Execution, GeneratorTask, JointTask
from iep.vocab import Vocab

VALIDATION_BATCH_SIZE = 256
TORCHRUN = ".torchrun"
"""Says which torchrun has begun the run or gone on with it."""


def train(config: Config, out: Path, resume: bool) -> bool:
    """As `train_from` the newest checkpoint of `out`, if there is one and `resume` is set."""
    return train_from(load_start(out) if resume else None, config, out)


def load_start(out: Path) -> Saved | None:
    """As `load_newest`; of several processes all load the one that the first has found.

    Raises:
        InputError: as `load_newest`, or another process cannot load it.
    """
    start, error = attempt(lambda: load_newest(out)) if is_main() else (None, None)
    raise_any(error)
    path = broadcast(None if start is None else start.path)
    if path is not None and not is_main():
        start, error = attempt(lambda: Saved(path, load_checkpoint(path, PARTS_OF_A_RUN)))
    raise_any(error)
    return start


def was_restarted(out: Path) -> bool:
    """Is this torchrun's second start of the run in `out`, after some process failed (`--max-restarts`)?"""
    mine, path = torchrun_identity(), out / TORCHRUN
    return broadcast(mine is not None and path.is_file() and path.read_text() == mine)


def train_from(start: Saved | None, config: Config, out: Path, asked: Collection[str] = ()) -> bool:
    """Train as `config` says into the run directory `out`; False when the run was already complete.

    `start` is the checkpoint of the same run to go on from, None for a new run. `asked` are the dotted names of the
    settings that were asked for even where they are the defaults: networks to start from must have them.

    Raises:
        InputError: the config, the data or a checkpoint does not fit.
        Stopped: a signal; what is done is saved.
    """
    if config.data is None:
        raise InputError("no data: give --data DIR, a directory that iep-preprocess wrote")
    _refuse_unused(config)
    check_freeze(config.model, config.freeze)
    _check_start(start, config, out)
    families = listed(config.families)
    _check_families(start, config, families)
    if start is not None and start.content["step"] >= config.iterations and not start.content["validation_due"]:
        return False
    check_options(config.placement, config.devices, config.device, config.model in ("ee", "joint"))
    data, device = Path(config.data), main_device(config.placement, config.devices, config.device)
    vocab = Vocab.load(data / "vocab.json")

    sees, reads = looks(NETWORKS[config.model]), config.model in ("pg", "ee")
    training, validation = _open_splits(config, data, vocab, sees)
    for split in filter(None, (training, validation)):
        _require(split.questions, config, reads)

    torch.manual_seed(config.seed)
    task = _make_task(config, vocab, training, device, start)
    freeze(task.networks, config.freeze)
    if sees and validation is not None:
        for name in FEATURE_SIDES.keys() & task.networks.keys():
            check_features(task.networks[name], validation.features.shape[1:], validation.features.path)
    if config.attention_penalty and not task.engine.makes_attentions:
        raise InputError(
            f"attention_penalty is {config.attention_penalty}, but the engine's modules "
            f"{task.engine.kwargs['modules']} make no attentions; those of --modules tbd do"
        )
    if config.placement != NONE:
        tqdm.write(_place(task.engine, config, training.questions))
    config = _with_networks_settings(config, task.networks, asked, resumed=start is not None)
    if (warning := check_module_norm(task.networks, config.batching, config.sharing)) is not None:
        tqdm.write(warning)
    trainer = Trainer(task, config, vocab, out, device, training, families)
    if start is not None:
        trainer.restore(start.content)

    batches, validation_batches = _batches(config, vocab, trainer, training, validation)
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        write_bytes(out / CONFIG, to_yaml(config).encode())
        if (torchrun := torchrun_identity()) is not None:
            write_bytes(out / TORCHRUN, torchrun.encode())
        if config.placement != NONE:
            write_bytes(out / PLACEMENT_FILE, task.engine.placement.to_yaml().encode())
    trainer.fit(batches, validation_batches)
    return True


def _open_splits(config: Config, data: Path, vocab: Vocab, sees: bool) -> tuple[Split, Split | None]:
    """What to train on and what to validate on, None where no split is named and there is no `val`."""
    train_path, choose = split_files(data, config.train_split)[0], None
    if config.families is not None:
        choose = family_filter(config.families, train_path, vocab)
    in_memory, samples = config.features_in_memory, config.num_train_samples
    training = open_split(data, config.train_split, vocab, sees, samples, in_memory, choose)
    if config.val_split == Config.val_split and not split_files(data, config.val_split)[0].exists():
        return training, None
    samples, skip = config.num_val_samples, config.skip_val_samples
    return training, open_split(data, config.val_split, vocab, sees, samples, in_memory, choose, skip)


def _place(engine: ExecutionEngine, config: Config, questions: Questions) -> str:
    """Place the engine's parts; returns a text on where they are and what is copied between devices."""
    sample = Sample(questions.programs, questions.image_idxs, questions.path)
    costs = place_engine(engine, config.placement, config.devices, sample)
    planner = engine.planner(config.batching, config.sharing, training=True)
    return describe_engine(config.placement, engine, costs, sample, planner, config.batch_size, config.precision)


def _batches(
    config: Config, vocab: Vocab, trainer: Trainer, training: Split, validation: Split | None
) -> tuple[Batches, Batches | None]:
    """What is left of training from the trainer's step on, and a pass over validation, None without that split."""
    plan_training, plan_validation = None, None
    if config.model == "ee" and config.programs == "ground-truth":
        planner = partial(trainer.task.engine.planner, config.batching, config.sharing)
        plan_training = planner(training=True, attentions=config.attention_penalty > 0)
        plan_validation = planner(training=False)
    programs = training.questions.programs
    order = make_order(
        program_lengths(programs, vocab.program) if config.curriculum and programs is not None else None,
        training.questions.image_idxs,
        config.curriculum,
        config.batch_size,
        config.seed,
        config.questions_per_image,
    )
    _check_enough(order, trainer.task.networks)
    loading = Loading(config.workers, config.prefetch, pin=trainer.device.type == "cuda")
    steps = range(trainer.step, config.iterations)
    draws = config.max_program_length if config.model == "joint" else 0
    ranks = {"rank": rank(), "world_size": world_size()}
    dataset = ClevrDataset(training.questions, training.features, plan_training)
    batches = training_batches(dataset, order, steps, loading, draws, **ranks)
    if validation is None:
        return batches, None
    dataset = ClevrDataset(validation.questions, validation.features, plan_validation)
    return batches, sequential_batches(dataset, VALIDATION_BATCH_SIZE, loading, **ranks)


def _check_enough(order: Order, networks: Mapping[str, nn.Module]) -> None:
    """Every process must get a question of every minibatch; batch norm over questions needs two."""
    fewest = min(order.batch_size, *(len(pool) for _, pool in order.stages))
    if fewest < world_size():
        raise InputError(f"a minibatch of {fewest} questions for {world_size()} processes, expected one each at least")
    layers = (layer for network in networks.values() for layer in network.modules())
    if fewest < 2 and any(isinstance(layer, nn.BatchNorm1d) and is_trained(layer) for layer in layers):
        raise InputError("a minibatch of 1 question, expected 2 at least for the batch norm of classifier_norm")


def _refuse_unused(config: Config) -> None:
    """A model to start from is never left unused without a word."""
    used = {"pg": ("pg",), "ee": ("ee",), "joint": ("pg", "ee")}.get(config.model, ("baseline",))
    if config.model == "ee" and config.programs == "predicted":
        used = ("pg", "ee")
    for key in ("pg", "ee", "baseline"):
        if getattr(config, key) is not None and key not in used:
            hint = "; --programs predicted runs its programs" if (config.model, key) == ("ee", "pg") else ""
            raise InputError(f"{key} is {getattr(config, key)}, which training {config.model} does not use{hint}")
    if config.model not in ("ee", "joint"):
        penalty, modules = config.attention_penalty, config.engine.modules
        for key, value, default in (
            ("attention_penalty", penalty, Config.attention_penalty),
            ("engine.modules", modules, EngineConfig.modules),
        ):
            if value != default:
                raise InputError(f"{key} is {value}, which training {config.model} does not use")


def _start_of(name: str, config: Config) -> str | None:
    """The checkpoint that the network `name` starts from, if any."""
    return {"generator": config.pg, "engine": config.ee}.get(name, config.baseline)


def _with_networks_settings(
    config: Config, networks: Mapping[str, nn.Module], asked: Collection[str], resumed: bool
) -> Config:
    """`config` with the settings that its networks have, which a checkpoint to start from brings along.

    Raises:
        InputError: other settings than the checkpoint's were asked for: by name, or by being no defaults.
    """
    sections = {}
    for name, network in networks.items():
        given, start = getattr(config, name), None if resumed else _start_of(name, config)
        held = {f.name: network.kwargs[f.name] for f in fields(given)}
        sections[name] = update(
            given, held, source=DESCRIPTIONS[name] if start is None else f"{start}: {DESCRIPTIONS[name]}"
        )
        for key in held if start is not None else ():
            wanted, default, has = (getattr(section, key) for section in (given, type(given)(), sections[name]))
            if wanted != has and (wanted != default or f"{name}.{key}" in asked):
                raise InputError(f"{start}: was trained with {name}.{key} {has}, cannot start with {wanted}")
    return replace(config, **sections)


def _check_start(start: Saved | None, config: Config, out: Path) -> None:
    """A run that stands is never written over, nor gone on with as another one."""
    if start is None:
        if checkpoints(out):
            raise InputError(f"{out}: already holds a run; add --resume to go on with it, or choose another --out")
        return
    model = start.content["model"]
    if model != config.model:
        raise InputError(f"{out}: holds a run of model {model}, cannot resume it as {config.model}")
    _check_same_networks(start, config)


def _check_same_networks(start: Saved, config: Config) -> None:
    """A run goes on with the networks that it has: their settings, and what is frozen, are those of its start."""
    trained = update(Config(), start.content["config"], source=str(start.path))  # by an earlier version, perhaps
    fixed = [("freeze", *(", ".join(sorted(held.freeze)) or "nothing" for held in (trained, config)))]
    saved, given = to_dict(trained), to_dict(config)
    for network in start.content["networks"]:
        fixed += [(f"{network}.{key}", value, given[network][key]) for key, value in saved[network].items()]
    for name, before, now in fixed:
        if before != now:
            raise InputError(f"{start.path}: was trained with {name} {before}, cannot go on with {now}")


def _check_families(start: Saved | None, config: Config, families: str | None) -> None:
    """A run goes on with the question families that its file lists, unless it is given another file: this one may have
    changed since."""
    if start is None or families is None or config.families != start.content["config"].get("families"):
        return
    before = start.content.get("families", families)  # earlier versions did not record them
    if before != families:
        raise InputError(
            f"{config.families}: lists the question families {families}, but {start.path} was trained on {before}; "
            "undo that to go on, or give --families another file"
        )


def _require(questions: Questions, config: Config, reads: bool) -> None:
    if config.model != "pg" and questions.answers is None:
        raise InputError(f"{questions.path}: has no answers, which training {config.model} needs")
    predicted = config.model == "ee" and config.programs == "predicted"
    if reads and not predicted and questions.programs is None:
        hint = " (or train with --programs predicted)" if config.model == "ee" else ""
        raise InputError(f"{questions.path}: has no programs, which training {config.model} needs{hint}")


def _learn_words(config: Config, name: str, start: str, network: nn.Module, count: int) -> None:
    """Make room in a network to start from for `count` question words that it has not seen, and say so."""
    if {name, *PARTS_WITH_WORDS} & set(config.freeze):
        raise InputError(f"{start}: {count} question words are new to it, and frozen it cannot learn them")
    add_words(network, name, count, config.seed)
    if is_main():
        tqdm.write(f"{start}: {count} new question words")


def _make_task(config: Config, vocab: Vocab, training: Split, device: torch.device, resumed: Saved | None) -> Any:
    """The task of the config's model, its networks new, from the start checkpoints, or from the run's own."""
    feature_shape = None if training.features is None else training.features.shape[1:]

    def network(name: str, kwargs: Callable[[], dict[str, Any]]) -> nn.Module:
        """The run's own network, that of its start, or a new one of `kwargs`; on the device."""
        start = _start_of(name, config)
        if resumed is not None:
            check_vocab(Vocab.from_json(resumed.content["vocab"], str(resumed.path)), vocab, name, resumed.path)
            made = unpack(resumed.content, name, resumed.path)
        elif start is None:
            made = build(name, kwargs())
        else:
            learn = None if name == "engine" else partial(_learn_words, config, name, start)
            made = load_network(start, name, vocab, torch.device("cpu"), learn)
            if name == "engine":
                made = with_module_norm(made, config.engine.module_norm)
        if name in FEATURE_SIDES:
            check_features(made, feature_shape, resumed.path if resumed else start or training.features.path)
            if is_main() and (warning := describe_other_features(made, training.features)) is not None:
                tqdm.write(warning)
        return place(made, device)

    def generator() -> nn.Module:
        return network("generator", lambda: generator_kwargs(config.generator, vocab))

    def engine() -> nn.Module:
        return network("engine", lambda: engine_kwargs(config.engine, vocab, feature_shape))

    execution = Execution(config.batching, config.sharing, config.defer_weight_grads, config.attention_penalty)
    max_length = config.max_program_length
    if config.model == "pg":
        return GeneratorTask(generator(), max_length)
    if config.model in BASELINES:
        (name,) = NETWORKS[config.model]
        kwargs = partial(baseline_kwargs, name, getattr(config, name), vocab, feature_shape)
        return BaselineTask(name, network(name, kwargs))
    if config.model == "ee":
        predictor = None
        if config.programs == "predicted":
            if config.pg is None:
                raise InputError("programs are to be predicted: give --pg CKPT, a trained program generator")
            predictor = load_network(config.pg, "generator", vocab, device)
        return EngineTask(engine(), execution, predictor, max_length)
    for part, start in (("pg", config.pg), ("ee", config.ee)):
        if start is None and resumed is None:
            raise InputError(f"joint training starts from trained parts: give --{part} CKPT")
    return JointTask(generator(), engine(), execution, max_length, config.reward_decay, config.temperature)
