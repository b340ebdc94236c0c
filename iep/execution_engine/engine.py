"""Image features and a plan of their programs -> answer logits: the execution engine of Johnson et al. 2017.

Knows both CLEVR's program tokens and `iep/batching/`. A plan is made without tensors, so that the data loader's
workers can make it. Does not train, and predicts no programs.

Shapes: B examples, L program tokens, C H W feature maps, A answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn

from iep.batching.execute import execute
from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.layout import Layout, lay_out
from iep.batching.placed import PlacedLayout, lay_out_placed
from iep.batching.reference import run_prefix
from iep.batching.schedulers import Schedule, make_schedule
from iep.batching.sharing import share
from iep.batching.threads import autocast_like
from iep.execution_engine.modules import (
    BinaryModule,
    UnaryModule,
    kaiming_normal,
    make_classifier,
    make_conv_stem,
    make_pixel_stem,
)
from iep.execution_engine.placement import CLASSIFIER, STEM, Placement
from iep.programs import SCENE, arities, arity
from iep.vocab import NULL, START

SCENES = ("module", "stem")
STEMS = ("conv", "pixels")
INITIALIZATIONS = ("kaiming", "torch")
DEFAULT_SCHEDULER = "lookahead"
NOT_ROW_BY_ROW = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Layers that, in training, draw random numbers or look at their whole batch."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What the engine will run for a minibatch of programs; plain data, cheap to pickle."""

    graph: Graph
    """Its inputs are stems: one for each image, or, without sharing, for each program."""
    schedule: Schedule
    layout: Layout | PlacedLayout
    program_tokens: tuple[str, ...]
    scene: str
    """With `program_tokens`, what an engine must have to run it."""
    num_images: int
    """Images whose features it is for: N."""
    image_rows: torch.Tensor | None
    """(num_inputs,) the row of each input's image in the features; None where input n is of image n."""
    placement: Placement | None = None
    """How an engine must be placed to run it; None for one device."""

    def to(self, device: torch.device) -> "Plan":
        """The same plan for features on `device`. Where it is placed, each device's index tensors go to that device."""

        def there(index: torch.Tensor) -> torch.Tensor:
            return index.to(device, non_blocking=True)

        if self.placement is None:
            return self.map(there)
        rows = None if self.image_rows is None else there(self.image_rows)
        return replace(self, layout=self.layout.on_devices(), image_rows=rows)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Plan":
        """The same plan with `function` of its index tensors."""
        rows = None if self.image_rows is None else function(self.image_rows)
        return replace(self, layout=self.layout.map(function), image_rows=rows)


def plan_programs(
    programs_BL: np.ndarray | torch.Tensor,
    program_tokens: Sequence[str],
    image_rows_B: np.ndarray | torch.Tensor | None = None,
    scene: str = "module",
    batching: str = DEFAULT_SCHEDULER,
    sharing: bool = True,
    placement: Placement | None = None,
) -> Plan:
    """The plan of (B, L) prefix programs, well-formed or not.

    `<START>` is skipped; `<NULL>` and the end of the row stand for `scene`; tokens after the tree is complete are
    ignored; other special tokens inside a tree are unary.

    Args:
        programs_BL: indices into `program_tokens`, numpy or torch.
        image_rows_B: the row of each program's image in the features, the greatest being N - 1; None where program b
            is about image b.
        scene: 'module', `scene` is a unary module on the stem's output (Johnson et al. 2017); or 'stem', it is that
            output itself (Suarez & Zhu, section 1.2.2).
        batching: name of a scheduler in `iep.batching.schedulers.SCHEDULERS`.
        sharing: run each image's stem once, and equal subtrees over one image once; otherwise every program runs the
            stem and all its functions for itself.
        placement: where every function runs; None for one device.

    Raises:
        ValueError: a token is out of range, `scene` or `batching` is unknown, the vocabulary lacks `scene`,
            `image_rows_B` is not one row number for each program, or a function that runs is not placed.
    """
    rows = None if image_rows_B is None else _checked_rows(image_rows_B, len(programs_BL))
    num_images = len(programs_BL) if rows is None else 1 + int(rows.numpy().max(initial=-1))
    graph = graph_of(programs_BL, program_tokens, scene, rows.numpy() if sharing and rows is not None else None)
    if sharing:
        graph, rows = share(graph), None
    schedule = make_schedule(graph, batching)
    if placement is None:
        layout = lay_out(graph, schedule)
    else:
        layout = lay_out_placed(graph, schedule, placement.homes(program_tokens))
    return Plan(graph, schedule, layout, tuple(program_tokens), scene, num_images, rows, placement)


