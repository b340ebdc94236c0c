"""Memory that several processes share, and how much there is for the taking.

Shared memory is a file of the kernel's that has no name in any directory: when the last process that has it open is
gone, in whatever way, so is the memory. Linux only.
"""

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np


class SharedMemory:
    """Bytes, zero at first, that any process of this user may open by `path`; what is never written takes no room.

    Pickled, it is the same memory elsewhere: the process that made it must still be there when it is unpickled.

    Attributes:
        path: where other processes open it while this one lives.
        size: in bytes.
    """

    def __init__(self, size: int, path: str | None = None) -> None:
        """Make the memory, or open that of another process."""
        self.size = size
        self._descriptor = os.memfd_create("iep", os.MFD_CLOEXEC) if path is None else os.open(path, os.O_RDWR)
        self.path = path or f"/proc/{os.getpid()}/fd/{self._descriptor}"
        if path is None:
            os.ftruncate(self._descriptor, size)
        self._bytes = np.frombuffer(mmap.mmap(self._descriptor, size), dtype=np.uint8)
        _OPEN[self.path] = self

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            close(self._descriptor)

    def __reduce__(self) -> tuple[Callable[..., "SharedMemory"], tuple[Any, ...]]:
        return attach, (self.path, self.size)

    @property
    def descriptor(self) -> int:
        """Of the open file."""
        return self._descriptor

    def array(self, start: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The bytes from `start` on as an array."""
        size = int(np.prod(shape)) * dtype.itemsize
        return self._bytes[start : start + size].view(dtype).reshape(shape)


_OPEN: WeakValueDictionary[str, SharedMemory] = WeakValueDictionary()


def attach(path: str, size: int) -> SharedMemory:
    """The shared memory `path` of `size` bytes, opened once in each process."""
    return _OPEN.get(path) or SharedMemory(size, path)


def available_memory() -> int:
    """Bytes that this process could still take: what the machine has, and what its control groups allow."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())])


def _left_in_groups(root: Path, groups: str) -> list[int]:
    """What each control group with a limit leaves, of both versions; file pages that can be dropped count as free."""
    left = []
    for line in groups.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, limit, usage, droppable = (
            (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else (root, "memory.max", "memory.current", "inactive_file")
        )
        inner = base / name.lstrip("/")
        for group in (inner, *inner.parents):  # in a container the group's own root is mounted, not its path
            if group.is_relative_to(base) and (group / limit).exists() and (group / usage).exists():
                left += _left(group / limit, group / usage, group / "memory.stat", droppable)
    return left


def _left(limit: Path, usage: Path, statistics: Path, droppable: str) -> list[int]:
    most = limit.read_text().strip()
    if most == "max":
        return []
    counts = dict(line.split() for line in statistics.read_text().splitlines())
    return [int(most) - int(usage.read_text()) + int(counts.get(droppable, 0))]
