"""The networks of a model: built from settings and the data's shapes, or loaded from a checkpoint.

Five sections: the networks and their arguments; checkpoints; what networks fit; devices and ways to execute; new words.
A checkpoint stores the constructor arguments of each network beside its weights, so that loading needs no config. The
networks have the names of the sections of a config with their settings: `generator`, `engine`, `lstm`, `cnn_lstm`,
`cnn_lstm_sa` and `backbone`. `NETWORKS` lists the networks of each model.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from iep.backbone.network import SceneNetwork
from iep.baselines.networks import CNNLSTMBaseline, LSTMBaseline, StackedAttentionBaseline
from iep.batching.template import make_template
from iep.config import DROPPED, MODELS, SECTIONS, Config, EngineConfig, to_dict
from iep.data.features import Features
from iep.errors import InputError
from iep.execution_engine.choices import (
    DEFAULT_EXECUTION,
    INITIALIZATIONS,
    check_choice,
    check_named,
    make_module_set,
)
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import Placement, Sample, make_placement, plan_sample
from iep.execution_engine.roles import MAP, result_kind
from iep.execution_engine.stem_and_classifier import make_classifier, make_stem
from iep.models.checkpoint import PARTS_OF_A_MODEL, load_checkpoint
from iep.program_generator.seq2seq import Seq2Seq
from iep.programs import SCENE
from iep.runtime.distributed import is_main
from iep.vocab import Vocab, count_new_words

T = TypeVar("T", bound=nn.Module)

# The networks and their constructor arguments


def make_engine(
    program_tokens: Sequence[str],
    num_answers: int,
    feature_dim: int,
    feature_height: int,
    feature_width: int,
    stem_bias: bool = False,
    classifier_pool_rest: bool = True,
    **settings: Any,
) -> ExecutionEngine:
    """Return an engine with new weights.

    Args:
        program_tokens: the program vocabulary, special tokens first.
        num_answers: A.
        feature_dim: C of the features.
        feature_height: H of the features.
        feature_width: W of the features.
        stem_bias: the stem's convolutions have biases even before batch norm, where they have no effect. This is for
            checkpoints of the original toolkit.
        classifier_pool_rest: if the pooling window does not divide the grid, pool the rest of it too; the original
            toolkit drops it.
        settings: the fields of `EngineConfig`.

    Raises:
        TypeError: a setting is unknown.
        ValueError: a choice is unknown, the vocabulary has no `scene`, a token cannot name a module, the set of modules
            does not support a setting or a token, the features do not fit the stem, or a norm does not fit the grid.
    """
    given = EngineConfig(**settings)
    check_choice("initialization", given.initialization, INITIALIZATIONS)
    module_set = make_module_set(
        given.modules,
        dim=given.module_dim,
        residual=given.module_residual,
        norm=given.module_norm,
        scene=given.scene,
        **given.module_settings,
    )
    stem = make_stem(
        given.stem,
        feature_dim,
        given.stem_widths,
        given.module_dim,
        given.stem_stride,
        given.stem_norm,
        stem_bias,
    )
    grid = height, width = -(-feature_height // given.stem_stride), -(-feature_width // given.stem_stride)
    if given.module_norm != "none" and height * width == 1:
        raise ValueError(f"module_norm {given.module_norm} needs maps of more than one position, and the grid is 1x1")
    returns_maps = result_kind(module_set.role(SCENE)) == MAP
    classifier = make_classifier(
        (given.module_dim, height, width) if returns_maps else (given.module_dim, 1, 1),
        given.classifier_projection,
        given.classifier_hidden,
        num_answers,
        given.classifier_pool,
        classifier_pool_rest,
        given.classifier_norm,
        given.classifier_dropout,
    )
    engine = ExecutionEngine(program_tokens, module_set, stem, classifier, grid)
    if given.initialization == "kaiming":
        _kaiming_normal(engine)
    for part in engine.children():
        if callable(adjust := getattr(part, "adjust_initial_weights", None)):
            adjust()
    return engine


def _kaiming_normal(module: nn.Module) -> None:
    """Draw Kaiming normal weights for all convolutions and linear layers (He et al. 2015); biases do not change."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight)