def graph_of(
    programs_BL: np.ndarray | torch.Tensor,
    program_tokens: Sequence[str],
    scene: str,
    input_B: np.ndarray | None = None,
) -> Graph:
    """The graph of programs; arguments and errors as of `plan_programs`, `input_B` as of `graph_from_prefix`."""
    return graph_from_prefix(
        programs_BL,
        arities(program_tokens),
        leaf=_scene_token(program_tokens),
        skip=START,
        pad=NULL,
        leaf_is_input=_scene_is_input(scene),
        input_B=input_B,
    )


def _checked_rows(image_rows_B: np.ndarray | torch.Tensor, count: int) -> torch.Tensor:
    rows = torch.as_tensor(image_rows_B).cpu()
    if rows.shape != (count,) or rows.is_floating_point() or rows.dtype == torch.bool or (rows.long() < 0).any():
        raise ValueError(f"image rows {rows.tolist()} for {count} programs, expected a whole number from 0 on for each")
    return rows.long()


Planner = Callable[..., Plan]
"""(programs_BL, *, image_rows_B) -> Plan: `plan_programs` with its other arguments given."""


class ExecutionEngine(nn.Module):
    """Stem, one module per program token, classifier (Johnson et al. 2017, section 3.2).

    A module is a direct child named by its token. `<NULL>` and `<START>` never run and have none; `scene` has one
    unless it is the stem's output.
    """

    def __init__(
        self,
        program_tokens: Sequence[str],
        num_answers: int,
        feature_dim: int = 1024,
        feature_height: int = 14,
        feature_width: int = 14,
        module_dim: int = 128,
        scene: str = "module",
        stem: str = "conv",
        stem_widths: Sequence[int] = (128,),
        stem_stride: int = 1,
        stem_pixels: int = 1,
        stem_norm: bool = False,
        initialization: str = "kaiming",
        classifier_projection: int = 512,
        classifier_pool: int = 2,
        classifier_hidden: Sequence[int] = (1024,),
    ):
        """Make the networks.

        Args:
            program_tokens: the program vocabulary, special tokens first.
            num_answers: A.
            feature_dim: C of the features; for a stem of pixels 3 * P * P.
            feature_height: H of the features.
            feature_width: W of the features.
            module_dim: channels of every module's maps.
            scene: as in `plan_programs`.
            stem: 'conv', or 'pixels' for features that are patches of pixels.
            stem_widths: channels of the stem's convolutions before the last, which gives `module_dim`.
            stem_stride: how many times smaller than the features' the modules' grid is along each side.
            stem_pixels: for a stem of pixels, the side of the little patches that its first convolution reads.
            stem_norm: batch norm after every convolution of the stem.
            initialization: 'kaiming', normal weights (Johnson et al. 2017); or 'torch', its layers' own, smaller ones,
                with which a deep tree of modules does not begin by blowing up its activations.
            classifier_projection: channels of the classifier's 1x1 convolution.
            classifier_pool: side of the classifier's max-pool window.
            classifier_hidden: widths of the classifier's linear layers before the last.

        Raises:
            ValueError: `scene`, `stem` or `initialization` is unknown, the vocabulary lacks `scene`, a token cannot
                name a module, or the features do not fit a stem of pixels.
        """
        super().__init__()
        _check_choice("stem", stem, STEMS)
        _check_choice("initialization", initialization, INITIALIZATIONS)
        self.program_tokens = tuple(program_tokens)
        self.scene_kind = scene
        if stem == "pixels":
            self.stem = make_pixel_stem(feature_dim, stem_widths, module_dim, stem_stride, stem_norm, stem_pixels)
        else:
            self.stem = make_conv_stem(feature_dim, stem_widths, module_dim, stem_stride, stem_norm)
        self.classifier = make_classifier(
            module_dim,
            -(-feature_height // stem_stride),
            -(-feature_width // stem_stride),
            classifier_projection,
            classifier_pool,
            classifier_hidden,
            num_answers,
        )
        self.placement: Placement | None = None
        """Where each part lives, where they do not all live on one device; see `iep.networks.place_parts`."""
        self._runs = self._add_modules(module_dim)
        if initialization == "kaiming":
            kaiming_normal(self)

    def _add_modules(self, module_dim: int) -> dict[int, str]:
        """Make a module for every token that can run; returns op -> token."""
        scene_token = _scene_token(self.program_tokens)
        never_run = {NULL, START, scene_token} if _scene_is_input(self.scene_kind) else {NULL, START}
        runs = {op: token for op, token in enumerate(self.program_tokens) if op not in never_run}
        for token in runs.values():
            if "." in token or hasattr(self, token):
                raise ValueError(f"program token {token!r} cannot name a module of the engine")
            self.add_module(token, BinaryModule(module_dim) if arity(token) == 2 else UnaryModule(module_dim))
        return runs

    @property
    def parts(self) -> tuple[str, ...]:
        """Children that a placement names: the stem, every function in the vocabulary's order, the classifier."""
        return STEM, *self._runs.values(), CLASSIFIER

    def planner(
        self, batching: str = DEFAULT_SCHEDULER, sharing: bool | None = None, training: bool = False
    ) -> Planner:
        """`plan_programs` for this engine as it is placed, without its weights: cheap to send to the loader's workers.

        Args:
            sharing: None to share where that is exact: in evaluation always, in training where no batch norm or
                dropout makes a result depend on how often it is computed.
            training: what the plans are for.
        """
        if sharing is None:
            sharing = not training or not any(isinstance(part, NOT_ROW_BY_ROW) for part in self.modules())
        own = {"program_tokens": self.program_tokens, "scene": self.scene_kind, "placement": self.placement}
        return partial(plan_programs, **own, batching=batching, sharing=sharing)

    def plan(
        self,
        programs_BL: np.ndarray | torch.Tensor,
        image_rows_B: np.ndarray | torch.Tensor | None = None,
        batching: str = DEFAULT_SCHEDULER,
        sharing: bool | None = None,
    ) -> Plan:
        """The plan of (B, L) programs for this engine as it stands, on its devices; see `planner`, `plan_programs`."""
        device = next(self.parameters()).device
        return self.planner(batching, sharing, self.training)(programs_BL, image_rows_B=image_rows_B).to(device)

    def forward(self, features_NCHW: torch.Tensor, plan: Plan, defer_weight_grads: bool = False) -> torch.Tensor:
        """(B, A) answer logits, on the device of the features.

        Args:
            features_NCHW: features of the images that the plan was made for.
            plan: of the B programs, its tensors where the features are; see `Plan.to`.
            defer_weight_grads: compute the gradient of each module's weights once, over all its calls.

        Raises:
            ValueError: the plan is for another kind of engine, for another number of images than there are features, or
                of no program.
        """
        if (plan.program_tokens, plan.scene) != (self.program_tokens, self.scene_kind):
            raise ValueError("the plan was made for an engine with another program vocabulary or another kind of scene")
        if plan.placement != self.placement:
            raise ValueError("the plan was made for an engine that is placed on other devices")
        if len(features_NCHW) != plan.num_images:
            raise ValueError(f"features of {len(features_NCHW)} images for a plan of {plan.num_images}")
        if plan.image_rows is not None:
            features_NCHW = features_NCHW[plan.image_rows.to(features_NCHW.device)]
        if self.placement is not None:
            return self._forward_placed(features_NCHW, plan.layout, defer_weight_grads)
        stems_NCHW = self.stem(features_NCHW)
        return self.classifier(execute(plan.layout, self._module_of_op(), stems_NCHW, defer_weight_grads))

    def _forward_placed(self, features_NCHW: torch.Tensor, layout: PlacedLayout, defer: bool) -> torch.Tensor:
        """The same on several devices. All compute in the precision that autocast gives where the features are."""
        home, stem, classifier = features_NCHW.device, self.placement.device(STEM), self.placement.device(CLASSIFIER)
        with autocast_like(home, stem):
            stems_NCHW = self.stem(features_NCHW.to(stem))
            maps_BCHW = execute(layout, self._module_of_op(), stems_NCHW, defer)
        with autocast_like(home, classifier):
            return self.classifier(maps_BCHW).to(home)

    def reference(self, features_BCHW: torch.Tensor, programs_BL: np.ndarray | torch.Tensor) -> torch.Tensor:
        """(B, A) answer logits, one example and one module at a time: slow, to test `forward` against."""
        modules = self._module_of_op()
        maps = [
            run_prefix(
                tokens,
                arity=lambda token: arity(self.program_tokens[token]),
                run=lambda token, *arguments: modules[token](*arguments),
                input_value=stem_1CHW,
                leaf=_scene_token(self.program_tokens),
                skip=START,
                pad=NULL,
                leaf_is_input=_scene_is_input(self.scene_kind),
            )
            for tokens, stem_1CHW in zip(programs_BL.tolist(), self.stem(features_BCHW).split(1), strict=True)
        ]
        return self.classifier(torch.cat(maps))

    def _module_of_op(self) -> dict[int, nn.Module]:
        return {op: getattr(self, token) for op, token in self._runs.items()}


def _scene_token(program_tokens: Sequence[str]) -> int:
    if SCENE not in program_tokens:
        raise ValueError(f"the program vocabulary {', '.join(program_tokens)} lacks {SCENE!r}")
    return program_tokens.index(SCENE)


def _scene_is_input(scene: str) -> bool:
    _check_choice("scene", scene, SCENES)
    return scene == "stem"


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
