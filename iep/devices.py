"""The device a user names -> a torch device that is really there."""

import torch

from iep.errors import InputError


def resolve_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU; anything else is torch's own naming.

    Raises:
        InputError: the name is not a device, or this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r}: not available here ({str(error).splitlines()[0]})") from None
    if device.type == "meta":
        raise InputError(f"device {name!r}: holds no values, nothing can be computed there")
    return device
