"""The memory that this process can still allocate (Linux only), and a setting under which it keeps what it frees."""

import ctypes
import os
from pathlib import Path

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
"""Parameters of mallopt(3)."""


def available_memory() -> int:
    """Return the number of bytes that this process can still allocate, given the machine and its control groups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())])


def left_in_groups(root: Path, groups: str) -> list[int]:
    """Return the number of free bytes of each control group with a limit; cached file pages count as free.

    Args:
        root: the directory where control groups, of version 1 or 2, are mounted.
        groups: the content of /proc/self/cgroup.
    """
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
        for group in (inner, *inner.parents):  # a container mounts only its own group, as the root
            if not group.is_relative_to(base) or not (group / limit).exists() or not (group / usage).exists():
                continue
            most = (group / limit).read_text().strip()
            if most != "max":
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                left.append(int(most) - int((group / usage).read_text()) + int(counts.get(droppable, 0)))
    return left


def keep_freed_memory() -> None:
    """Make this process keep up to two gigabytes of freed memory for later allocations.

    By default glibc maps each large block separately and returns it to the system when it is freed. The system then
    clears the pages of the next block one by one, when they are first used. For the large tensors that PyTorch
    allocates anew at every step, this takes several percent of the time of a full-size training step on a CPU. The
    function has no effect if the user has set one of glibc's MALLOC_ variables, or the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(M_MMAP_MAX, 0)  # no separate mappings: the threshold for these cannot exceed 32 MB
    mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(M_TOP_PAD, 1 << 25)
