"""Devices to place engines on: positions on the CPU everywhere, and GPUs where there are any."""

import copy

import numpy as np
import pytest
import torch

from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.placement import Placement, round_robin
from iep.models.build import place_parts

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICE_LISTS = [
    ("cpu", "cpu"),
    ("cpu", "cpu", "cpu"),
    pytest.param(("cpu", "cuda:0"), marks=ONE_GPU),
    pytest.param(("cuda:0", "cpu"), marks=ONE_GPU),
    pytest.param(("cuda:0", "cuda:0"), marks=ONE_GPU),
    pytest.param(("cuda:0", "cuda:1"), marks=TWO_GPUS),
]


def placed_copy(engine: ExecutionEngine, devices: tuple[str, ...], seed: int | None = None) -> ExecutionEngine:
    """Return a copy of the engine with its parts on the devices in turn, or at random."""
    placement = round_robin(engine.parts, devices)
    if seed is not None:
        positions = np.random.default_rng(seed).integers(0, len(devices), len(engine.parts)).tolist()
        placement = Placement(devices, dict(zip(engine.parts, positions, strict=True)))
    return place_parts(copy.deepcopy(engine), placement, "channels-first")
