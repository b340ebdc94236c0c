"""Programs of a minibatch -> the plan of their module calls: graph, schedule and calls.

Making a plan computes no tensor, so that the workers of the data loader can do it. `engine.py` runs the plan.

Shapes: B programs, L program tokens, N images.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from iep.batching.graph import Graph
from iep.batching.placement import make_placed_plan
from iep.batching.plan import Plan, make_plan
from iep.batching.schedulers import Schedule, make_schedule
from iep.batching.sharing import share
from iep.execution_engine.choices import DEFAULT_EXECUTION, DEFAULT_SCHEDULER
from iep.execution_engine.parts import Placement
from iep.execution_engine.roles import Roles, module_graph, penalized, types_of, whole_graph
from iep.kernels.template import Template


@dataclass(frozen=True, eq=False)
class ProgramPlan:
    """The module calls of a minibatch of programs: plain data, which is cheap to pickle."""

    graph: Graph
    """The graph of the calls. Its first inputs are stems, one for each image, or for each program without sharing. Its
    first roots are the programs' results, and further roots are attentions."""
    schedule: Schedule
    """The schedule of the graph; it is empty for a plan in the calls of a template."""
    plan: Plan
    program_tokens: tuple[str, ...]
    roles: Roles
    """The role of each token. An engine that runs the plan must have the same program tokens and roles."""
    num_images: int
    """The number of images whose features an engine needs to run the plan, N."""
    image_rows: torch.Tensor | None
    """The row of each input's image in the features, (num_inputs,); None if input n belongs to image n."""
    placement: Placement | None = None
    """The placement that an engine that runs the plan must have; None for one device."""
    execution: str = DEFAULT_EXECUTION
    """How an engine runs the plan, one of `choices.EXECUTIONS`."""

    @property
    def num_calls(self) -> int:
        """The number of module calls, without copies between devices."""
        return sum(call.op >= 0 for call in self.plan.calls)

    def to(self, device: torch.device) -> "ProgramPlan":
        """Return the plan for features on `device`; the index tensors of a placed plan are on their own devices."""
        rows = None if self.image_rows is None else self.image_rows.to(device, non_blocking=True)
        return replace(self, plan=self.plan.to(device), image_rows=rows)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ProgramPlan":
        """Return the plan with `function` applied to its index tensors."""
        rows = None if self.image_rows is None else function(self.image_rows)
        return replace(self, plan=self.plan.map(function), image_rows=rows)


def plan_programs(
    programs_BL: np.ndarray | torch.Tensor,
    program_tokens: Sequence[str],
    roles: Roles,
    image_rows_B: np.ndarray | torch.Tensor | None = None,
    batching: str = DEFAULT_SCHEDULER,
    sharing: bool = True,
    placement: Placement | None = None,
    attentions: bool = False,
    op_groups: Mapping[int, int] | None = None,
    whole: bool = False,
    execution: str = DEFAULT_EXECUTION,
    template: Template | None = None,
) -> ProgramPlan:
    """Return the plan of (B, L) prefix programs, well-formed or not (`iep/programs.py` defines what they mean).

    Args:
        programs_BL: indices into `program_tokens`, numpy or torch.
        roles: the role of every token, as `roles_of` returns them.
        image_rows_B: the row of each program's image in the features, of which the greatest is N - 1; None if program
            b is about image b.
        batching: the name of a scheduler in `iep.batching.schedulers.SCHEDULERS`.
        sharing: run each image's stem once, and equal subtrees over one image once; otherwise every program runs its
            own stem and all its functions.
        placement: the device of every function; None for one device.
        attentions: also return the sum of the attentions. An attention that several programs share counts once for each
            of them.
        op_groups: the number of the op group of each op, as for `iep.batching.schedulers.make_schedule`. One call then
            runs several functions of the same architecture.
        whole: the stem and the classifier are ops of the graph, as in `whole_graph`, so that a run computes the scores
            of the answers from features.
        execution: how an engine runs the op groups, one of `choices.EXECUTIONS`.
        template: the calls that a CUDA graph runs. The plan of programs that do not fit into it is for `triton`.

    Raises:
        ValueError: a token is out of range, the scheduler is unknown, the vocabulary has no `scene`, `image_rows_B` is
            not one row number for each program, a function that runs is not placed, or no role has attentions.
    """
    rows = None if image_rows_B is None else _checked_rows(image_rows_B, len(programs_BL))
    num_images = len(programs_BL) if rows is None else 1 + int(rows.numpy().max(initial=-1))
    stem_B = rows.numpy() if sharing and rows is not None else None
    graph = module_graph(programs_BL, program_tokens, roles, stem_B)
    if attentions:
        graph = replace(graph, roots=np.concatenate([graph.roots, penalized(graph, roles)]))
    if sharing:
        graph, rows = share(graph), None
    count = len(programs_BL)
    if template is not None:
        if (plan := template.plan_of(graph)) is not None:
            return ProgramPlan(graph, (), plan, tuple(program_tokens), roles, num_images, rows, None, execution)
        execution = "triton"
    types = types_of(graph, roles, count)
    if whole:
        graph, types = whole_graph(graph, types, roles)
    schedule = make_schedule(graph, batching, op_groups)
    if placement is None:
        plan = make_plan(graph, schedule, types)
    else:
        plan = make_placed_plan(graph, schedule, placement.of_ops(program_tokens), types)
    return ProgramPlan(graph, schedule, plan, tuple(program_tokens), roles, num_images, rows, placement, execution)


def _checked_rows(image_rows_B: np.ndarray | torch.Tensor, count: int) -> torch.Tensor:
    rows = torch.as_tensor(image_rows_B).cpu()
    if rows.shape != (count,) or rows.is_floating_point() or rows.dtype == torch.bool or (rows.long() < 0).any():
        raise ValueError(f"image rows {rows.tolist()} for {count} programs, expected one whole number >= 0 for each")
    return rows.long()


Planner = Callable[..., ProgramPlan]
"""A partial application of `plan_programs` that takes (programs_BL, *, image_rows_B)."""