BASELINES: dict[str, type[LSTMBaseline | CNNLSTMBaseline | StackedAttentionBaseline]] = {
    "lstm": LSTMBaseline,
    "cnn_lstm": CNNLSTMBaseline,
    "cnn_lstm_sa": StackedAttentionBaseline,
}
CLASSES: dict[str, Callable[..., nn.Module]] = {
    "generator": Seq2Seq,
    "engine": make_engine,
    **BASELINES,
    "backbone": SceneNetwork,
}
DESCRIPTIONS = {
    "generator": "a program generator",
    "engine": "an execution engine",
    "lstm": "a question-only LSTM",
    "cnn_lstm": "a CNN+LSTM",
    "cnn_lstm_sa": "a CNN+LSTM+SA",
    "baseline": "a baseline",
    "backbone": "a backbone",
}
NETWORKS = {model: tuple(name for name, models in SECTIONS.items() if model in models) for model in MODELS}
"""The networks of each model."""
FEATURE_SIDES = {
    "engine": ("feature_dim", "feature_height", "feature_width"),
    **{name: network.feature_sides for name, network in BASELINES.items() if network.feature_sides},
}
"""The constructor arguments for the shape of the features, by network; those that read no features are not here."""
Shape = tuple[int, int, int]


def network_kwargs(name: str, settings: Any, vocab: Vocab, feature_shape: Shape | None = None) -> dict[str, Any]:
    """Return the constructor arguments of the network `name`: its settings, and the sizes of the data that it takes.

    Args:
        settings: the network's section of a `Config`.
        feature_shape: (C, H, W) of the features; None for a network that does not read features.
    """
    sizes = {
        "num_question_tokens": len(vocab.question),
        "num_program_tokens": len(vocab.program),
        "program_tokens": list(vocab.program),
        "num_answers": len(vocab.answer),
        **dict(zip(FEATURE_SIDES["engine"], feature_shape or (), strict=False)),
    }
    accepted = inspect.signature(CLASSES[name]).parameters
    return {key: size for key, size in sizes.items() if key in accepted} | to_dict(settings)


