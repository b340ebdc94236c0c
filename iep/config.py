"""All settings of training with their defaults, in frozen dataclasses.

This file turns a YAML file, which overrides the defaults, and `key=value` strings, which override YAML, into a checked
`Config`. An unknown key, a value of the wrong type or out of range, and a setting that the model does not use are each
an `InputError` that names the key and where it was given.
"""

import contextlib
import dataclasses
import json
import math
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from iep.batching.schedulers import SCHEDULERS
from iep.errors import InputError, nearest
from iep.execution_engine import choices
from iep.runtime.reading import parse_yaml, read_yaml

BASELINES = ("lstm", "cnn-lstm", "cnn-lstm-sa")
"""Models of a single network that answers without programs."""
MODELS = ("pg", "ee", "joint", *BASELINES, "backbone")
ANSWERING = MODELS[:-1]
"""Models that are trained on questions."""
WITH_ENGINE = ("ee", "joint")
READING_FEATURES = ("ee", "joint", "cnn-lstm", "cnn-lstm-sa")
"""Models that read features."""
MODULES = choices.MODULES
BATCHING = tuple(SCHEDULERS)
DTYPES = ("float32", "bfloat16")
PRECISIONS = (*DTYPES, "auto")
PROGRAM_SOURCES = ("ground-truth", "predicted")
CONFIG = "config.yaml"
"""The file in a run directory that holds its settings."""
PLACES = ("device", "devices", "placement")
"""The settings of the devices on which a run computes; checkpoints do not store them."""
ASYNCHRONOUS = ("instance_size", "max_active_keys", "min_update_frequency")
"""The settings that only asynchronous training uses."""
FIXED = ("model", "freeze", "pg", "ee", "baseline")
"""Settings that are fixed on resume, as are network settings; `pg` may change when it only supplies programs."""
SYNCHRONOUS = ("defer_weight_grads", "execution")
"""The settings that asynchronous training does not use."""
SECTIONS = {
    "generator": ("pg", "joint"),
    "engine": WITH_ENGINE,
    **{name.replace("-", "_"): (name,) for name in (*BASELINES, "backbone")},
}
"""The sections of a `Config`, each with the settings of one network, and the models that have this network."""
PATHS = {
    **dict.fromkeys(("data", "pg", "ee", "baseline"), ()),
    "families": ("short", "long"),
}
"""The settings that name files, and the words that each of them accepts instead of a file name."""
SHIPPED = Path(__file__).parent / "configs"
"""The directory of the package's configs; `mini/pg` is the name of its file `mini/pg.yaml`."""
Given = list[tuple[str, str, Any]]
"""Settings as a user gave them: the place, the dotted name and the value of each."""
LEARNING_RATES = {"pg": 5e-4, "ee": 1e-4, "joint": 5e-5, **dict.fromkeys(BASELINES, 5e-4), "backbone": 3e-3}


def setting(
    default: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] | None = None,
    models: tuple[str, ...] = MODELS,
) -> Any:
    """Return a dataclass field with a default and, to be checked when a config is read, bounds or a list of choices.

    The bounds of a tuple apply to each of its items. `models` are the models that use the setting; for other models it
    is an error to give it.
    """
    return field(
        default=default, metadata={"minimum": minimum, "maximum": maximum, "choices": choices, "models": models}
    )


