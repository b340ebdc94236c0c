"""Devices by name, the precision in which they compute, and memory: used, available, and errors about too little."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from iep.errors import InputError
from iep.runtime.distributed import local_rank, local_world_size, world_size


def resolve_device(name: str) -> torch.device:
    """Return the device that has one of torch's names, or for `auto` the first CUDA device or else the CPU.

    If the job has several processes on this machine, `auto` and `cuda` give each of them a different CUDA device.

    Raises:
        InputError: the name is not a device, or this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and local_world_size() > 1:
        if name != "cuda":
            raise InputError(f"device {name!r}: each process on a machine uses its own device; give cuda or auto")
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r}: not available here ({str(error).splitlines()[0]})") from None
    if world_size() > 1 and device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL and other libraries use the current device of the process
    if device.type == "meta":
        raise InputError(f"device {name!r}: stores no values and cannot be used")
    return device


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which networks compute in `precision`, float32 or bfloat16; weights do not change."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes of the tensors on a CUDA device, or for other devices that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def available_memory() -> int:
    """Return the number of bytes that this process can still allocate, given the machine and its control groups."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *left_in_groups(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())])


def left_in_groups(root: Path, groups: str) -> list[int]:
    """Return the number of free bytes of each control group (version 2) with a limit; cached file pages count as free.

    Args:
        root: the directory where control groups are mounted. A container mounts only its own group, as the root.
        groups: the content of /proc/self/cgroup.
    """
    left = []
    for line in (line for line in groups.splitlines() if line.startswith("0::")):
        inner = root / line.removeprefix("0::").lstrip("/")
        for group in (inner, *inner.parents):
            if (group / "memory.max").exists() and (most := (group / "memory.max").read_text().strip()) != "max":
                counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                used = int((group / "memory.current").read_text()) - int(counts.get("inactive_file", 0))
                left.append(int(most) - used)
    return left


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that memory ran out. PyTorch has an exception class for this only on GPUs."""
    words = ("allocate memory", "Storage size calculation overflowed")
    is_cpu = isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    return is_cpu or isinstance(error, (torch.OutOfMemoryError, MemoryError))


@contextmanager
def enough_memory(device: torch.device, what: str, setting: str) -> Iterator[None]:
    """Report running out of memory in the block in one line.

    Raises:
        InputError: there was not enough memory for `what`; the message advises to lower `setting`.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"{device}: not enough memory for {what}; lower {setting}") from None
