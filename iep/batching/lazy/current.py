"""What a thread is at: which recording takes its calls, in which modes of PyTorch, at which line of the user's code."""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BATCHING = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
TORCH = os.path.join(os.path.dirname(torch.__file__), "")


@contextmanager
def recording_into(recording: Any) -> Iterator[None]:
    """Within it, calls of this thread are recorded into `recording`; with None they run as ever."""
    before = current.recording
    current.recording = recording
    try:
        yield
    finally:
        current.recording = before


class _Current(threading.local):
    recording: Any = None


current = _Current()


def autocast_of_thread() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of device for which it is on, and to which dtype."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def is_in_forward() -> bool:
    """Whether a `forward` of a `torch.autograd.Function` runs: it switches off gradients of both directions."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def off_for(recording: Any) -> bool:
    """False, where gradients are off.

    Raises:
        ValueError: a `forward` of a `torch.autograd.Function` switched them off, and was given futures of `recording`.
    """
    if is_in_forward() and not recording.is_in_forward:
        raise loses_gradient()
    return False


def loses_gradient() -> ValueError:
    """Why the forward of a `torch.autograd.Function` cannot use a future."""
    return ValueError(
        "a torch.autograd.Function was given a future, whose gradient it would lose: inside the scope call it by its "
        "class, as in MyFunction.apply(x); outside, give it the future's value"
    )


def users_line() -> str:
    """File and line of the innermost caller that is neither of `iep.batching` nor of PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((BATCHING, TORCH)):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