@dataclass(frozen=True)
class GeneratorConfig:
    """Settings of the program generator (Johnson et al. 2017, section 3.2 and supplementary material)."""

    embedding_dim: int = setting(300, minimum=1)
    """The width of the embeddings of words and of program tokens."""
    hidden_dim: int = setting(256, minimum=1)
    """The width of the LSTMs."""
    num_layers: int = setting(2, minimum=1)
    """The number of layers of the encoder and of the decoder."""
    dropout: float = setting(0.0, minimum=0, maximum=1)
    """The probability of dropping a unit between the layers of the LSTMs."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the execution engine (Johnson et al. 2017, section 3.2; `scene: stem` is from Suarez & Zhu)."""

    modules: str = setting("iep", choices=MODULES)
    """The set of modules: `iep`, residual blocks (Johnson et al. 2017); `tbd`, attentions (Mascharka et al. 2018);
    `pooled`, attentions and vectors pooled by them (after Hu et al. 2017); `vector`, vectors of a block that all
    functions share (Bahdanau et al. 2019); or `MODULE:CLASS`, a class of another package. Only `iep` has the settings
    `module_residual`, `module_norm` and `scene`."""
    module_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of one set of modules, which its class gets by name: those of a set of another package, or `context` of
    `iep`, whose blocks then also read the maxima of the whole map (`{context: true}`)."""
    module_dim: int = setting(128, minimum=1)
    """The number of channels of the maps that modules read and return."""
    module_residual: bool = True
    """Add the input of a block to its output."""
    module_norm: str = setting("none", choices=choices.NORMS)
    """The norm after every convolution of a block: `none`, or batch norm over each `example` by itself, as if examples
    ran one at a time."""
    scene: str = setting("module", choices=choices.SCENES)
    """The value of `scene`: the output of a `module` on the stem's output, or the `stem`'s output itself."""
    stem: str = setting("conv", choices=choices.STEMS)
    """`conv`, 3x3 convolutions of the features, or `none`, the features as they are."""
    stem_widths: tuple[int, ...] = setting((128,), minimum=1)
    """The numbers of channels of the stem's convolutions before the last one."""
    stem_stride: int = setting(1, minimum=1)
    """The stride of the stem's last convolution."""
    stem_norm: bool = False
    """Batch norm after every convolution of the stem."""
    initialization: str = setting("kaiming", choices=choices.INITIALIZATIONS)
    """The initial weights: `kaiming` (He et al. 2015), or PyTorch's defaults, `torch`, which are smaller, so that
    activations do not grow along a deep tree of modules at the start."""
    classifier_projection: int = setting(512, minimum=0)
    """The number of channels of the classifier's 1x1 convolution; 0 omits it."""
    classifier_pool: int = setting(2, minimum=0)
    """The side of the classifier's max pooling window; 1 omits pooling, and 0 reads the maxima and the sums of the
    whole grid."""
    classifier_hidden: tuple[int, ...] = setting((1024,), minimum=1)
    """The widths of the classifier's hidden layers."""
    classifier_norm: bool = False
    """Batch norm in the classifier."""
    classifier_dropout: float = setting(0.0, minimum=0, maximum=1)
    """The probability of dropping a unit after each hidden layer of the classifier."""


@dataclass(frozen=True)
class LstmConfig:
    """Settings of the baseline that reads the question only (Johnson et al. 2017, CLEVR, section 4.1)."""

    embedding_dim: int = setting(300, minimum=1)
    """The width of the embeddings of words."""
    hidden_dim: int = setting(256, minimum=1)
    """The width of the LSTM."""
    num_layers: int = setting(2, minimum=1)
    """The number of layers of the LSTM."""
    dropout: float = setting(0.0, minimum=0, maximum=1)
    """The probability of dropping a unit between the layers of the LSTM."""
    classifier_dims: tuple[int, ...] = setting((1024,), minimum=1)
    """The widths of the classifier's hidden layers."""
    classifier_norm: bool = False
    """Batch norm in the classifier."""
    classifier_dropout: float = setting(0.0, minimum=0, maximum=1)
    """The probability of dropping a unit after each hidden layer of the classifier."""


