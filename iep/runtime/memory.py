"""The memory that this process can still allocate (Linux only)."""

from pathlib import Path


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
