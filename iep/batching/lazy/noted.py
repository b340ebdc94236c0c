"""What a recorded call's result depends on besides its arguments: noted at recording, and looked at when it runs.

A call runs later than it was written. What a module is made of (parameters, buffers, hooks, whether its parts are in
training) must be the same by then, or the results would be those of another time. Other attributes of a module, and
what a function finds outside of its arguments, are not looked at. A module's method counts as the module.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import MethodType

from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from iep.batching.lazy.direct import is_plain

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HOOKS_OF_ALL = tuple(vars(of_all_modules)[f"_global{name}"] for name in HOOKS)


def module_of(function: Callable) -> nn.Module | None:
    """The module that a call runs: itself, or what it is a method of."""
    owner = function.__self__ if isinstance(function, MethodType) else function
    return owner if isinstance(owner, nn.Module) else None


def parts_of(function: Callable) -> tuple[list[Tensor], list[bool], list[tuple]]:
    """A module's parameters and buffers, which of its parts are in training, and what calls of them run besides;
    nothing of a function."""
    module = module_of(function)
    if module is None:
        return [], [], []
    parts = list(module.modules())
    runs = [tuple(map(tuple, HOOKS_OF_ALL)), *map(_run_by, parts)]
    return [*module.parameters(), *module.buffers()], [part.training for part in parts], runs


def _run_by(part: nn.Module) -> tuple:
    """The numbers of its hooks, each of which is another's no more, and a `forward` of its own."""
    attributes = vars(part)
    return type(part), id(attributes.get("forward")), *(tuple(attributes[name]) for name in HOOKS)


def state_of(function: Callable) -> tuple:
    """What of its parts decides how it runs, and what shapes and dtypes it returns: nothing that keeps them alive."""
    tensors, training, runs = parts_of(function)
    module = module_of(function)
    plain = () if module is None else tuple(map(is_plain, module.modules()))
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors]
    return (*training, *plain, *runs, *kinds)


class Noted:
    """What a module is made of, and tensors that its calls share, at one time."""

    __slots__ = ("_function", "_runs", "_shared", "_tensors", "_training", "_versions")

    def __init__(self, function: Callable, shared: Sequence[Tensor]):
        self._function, self._shared = function, shared
        tensors, self._training, self._runs = parts_of(function)
        self._tensors = [*tensors, *shared]
        self._versions = list(map(version_of, self._tensors))

    def change(self, changes_buffers: bool) -> str | None:
        """What is not as it was; None where all is.

        Args:
            changes_buffers: its calls themselves change them, so that it does not count when they are.
        """
        tensors, training, runs = parts_of(self._function)
        if training != self._training:
            return "switched between training and evaluation"
        if runs != self._runs:
            return "given other hooks, parts or another forward"
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