@dataclass(frozen=True)
class CnnLstmConfig(LstmConfig):
    """Settings of CNN+LSTM (Johnson et al. 2017, CLEVR, section 4.1): an LSTM and a CNN over the features."""

    cnn_res_blocks: int = setting(0, minimum=0)
    """The number of residual blocks of the CNN over the features."""
    cnn_res_block_dim: int = setting(128, minimum=1)
    """The number of channels of the residual blocks."""
    cnn_projection: int = setting(512, minimum=0)
    """The number of channels of the 1x1 convolution after the blocks; 0 omits it."""
    cnn_pooling: str = setting("maxpool2", choices=choices.POOLINGS)
    """How the maps of the CNN become a vector."""


@dataclass(frozen=True)
class CnnLstmSaConfig(LstmConfig):
    """Settings of CNN+LSTM+SA (Johnson et al. 2017, CLEVR, section 4.1; Yang et al. 2016): stacked attention."""

    attention_dim: int = setting(512, minimum=1)
    """The width of the attention's hidden layer."""
    attention_steps: int = setting(2, minimum=0)
    """The number of steps of attention."""


@dataclass(frozen=True)
class BackboneConfig:
    """Scene network, whose features the other models read (`iep/backbone/network.py`)."""

    widths: tuple[int, ...] = setting((32, 64, 96), minimum=1)
    """The numbers of channels at strides 4, 8 and 16."""
    depths: tuple[int, ...] = setting((1, 1, 4), minimum=0)
    """The numbers of residual blocks at these strides."""
    image_size: tuple[int, int] = setting((336, 224), minimum=32, maximum=4096)
    """The width and height of images in pixels, multiples of 16."""


