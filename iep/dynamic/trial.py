"""Trial runs: a user's code is run once on tensors without numbers, to see what it returns, and leaves no trace.

Modules are called as twins of themselves, with the same parameters and with copies of their buffers. A trial also finds
out what prevents many samples from sharing one call.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from iep.dynamic.future import recording_into

REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""The dicts of every module: parameters, buffers, parts and hooks of all kinds."""
_log_of_fake_tensors = logging.getLogger("torch._subclasses.fake_tensor")
_one_at_a_time = threading.RLock()
"""Fake tensors of several threads share state that they should not."""


class Trial:
    """Takes the calls of modules while a trial runs, and sends them to the modules' twins.

    Args:
        copied: makes a twin's buffer of a module's buffer.
    """

    def __init__(self, copied: Callable[[Tensor], Tensor]):
        self._copied = copied
        self._twins: dict[nn.Module, nn.Module] = {}
        self._buffers: dict[nn.Module, dict[str, tuple[Tensor, int]]] = {}
        """Of every twin, with how often they had been changed in place."""
        self.watch = _Watch()

    def takes(self, module: nn.Module) -> bool:
        """Return whether a module is not a twin itself."""
        return module not in self._buffers

    def call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the module's twin."""
        return self._twin_of(module)(*args, **kwargs)

    def stand_in(self, function: Callable) -> Callable:
        """Return what to call in the place of a function, module or method of a module."""
        if isinstance(function, nn.Module):
            return self._twin_of(function)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            return MethodType(function.__func__, self._twin_of(function.__self__))
        return function

    def why_singly(self) -> str | None:
        """Return why one call on many samples would differ from one call for each, if it would."""
        for twin, before in self._buffers.items():
            for name, buffer in twin.named_buffers(recurse=False):
                if name not in before or before[name][0] is not buffer or before[name][1] != buffer._version:
                    return f"{type(twin).__name__} changes its buffer {name}"
        return self.watch.reason

    def _twin_of(self, module: nn.Module) -> nn.Module:
        if module in self._twins:
            return self._twins[module]
        if isinstance(module, torch.jit.ScriptModule):  # its code cannot be copied
            self._buffers[module] = {}
            return module
        twin = self._twins[module] = object.__new__(type(module))
        vars(twin).update({name: copy(value) if name in REGISTRIES else value for name, value in vars(module).items()})
        for name, part in module.named_children():
            setattr(twin, name, self._twin_of(part))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(twin, name, self._copied(buffer))
        self._buffers[twin] = {name: (buffer, buffer._version) for name, buffer in twin.named_buffers(recurse=False)}
        return twin


class _Watch(TorchFunctionMode):
    """Looks for functions that depend on all samples of a call."""

    reason: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("max_norm") is not None or kwargs.get("scale_grad_by_freq"):
            self.reason = f"{func.__name__} with max_norm or scale_grad_by_freq depends on all indices of a call"
        return func(*args, **kwargs)


@contextmanager
def fake_trial() -> Iterator[Trial]:
    """Run a trial on fake tensors, whose shapes, dtypes and devices are known but not their numbers."""
    with _one_at_a_time, FakeTensorMode(allow_non_fake_inputs=True) as mode, _trial(mode.from_tensor) as trial:
        yield trial


@contextmanager
def real_trial(leaves: Sequence[Tensor]) -> Iterator[tuple[Trial, list[Tensor]]]:
    """Run a trial on copies of one sample's tensors, without gradients; random numbers are drawn anew later."""
    with torch.random.fork_rng(), torch.no_grad(), _trial(Tensor.clone) as trial:
        yield trial, [leaf.clone() for leaf in leaves]


@contextmanager
def _trial(copied: Callable[[Tensor], Tensor]) -> Iterator[Trial]:
    """Leave autocast's cache of weights as it is, count changes in place, and write no log: errors are raised."""
    grad, caches, is_silent = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _log_of_fake_tensors.disabled
    torch.set_autocast_cache_enabled(False)
    _log_of_fake_tensors.disabled = True
    trial = Trial(copied)
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), recording_into(trial), trial.watch:
            yield trial
    finally:
        _log_of_fake_tensors.disabled = is_silent
        torch.set_autocast_cache_enabled(caches)
