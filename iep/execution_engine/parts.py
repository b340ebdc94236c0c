"""The parts of an engine, which are the stem, each function, and the classifier: their work, and the device of each.

To place the parts is the scheme for several GPUs of Suarez & Zhu 2017 (section 3.1, last paragraph). A placement is
plain data. It is made before the run from the names of the parts, or from the work that programs give them, and its
devices need not be available at that time. `assembly.py` moves the parts, `iep/batching/placement.py`
plans the copies between devices, and `engine.py` runs them.

Shapes: Q programs, L program tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from iep.batching.placement import OpPlacement, longest_first
from iep.errors import InputError
from iep.execution_engine.choices import PLACEMENTS
from iep.execution_engine.roles import module_graph, result_kind
from iep.programs import SCENE
from iep.runtime.distributed import world_size

STEM, CLASSIFIER = "stem", "classifier"
NONE, ROUND_ROBIN, BALANCED = PLACEMENTS
MOST_PROGRAMS = 16_384
"""The greatest number of programs from which the work is computed."""


@dataclass(frozen=True)
class Placement:
    """The device of each part of an engine."""

    devices: tuple[str, ...]
    """The names that the user gave. A name that occurs several times stands for several devices."""
    parts: Mapping[str, int]
    """The position in `devices` of the stem, of every function that can run, and of the classifier, in this order."""

    def device(self, part: str) -> torch.device:
        """Return the device of a part."""
        return torch.device(self.devices[self.parts[part]])

    def of_ops(self, program_tokens: Sequence[str]) -> OpPlacement:
        """Return the placement of the ops of a graph: indices into `program_tokens`, then the stem, the classifier."""
        parts = (*program_tokens, STEM, CLASSIFIER)
        return OpPlacement(
            devices=tuple(map(torch.device, self.devices)),
            ops={op: self.parts[part] for op, part in enumerate(parts) if part in self.parts},
            inputs=self.parts[STEM],
            roots=self.parts[CLASSIFIER],
        )


@dataclass(frozen=True)
class ProgramSample:
    """Programs from which the work of each part is computed."""

    programs_QL: np.ndarray | None
    """The programs; None if they are not known."""
    image_idxs_Q: np.ndarray
    source: object
    """The file or the like that the programs come from, for messages."""

    @property
    def is_known(self) -> bool:
        """True if there are programs."""
        return self.programs_QL is not None and len(self.programs_QL) > 0


def check_options(placement: str, devices: Sequence[str], device: str = "auto", has_engine: bool = True) -> None:
    """Check that `--placement`, `--devices` and `--device` fit together.

    Raises:
        InputError: devices are given without a placement, or fewer than two with one; both `--device` and `--devices`
            are given; there is no engine, or there are several processes; or a device's name is invalid.
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
        try:
            torch.device(name)
        except RuntimeError:
            raise InputError(f"--devices: invalid device {name!r}, expected names such as cpu or cuda:0") from None


def make_placement(option: str, devices: Sequence[str], engine: Any, sample: ProgramSample) -> tuple[Placement, str]:
    """Return the placement of the parts of an `ExecutionEngine` that `option` names, and a description of it.

    The description has for each device the number, the share of the work and the names of its parts. Devices are
    numbered if their names are not distinct: cpu#0, cpu#1.

    Raises:
        InputError: the modules share their weights, so that the parts cannot be on several devices, or the option is
            `balanced`, and the sample has no programs.
    """
    if engine.shared is not None:
        raise InputError("the modules share their weights and cannot be placed on several devices or workers")
    work = work_of(engine, sample) if sample.is_known else None
    if option == ROUND_ROBIN:
        placement = round_robin(engine.parts, devices)
    elif work is not None:
        placement = balanced(work, devices)
    else:
        what = f"has no programs, from which --placement {BALANCED} computes the functions' work"
        raise InputError(f"{sample.source}: {what}; choose {ROUND_ROBIN}")
    lines, is_distinct = [f"placement {option}:"], len(set(devices)) == len(devices)
    for position, name in enumerate(devices):
        parts = [part for part, at in placement.parts.items() if at == position]
        label = name if is_distinct else f"{name}#{position}"
        share = f", {sum(map(work.__getitem__, parts)) / sum(work.values()):.0%} of the work" if work else ""
        lines.append(f"  {label}, {len(parts)} parts{share}: {' '.join(parts)}")
    return placement, "\n".join(lines)


def round_robin(parts: Sequence[str], devices: Sequence[str]) -> Placement:
    """Return the placement that assigns the parts, in their order, to the devices in turn."""
    return Placement(tuple(devices), {part: number % len(devices) for number, part in enumerate(parts)})


def balanced(work: Mapping[str, float], devices: Sequence[str]) -> Placement:
    """Return the placement of `longest_first`, with the devices numbered so that the first one has the stem.

    The stem reads the batches, which are on the first device.

    Args:
        work: the work of every part, in the order of the parts.
    """
    found = longest_first(work, len(devices))
    swapped = {found[STEM]: 0, 0: found[STEM]}
    return Placement(tuple(devices), {part: swapped.get(found[part], found[part]) for part in work})


def work_of(engine: Any, sample: ProgramSample) -> dict[str, float]:
    """Return the work of each part: the mean floating-point operations of its forward pass per question of a sample."""
    assert sample.programs_QL is not None
    flops, tokens = _flops_of_parts(engine), engine.program_tokens
    programs_QL = sample.programs_QL[_spread(len(sample.programs_QL), MOST_PROGRAMS)]
    graph = module_graph(programs_QL, tokens, engine.roles)
    calls = dict(zip(tokens, (np.bincount(graph.op, minlength=len(tokens)) / len(programs_QL)).tolist(), strict=True))
    calls |= {STEM: 1.0, CLASSIFIER: 1.0}
    return {part: calls[part] * flops[part] for part in engine.parts}


def _flops_of_parts(engine: Any) -> dict[str, float]:
    """Return the floating-point operations of each part for one image, one row of a call, or one question.

    They are counted with a copy of the engine on the device `meta`.
    """
    from torch.utils.flop_counter import FlopCounterMode  # a slow import, which few runs need

    copy = deepcopy(engine).to("meta").eval()  # a batch norm would not train on one example
    flops: dict[str, float] = {}

    def run(part: str, *arguments: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            result = getattr(copy, part)(*arguments)
        flops[part] = float(counter.get_total_flops())
        return result

    map_1CHW = run(STEM, torch.empty(1, *engine.feature_shape, device="meta"))
    scene = engine.module_set.scene_values(map_1CHW)
    for token in engine.parts[1:-1]:
        run(token, *(scene[kind] for kind in engine.module_set.role(token).reads))
    run(CLASSIFIER, scene[result_kind(engine.module_set.role(SCENE))])
    return flops


def plan_sample(sample: ProgramSample, planner: Callable, batch_size: int, most: int) -> list[Any]:
    """Return the plans of at most `most` minibatches of questions that are evenly spread over a sample.

    Args:
        planner: `plan_programs` for an engine, as `engine.planner` returns it.
    """
    assert sample.programs_QL is not None
    rows = _spread(len(sample.programs_QL), most * batch_size)
    count, plans = max(1, len(rows) // batch_size), []
    for number in range(count):
        batch = rows[number::count][:batch_size]
        image_rows_B = np.unique(sample.image_idxs_Q[batch], return_inverse=True)[1]
        plans.append(planner(sample.programs_QL[batch], image_rows_B=image_rows_B))
    return plans


def _spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the positions 0 to `count` - 1, evenly spread."""
    return np.linspace(0, count - 1, min(count, most)).astype(np.int64)