@dataclass(frozen=True)
class Config:
    """All settings of a training run, which are saved beside its checkpoints."""

    model: str = setting("ee", choices=MODELS)
    """The model to train: the program generator (`pg`), the execution engine (`ee`), both jointly, a baseline, or a
    backbone."""
    data: str | None = None
    """The directory that `iep-preprocess` wrote; for a backbone, a directory in CLEVR's layout."""
    pg: str | None = setting(None, models=("pg", *WITH_ENGINE))
    """The checkpoint that the program generator starts from, or that predicts the engine's programs."""
    ee: str | None = setting(None, models=WITH_ENGINE)
    """The checkpoint that the execution engine starts from."""
    baseline: str | None = setting(None, models=BASELINES)
    """The checkpoint that a baseline starts from."""

    programs: str = setting("ground-truth", choices=PROGRAM_SOURCES, models=("ee",))
    """The programs that the engine is trained on: those of the questions, or those that `pg` predicts before the first
    iteration."""
    batching: str = setting(choices.DEFAULT_SCHEDULER, choices=BATCHING, models=WITH_ENGINE)
    """The scheduler of the engine's module calls."""
    sharing: bool | None = setting(None, models=WITH_ENGINE)
    """Run each image's stem, and equal subtrees over one image, once. If unset, training shares only where this is
    exact, that is without batch norm and dropout, and validation always does."""
    execution: str = setting(choices.DEFAULT_EXECUTION, choices=tuple(choices.EXECUTIONS), models=WITH_ENGINE)
    """How module calls run: one function in each call (calls), or all of one architecture."""
    defer_weight_grads: bool = setting(False, models=WITH_ENGINE)
    """Compute the gradient of each module's weights once a step, over all its calls."""
    train_split: str = "train"
    """The split for training."""
    val_split: str = "val"
    """The split for validation. CLEVR-CoGenT has trainA, valA and valB."""
    families: str | None = setting(None, models=ANSWERING)
    """The question families to train and validate on: a JSON or YAML file that lists them, or `short` or `long` (see
    `iep/data/question_families.py`). The following settings count the questions of these families only."""
    num_train_samples: int | None = setting(None, minimum=1)
    """The number of questions to train on, from the first."""
    skip_val_samples: int = setting(0, minimum=0)
    """The number of questions at the start that validation skips, for example because they are trained on."""
    num_val_samples: int | None = setting(10_000, minimum=1)
    """The number of questions to validate on, from the first that is not skipped."""
    curriculum: tuple[tuple[int, int], ...] = setting((), models=ANSWERING)
    """Pairs of the first iteration and the greatest program length from then on, in functions besides `scene`."""
    max_program_length: int | None = setting(None, minimum=2, maximum=1000, models=("pg", *WITH_ENGINE))
    """The number of tokens, `<START>` and `<END>` included, after which decoding stops, which checkpoints store. The
    default is the length of the longest program to train on, and at least that of the original toolkit, 31."""
    questions_per_image: int = setting(1, minimum=1, models=ANSWERING)
    """The number of questions about one image that are drawn together. With more than 1, sharing runs fewer stems."""
    workers: int = setting(1, minimum=0)
    """The number of processes that read and plan batches; with 0, the training process does this itself."""
    prefetch: int = setting(2, minimum=1)
    """The number of batches that each worker prepares in advance."""
    features_in_memory: bool = setting(False, models=(*READING_FEATURES, "backbone"))
    """Read all features at the start into the system's file cache, which all processes of a machine share; this makes
    later reads faster if the file is not compressed. For a backbone, decode all images into memory."""

    iterations: int = setting(20_000, minimum=1)
    """The number of training steps."""
    batch_size: int = setting(64, minimum=1)
    """The number of questions (for a backbone, images) of a step, over all processes."""
    val_batch_size: int = setting(256, minimum=1)
    """The number of questions that validation runs at a time."""
    learning_rate: float | None = setting(None, minimum=0)
    """The peak learning rate. If unset, it is 5e-4 for pg and the baselines, 1e-4 for ee, 5e-5 for joint, and 3e-3
    for a backbone."""
    warmup: int = setting(0, minimum=0)
    """The number of steps in which the learning rate rises from 0 to its peak."""
    decay: str = setting("constant", choices=("constant", "cosine"))
    """How the learning rate falls after its peak: not at all, or to 0 at the last iteration as a `cosine` does."""
    weight_decay: float = setting(0.0, minimum=0)
    """The weight decay of AdamW, which is Adam with 0."""
    clip_gradients: float | None = setting(None, minimum=1e-6)
    """The greatest norm of the gradient of all parameters together; larger gradients are scaled down to it."""

    attention_penalty: float = setting(0.0, minimum=0, models=WITH_ENGINE)
    """The factor by which the sum of all attentions that networks return is added to the loss of a minibatch, for the
    modules tbd and pooled (Mascharka et al. 2018 and their code: 2.5e-7 for minibatches of 128)."""

    precision: str = setting("float32", choices=PRECISIONS)
    """The dtype in which the networks compute. Weights and the program generator always use float32. auto is bfloat16
    on devices with instructions for it, and float32 on others."""

    freeze: tuple[str, ...] = ()
    """The parts of the model that training does not change, by their names in `iep/training/freezing.py`."""
    reward_decay: float = setting(0.9, minimum=0, maximum=1, models=("joint",))
    """The decay of the moving average of rewards that REINFORCE subtracts."""
    temperature: float = setting(1.0, minimum=1e-6, models=("joint",))
    """The temperature at which joint training samples programs."""

    seed: int = setting(0, minimum=0, maximum=2**32 - 1)
    """The seed of initial weights, of the order of questions, and of everything else that is random."""
    device: str = "auto"
    """The device: auto, cpu, cuda or cuda:N; auto is a GPU if there is one."""
    placement: str = setting("none", choices=choices.PLACEMENTS, models=WITH_ENGINE)
    """The placement of the engine's functions on `devices`: in turn (`round-robin`), or by their work (`balanced`)."""
    devices: tuple[str, ...] = setting((), models=WITH_ENGINE)
    """The devices of the placement. Everything that is not placed is on the first one."""
    asynchronous: bool = setting(False, models=("ee",))
    """Train asynchronously (Gaunt et al. 2017, AMPNet): each device of the placement is a worker, which runs its parts
    of several instances, small minibatches, and updates the weights of each part by itself."""
    instance_size: int = setting(8, minimum=1, models=("ee",))
    """The number of questions of an instance. `batch_size`, the number of an iteration, must be a multiple of it."""
    max_active_keys: int = setting(4, minimum=1, models=("ee",))
    """The greatest number of instances in flight."""
    min_update_frequency: int = setting(0, minimum=0, models=("ee",))
    """The number of calls after which a part is updated; 0 for the number that it has in a minibatch of `batch_size`
    questions, so that a rare function is updated as often as in synchronous training."""
    validate_every: int = setting(1000, minimum=1)
    """The number of iterations after which the model is validated and saved."""
    log_every: int = setting(50, minimum=1)
    """The number of iterations after which the speed and the means of loss and accuracy over them are logged."""
    tracker: str | None = setting(None, choices=("trackio", "wandb"))
    """A package that gets the metrics as well: `trackio` or `wandb` (Weights & Biases)."""
    keep: int = setting(2, minimum=1)
    """The number of newest checkpoints that a run keeps, besides the best one."""

    generator: GeneratorConfig = GeneratorConfig()
    engine: EngineConfig = EngineConfig()
    lstm: LstmConfig = LstmConfig()
    cnn_lstm: CnnLstmConfig = CnnLstmConfig()
    cnn_lstm_sa: CnnLstmSaConfig = CnnLstmSaConfig()
    backbone: BackboneConfig = BackboneConfig()

    @property
    def peak_learning_rate(self) -> float:
        """The given learning rate, or the published one of the model."""
        return LEARNING_RATES[self.model] if self.learning_rate is None else self.learning_rate


