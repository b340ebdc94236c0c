"""Trial runs: a user's code, run to see what it returns and whether many samples may share a call, leaving no trace.

Modules are called as twins of themselves, with the same parameters and copied buffers. PyTorch's cache of weights under
autocast is left as it is, and its log of what fake tensors cannot do is not written: the user is told in another way.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from iep.batching.lazy.current import recording_into

_log_of_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")


class Trial:
    """Takes the place of a recording: calls of modules are calls of their twins.

    Args:
        copied: makes a twin's buffer of a module's.
    """

    def __init__(self, copied: Callable[[Tensor], Tensor]):
        self._copied = copied
        self._twins: dict[nn.Module, nn.Module] = {}
        self._own: set[nn.Module] = set()
        self._buffers: dict[nn.Module, dict[str, tuple[Tensor, int]]] = {}
        self.watch = _Watch()

    def takes(self, module: nn.Module) -> bool:
        return module not in self._own

    def call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self.twin_of(module)(*args, **kwargs)

    def of(self, function: Callable) -> Callable:
        """What to call in the place of a function or module."""
        if isinstance(function, nn.Module):
            return self.twin_of(function)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            return MethodType(function.__func__, self.twin_of(function.__self__))
        return function

    def twin_of(self, module: nn.Module) -> nn.Module:
        if module in self._own or module in self._twins:
            return self._twins.get(module, module)
        other = self._twins[module] = twin(module, self._copied)
        self._own.update(other.modules())
        self._buffers[other] = {name: (buffer, buffer._version) for name, buffer in other.named_buffers()}
        return other

    def modules_but(self, function: Callable) -> list[nn.Module]:
        """All that were called, but itself."""
        return [module for module in self._twins if module is not function]

    def why_singly(self, function: Callable) -> str | None:
        """Why, by what was seen, one call on many samples would not be the same as one each."""
        for layer in self._own:
            if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.training and layer.track_running_stats:
                return f"{type(layer).__name__} in training changes its running statistics"
        for module, before in self._buffers.items():
            for name, buffer in module.named_buffers():
                if name not in before or before[name][0] is not buffer or before[name][1] != buffer._version:
                    whose = "its buffer" if isinstance(function, nn.Module) else f"{type(module).__name__}'s buffer"
                    return f"it changes {whose} {name}"
        return self.watch.reason


class _Watch(TorchDispatchMode):
    """Looks for functions that see all of a group where they should see one sample."""

    reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "embedding" and (kwargs.get("scale_grad_by_freq") or (len(args) > 3 and args[3])):
            self.reason = "an embedding with scale_grad_by_freq counts all indices of a call"
        elif name == "embedding_renorm_":
            self.reason = "an embedding with max_norm changes its weights"
        return func(*args, **kwargs)


@contextmanager
def trial_run(copied: Callable[[Tensor], Tensor]) -> Iterator[Trial]:
    """Within it, calls of modules are of their twins, and what autocast remembers is not touched."""
    trial = Trial(copied)
    caches, is_silent = torch.is_autocast_cache_enabled(), _log_of_fake_tensors.disabled
    torch.set_autocast_cache_enabled(False)
    _log_of_fake_tensors.disabled = True
    try:
        with recording_into(trial):
            yield trial
    finally:
        _log_of_fake_tensors.disabled = is_silent
        torch.set_autocast_cache_enabled(caches)


def twin(module: nn.Module, copied: Callable[[Tensor], Tensor]) -> nn.Module:
    """A module with the same parameters, and buffers that are `copied`; what it does to itself the other, which
    another thread may be calling, does not notice."""
    twins: dict[nn.Module, nn.Module] = {}
    for one in module.modules():
        if isinstance(one, torch.jit.ScriptModule):  # no copy of its code can be had
            return module
        twins[one] = other = object.__new__(type(one))
        other.__dict__ = dict(one.__dict__)
        for name in ("_parameters", "_buffers", "_modules"):
            other.__dict__[name] = dict(one.__dict__[name])
        if getattr(other.__dict__.get("forward"), "__self__", None) is one:
            other.forward = MethodType(one.forward.__func__, other)
    copies: dict[Tensor, Tensor] = {buffer: copied(buffer) for buffer in module.buffers()}
    for other in twins.values():
        other._modules.update((name, twins[part]) for name, part in other._modules.items() if part is not None)
        other._buffers.update((name, copies[part]) for name, part in other._buffers.items() if part is not None)
    return twins[module]
