"""Large tensors that are needed anew at every step -> the same memory every time.

The first writing of fresh memory costs a CPU several times as much as the work of a step that reads it once (the system
clears it page by page), and an allocator gives blocks of many megabytes back to the system as soon as they are free. So
what a layer's steps use is kept by the layer, and taken again when no tensor refers to it any more. GPUs' allocators
do this themselves.
"""

import math
from threading import Lock
from typing import Any

import torch
from torch import Tensor

MIN_BYTES = 1 << 18
"""Of a tensor; smaller ones are the allocator's."""
MAX_IDLE = 8
"""Blocks kept that nothing refers to, when a larger one is needed than any of them."""

_use_count = getattr(torch._C, "_storage_Use_Count", None)


class ReusedMemory:
    """Hands out tensors whose memory is used again once nobody has them, nor any view of them.

    A tensor that was handed out may be kept for as long as one likes. Memory that was used is held until this object
    goes. Copied or pickled, it is a new one.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.UntypedStorage] = []
        self._lock = Lock()

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A contiguous tensor of any content, of the dtype and on the device of `like`."""
        size = math.prod(shape) * like.element_size()
        if like.device.type != "cpu" or size < MIN_BYTES or _use_count is None:
            return like.new_empty(shape)
        with self._lock:
            block = self._idle(size) or self._add(size)
            return like.new_empty(0).set_(block, 0, shape)

    def _idle(self, size: int) -> torch.UntypedStorage | None:
        fits = [block for block in self._unused() if size <= block.nbytes() <= 2 * size]
        return min(fits, key=lambda block: block.nbytes(), default=None)

    def _add(self, size: int) -> torch.UntypedStorage:
        idle = sorted(self._unused(), key=lambda block: block.nbytes())
        gone = {id(block) for block in idle[: max(0, len(idle) - MAX_IDLE + 1)]}
        block = torch.UntypedStorage(size + size // 8)  # the next may be a little larger
        self._blocks = [*(block for block in self._blocks if id(block) not in gone), block]
        return block

    def _unused(self) -> list[torch.UntypedStorage]:
        return [block for block in self._blocks if _use_count(block._cdata) == 1]

    def __reduce__(self) -> tuple[Any, tuple]:
        return ReusedMemory, ()