def read_config(
    file: Path | None = None,
    assignments: Iterable[str] = (),
    overrides: Mapping[str, Any] | None = None,
    base: Config | None = None,
) -> Config:
    """Return `base`, or the defaults if it is None, with the settings of `given_settings` in place of its own.

    Raises:
        InputError: the file is missing or not a YAML mapping, an assignment is not of the form `key=value`, a key is
            unknown, or a value has the wrong type or is out of range.
    """
    return overridden(base or Config(), given_settings(file, assignments, overrides))


def given_settings(
    file: Path | None = None, assignments: Iterable[str] = (), overrides: Mapping[str, Any] | None = None
) -> Given:
    """Return the settings of a YAML file, of `key=value` strings, and of `overrides` other than None, in this order.

    Later settings replace earlier ones. `file` may also be the name of a config of the package, such as `mini/pg`.

    Raises:
        InputError: the file is missing or not a YAML mapping, or a string is not of the form `key=value`.
    """
    given: Given = []
    if file is not None:
        file = find_config(file)
        content = read_yaml(file, "a YAML file of settings")
        if not isinstance(content, Mapping | None):
            raise InputError(f"{file}: expected a YAML mapping of settings, found {type(content).__name__}")
        given += [(str(file), name, value) for name, value in flat(content or {}).items()]
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise InputError(f"{assignment!r}: expected key=value, such as batch_size=128")
        try:
            value = parse_yaml(text)
        except InputError as error:
            raise InputError(f"{assignment!r}: {error}") from None
        given += [(assignment, name, value) for name, value in flat({key: value}).items()]
    options = {key: value for key, value in (overrides or {}).items() if value is not None}
    return [*given, *(("command line", name, value) for name, value in flat(options).items())]


def find_config(file: Path | str) -> Path:
    """Return the path of a config, given the path of a file or the name of a config of the package.

    Raises:
        InputError: there is neither; the message suggests the nearest name.
    """
    file = Path(file)
    name = file.as_posix().removesuffix(".yaml")
    shipped = {path.relative_to(SHIPPED).with_suffix("").as_posix(): path for path in SHIPPED.glob("*/*.yaml")}
    if file.is_file() or (file.exists() and name not in shipped):
        return file
    if name not in shipped:
        hint = nearest(name, shipped) or f"; which are {', '.join(sorted(shipped))}"
        raise InputError(f"{file}: no such file, nor the name of a config of this package{hint}")
    return shipped[name]


