"""What a lazy scope's recording is made of: columns of tensors, tensors that all calls share, and ops.

Plain records; they are filled in by `recording.py`.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from iep.batching.lazy.kernels import SINGLY, Call, Kernel, Spec, known, name_of, spec_of
from iep.batching.lazy.noted import Noted, state_of

STATIC_KINDS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))
"""Of the arguments that most calls have, besides tensors."""
PLAIN_KINDS = STATIC_KINDS | {complex, bytes, type(...), torch.Size, torch.layout, torch.memory_format}


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
    shared: tuple[Tensor, ...]
    """Tensors among the arguments that all its calls share."""
    noted: Noted
    """Of when it was first recorded since anything ran."""
    since: int
    """The first node of which that holds; earlier ones found something else."""

    def note(self, node: int) -> None:
        """Look anew, for calls from `node` on."""
        if self.change() is not None:
            self.noted, self.since = Noted(self.call.function, self.shared), node

    def change(self) -> str | None:
        """What of the module and the tensors that its calls share is not as noted; None where all is."""
        return self.noted.change(changes_buffers=self.kernel.how == SINGLY)

    def check(self, node: int) -> None:
        """Refuse to run nodes, of which `node` is the first, if what the op is made of has changed since."""
        change = self.change() or (node < self.since and "changed")
        if change:
            raise ValueError(
                f"{name_of(self.call.function)} was {change} after a call of it was recorded, and before it ran: "
                "calls run at the scope's end, or when a value is read"
            )


class Nodes(NamedTuple):
    """All nodes of a recording. Shapes: N nodes, R results, U tensors that nodes take."""

    op: np.ndarray
    """(N,)"""
    address: np.ndarray
    """(N,) of its first result."""
    first: np.ndarray
    """(N + 1,) where the addresses that it takes begin in `taken`, and where the last one's end."""
    taken: np.ndarray
    """(U,) addresses, node after node."""
    maker: np.ndarray
    """(R,) the node whose result is at an address."""

    @classmethod
    def of(cls, op: array, taken: array, ops: Sequence[Op]) -> "Nodes":
        """Those of a recording: (N,) the op of each, in order, and (U,) the addresses that they take one by one."""
        op_N = np.array(op)
        widths = np.array([len(one.columns) for one in ops], dtype=np.int64)[op_N]
        leaves = np.array([one.num_leaves for one in ops], dtype=np.int64)[op_N]
        first = np.append(0, np.cumsum(leaves))
        return cls(op_N, np.cumsum(widths) - widths, first, np.array(taken), np.repeat(np.arange(len(op_N)), widths))


class Behind(NamedTuple):
    """An op that is not to be recorded without a further look."""

    op: Op


def general_key(key: tuple, function: Callable) -> tuple | None:
    """The key of an op without what belongs to a scope, or keeps tensors and users' objects alive: by it kernels are
    remembered. None where an object cannot be referred to weakly."""
    general: list = []
    for part in key[1:]:
        if type(part) is Column:
            general.append(Spec(part.shape, part.dtype, part.device))
        elif type(part) is Constant:
            general.append(("constant", *spec_of(part.tensor), part.tensor.requires_grad))
        elif _is_plain(part):
            general.append(part)
        else:
            try:
                general.append(ref(part))
            except TypeError:
                return None
    return (*general, state_of(function), *map(state_of, known(function).modules()))


def _is_plain(part: Any) -> bool:
    if type(part) is tuple:
        return all(map(_is_plain, part))
    return type(part) in PLAIN_KINDS or isinstance(part, type | np.generic | Enum)
