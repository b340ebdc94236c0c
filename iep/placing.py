"""What a user says with --placement and --devices -> an engine with its parts there, and a text about it.

Which placements there are is `execution_engine/placement.py`. The shares of work and the bytes that cross are those of
programs given: a sample of the training data's, or of the split that is evaluated.

Shapes: Q programs, L tokens of them.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from iep.batching.placed import PlacedLayout, least_time
from iep.devices import resolve_device
from iep.distributed import world_size
from iep.errors import InputError, nearest
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.family import MAP
from iep.execution_engine.placement import (
    BALANCED,
    NONE,
    ROUND_ROBIN,
    Placement,
    balanced,
    calls_of_parts,
    flops_of_parts,
    read_placement,
    round_robin,
)
from iep.execution_engine.program_plan import ProgramPlan, Planner, graph_of
from iep.networks import build, place_parts

MOST_PROGRAMS, MOST_MINIBATCHES = 16_384, 8
PLACEMENT_FILE = "placement.yaml"
WIDTH = 120


@dataclass(frozen=True)
class Sample:
    """Programs that say how much work there is; None where they are not known."""

    programs_QL: np.ndarray | None
    image_idxs_Q: np.ndarray
    source: object
    """Where they are from, or would be."""

    @property
    def is_known(self) -> bool:
        """There are programs."""
        return self.programs_QL is not None and len(self.programs_QL) > 0


@dataclass(frozen=True)
class Costs:
    """What an engine's parts cost, and how much work programs give them."""

    sizes: tuple[int, ...]
    """Numbers of a map, and of an attention, between modules."""
    flops: Mapping[str, float]
    """Floating-point operations of each part for a question, or of a function for one call's row, forward."""
    work: Mapping[str, float] | None
    """Floating-point operations of each part for a question, forward: those of its calls."""


def check_options(placement: str, devices: Sequence[str], device: str = "auto", has_engine: bool = True) -> None:
    """Refuse what makes no sense.

    Raises:
        InputError: devices without a placement or the other way round, both --device and --devices, no engine to
            place, several processes, no name of a device, or neither a known placement nor a file.
    """
    if placement == NONE:
        if devices:
            raise InputError(f"--devices {','.join(devices)} is for --placement; a single device is --device")
        return
    if not has_engine:
        raise InputError(f"--placement {placement} is for an execution engine, and there is none")
    if len(devices) < 2:
        raise InputError(f"--placement {placement} needs two devices or more, such as --devices cuda:0,cuda:1")
    if device != "auto":
        raise InputError(f"--device {device} together with --devices {','.join(devices)}; give one of them")
    if world_size() > 1:
        raise InputError(f"--placement {placement} is for one process, and there are {world_size()}")
    for name in devices:
        _check_name(name)
    if placement not in (ROUND_ROBIN, BALANCED) and not Path(placement).is_file():
        names = (NONE, ROUND_ROBIN, BALANCED)
        raise InputError(f"{placement}: no such file, nor one of {', '.join(names)}{nearest(placement, names)}")


def _check_name(device: str) -> None:
    try:
        torch.device(device)
    except RuntimeError:
        raise InputError(f"--devices: {device!r} is no device, expected names such as cpu or cuda:0") from None


def resolve_home(placement: str, devices: Sequence[str], device: str) -> torch.device:
    """Where batches come, and where all is that is not placed: the device, or the first of several.

    Raises:
        InputError: one of them is not there.
    """
    first, *_ = [resolve_device(name) for name in (devices if placement != NONE else [device])]
    return first


def costs_of(engine: ExecutionEngine, sample: Sample) -> Costs:
    """The costs of an engine that `iep.networks.build` has made."""
    with torch.device("meta"):
        alike = build("engine", engine.kwargs)
    flops, sizes = flops_of_parts(alike, [engine.kwargs[f"feature_{side}"] for side in ("dim", "height", "width")])
    if not sample.is_known:
        return Costs(sizes, flops, None)
    rows = _spread(len(sample.programs_QL), MOST_PROGRAMS)
    programs_QL = sample.programs_QL[rows]
    graph = graph_of(programs_QL, engine.program_tokens, engine.scene_kind, modules=engine.family_name)
    calls = calls_of_parts(engine.parts, graph.op, engine.program_tokens, len(rows))
    return Costs(sizes, flops, {part: calls[part] * flops[part] for part in engine.parts})


