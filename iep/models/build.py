"""The networks of a model: built from settings and the data's shapes, and prepared to run on devices.

The networks have the names of the sections of a config with their settings: `generator`, `engine`, `lstm`, `cnn_lstm`,
`cnn_lstm_sa` and `backbone`. `NETWORKS` lists the networks of each model. `checkpoint.py` saves and loads them.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from iep.backbone.network import SceneNetwork
from iep.baselines.networks import CNNLSTMBaseline, LSTMBaseline, StackedAttentionBaseline
from iep.config import MODELS, SECTIONS, Config, EngineConfig, to_dict
from iep.data.features import Features
from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_EXECUTION, INITIALIZATIONS, check_choice, make_module_set
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import Placement, Sample, make_placement, plan_sample
from iep.execution_engine.roles import MAP, result_kind
from iep.execution_engine.stem_and_classifier import make_classifier, make_stem
from iep.kernels.template import make_template
from iep.program_generator.seq2seq import Seq2Seq
from iep.programs import SCENE
from iep.runtime.devices import resolve_precision
from iep.runtime.distributed import is_main
from iep.vocab import Vocab

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
            does not support a setting or a token, or the features do not fit the stem.
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
    engine = ExecutionEngine(
        program_tokens, module_set, stem, classifier, (feature_dim, feature_height, feature_width), grid
    )
    if given.initialization == "kaiming":  # He et al. 2015; biases keep PyTorch's defaults
        for layer in engine.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight)
    for part in engine.children():
        if callable(adjust := getattr(part, "adjust_initial_weights", None)):
            adjust()
    return engine


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


@dataclass(frozen=True)
class Network:
    """A network, and what a checkpoint stores of it beside its weights, so that loading needs no config."""

    name: str
    module: Any
    kwargs: Mapping[str, Any]
    """All constructor arguments."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """How the features that it was trained on were computed; empty if that is not known."""

    @property
    def feature_shape(self) -> tuple[int, ...]:
        """The sizes among (C, H, W) of the features that it was built for; empty if it reads none."""
        return tuple(self.kwargs[side] for side in FEATURE_SIDES.get(self.name, ()))

    def packed(self) -> dict[str, Any]:
        """Return what a checkpoint stores of the network."""
        return {"kwargs": dict(self.kwargs), "weights": self.module.state_dict()}


def with_defaults(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments of the network `name`, with the defaults of settings that are missing."""
    return to_dict(getattr(Config, name)) | dict(kwargs)


def build(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the module of the network `name` with new weights; `kwargs` are as for `with_defaults`.

    Raises:
        InputError: an argument is unknown, or the arguments do not fit together, as with too few convolutions for the
            stride.
    """
    try:
        return CLASSES[name](**with_defaults(name, kwargs))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"{DESCRIPTIONS[name]} cannot be built: {error}") from None


# Features


def check_features(network: Network, feature_shape: Sequence[int], path: Path | str) -> None:
    """Check that features have the shape that a network was built for.

    Raises:
        InputError: they have another shape.
    """
    made_for = network.feature_shape
    if made_for != tuple(feature_shape)[: len(made_for)]:
        what = DESCRIPTIONS[network.name].split(" ")[-1]
        raise InputError(f"{path}: features are {tuple(feature_shape)} an image, but the {what} is made for {made_for}")


def different_settings(features: Features, recipe: Mapping[str, Any]) -> str:
    """Return the settings with which features were computed differently from a recipe, "" if there are none.

    Only settings that both record are compared, except the dtype in which the features are stored.
    """
    both = sorted(recipe.keys() & features.recipe.keys() - {"dtype"})
    changed = [key for key in both if recipe[key] != features.recipe[key]]
    return ", ".join(f"{key} {features.recipe[key]} instead of {recipe[key]}" for key in changed)


def warn_of_other_features(network: Network, features: Features) -> None:
    """Print a line if features were computed differently from those that a network was trained on."""
    if is_main() and (found := different_settings(features, network.recipe)):
        what = f"the features that {DESCRIPTIONS[network.name]} was trained on"
        tqdm.write(f"{features.path}: computed differently from {what}: {found}")


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
            raise InputError(f"execution is {execution}, but {problem}; expected {DEFAULT_EXECUTION}")
        together, count = engine.op_groups(by_kernels=True), len(engine.program_tokens)
        others = [token for op, token in engine.ops.items() if op < count and op not in together]
        alone = [token for token in others if any(True for _ in engine.get_submodule(token).parameters())]
        if alone and is_main():
            tqdm.write(f"execution {execution}: by calls, without convolutions for kernels: {', '.join(alone)}")
    engine.execution = execution


def _problem(
    engine: ExecutionEngine, execution: str, device: torch.device, precision: str, defer: bool, training: bool
) -> str | None:
    """Return why an execution by kernels does not work, or has no effect, or None."""
    is_cuda = device.type == "cuda"
    problems = {
        "the engine is placed on several devices": engine.placement is not None,
        "defer_weight_grads is for calls, and other executions always defer": defer,
        "CUDA graphs are for training on a GPU": execution == "cuda_graph" and not (training and is_cuda),
        f"Triton's kernels run on a GPU, not on {device}": not is_cuda and os.environ.get("TRITON_INTERPRET") != "1",
        f"Triton's kernels compute in bfloat16, and precision is {precision}": is_cuda
        and resolve_precision(precision, device) != "bfloat16",
        "Triton's kernels are for modules with weights of their own": engine.shared is not None,
        "CUDA graphs are for modules with conv_steps, such as those of the set iep without norm and context": (
            execution == "cuda_graph" and not engine.can_be_captured
        ),
        "Triton's kernels run only modules whose parameters are all those of convolutions of iep.kernels.layers that "
        "keep the size of the maps (module_norm adds others, and context reads the whole map)": not engine.op_groups(
            by_kernels=True
        ),
    }
    return next((problem for problem, holds in problems.items() if holds), None)


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


def add_words(network: Network, count: int, seed: int) -> Network:
    """Add embeddings of N = `count` new question words to a generator or a baseline, and return the network with them.

    Johnson et al. 2017 (Inferring and Executing Programs, section 4.5) fine-tune on questions that people asked, in
    words that CLEVR does not have. `iep-preprocess --expand-vocab` puts such words after the old ones.

    The embeddings (V, E) of the module become (V + N, E). The old rows keep their bits, and the new ones are normal
    with a standard deviation of 0.01, drawn with `seed`.
    """
    words = network.module.get_submodule("encoder_embed" if network.name == "generator" else "rnn.embed")
    generator = torch.Generator().manual_seed(seed)
    new_NE = torch.randn(count, words.embedding_dim, generator=generator) * NEW_WORDS_STD
    words.weight = nn.Parameter(torch.cat([words.weight.detach(), new_NE.to(words.weight)]), words.weight.requires_grad)
    words.num_embeddings += count
    return replace(network, kwargs={**network.kwargs, "num_question_tokens": words.num_embeddings})
