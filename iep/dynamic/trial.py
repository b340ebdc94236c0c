"""Trial runs of a user's code on tensors without values, which find the structure of its results without side effects.

Twins replace the modules in a trial. They have the same parameters and copies of the buffers. A trial also finds
reasons why several samples cannot share one call.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
_one_at_a_time = threading.RLock()
"""A lock for fake tensors, which wrongly share state between threads."""
_saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The function that returns the hooks by which activation checkpoints avoid saving tensors."""


class Trial:
    """The receiver of module calls during a trial, which passes them to twins with `copied` buffers."""

    def __init__(self, copied: Callable[[Tensor], Tensor]):
        self._copied = copied
        self._twins: dict[nn.Module, nn.Module] = {}
        self._buffers: dict[nn.Module, list[tuple]] = {}
        """The buffers of every twin before its call."""
        self.watch = _Watch()

    def handles(self, module: nn.Module) -> bool:
        """Return whether a module is not a twin itself."""
        return module not in self._buffers

    def call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the module's twin."""
        return self._twin_of(module)(*args, **kwargs)

    def stand_in(self, function: Callable) -> Callable:
        """Return the replacement of a function, module or method of a module in a trial."""
        if isinstance(function, nn.Module):
            return self._twin_of(function)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            return MethodType(function.__func__, self._twin_of(function.__self__))
        return function

    def why_singly(self) -> str | None:
        """Return the reason why a call on many samples would differ from one call for each, or None."""
        for twin, before in self._buffers.items():
            if has_backward_hooks(twin):
                return f"{type(twin).__name__} has backward hooks, which are called for each sample"
            changed = [name for name, *state in _buffers_of(twin) if (name, *state) not in before]
            if changed:
                return f"{type(twin).__name__} changes its buffer {changed[0]}"
        return self.watch.reason

    def _twin_of(self, module: nn.Module) -> nn.Module:
        if module in self._twins:
            return self._twins[module]
        if isinstance(module, torch.jit.ScriptModule):  # its code cannot be copied
            self._buffers[module] = []
            return module
        twin = self._twins[module] = object.__new__(type(module))
        vars(twin).update({name: copy(value) if name in REGISTRIES else value for name, value in vars(module).items()})
        for name, part in module.named_children():
            setattr(twin, name, self._twin_of(part))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(twin, name, self._copied(buffer))
        self._buffers[twin] = _buffers_of(twin)
        return twin


class _Watch(TorchFunctionMode):
    """A mode that finds operations that depend on all samples of a call or that vmap cannot run; `reason` names one."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None
        self._outer_hooks = _saving_hooks(True)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if kwargs and kwargs.get("scale_grad_by_freq"):
            self.reason = "scale_grad_by_freq counts the indices of all samples"
        if func is Tensor.register_hook:
            self.reason = "it hooks gradients of tensors, which are those of one sample"
        if _saving_hooks(True) != self._outer_hooks:
            self.reason = 'it saves tensors by hooks, as checkpoint does; granularity="op" batches it without them'
        return func(*args, **(kwargs or {}))


def has_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module itself, without its parts, has hooks that the backward pass calls."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def _buffers_of(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), buffer._version) for name, buffer in module.named_buffers(recurse=False)]


@contextmanager
def trial_run(is_fake: bool) -> Iterator[Trial]:
    """Run a trial on fake tensors, which have no values, or on one sample without gradients.

    A trial preserves the weights cached by autocast and the state of random number generators. Inference mode is off,
    so that tensors count their changes in place.
    """
    grad, is_cached = is_fake and torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    with ExitStack() as stack:
        copied = Tensor.clone
        if is_fake:
            stack.enter_context(_one_at_a_time)
            copied = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True)).from_tensor
            log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the errors that are also raised
            stack.callback(setattr, log, "disabled", log.disabled)
            log.disabled = True
        else:
            stack.enter_context(torch.random.fork_rng())
        stack.callback(torch.set_autocast_cache_enabled, is_cached)
        torch.set_autocast_cache_enabled(False)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        trial = Trial(copied)
        stack.enter_context(recording_into(trial))
        stack.enter_context(trial.watch)
        yield trial