def build(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the network `name` with new weights.

    Settings that `kwargs` lacks, such as those of an earlier version's checkpoint, have the defaults of `Config`. The
    network has two attributes for its checkpoints: all of its `kwargs`, and the `recipe` of the features that it was
    trained on, which is still empty.

    Raises:
        InputError: an argument is unknown, or the arguments do not fit together, as with too few convolutions for the
            stride.
    """
    known = {key: value for key, value in kwargs.items() if f"{name}.{key}" not in DROPPED}
    kwargs = to_dict(getattr(Config, name)) | known
    try:
        network: Any = CLASSES[name](**kwargs)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{DESCRIPTIONS[name]} cannot be built: {error}") from None
    network.kwargs, network.recipe = kwargs, {}
    return network


def name_of(network: nn.Module) -> str:
    """Return the name of a network that `build` has made."""
    if isinstance(network, ExecutionEngine):
        return "engine"
    return next(name for name, kind in CLASSES.items() if type(network) is kind)


# Checkpoints


def pack(networks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments and the weights of networks, as a checkpoint stores them."""
    return {name: {"kwargs": net.kwargs, "weights": net.state_dict()} for name, net in networks.items()}


def unpack(checkpoint: Mapping[str, Any], name: str, path: Path | str, modules: str | None = None) -> Any:
    """Return the network `name` of a loaded checkpoint, with the `recipe` of the features that it was trained on.

    Args:
        modules: the class of another package, such as `mypackage.modules:Gated`, that may be imported as an engine's
            set of modules; it must be that of the checkpoint. With None, the set must be one of this package.

    Raises:
        InputError: the checkpoint does not hold this network, its set of modules is not the one named, its arguments
            are invalid, or its weights do not fit them or are not finite.
    """
    packed = checkpoint.get("networks", {})
    if name not in packed:
        found = ", ".join(DESCRIPTIONS.get(each, each) for each in packed) or "no network"
        raise InputError(f"{path}: holds {found}, expected a checkpoint with {DESCRIPTIONS[name]}")
    if name == "engine":
        check_named(packed[name]["kwargs"].get("modules", Config.engine.modules), modules, path)
    what = DESCRIPTIONS[name]
    try:
        with torch.random.fork_rng(devices=[]):  # the initial weights, which are replaced, take no random numbers
            network = build(name, packed[name]["kwargs"])
    except Exception as error:  # arguments of a wrong type can fail in any way
        cannot = "" if isinstance(error, InputError) else f"{what} cannot be built: "
        raise InputError(f"{path}: {cannot}{_short(error)}") from None
    try:
        network.load_state_dict(packed[name]["weights"])
    except RuntimeError as error:
        raise InputError(f"{path}: the weights do not fit the settings of {what} ({_short(error)})") from None
    for key, value in network.state_dict().items():
        if not (is_good := value.isfinite()).all():  # every answer would be NaN or the first one
            raise InputError(f"{path}: {key} of {what} holds {value[~is_good][0].item()}, expected finite numbers")
    network.recipe = checkpoint.get("features") or {}
    return network


def _short(error: Exception) -> str:
    return shorten(" ".join(str(error).split()), 300, placeholder=" ...")


def load_network(
    path: Path | str,
    name: str,
    vocab: Vocab,
    device: torch.device,
    add_words: Callable[[nn.Module, int], None] | None = None,
    modules: str | None = None,
) -> Any:
    """Return the network `name` of the checkpoint at `path`, in evaluation mode; `baseline` is a baseline of any kind.

    If `vocab` has further question words after those of the checkpoint, `add_words` (unless None) is called with the
    network and their number, to extend the network to `vocab`. `modules` is as for `unpack`.

    Raises:
        InputError: the checkpoint is missing or damaged, does not hold the network, was trained with another
            vocabulary, or cannot be unpacked.
    """
    checkpoint = load_checkpoint(Path(path), PARTS_OF_A_MODEL)
    if name == "baseline":
        name = next((held for held in checkpoint["networks"] if held in BASELINES), name)
    network = unpack(checkpoint, name, path, modules)
    trained = Vocab.from_json(checkpoint["vocab"], f"{path} (vocabulary)")
    if add_words is not None and (count := count_new_words(trained, vocab)):
        add_words(network, count)
        trained = replace(trained, question=vocab.question)
    check_vocab(trained, vocab, name, path)
    return place(network, device).eval()


def with_module_norm(engine: Any, norm: str) -> Any:
    """Return the engine, or one with the same weights and `norm` in its modules if `norm` is one of 'batch' and
    'example' and the engine has the other one."""
    if {norm, engine.kwargs.get("module_norm")} != {"batch", "example"}:
        return engine
    other = build("engine", engine.kwargs | {"module_norm": norm})
    other.load_state_dict(engine.state_dict())
    other.recipe = engine.recipe
    return other


# What networks fit


def check_vocab(trained: Vocab, given: Vocab, name: str, path: Path | str, engine: Path | None = None) -> None:
    """Check that two vocabularies are equal in the tokens that the network `name` depends on.

    Args:
        engine: the checkpoint of an engine that the `given` vocabulary is of; None if it is that of the data.

    Raises:
        InputError: they differ (names the first index where they do, and for data how to make them fit).
    """
    kinds = {"generator": ("question", "program"), "engine": ("program", "answer")}.get(name, ("question", "answer"))
    for kind in kinds:
        ours, theirs = getattr(trained, kind), getattr(given, kind)
        if ours == theirs:
            continue
        pairs = enumerate(zip_longest(ours, theirs))
        index, tokens = next((index, pair) for index, pair in pairs if pair[0] != pair[1])
        there, here = ("missing" if token is None else repr(token) for token in tokens)
        what = f"{path}: trained with another vocabulary: {kind} token {index} is {there} there and {here} in "
        if engine is not None:
            raise InputError(f"{what}{engine}")
        unknown = " --encode-unk" if set(given.question) - set(trained.question) else ""
        what += f"the data; preprocess them with --vocab {path}{unknown}"
        if kind == "question" and (count := count_new_words(trained, given)):
            what += f", or train from it to learn the {count} new question words"
        raise InputError(what)


def check_features(network: nn.Module, feature_shape: Sequence[int], path: Path | str) -> None:
    """Check that features have the shape that a network was built for.

    Raises:
        InputError: they have another shape.
    """
    made_for = features_shape(network)
    if made_for != tuple(feature_shape)[: len(made_for)]:
        what = DESCRIPTIONS[name_of(network)].split(" ")[-1]
        raise InputError(f"{path}: features are {tuple(feature_shape)} an image, but the {what} is made for {made_for}")


def describe_other_features(network: Any, features: Features) -> str | None:
    """Return a line on how the features were computed differently from those that a network was trained on, or None."""
    what = f"the features that {DESCRIPTIONS[name_of(network)]} was trained on"
    return describe_difference(features, network.recipe, what)


def describe_difference(features: Features, recipe: Mapping[str, Any], what: str) -> str | None:
    """Return a line on how the features were computed differently from `what`, which has the recipe, or None.

    Only settings that both record are compared, except the dtype in which the features are stored.
    """
    both = sorted(recipe.keys() & features.recipe.keys() - {"dtype"})
    parts = [
        f"{key} {features.recipe[key]} instead of {recipe[key]}" for key in both if recipe[key] != features.recipe[key]
    ]
    return f"{features.path}: computed differently from {what}: {', '.join(parts)}" if parts else None


def features_shape(network: Any) -> tuple[int, ...]:
    """Return the sizes among (C, H, W) that a network was built for."""
    return tuple(network.kwargs[side] for side in FEATURE_SIDES[name_of(network)])


# Devices

MEMORY_FORMATS = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}


