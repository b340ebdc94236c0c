"""The device a user names -> a torch device that is really there, what it computes in, and how much memory it took."""

import resource

import torch

from iep.errors import InputError
from iep.runtime.distributed import local_rank, local_world_size, world_size


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU; anything else is torch's own naming. Of several
    processes on a machine each takes its own for `auto` and `cuda`.

    Raises:
        InputError: the name is not a device, or this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and local_world_size() > 1:
        if name != "cuda":
            raise InputError(f"device {name!r}: of a machine's processes each takes its own; give cuda, or nothing")
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r}: not available here ({str(error).splitlines()[0]})") from None
    if world_size() > 1 and device.type == "cuda":
        torch.cuda.set_device(device)  # the current device of this process, which libraries take
    if device.type == "meta":
        raise InputError(f"device {name!r}: holds no values, nothing can be computed there")
    return device


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """A context in which networks compute in `precision`, float32 or bfloat16; weights stay as they are."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")


def peak_memory(device: torch.device) -> int:
    """Bytes: on a CUDA device the most that tensors have taken there at one time, elsewhere the most that this process
    has held in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_out_of_memory(error: Exception) -> bool:
    """Was it memory that an operation on some device wanted for? Torch has a class for that on GPUs alone."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
