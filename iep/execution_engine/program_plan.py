"""Programs of a minibatch -> the plan of their module calls: graph, schedule and calls.

A plan is made without values of tensors, so that the data loader's workers can make it. `engine.py` runs it.

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
from iep.execution_engine.choices import DEFAULT_SCHEDULER
from iep.execution_engine.placement import Placement
from iep.execution_engine.program_graph import Roles, module_graph, penalized, types_of


@dataclass(frozen=True, eq=False)
class ProgramPlan:
    """What the engine will run for a minibatch of programs: plain data, cheap to pickle."""

    graph: Graph
    """Its first inputs are stems: one for each image, or, without sharing, for each program. Its first roots are the
    programs' results, and further roots are attentions."""
    schedule: Schedule
    plan: Plan
    program_tokens: tuple[str, ...]
    roles: Roles
    """The engine that runs the plan must have the same program tokens and roles."""
    num_images: int
    """The number of images whose features the plan is for, N."""
    image_rows: torch.Tensor | None
    """(num_inputs,) the row of each input's image in the features; None where input n is of image n."""
    placement: Placement | None = None
    """How the engine that runs the plan must be placed; None for one device."""

    def to(self, device: torch.device) -> "ProgramPlan":
        """Return the plan for features on `device`; where it is placed, each device's index tensors are there."""
        rows = None if self.image_rows is None else self.image_rows.to(device, non_blocking=True)
        return replace(self, plan=self.plan.to(device), image_rows=rows)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "ProgramPlan":
        """Return the plan with `function` of its index tensors."""
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
    families: Mapping[int, int] | None = None,
) -> ProgramPlan:
    """Return the plan of (B, L) prefix programs, well-formed or not (`iep/programs.py` defines what they mean).

    Args:
        programs_BL: indices into `program_tokens`, numpy or torch.
        roles: the role of every token, as `roles_of` returns them.
        image_rows_B: the row of each program's image in the features, the greatest being N - 1; None where program b
            is about image b.
        batching: the name of a scheduler in `iep.batching.schedulers.SCHEDULERS`.
        sharing: run each image's stem once, and equal subtrees over one image once; otherwise every program runs the
            stem and all its functions for itself.
        placement: where every function runs; None for one device.
        attentions: the engine is to return the sum of the attentions too. An attention that several programs share
            counts once for each of them.
        families: by op, the number of its family, as `iep.batching.schedulers.make_schedule` takes them: one call then
            runs several functions of one architecture.

    Raises:
        ValueError: a token is out of range, the scheduler is unknown, the vocabulary lacks `scene`, `image_rows_B` is
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
    schedule = make_schedule(graph, batching, families)
    types = types_of(graph, roles, len(programs_BL))
    if placement is None:
        plan = make_plan(graph, schedule, types)
    else:
        plan = make_placed_plan(graph, schedule, placement.of_ops(program_tokens), types)
    return ProgramPlan(graph, schedule, plan, tuple(program_tokens), roles, num_images, rows, placement)


def _checked_rows(image_rows_B: np.ndarray | torch.Tensor, count: int) -> torch.Tensor:
    rows = torch.as_tensor(image_rows_B).cpu()
    if rows.shape != (count,) or rows.is_floating_point() or rows.dtype == torch.bool or (rows.long() < 0).any():
        raise ValueError(f"image rows {rows.tolist()} for {count} programs, expected a whole number from 0 on for each")
    return rows.long()


Planner = Callable[..., ProgramPlan]
"""`plan_programs` with all arguments given but (programs_BL, *, image_rows_B)."""