def make_placement(
    option: str, devices: Sequence[str], parts: Sequence[str], work: Mapping[str, float] | None, source: object
) -> Placement:
    """The placement that `option` names: one of those there are, or a YAML file.

    Raises:
        InputError: as `read_placement`, or `balanced` lacks programs to weigh functions by; `source` has none.
    """
    if option == ROUND_ROBIN:
        return round_robin(parts, devices)
    if option != BALANCED:
        return read_placement(Path(option), parts, devices)
    if work is None:
        raise InputError(
            f"{source}: has no programs, by which --placement {BALANCED} weighs functions; choose {ROUND_ROBIN} or a "
            "file"
        )
    return balanced(work, devices)


def place_engine(
    engine: ExecutionEngine, option: str, devices: Sequence[str], sample: Sample, memory_format: str | None = None
) -> Costs:
    """Put every part of `engine` on its device, in a memory format as `iep.networks.place` has it.

    Raises:
        InputError: as `make_placement`.
    """
    costs = costs_of(engine, sample)
    place_parts(engine, make_placement(option, devices, engine.parts, costs.work, sample.source), memory_format)
    return costs


def describe_placement(option: str, placement: Placement, work: Mapping[str, float] | None) -> str:
    """A heading, and for each device its number of parts, their share of the work, and their names."""
    labels = placement.labels
    width = max(map(len, labels))
    lines = [f"placement {option}:"]
    for position, label in enumerate(labels):
        parts = [part for part, at in placement.parts.items() if at == position]
        share = (
            "" if work is None else f"  {100 * sum(work[part] for part in parts) / sum(work.values()):3.0f}% of work"
        )
        start = f"  {label:<{width}}  {len(parts):2} parts{share}  "
        lines += textwrap.wrap(
            " ".join(parts), WIDTH, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False
        ) or [start.rstrip()]
    return "\n".join(lines)


def describe_moves(layouts: Sequence[PlacedLayout], costs: Costs, number_bytes: int, share: float, what: str) -> str:
    """What crosses on the way forward of `what`, the mean of some layouts, in numbers of so many bytes; and what the
    devices can gain."""
    kinds, total = [], 0.0
    for column, (name, size) in enumerate(zip(("maps", "attentions"), costs.sizes, strict=True)):
        rows = mean(layout.rows_moved(column) for layout in layouts)
        if rows or column == MAP:
            kinds.append(f"{rows:.4g} {name} of {size * number_bytes:,} bytes")
        total += rows * size * number_bytes
    return (
        f"  {' and '.join(kinds)}, {total / 1e6:.4g} MB, cross {what} on the way forward, "
        f"as much on the way back\n  side by side, the modules take {100 * share:.0f}% of one device's time at best"
    )


def describe_engine(
    option: str,
    engine: ExecutionEngine,
    costs: Costs,
    sample: Sample,
    planner: Planner,
    batch_size: int,
    precision: str,
) -> str:
    """The placement of `engine`, and what crosses in a minibatch of the sample's questions under `planner`."""
    text = describe_placement(option, engine.placement, costs.work)
    if not sample.is_known:
        return f"{text}\n  how much crosses depends on programs that are not known yet"
    plans = [planner(programs_BL, image_rows_B=rows_B) for programs_BL, rows_B in _minibatches(sample, batch_size)]
    share, number_bytes = mean(share_of_time(plan, costs) for plan in plans), 2 if precision == "bfloat16" else 4
    what = f"in a minibatch of {min(batch_size, len(sample.programs_QL))} questions"
    return f"{text}\n{describe_moves([plan.layout for plan in plans], costs, number_bytes, share, what)}"


def share_of_time(plan: Plan, costs: Costs) -> float:
    """The least time of a placed plan's calls over the time that one device takes for them; 1 where there are none."""
    cost_of_op = {op: costs.flops[plan.program_tokens[op]] for op in plan.graph.op.tolist()}
    alone = sum(len(group.nodes) * cost_of_op[group.op] for group in plan.schedule)
    return least_time(plan.layout, cost_of_op) / alone if alone else 1.0


def _minibatches(sample: Sample, batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Programs and image rows of several minibatches, of questions from all over the sample."""
    rows = _spread(len(sample.programs_QL), MOST_MINIBATCHES * batch_size)
    count = max(1, len(rows) // batch_size)
    for number in range(count):
        batch = rows[number::count][:batch_size]
        yield sample.programs_QL[batch], np.unique(sample.image_idxs_Q[batch], return_inverse=True)[1]


def _spread(count: int, most: int) -> np.ndarray:
    """Up to `most` of `count` positions, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64) if count else np.empty(0, dtype=np.int64)