def place(network: T, device: torch.device, memory_format: str | None = None) -> T:
    """Move a network to a device, with its convolutions in a format of `MEMORY_FORMATS`, and return it.

    The format None is channels last, that of cuDNN's kernels for tensor cores, and the faster one on a CPU (`iep-bench
    engine --memory-format` compares them).
    """
    chosen = MEMORY_FORMATS[memory_format or "channels-last"]
    return network.to(device, memory_format=chosen)  # type: ignore[call-overload] # torch takes both


def place_parts(engine: ExecutionEngine, placement: Placement, memory_format: str | None = None) -> ExecutionEngine:
    """Move each part of an engine to its device, in a memory format as for `place`, and return the engine."""
    for part in engine.parts:
        place(getattr(engine, part), placement.device(part), memory_format)
    engine.placement = placement
    return engine


def place_engine(
    engine: ExecutionEngine, option: str, devices: Sequence[str], sample: Sample, memory_format: str | None = None
) -> str:
    """Place the parts of an engine by `--placement` and `--devices`, and return a description of the placement.

    Raises:
        InputError: the engine cannot be placed, or the sample has no programs, which `balanced` needs.
    """
    placement, description = make_placement(option, devices, engine, sample)
    place_parts(engine, placement, memory_format)
    return description


# Ways to execute

MOST_MINIBATCHES = 32
"""The number of minibatches whose programs determine the calls of a CUDA graph."""


