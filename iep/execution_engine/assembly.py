"""Settings -> an execution engine with new weights, and where and how an engine runs.

`Running` has the options of the devices and of the execution, which training, evaluation and benchmarks share.
`prepare` moves an engine to its devices and sets its execution accordingly.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from iep.errors import InputError
from iep.execution_engine.choices import DEFAULT_EXECUTION, INITIALIZATIONS, check_choice, make_module_set
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import NONE, Placement, ProgramSample, check_options, make_placement, plan_sample
from iep.execution_engine.roles import MAP, result_kind
from iep.execution_engine.stem_and_classifier import make_classifier, make_stem
from iep.kernels.template import make_template
from iep.programs import SCENE
from iep.runtime.devices import place, resolve_device, resolve_precision
from iep.runtime.distributed import is_main

MOST_MINIBATCHES = 32
"""The number of minibatches whose programs determine the calls of a CUDA graph."""


def make_engine(
    program_tokens: Sequence[str],
    num_answers: int,
    feature_dim: int,
    feature_height: int,
    feature_width: int,
    modules: str,
    module_settings: Mapping[str, Any],
    module_dim: int,
    module_residual: bool,
    module_norm: str,
    scene: str,
    stem: str,
    stem_widths: Sequence[int],
    stem_stride: int,
    stem_norm: bool,
    initialization: str,
    classifier_projection: int,
    classifier_pool: int,
    classifier_hidden: Sequence[int],
    classifier_norm: bool,
    classifier_dropout: float,
    stem_bias: bool = False,
    classifier_pool_rest: bool = True,
) -> ExecutionEngine:
    """Return an engine with new weights. Arguments that are not listed here are fields of `iep.config.EngineConfig`.

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

    Raises:
        ValueError: a choice is unknown, the vocabulary has no `scene`, a token cannot name a module, the set of modules
            does not support a setting or a token, or the features do not fit the stem.
    """
    check_choice("initialization", initialization, INITIALIZATIONS)
    module_set = make_module_set(
        modules,
        dim=module_dim,
        residual=module_residual,
        norm=module_norm,
        scene=scene,
        **module_settings,
    )
    stem_module = make_stem(stem, feature_dim, stem_widths, module_dim, stem_stride, stem_norm, stem_bias)
    grid = height, width = -(-feature_height // stem_stride), -(-feature_width // stem_stride)
    returns_maps = result_kind(module_set.role(SCENE)) == MAP
    classifier = make_classifier(
        (module_dim, height, width) if returns_maps else (module_dim, 1, 1),
        classifier_projection,
        classifier_hidden,
        num_answers,
        classifier_pool,
        classifier_pool_rest,
        classifier_norm,
        classifier_dropout,
    )
    feature_shape = feature_dim, feature_height, feature_width
    engine = ExecutionEngine(program_tokens, module_set, stem_module, classifier, feature_shape, grid)
    if initialization == "kaiming":  # He et al. 2015; biases keep PyTorch's defaults
        for layer in engine.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(layer.weight)
    for part in engine.children():
        if callable(adjust := getattr(part, "adjust_initial_weights", None)):
            adjust()
    return engine


@dataclass(frozen=True)
class Running:
    """Where networks run, and how an engine among them runs its module calls.

    Raises:
        InputError: the devices are invalid, or do not fit the placement.
    """

    device: str = "auto"
    placement: str = NONE
    devices: tuple[str, ...] = ()
    """The devices of the engine's parts, for a placement."""
    execution: str = DEFAULT_EXECUTION
    precision: str = "float32"
    memory_format: str | None = None
    """The format of convolutions, as for `iep.runtime.devices.place`."""
    training: bool = False
    """The networks will be trained."""
    defer_weight_grads: bool = False
    batch_size: int = 1
    """The number of questions of a training minibatch in one process, to which CUDA graphs are fitted."""
    sharing: bool | None = None
    """Whether equal subtrees run once in these minibatches; None where the results are exactly the same."""

    def __post_init__(self):
        check_options(self.placement, self.devices, self.device)

    @cached_property
    def main_device(self) -> torch.device:
        """The device of the batches and of everything that is not placed: `device`, or the first of `devices`.

        Raises:
            InputError: a device is not available.
        """
        names = [self.device] if self.placement == NONE else self.devices
        first, *_ = [resolve_device(name) for name in names]
        return first


