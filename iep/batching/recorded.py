"""What a lazy scope's recording is made of: columns of tensors, tensors that all calls share, and ops.

Plain records; they are filled in by `recording.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from iep.batching.kernels import Call, Kernel


@dataclass(frozen=True, eq=False, slots=True)
class Column:
    """Tensors of one shape, dtype and device."""

    recording: Any
    """The `Recording` that its addresses are of."""
    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False, slots=True)
class Constant:
    """A tensor that all calls of an op share, such as a parameter."""

    tensor: Tensor


@dataclass(frozen=True)
class Modes:
    """What PyTorch keeps for a thread and a call's result depends on."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """Kinds of device for which it is on, and to which dtype."""


@dataclass(eq=False, slots=True)
class Op:
    """What nodes of one key run."""

    index: int
    call: Call
    kernel: Kernel
    num_leaves: int
    """How many tensors each of its nodes takes."""
    columns: tuple[Column, ...]
    """Of its results."""
    modes: Modes
    is_single: bool
    """The call returns a tensor and nothing else."""
    is_tuple: bool
    """The call returns a tuple of tensors and nothing else."""
