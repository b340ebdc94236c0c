"""Devices by name, the precision in which they compute, peak memory, and errors about too little memory."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from iep.errors import InputError
from iep.runtime.distributed import local_rank, local_world_size, world_size

T = TypeVar("T", bound=nn.Module)
MEMORY_FORMATS = {"channels-first": torch.contiguous_format, "channels-last": torch.channels_last}
CPU_INFO = Path("/proc/cpuinfo")
"""Where Linux lists the instruction sets of the CPU."""


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
    return device


def resolve_precision(precision: str, device: torch.device) -> str:
    """Return `float32` or `bfloat16`; `auto` is bfloat16 where the device has instructions for it.

    These devices are GPUs of compute capability 8.0 or higher, and CPUs with AVX512-BF16 or AMX. Small networks, and
    module calls on a GPU, can be slower in bfloat16.
    """
    if precision != "auto":
        return precision
    is_cuda = device.type == "cuda"
    has_bfloat16 = torch.cuda.get_device_capability(device) >= (8, 0) if is_cuda else _computes_bfloat16(CPU_INFO)
    return "bfloat16" if has_bfloat16 else "float32"


@cache
def _computes_bfloat16(cpu_info: Path) -> bool:
    """Return whether a CPU has instructions for bfloat16; the file is long where there are many cores."""
    return re.search(r"\b(avx512_bf16|amx_bf16)\b", cpu_info.read_text()) is not None


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return a context in which networks compute in float32, bfloat16 or `auto`; weights do not change."""
    return torch.autocast(device.type, torch.bfloat16, enabled=resolve_precision(precision, device) == "bfloat16")


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes of the tensors on a CUDA device, or for other devices that of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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


def place(network: T, device: torch.device, memory_format: str | None = None) -> T:
    """Move a network to a device, with its convolutions in a format of `MEMORY_FORMATS`, and return it.

    None means channels-last, which tensor-core kernels need and which is also faster on CPUs (`iep-bench engine
    --memory-format` compares them).
    """
    chosen = MEMORY_FORMATS[memory_format or "channels-last"]
    return network.to(device, memory_format=chosen)  # type: ignore[call-overload] # torch takes both