def prepare(engine: ExecutionEngine, running: Running, sample: ProgramSample | None = None) -> None:
    """Move an engine to its devices, and set its execution.

    Args:
        sample: programs, from which the work of the parts and the calls of CUDA graphs are computed; None if the engine
            is neither placed nor executed by CUDA graphs.

    Raises:
        InputError: the engine cannot be placed or executed in this way, or the sample has no programs, which the
            placement `balanced` and the execution `cuda_graph` need.
    """
    if running.placement == NONE:
        place(engine, running.main_device, running.memory_format)
    else:
        assert sample is not None
        placement, description = make_placement(running.placement, running.devices, engine, sample)
        place_parts(engine, placement, running.memory_format)
        if is_main():
            tqdm.write(description)
    set_execution(engine, running)
    if running.execution == "cuda_graph":
        assert sample is not None
        fit_template(engine, sample, running.batch_size, running.sharing)


def place_parts(engine: ExecutionEngine, placement: Placement, memory_format: str | None = None) -> ExecutionEngine:
    """Move each part of an engine to its device, in a memory format as for `place`, and return the engine."""
    for part in engine.parts:
        place(getattr(engine, part), placement.device(part), memory_format)
    engine.placement = placement
    return engine


def set_execution(engine: ExecutionEngine, running: Running) -> None:
    """Set the execution of an engine, after it has been placed, to one of `choices.EXECUTIONS`.

    With kernels, a line names the functions that have calls of their own.

    Raises:
        InputError: the execution would have no effect, or does not work, for this engine.
    """
    if running.execution != DEFAULT_EXECUTION:
        if (problem := _problem(engine, running)) is not None:
            raise InputError(f"execution is {running.execution}, but {problem}; expected {DEFAULT_EXECUTION}")
        together = engine.op_groups(by_kernels=True)
        functions = [
            token for op, token in engine.ops.items() if op < len(engine.program_tokens) and op not in together
        ]
        alone = [token for token in functions if any(True for _ in engine.get_submodule(token).parameters())]
        if alone and is_main():
            names = ", ".join(alone)
            tqdm.write(f"execution {running.execution}: by calls, without convolutions for kernels: {names}")
    engine.execution = running.execution


def _problem(engine: ExecutionEngine, running: Running) -> str | None:
    """Return why an execution by kernels does not work, or has no effect, or None."""
    device = running.main_device
    precision = resolve_precision(running.precision, device)
    is_graph = running.execution == "cuda_graph"
    if engine.placement is not None:
        return "the engine is placed on several devices"
    if running.defer_weight_grads:
        return "defer_weight_grads is for calls, and other executions always defer"
    if is_graph and not (running.training and device.type == "cuda"):
        return "CUDA graphs are for training on a GPU"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton's kernels run on a GPU, not on {device}"
    if device.type == "cuda" and precision != "bfloat16":
        return f"Triton's kernels compute in bfloat16, and precision is {precision}"
    if engine.shared is not None:
        return "Triton's kernels are for modules with weights of their own"
    if is_graph and not engine.can_be_captured:
        return "CUDA graphs are for modules with conv_steps, such as those of the set iep without norm and context"
    if not engine.op_groups(by_kernels=True):
        return (
            "Triton's kernels run only modules whose parameters are all those of convolutions of iep.kernels.layers "
            "that keep the size of the maps (module_norm adds others, and context reads the whole map)"
        )
    return None


def fit_template(engine: ExecutionEngine, sample: ProgramSample, batch_size: int, sharing: bool | None) -> None:
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
