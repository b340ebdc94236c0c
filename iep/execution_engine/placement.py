"""Every function of a program vocabulary, the stem and the classifier -> one of several devices.

The paper's scheme for several GPUs: a different function on each (Suarez & Zhu, section 3.1, last paragraph). A
placement is plain data, made before the run from the functions' names, from what they cost and how often programs call
them, or from a YAML file; devices need not be there to make one. Running a placed engine is `engine.py`'s.

Shapes: N nodes of programs, C H W feature maps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn

from iep.batching.placement import OpPlacement
from iep.errors import InputError, nearest
from iep.execution_engine.families import family
from iep.execution_engine.family import ATTENTION, MAP, as_column

STEM, CLASSIFIER = "stem", "classifier"
NONE, ROUND_ROBIN, BALANCED = "none", "round-robin", "balanced"


@dataclass(frozen=True)
class Placement:
    """Where each part of an engine lives."""

    devices: tuple[str, ...]
    """By the user's names; one that stands there several times is as many devices to the engine."""
    parts: Mapping[str, int]
    """Position in `devices` of the stem, of every function that can run, and of the classifier, in this order."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The devices' names, numbered where they are not distinct: cpu#0, cpu#1."""
        if len(set(self.devices)) == len(self.devices):
            return self.devices
        return tuple(f"{name}#{position}" for position, name in enumerate(self.devices))

    def device(self, part: str) -> torch.device:
        """Where a part lives."""
        return torch.device(self.devices[self.parts[part]])

    def of_ops(self, program_tokens: Sequence[str]) -> OpPlacement:
        """The same for a schedule's ops, which are indices of `program_tokens`."""
        return OpPlacement(
            devices=tuple(map(torch.device, self.devices)),
            ops={op: self.parts[token] for op, token in enumerate(program_tokens) if token in self.parts},
            inputs=self.parts[STEM],
            roots=self.parts[CLASSIFIER],
        )

    def to_yaml(self) -> str:
        """As `read_placement` reads it: a device's name for each part; its position where names are not distinct."""
        distinct = self.labels == self.devices
        values = {part: self.devices[at] if distinct else at for part, at in self.parts.items()}
        return yaml.safe_dump(values, sort_keys=False)


def round_robin(parts: Sequence[str], devices: Sequence[str]) -> Placement:
    """The parts dealt to the devices in turn, in their order."""
    return Placement(tuple(devices), {part: place % len(devices) for place, part in enumerate(parts)})


def balanced(work: Mapping[str, float], devices: Sequence[str]) -> Placement:
    """By turns the part with most work to the device that has least: longest processing time first (Graham 1969,
    Bounds on multiprocessing timing anomalies). The earlier part, and the earlier device, goes first among equals; the
    first device has the stem.

    Args:
        work: of every part, in the parts' order: how often it is called, times its operations.
    """
    load, place = [0.0] * len(devices), {}
    for part in sorted(work, key=work.__getitem__, reverse=True):
        place[part] = min(range(len(devices)), key=load.__getitem__)
        load[place[part]] += work[part]
    # Devices count as equal, so that any order of them is as good; batches come to the first, which the stem reads.
    order = {place[STEM]: 0, 0: place[STEM]}
    return Placement(tuple(devices), {part: order.get(place[part], place[part]) for part in work})


def read_placement(path: Path, parts: Sequence[str], devices: Sequence[str]) -> Placement:
    """The placement in a YAML mapping from every part to a device's name, or to its position in `devices` from 0.

    Raises:
        InputError: the file is no such mapping, names something unknown, leaves a part out, or names a device that is
            not in `devices` or stands there several times.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a YAML mapping from functions to devices, such as 'count: {devices[0]}'")
    for name in content:
        if name not in parts:
            raise InputError(f"{path}: unknown function {name!r}{nearest(str(name), parts)}")
    missing = [part for part in parts if part not in content]
    if missing:
        raise InputError(f"{path}: {missing[0]!r} has no device ({len(missing)} of {len(parts)} parts have none)")
    return Placement(tuple(devices), {part: _position(content[part], part, path, devices) for part in parts})


def _position(value: object, part: str, path: Path, devices: Sequence[str]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(devices):
        return value
    count = list(devices).count(value)
    if count == 1:
        return devices.index(value)
    if count:
        raise InputError(f"{path}: {part} is on {value!r}, which is {count} of the devices; expected a position from 0")
    raise InputError(f"{path}: {part} is on {value!r}, expected one of the devices {', '.join(devices)}")


def flops_of_parts(engine: nn.Module, feature_shape: Sequence[int]) -> tuple[dict[str, int], tuple[int, ...]]:
    """Floating-point operations of each part, forward, for one image, one call's row or one question; and how many
    numbers a value between modules has, by column.

    Args:
        engine: an `ExecutionEngine` on the device `meta`, which computes nothing.
        feature_shape: (C, H, W).
    """
    from torch.utils.flop_counter import FlopCounterMode  # late: it takes a while, and few runs are placed

    flops = {}

    def count(part: str, *arguments: torch.Tensor) -> torch.Tensor:
        with FlopCounterMode(display=False) as counter:
            result = getattr(engine, part)(*arguments)
        flops[part] = counter.get_total_flops()
        return result

    own, map_1CHW = family(engine.family_name), count(STEM, torch.empty(1, *feature_shape, device="meta"))
    for part in engine.parts[1:]:
        columns = (MAP,) if part == CLASSIFIER else own.takes(part)
        count(part, *(as_column(column, map_1CHW) for column in columns))
    return flops, tuple(as_column(column, map_1CHW).numel() for column in (MAP, ATTENTION))


def calls_of_parts(
    parts: Sequence[str], ops: np.ndarray, program_tokens: Sequence[str], count: int
) -> dict[str, float]:
    """How often a program calls each part, of the `ops` (N,) that `count` programs run."""
    calls = dict(zip(program_tokens, np.bincount(ops, minlength=len(program_tokens)) / count, strict=True))
    return {part: 1.0 if part in (STEM, CLASSIFIER) else float(calls[part]) for part in parts}
