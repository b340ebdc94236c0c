"""Sizes of a layer of experts and the speed of this machine -> the time that no way to run the layer can go below.

Two things must happen: the weights of the experts that are called come from memory (in training once on the way
forward and once for the inputs' gradients, and gradients of the same size go to it), and their products are computed.
The bound is the longer of both. Tokens and what lies between layers are not counted, and where all weights stay in a
cache between steps they are read faster than memory gives them.
"""

import os
from dataclasses import dataclass

import torch

from iep.bench.limit import fastest_product
from iep.bench.measure import seconds

PROBE_NUMBERS = 1 << 26
"""Of a tensor, 256 MiB, that is read and written to measure memory: no cache should hold it."""
KEPT_FREE = 0.1
"""Of the memory that is available, for others."""
TRAINING_COPIES = 3.25
"""Of all weights: themselves, gradients of every expert, and memory that `batched` keeps for the next gradients."""


@dataclass(frozen=True)
class Bound:
    """What a minibatch needs, and the least seconds that it takes."""

    bytes: int
    """Of weights read and gradients written."""
    flop: int
    """Of all products; a multiplication and an addition are two."""
    bytes_per_second: float
    """Of memory, measured beside the rest."""
    flop_per_second: float
    """Of the fastest square product, measured beside the rest."""
    memory: float
    """Seconds for the bytes."""
    products: float
    """Seconds for the operations."""

    @property
    def seconds(self) -> float:
        return max(self.memory, self.products)


@dataclass
class Speeds:
    """The fastest that memory and products were seen to be."""

    bytes_per_second: float = 0.0
    flop_per_second: float = 0.0


class Probe:
    """What the device can do, with the threads that PyTorch uses at the time."""

    def __init__(self, device: torch.device):
        self.device = device
        self.source = torch.ones(PROBE_NUMBERS, device=device)
        self.target = torch.zeros(PROBE_NUMBERS, device=device)

    def measure(self, speeds: Speeds) -> None:
        """Raise `speeds` to what is seen now: of reading, writing and copying the fastest counts."""
        size = self.source.nbytes
        runs = ((self.source.sum, size), (lambda: self.target.fill_(1), size), (self._copy, 2 * size))
        seen = max(moved / seconds(run, (self.device,)) for run, moved in runs)
        speeds.bytes_per_second = max(speeds.bytes_per_second, seen)
        speeds.flop_per_second = max(speeds.flop_per_second, fastest_product(1, self.device))

    def _copy(self) -> None:
        self.target.copy_(self.source)


def weight_numbers(sizes: tuple[int, int, int]) -> int:
    """How many numbers an expert's weights are; `sizes` are its inputs, hidden and outputs."""
    inputs, hidden, outputs = sizes
    return hidden * (inputs + outputs)


def bound(sizes: tuple[int, int, int], active: int, rows: int, training: bool, speeds: Speeds) -> Bound:
    """Of `rows` rows that call `active` experts in float32."""
    moved = 4 * active * weight_numbers(sizes) * (1 + 2 * training)
    flop = 2 * rows * weight_numbers(sizes) * (1 + 2 * training)
    return Bound(
        bytes=moved,
        flop=flop,
        bytes_per_second=speeds.bytes_per_second,
        flop_per_second=speeds.flop_per_second,
        memory=moved / speeds.bytes_per_second,
        products=flop / speeds.flop_per_second,
    )


def refused_for_memory(
    sizes: tuple[int, int, int], experts: int, rows: int, training: bool, available: float
) -> str | None:
    """Why a layer and its minibatch are not run where `available` bytes are free; None where they fit."""
    weights = 4 * experts * weight_numbers(sizes) * (TRAINING_COPIES if training else 1)
    needed = weights + 4 * rows * sum(sizes) * (8 if training else 4)
    if needed <= (1 - KEPT_FREE) * available:
        return None
    return f"needs {needed / 1e9:.3g} GB of memory, {available / 1e9:.3g} GB are available"


def available_memory(device: torch.device) -> float:
    """Bytes that a process may still take; infinitely many where the system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else float("inf")