def set_execution(
    engine: ExecutionEngine,
    execution: str,
    device: torch.device,
    precision: str,
    defer: bool = False,
    training: bool = False,
) -> None:
    """Set the execution of an engine, after it has been placed, to one of `choices.EXECUTIONS`.

    With kernels, a line names the functions that have calls of their own.

    Args:
        defer: the weight gradients of calls are deferred.
        training: the engine will be trained, so that its execution may be `cuda_graph`; see `fit_template`.

    Raises:
        InputError: the execution would have no effect, or does not work, for this engine.
    """
    if execution != DEFAULT_EXECUTION:
        if (problem := _problem(engine, execution, device, precision, defer, training)) is not None:
            raise InputError(f"execution is {execution}, but {problem}")
        together, count = engine.op_groups(by_kernels=True), len(engine.program_tokens)
        others = [token for op, token in engine.ops.items() if op < count and op not in together]
        alone = [token for token in others if any(True for _ in engine.get_submodule(token).parameters())]
        if alone and is_main():
            tqdm.write(f"execution {execution}: by calls, without convolutions for kernels: {', '.join(alone)}")
    engine.execution = execution


def _problem(
    engine: ExecutionEngine, execution: str, device: torch.device, precision: str, defer: bool, training: bool
) -> str | None:
    """Return why an execution by kernels does not work, or has no effect, and what is expected, or None."""
    if engine.placement is not None:
        return "the engine is placed on several devices; expected calls"
    if defer:
        return "defer_weight_grads is for calls, and other executions always defer; remove it"
    if execution == "cuda_graph" and not (training and device.type == "cuda"):
        return "CUDA graphs are for training on a GPU; expected calls"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton's kernels run on a GPU, not on {device}; expected calls"
    if device.type == "cuda" and precision != "bfloat16":
        return f"Triton's kernels compute in bfloat16, and precision is {precision}; expected bfloat16, or calls"
    if engine.shared is not None:
        return "Triton's kernels are for modules with weights of their own; expected calls"
    if execution == "cuda_graph" and not engine.can_be_captured:
        what = "CUDA graphs are for modules with conv_steps, such as those of the set iep without norm"
        return f"{what}; expected calls or triton"
    if not engine.op_groups(by_kernels=True):
        return (
            "kernels run only modules whose parameters are all those of convolutions of iep.batching.layers that keep "
            "the size of the maps (module_norm adds others); expected calls"
        )
    return None


def fit_template(engine: ExecutionEngine, sample: Sample, batch_size: int, sharing: bool | None) -> None:
    """Set the calls that a CUDA graph runs, so that minibatches like those of a sample fit.

    Args:
        batch_size: the number of questions of a minibatch, of which the engine may get fewer.
        sharing: as for the engine's plans.

    Raises:
        InputError: the sample has no programs.
    """
    if not sample.is_known:
        raise InputError(f"{sample.source}: no programs, which execution cuda_graph needs; expected those of training")
    planner = engine.planner(sharing=sharing, training=True, execution="triton")
    plans = plan_sample(sample, planner, batch_size, MOST_MINIBATCHES)
    engine.set_template(make_template([each.graph for each in plans], engine.op_groups(by_kernels=True)))


# New question words

PARTS_WITH_WORDS = ("encoder", "rnn")
"""The parts that hold the word embeddings of a generator and of a baseline, as `--freeze` names them."""
NEW_WORDS_STD = 0.01
"""The standard deviation of the embeddings of new words, as in the original toolkit."""


def add_words(network: Any, name: str, count: int, seed: int) -> None:
    """Add embeddings of N = `count` new question words to the network `name`, a generator or a baseline.

    Johnson et al. 2017 (Inferring and Executing Programs, section 4.5) fine-tune on questions that people asked, in
    words that CLEVR does not have. `iep-preprocess --expand-vocab` puts such words after the old ones.

    The embeddings (V, E) become (V + N, E). The old rows keep their bits, and the new ones are normal with a standard
    deviation of 0.01, drawn with `seed`. The network's `kwargs` are updated.
    """
    words = network.get_submodule("encoder_embed" if name == "generator" else "rnn.embed")
    generator = torch.Generator().manual_seed(seed)
    new_NE = torch.randn(count, words.embedding_dim, generator=generator) * NEW_WORDS_STD
    words.weight = nn.Parameter(torch.cat([words.weight.detach(), new_NE.to(words.weight)]), words.weight.requires_grad)
    words.num_embeddings += count
    network.kwargs = network.kwargs | {"num_question_tokens": words.num_embeddings}
