"""What a recorded call's result depends on besides its arguments: noted at recording, and looked at when it runs.

A call runs later than it was written. What a module is made of (parameters, buffers, whether its parts are in training)
must be the same by then, or the results would be those of another time. Other attributes of a module, and what a
function finds outside of its arguments, are not looked at.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from torch import Tensor, nn


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
        tensors, self._training = parts_of(function)
        self._tensors = [*tensors, *shared]
        self._versions = list(map(version_of, self._tensors))

    def change(self, changes_buffers: bool) -> str | None:
        """What is not as it was; None where all is.

        Args:
            changes_buffers: its calls themselves change them, so that it does not count when they are.
        """
        tensors, training = parts_of(self._function)
        if training != self._training:
            return "switched between training and evaluation"
        then, now = zip(self._tensors, self._versions, strict=True), [*tensors, *self._shared]
        if changes_buffers:
            then, now = [one for one in then if isinstance(one[0], nn.Parameter)], list(filter(_is_parameter, now))
        for (tensor, version), other in zip_longest(then, now, fillvalue=(None, None)):
            if tensor is not other:
                return "given other parameters or buffers"
            if version_of(tensor) != version:
                return "changed in its parameters or buffers"
        return None


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def version_of(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; None of a tensor of inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version