def overridden(config: Config, given: Given) -> Config:
    """Return `config` with the given settings in place of its own.

    Raises:
        InputError: a key is unknown, or a value has the wrong type or is out of range.
    """
    for source, name, value in given:
        for part in reversed(name.split(".")):
            value = {part: value}
        config = update(config, value, source)
    return config


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested settings by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        is_nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return found


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that the model of `config` uses, as plain mappings, lists, numbers and strings."""
    models = {f.name: f.metadata.get("models", SECTIONS.get(f.name, MODELS)) for f in fields(config)}
    models |= dict.fromkeys(SYNCHRONOUS if config.asynchronous else ASYNCHRONOUS, ())
    return {name: value for name, value in to_dict(config).items() if config.model in models[name]}


def only_used(config: Config) -> Config:
    """Return `config` with defaults for all settings that its model does not use."""
    return update(Config(), settings_of(config), "only used")


def saved_config(settings: Mapping[str, Any], source: str) -> Config:
    """Return the settings of a run that it has saved in the file `source`.

    Raises:
        InputError: the settings are not a mapping, or a setting is unknown or invalid.
    """
    if not isinstance(settings, Mapping):
        raise InputError(f"{source}: expected a YAML mapping of settings, found {type(settings).__name__}")
    given = [(source, name, value) for name, value in flat(settings).items()]
    return absolute(only_used(overridden(Config(), given)))


def check_changes(before: Config, now: Config, path: Path) -> None:
    """Check that the run `before` may be resumed with the settings `now`.

    Args:
        path: the checkpoint of the run, for messages.

    Raises:
        InputError: settings differ that may not change during a run (names all of them).
    """
    if before.model != now.model:
        raise InputError(f"{path}: holds a run of model {before.model}, cannot resume it as {now.model}")
    held, wanted = flat(settings_of(before)), flat(settings_of(now))
    for settings in (held, wanted):
        settings["freeze"] = ", ".join(sorted(settings["freeze"])) or "nothing"
    fixed = {*SECTIONS, *FIXED} - ({"pg"} if now.model == "ee" else set())
    # Only a section may have settings in one of the two alone: those of its set of modules.
    refused = [name for name in held | wanted if name.partition(".")[0] in fixed and held.get(name) != wanted.get(name)]
    if refused:
        texts = [", ".join(f"{name} {settings.get(name)}" for name in refused) for settings in (held, wanted)]
        raise InputError(f"{path}: was trained with {texts[0]}, cannot resume with {texts[1]}")


def check_used(config: Config, given: Collection[str] = ()) -> None:
    """Check that the model uses every setting that differs from its default, or whose dotted name is in `given`.

    Raises:
        InputError: the model does not use some; the message names all of them.
    """
    used, defaults = flat(settings_of(config)), flat(to_dict(Config()))
    given = [name for name in given if name not in PLACES]
    unused = [
        f"{name} is {value}"
        for name, value in flat(to_dict(config)).items()
        if name not in used and (value != defaults.get(name) or name in given)
    ]
    if unused:
        how = " asynchronously" if config.asynchronous and config.model == "ee" else ""
        raise InputError(f"{', '.join(unused)}, which training {config.model}{how} does not use")


def absolute(config: Config) -> Config:
    """Return `config` with absolute paths of the files that exist, so that it is valid in any working directory."""
    return replace(
        config,
        **{
            key: os.path.abspath(path)
            for key, words in PATHS.items()
            if (path := getattr(config, key)) not in (None, *words) and os.path.exists(path)
        },
    )


def update(config: Any, values: Mapping[str, Any], source: str, prefix: str = "") -> Any:
    """Return a copy of the dataclass `config` with checked `values`; nested mappings replace values of its sections.

    Raises:
        InputError: a key is unknown, or a value has the wrong type or is out of range. The message begins with `source`
            and the dotted key.
    """
    known = {f.name: f for f in fields(config)}
    kinds = typing.get_type_hints(type(config))
    changes = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in known:
            raise InputError(f"{source}: unknown key {name!r}{_meant(config, str(key))}")
        current = getattr(config, key)
        if dataclasses.is_dataclass(current):
            if not isinstance(value, Mapping):
                raise InputError(f"{source}: {name} is {value!r}, expected a mapping of settings")
            changes[key] = update(current, value, source, prefix=f"{name}.")
        elif isinstance(current, Mapping):
            if not isinstance(value, Mapping):
                raise InputError(f"{source}: {name} is {value!r}, expected a mapping of settings")
            changes[key] = {**current, **value}
        else:
            changes[key] = _checked(value, kinds[key], known[key].metadata, f"{source}: {name}")
    return replace(config, **changes)


def _meant(config: Any, key: str) -> str:
    """Return a hint at an unknown key: the same key of a section, a key with these initials, or else a similar key."""
    values = to_dict(config)
    found = [f"{name}.{key}" for name, value in values.items() if isinstance(value, dict) and key in value]
    found += [name for name in values if key == "".join(word[0] for word in name.split("_"))]  # such as lr
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else nearest(key, values)


def to_dict(config: Any) -> dict[str, Any]:
    """Return `config` as plain mappings, lists, numbers and strings, in the order of its fields."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # lists instead of tuples


