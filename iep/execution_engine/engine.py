"""Image features and a plan of their programs -> answer logits: the execution engine of Johnson et al. 2017.

The engine runs CLEVR's programs with `iep/batching/` and `iep/kernels/`. `program_plan.py` makes the plans, and a set
of modules (`roles.py`) defines the module of each function. Training and the prediction of programs are elsewhere.

Shapes: B examples, L program tokens, C H W feature maps, A answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import nn

from iep.execution_engine.choices import (
    DEFAULT_EXECUTION,
    DEFAULT_SCHEDULER,
    EXECUTIONS,
    check_choice,
)
from iep.execution_engine.parts import CLASSIFIER, STEM, Placement
from iep.execution_engine.program_plan import Planner, ProgramPlan, plan_programs
from iep.execution_engine.roles import MAP, ModuleSet, num_kinds, roles_of
from iep.execution_engine.trace import run_tree
from iep.kernels.executions import CudaGraphs, Execution, run_calls, run_kernels
from iep.kernels.op_groups import architecture
from iep.kernels.template import Template
from iep.programs import program_tree

NOT_ROW_BY_ROW = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)
"""Layers that, in training, draw random numbers or depend on their whole batch."""


class ExecutionEngine(nn.Module):
    """A stem, one module for each program token, and a classifier (Johnson et al. 2017, section 3.2).

    Each module is a direct child that is named after its token. Tokens without a role in the set of modules have no
    module: `<NULL>`, `<START>`, and `scene` if it is the stem's output.

    Args:
        program_tokens: the program vocabulary, special tokens first.
        module_set: the set of modules, which makes the module of each token.
        stem: image features -> maps, (N, C, H, W).
        classifier: results of programs, (B, C, H, W) or (B, C, 1, 1), -> answer logits, (B, A).
        feature_shape: C, H and W of the features.
        grid: H and W of the maps.

    Raises:
        ValueError: the vocabulary has no `scene`, a token cannot name a module, or the set of modules does not support
            a token.
    """

    def __init__(
        self,
        program_tokens: Sequence[str],
        module_set: ModuleSet,
        stem: nn.Module,
        classifier: nn.Module,
        feature_shape: tuple[int, int, int],
        grid: tuple[int, int],
    ):
        super().__init__()
        self.program_tokens, self.module_set = tuple(program_tokens), module_set
        self.feature_shape, self.grid = feature_shape, grid
        self.roles = roles_of(self.program_tokens, module_set)
        self.stem, self.classifier = stem, classifier
        self.execution = DEFAULT_EXECUTION
        """The execution of plans that do not name another one, one of `choices.EXECUTIONS`."""
        self._executions: dict[str, Execution] = {"calls": run_calls, "triton": run_kernels}
        """By name, the executions that `choices.EXECUTIONS` describes. `set_template` adds CUDA graphs."""
        self.placement: Placement | None = None
        """The device of each part; None if all are on one device. `assembly.prepare` sets it."""
        self.shared: nn.Module | None = getattr(self.module_set, "shared", None)
        """The module that all functions share, such as the block of the set `vector`; None for most sets."""
        self._op_groups: dict[bool, dict[int, int]] = {}
        """The op groups without kernels, and those with kernels."""
        self._runs = {op: self.program_tokens[op] for op, role in enumerate(self.roles) if role is not None}
        for token in self._runs.values():
            if not token or "." in token or hasattr(self, token):
                raise ValueError(f"program token {token!r} cannot name a module of the engine")
            self.add_module(token, self.module_set.make(token))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of a placement: the stem, the functions in the vocabulary's order, the classifier."""
        return STEM, *self._runs.values(), CLASSIFIER

    @property
    def makes_attentions(self) -> bool:
        """True if some module returns attentions that the penalty on attentions counts."""
        return any(role is not None and role.is_penalized for role in self.roles)

    @contextmanager
    def greatest_attentions(self) -> Iterator[dict[str, float]]:
        """Record the greatest attention that each function returns in the block, by its token.

        Functions of an op group then have calls of their own.
        """
        greatest: dict[str, float] = {}

        def record(token: str, module: nn.Module, inputs: tuple, result: torch.Tensor) -> None:
            greatest[token] = max(greatest.get(token, 0.0), result.amax().item())

        with ExitStack() as hooks:
            for token, role in zip(self.program_tokens, self.roles, strict=True):
                if role is not None and role.is_penalized:
                    hooks.enter_context(getattr(self, token).register_forward_hook(partial(record, token)))
            yield greatest

    @property
    def can_be_captured(self) -> bool:
        """True if Triton's kernels run all modules in place, so that a CUDA graph can run them."""
        modules = [getattr(self, token) for token in self._runs.values()]
        are_chains = all(getattr(each, "conv_steps", None) is not None for each in modules)
        return num_kinds(self.roles) == 1 and are_chains and self.op_groups(by_kernels=True).keys() == self._runs.keys()

    def set_template(self, template: Template) -> None:
        """Set the calls of plans for CUDA graphs, and forget the graphs of other calls."""
        self._executions["cuda_graph"] = CudaGraphs(template)

    def op_groups(self, by_kernels: bool) -> dict[int, int]:
        """Return the op group of every op that has one, numbered from the vocabulary's length on.

        Args:
            by_kernels: Triton's kernels run convolutions.
        """
        if by_kernels not in self._op_groups:
            numbers, found = dict[tuple, int](), dict[int, int]()
            for op, token in self._runs.items():
                role, kind = self.roles[op], architecture(getattr(self, token), by_kernels)
                if role is not None and kind is not None:
                    key = role.reads, role.result, kind
                    found[op] = len(self.program_tokens) + numbers.setdefault(key, len(numbers))
            self._op_groups[by_kernels] = found
        return self._op_groups[by_kernels]

    @property
    def ops(self) -> dict[int, str]:
        """The part that each op of a `whole` plan runs."""
        return self._runs | {len(self.program_tokens): STEM, len(self.program_tokens) + 1: CLASSIFIER}

    def inputs_of(self, features_NCHW: torch.Tensor, plan: ProgramPlan, dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Return the inputs of a `whole` plan for the features of its images; `dtype` is that of attentions."""
        if plan.image_rows is not None:
            features_NCHW = features_NCHW[plan.image_rows.to(features_NCHW.device)]
        map_1CHW = features_NCHW.new_zeros(1, 1, *self.grid, dtype=dtype)
        others = {kind: each for kind, each in self._scene_values(map_1CHW).items() if kind != MAP}
        return others | {num_kinds(self.roles): features_NCHW}

    def planner(
        self,
        batching: str = DEFAULT_SCHEDULER,
        sharing: bool | None = None,
        training: bool = False,
        attentions: bool = False,
        whole: bool = False,
        execution: str | None = None,
    ) -> Planner:
        """Return `plan_programs` for this engine and its placement, without weights, so that workers can receive it.

        Args:
            sharing: run equal subtrees once. None shares where the results are exactly the same: always in evaluation,
                and in training if no batch norm or dropout makes a result depend on how often it is computed.
            training: the plans are for training.
            attentions: as in `plan_programs`.
            whole: as in `plan_programs`; `ops` has the modules of such a plan, and `inputs_of` its inputs.
            execution: one of `choices.EXECUTIONS`; None for the engine's own. A CUDA graph is for training, and other
                plans are for `triton` instead.

        Raises:
            ValueError: there is no such execution, or `attentions` is set, and the modules return none that the penalty
                counts.
        """
        execution = execution or self.execution
        check_choice("execution", execution, EXECUTIONS)
        if execution == "cuda_graph" and not training:
            execution = "triton"
        run = self._executions.get(execution)
        if attentions and not self.makes_attentions:
            raise ValueError("the engine's modules return no attentions; those of the sets tbd and pooled do")
        if sharing is None:
            layers = (layer for part in self.parts[:-1] for layer in getattr(self, part).modules())
            sharing = not training or not any(isinstance(layer, NOT_ROW_BY_ROW) for layer in layers)
        return partial(
            plan_programs,
            program_tokens=self.program_tokens,
            roles=self.roles,
            batching=batching,
            sharing=sharing,
            placement=self.placement,
            attentions=attentions,
            # Functions on several devices or workers have calls of their own.
            op_groups=None if self.placement or whole else self.op_groups(execution != DEFAULT_EXECUTION),
            whole=whole,
            execution=execution,
            template=run.template if isinstance(run, CudaGraphs) else None,
        )

    def plan(
        self,
        programs_BL: np.ndarray | torch.Tensor,
        image_rows_B: np.ndarray | torch.Tensor | None = None,
        batching: str = DEFAULT_SCHEDULER,
        sharing: bool | None = None,
        attentions: bool = False,
        execution: str | None = None,
    ) -> ProgramPlan:
        """Return the plan of (B, L) programs for this engine, its devices and its training mode; see `planner`."""
        device = next(self.parameters()).device
        planner = self.planner(batching, sharing, self.training, attentions, execution=execution)
        return planner(programs_BL, image_rows_B=image_rows_B).to(device)

    def forward(self, features_NCHW: torch.Tensor, plan: ProgramPlan, defer_weight_grads: bool = False) -> torch.Tensor:
        """Return the answer logits, (B, A), on the device of the features.

        Args:
            features_NCHW: the features of the images for which the plan was made.
            plan: the plan of the B programs, with its tensors on the features' device; see `ProgramPlan.to`.
            defer_weight_grads: compute the gradient of each module's weights once, over all its calls. A plan for
                kernels always does so.

        Raises:
            ValueError: the plan is for another kind of engine or another number of images, or it has no program.
        """
        return self.forward_with_attentions(features_NCHW, plan, defer_weight_grads)[0]

    def forward_with_attentions(
        self, features_NCHW: torch.Tensor, plan: ProgramPlan, defer_weight_grads: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answer logits, as `forward`, and the sum of the attentions, or 0 if the plan has none."""
        if (plan.program_tokens, plan.roles) != (self.program_tokens, self.roles):
            raise ValueError("the plan was made for an engine with another vocabulary, other modules or another scene")
        if plan.placement != self.placement:
            raise ValueError("the plan was made for an engine that is placed on other devices")
        if len(features_NCHW) != plan.num_images:
            raise ValueError(f"features of {len(features_NCHW)} images for a plan of {plan.num_images}")
        if plan.image_rows is not None:
            features_NCHW = features_NCHW[plan.image_rows.to(features_NCHW.device)]
        device = features_NCHW.device
        if self.placement is not None:
            features_NCHW = features_NCHW.to(self.placement.device(STEM))
        inputs = self._scene_values(self.stem(features_NCHW))
        modules = {op: getattr(self, token) for op, token in self._runs.items()}
        run = self._executions[plan.execution]
        maps_BCHW, *attentions = run(plan.plan, plan.graph, modules, inputs, defer_weight_grads)
        dtype = torch.promote_types(maps_BCHW.dtype, torch.float32)
        attention = sum((each.sum(dtype=dtype) for each in attentions), maps_BCHW.new_zeros((), dtype=dtype))
        return self.classifier(maps_BCHW).to(device), attention.to(device)

    def _scene_values(self, stems_NCHW: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the value of `scene` in each kind of a plan's values; the set may have further kinds."""
        count = num_kinds(self.roles)
        return {kind: each for kind, each in self.module_set.scene_values(stems_NCHW).items() if kind < count}

    def reference(self, features_BCHW: torch.Tensor, programs_BL: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return the answer logits, (B, A), by one module call per node: slow, for comparison with `forward`."""
        trees = [program_tree([self.program_tokens[token] for token in row]) for row in programs_BL.tolist()]
        stems = self.stem(features_BCHW).split(1)
        results = [run_tree(self, tree, stem_1CHW)[1] for tree, stem_1CHW in zip(trees, stems, strict=True)]
        return self.classifier(torch.cat(results))
