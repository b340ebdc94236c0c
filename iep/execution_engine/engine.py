"""Image features and a plan of their programs -> answer logits: the execution engine of Johnson et al. 2017.

Knows both CLEVR's program tokens and `iep/batching/`. Plans are `program_plan.py`'s, what its modules are, a family's
(`families.py`). Does not train, and predicts no programs.

Shapes: B examples, L program tokens, C H W feature maps, A answers.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn

from iep.batching.execute import execute
from iep.batching.plan import Plan
from iep.execution_engine.classifier import make_classifier
from iep.execution_engine.families import family
from iep.execution_engine.placement import CLASSIFIER, STEM, Placement
from iep.execution_engine.program_plan import DEFAULT_SCHEDULER, Planner, ProgramPlan, plan_programs
from iep.execution_engine.stems import make_conv_stem, make_no_stem, make_pixel_stem

STEMS = ("conv", "pixels", "none")
INITIALIZATIONS = ("kaiming", "torch")
NOT_ROW_BY_ROW = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
"""Layers that, in training, draw random numbers or look at their whole batch."""


class ExecutionEngine(nn.Module):
    """Stem, one module per program token, classifier (Johnson et al. 2017, section 3.2).

    A module is a direct child named by its token. `<NULL>` and `<START>` never run and have none, nor have tokens that
    its family of modules does not run, such as `scene` where it is the stem's output.

    Args:
        program_tokens: the program vocabulary, special tokens first.
        num_answers: A.
        feature_dim: C of the features; for a stem of pixels 3 * P * P.
        feature_height: H of the features.
        feature_width: W of the features.
        modules: name of the family of modules, in `families.py`.
        module_dim: channels of every module's maps.
        module_residual: of the family `iep`: its blocks add their input to their output.
        module_norm: of the family `iep`: 'none', or after every convolution of a block 'batch', over all rows of a
            call, or 'example', over each row by itself, as if examples ran one at a time.
        scene: of the family `iep`, as in `plan_programs`.
        stem: 'conv'; 'pixels' for features that are patches of pixels; or 'none', features are maps already, of
            `module_dim` channels.
        stem_widths: channels of the stem's convolutions before the last, which gives `module_dim`.
        stem_stride: how many times smaller than the features' the modules' grid is along each side.
        stem_pixels: for a stem of pixels, the side of the little patches that its first convolution reads.
        stem_norm: batch norm after every convolution of the stem.
        stem_bias: the stem's convolutions have biases under batch norm too, which makes them idle.
        initialization: 'kaiming', normal weights (Johnson et al. 2017); or 'torch', its layers' own, smaller ones,
            with which a deep tree of modules does not begin by blowing up its activations.
        classifier_projection: channels of the classifier's 1x1 convolution; 0 for none.
        classifier_pool: side of the classifier's max-pool window; 1 for none.
        classifier_pool_rest: what is left of a grid that the window does not divide is pooled too, not dropped.
        classifier_hidden: widths of the classifier's linear layers before the last.
        classifier_norm: batch norm after each layer of the classifier but the last.
        classifier_dropout: probability of dropping a unit after each linear layer but the last, in training.

    Raises:
        ValueError: a choice is unknown, the vocabulary lacks `scene`, a token cannot name a module, the family does not
            have what is asked for, the features do not fit the stem, or a norm the grid.
    """

    def __init__(
        self,
        program_tokens: Sequence[str],
        num_answers: int,
        feature_dim: int = 1024,
        feature_height: int = 14,
        feature_width: int = 14,
        modules: str = "iep",
        module_dim: int = 128,
        module_residual: bool = True,
        module_norm: str = "none",
        scene: str = "module",
        stem: str = "conv",
        stem_widths: Sequence[int] = (128,),
        stem_stride: int = 1,
        stem_pixels: int = 1,
        stem_norm: bool = False,
        stem_bias: bool = False,
        initialization: str = "kaiming",
        classifier_projection: int = 512,
        classifier_pool: int = 2,
        classifier_pool_rest: bool = True,
        classifier_hidden: Sequence[int] = (1024,),
        classifier_norm: bool = False,
        classifier_dropout: float = 0.0,
    ):
        super().__init__()
        _check_choice("stem", stem, STEMS)
        _check_choice("initialization", initialization, INITIALIZATIONS)
        self.program_tokens = tuple(program_tokens)
        self.family_name = modules
        self.scene_kind = scene
        if stem == "none":
            self.stem = make_no_stem(feature_dim, module_dim, stem_stride)
        else:
            make, pixels = (make_pixel_stem, (stem_pixels,)) if stem == "pixels" else (make_conv_stem, ())
            self.stem = make(feature_dim, stem_widths, module_dim, stem_stride, stem_norm, stem_bias, *pixels)
        height, width = (-(-side // stem_stride) for side in (feature_height, feature_width))
        if module_norm != "none" and height * width == 1:
            raise ValueError(f"module_norm {module_norm} needs maps of more than one place, and the grid is 1x1")
        pool = {"pool": classifier_pool, "pool_rest": classifier_pool_rest}
        regular = {"norm": classifier_norm, "dropout": classifier_dropout}
        self.classifier = make_classifier(
            (module_dim, height, width), classifier_projection, classifier_hidden, num_answers, **pool, **regular
        )
        self.placement: Placement | None = None
        """The device of each part; None where they are all on one. `iep.models.build.place_parts` sets it."""
        self._runs = family(modules).runs(self.program_tokens, scene)
        for token in self._runs.values():
            if not token or "." in token or hasattr(self, token):
                raise ValueError(f"program token {token!r} cannot name a module of the engine")
            self.add_module(token, family(modules).make(token, module_dim, module_residual, module_norm))
        if initialization == "kaiming":
            _kaiming_normal(self)

    @property
    def parts(self) -> tuple[str, ...]:
        """Children that a placement names: the stem, every function in the vocabulary's order, the classifier."""
        return STEM, *self._runs.values(), CLASSIFIER

    def planner(
        self,
        batching: str = DEFAULT_SCHEDULER,
        sharing: bool | None = None,
        training: bool = False,
        attentions: bool = False,
        families: bool = False,
    ) -> Planner:
        """`plan_programs` for this engine as it is placed, without its weights: cheap to send to the loader's workers.

        Args:
            sharing: None to share where that is exact: in evaluation always, in training where no batch norm or
                dropout makes a result depend on how often it is computed.
            training: what the plans are for.
            attentions: as in `plan_programs`.
            families: schedule families of functions of one architecture, which differ only in their weights.
        """
        if sharing is None:
            layers = (layer for part in self.parts[:-1] for layer in getattr(self, part).modules())
            sharing = not training or not any(isinstance(layer, NOT_ROW_BY_ROW) for layer in layers)
        own = {
            "program_tokens": self.program_tokens,
            "modules": self.family_name,
            "scene": self.scene_kind,
            "placement": self.placement,
            "attentions": attentions,
            "families": self._families() if families else None,
        }
        return partial(plan_programs, **own, batching=batching, sharing=sharing)

    def plan(
        self,
        programs_BL: np.ndarray | torch.Tensor,
        image_rows_B: np.ndarray | torch.Tensor | None = None,
        batching: str = DEFAULT_SCHEDULER,
        sharing: bool | None = None,
        attentions: bool = False,
        families: bool = False,
    ) -> ProgramPlan:
        """The plan of (B, L) programs for this engine as it stands, on its devices; see `planner`, `plan_programs`."""
        device = next(self.parameters()).device
        planner = self.planner(batching, sharing, self.training, attentions, families)
        return planner(programs_BL, image_rows_B=image_rows_B).to(device)

    def forward(self, features_NCHW: torch.Tensor, plan: ProgramPlan, defer_weight_grads: bool = False) -> torch.Tensor:
        """(B, A) answer logits, on the device of the features.

        Args:
            features_NCHW: features of the images that the plan was made for.
            plan: of the B programs, its tensors where the features are; see `Plan.to`.
            defer_weight_grads: compute the gradient of each module's weights once, over all its calls.

        Raises:
            ValueError: the plan is for another kind of engine, for another number of images than there are features, or
                of no program.
        """
        return self.look(features_NCHW, plan, defer_weight_grads)[0]

    def look(
        self, features_NCHW: torch.Tensor, plan: ProgramPlan, defer_weight_grads: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `forward` returns; and the sum of the attentions, on the same device, 0 if the plan was made without
        them."""
        if (plan.program_tokens, plan.modules, plan.scene) != (self.program_tokens, self.family_name, self.scene_kind):
            raise ValueError("the plan was made for an engine with another vocabulary, other modules or another scene")
        if plan.placement != self.placement:
            raise ValueError("the plan was made for an engine that is placed on other devices")
        if len(features_NCHW) != plan.num_images:
            raise ValueError(f"features of {len(features_NCHW)} images for a plan of {plan.num_images}")
        if plan.image_rows is not None:
            features_NCHW = features_NCHW[plan.image_rows.to(features_NCHW.device)]
        device, placement = features_NCHW.device, self.placement
        if placement is not None:
            features_NCHW = features_NCHW.to(placement.device(STEM))
        with _autocast_like(device, () if placement is None else map(torch.device, placement.devices)):
            maps_BCHW, attention = self._execute(plan.plan, self.stem(features_NCHW), defer_weight_grads)
            return self.classifier(maps_BCHW).to(device), attention.to(device)

    def _execute(self, calls: Plan, stems_NCHW: torch.Tensor, defer: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, C, H, W) the programs' last maps, and the sum of the attentions."""
        found = execute(calls, self._module_of_op(), family(self.family_name).inputs(stems_NCHW), defer)
        maps_BCHW, *attentions = (found,) if isinstance(found, torch.Tensor) else found
        dtype = torch.promote_types(maps_BCHW.dtype, torch.float32)
        return maps_BCHW, sum((each.sum(dtype=dtype) for each in attentions), maps_BCHW.new_zeros((), dtype=dtype))

    def reference(self, features_BCHW: torch.Tensor, programs_BL: np.ndarray | torch.Tensor) -> torch.Tensor:
        """(B, A) answer logits, one example and one module at a time: slow, to test `forward` against."""
        run, modules = family(self.family_name).reference, self._module_of_op()
        maps = [
            run(program_L, self.program_tokens, self.scene_kind, modules, stem_1CHW)
            for program_L, stem_1CHW in zip(programs_BL.tolist(), self.stem(features_BCHW).split(1), strict=True)
        ]
        return self.classifier(torch.cat(maps))

    def _families(self) -> dict[int, int]:
        """Return the family of every op that runs, numbered from the vocabulary's length on."""
        numbers: dict[tuple, int] = {}
        places = {} if self.placement is None else self.placement.parts
        kinds = {op: (repr(getattr(self, token)), places.get(token)) for op, token in self._runs.items()}
        return {op: len(self.program_tokens) + numbers.setdefault(kind, len(numbers)) for op, kind in kinds.items()}

    def _module_of_op(self) -> dict[int, nn.Module]:
        return {op: getattr(self, token) for op, token in self._runs.items()}


@contextmanager
def _autocast_like(device: torch.device, others: Iterable[torch.device]) -> Iterator[None]:
    """Compute on other devices in the precision that autocast gives on `device`."""
    enabled = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if enabled else None
    with ExitStack() as stack:
        for kind in {other.type for other in others} - {device.type}:
            stack.enter_context(torch.autocast(kind, dtype, enabled))
        yield


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")


def _kaiming_normal(module: nn.Module) -> None:
    """Kaiming normal weights for all convolutions and linear layers (He et al. 2015); biases stand."""
    for part in module.modules():
        if isinstance(part, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(part.weight)