def to_yaml(config: Config) -> str:
    """Return the settings that the model of `config` uses as YAML, which `read_config` reads."""
    return yaml.safe_dump(settings_of(config), sort_keys=False)


def _checked(value: Any, kind: Any, limits: Mapping[str, Any], name: str) -> Any:
    value = _converted(value, kind, name)
    minimum, maximum, choices = (limits.get(key) for key in ("minimum", "maximum", "choices"))
    for item in value if isinstance(value, tuple) else () if value is None else (value,):
        if minimum is not None and not item >= minimum:
            raise InputError(f"{name} is {item!r}, expected at least {minimum}")
        if maximum is not None and not item <= maximum:
            raise InputError(f"{name} is {item!r}, expected at most {maximum}")
    if value is not None and choices is not None and value not in choices:
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(choices)}{nearest(value, choices)}")
    return value


def _converted(value: Any, kind: Any, name: str) -> Any:
    """Return `value` as `kind`: int, float, bool, str, an optional one of these, or a tuple of them.

    A tuple of strings may be given as comma-separated text, and as None if it is empty.

    Raises:
        InputError: the value is not of this kind.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _converted(value, arguments[0], name)
    if arguments == (str, Ellipsis) and (value is None or isinstance(value, str)):
        value = [item.strip() for item in (value or "").split(",") if item.strip()]
    if origin is tuple and isinstance(value, (list, tuple)):
        if arguments[-1] is Ellipsis:
            return tuple(_converted(item, arguments[0], name) for item in value)
        if len(value) == len(arguments):
            return tuple(_converted(item, part, name) for item, part in zip(value, arguments, strict=True))
    if kind is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):  # YAML 1.1 reads 1e-4, which has no dot, as text
            value = float(value)
    is_finite = kind is not float or not isinstance(value, float) or math.isfinite(value)
    if origin is None and isinstance(value, kind) and is_finite and (kind is bool or not isinstance(value, bool)):
        return value
    found = " ".join(repr(value).split())  # of a tensor in a damaged checkpoint, this has several lines
    raise InputError(f"{name} is {found}, expected {_kind_name(kind)}")


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is tuple:
        arguments = typing.get_args(kind)
        if arguments[-1] is Ellipsis:
            return f"a list, each item {_kind_name(arguments[0])}"
        return f"({', '.join(_kind_name(part) for part in arguments)})"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}[kind]
