"""Functions with gradients of their own (`torch.autograd.Function`): a call on futures is recorded as one node.

Their `forward` runs without gradients; what it calls on futures would be recorded so, and the gradient lost.
"""

from typing import Any

import torch

from iep.batching.lazy.future import Future, first_pending, values_of

_original = vars(torch.autograd.Function)["apply"]


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    given = (*args, *kwargs.values())
    if not any(type(value) is Future for value in given):
        return _original.__get__(None, cls)(*args, **kwargs)
    pending = first_pending(given)
    if pending is None:
        return _original.__get__(None, cls)(*values_of(args), **values_of(kwargs))
    return pending._column.recording.record(_original.__get__(None, cls), args, kwargs)


def patch_apply() -> None:
    """Let `apply` of all such functions take futures."""
    torch.autograd.Function.apply = classmethod(_apply)


def unpatch_apply() -> None:
    """Undo it."""
    torch.autograd.Function.apply = _original
