"""What a recorded call's result depends on besides its arguments: noted at recording, and looked at when it runs.

A call runs later than it was written. What a module is made of (parameters, buffers, whether its parts are in training)
must be the same by then, or the results would be those of another time. Other attributes of a module, and what a
function finds outside of its arguments, are not looked at.
"""

from collections.abc import Callable, Sequence
from itertools import chain

from torch import Tensor, nn


def version_of(tensor: Tensor) -> int | None:
    """How often it was changed in place; None of a tensor of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def parts_of(function: Callable) -> tuple[list[Tensor], list[bool]]:
    """A module's parameters and buffers, and which of its parts are in training; nothing of a function."""
    if not isinstance(function, nn.Module):
        return [], []
    return [*function.parameters(), *function.buffers()], [part.training for part in function.modules()]


def state_of(function: Callable) -> tuple:
    """What of its parts decides how it runs, and what shapes and dtypes it returns: nothing that keeps them alive."""
    tensors, training = parts_of(function)
    return (*training, *((tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors))


class Noted:
    """What a module is made of, and tensors that its calls share, at one time."""

    __slots__ = ("_function", "_shared", "_tensors", "_training", "_versions")

    def __init__(self, function: Callable, shared: Sequence[Tensor]):
        self._function, self._shared = function, shared
        self._tensors, self._training = parts_of(function)
        self._versions = [version_of(tensor) for tensor in chain(self._tensors, shared)]

    def change(self, changes_buffers: bool) -> str | None:
        """What is not as it was; None where all is.

        Args:
            changes_buffers: its calls themselves change them, so that it does not count when they are.
        """
        tensors, training = parts_of(self._function)
        if training != self._training:
            return "switched between training and evaluation"
        if len(tensors) != len(self._tensors) or any(map(_is_other, tensors, self._tensors)):
            return "given other parameters or buffers"
        for tensor, version in zip(chain(tensors, self._shared), self._versions, strict=True):
            if version_of(tensor) != version and (isinstance(tensor, nn.Parameter) or not changes_buffers):
                return "changed in its parameters or buffers"
        return None


def _is_other(one: Tensor, other: Tensor) -> bool:
    return one is not other
