"""The first call of a kind, which runs on its own tensors -> the kernel of all calls like it.

The call is the user's own code on real tensors, and its result is used. What it returns gives the structure and specs
of the results. Calls run at once if the first one changes its module (an attribute, a container, a buffer) or reads
values, because only then do these changes and reads happen as in plain code.
"""

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

# PyTorch has no public name that tells of hooks for all modules.
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from iep.dynamic.future import LEAF, READERS, Future, Nested, in_place_error, names, recording_into, split
from iep.dynamic.kernels import (
    COUNTS_INDICES,
    ENTERED,
    NOW,
    READS_VALUES,
    Kernel,
    Spec,
    kernel_of_result,
    name_of,
)
from iep.dynamic.rowwise import counts_indices

PLAIN: set[type] = {type(None), type(...), bool, int, float, complex, str, bytes, range, torch.Size}
PLAIN |= {torch.dtype, torch.device, torch.memory_format, torch.layout}
"""Types of values that are described completely by their `repr`."""
CONTAINERS = (list, tuple, dict, OrderedDict, defaultdict, set, frozenset, deque)
MOST_ITEMS = 64
"""The greatest length of a container whose items are compared."""
DEEPEST = 4
"""The greatest depth of containers and objects inside a module that are compared."""
VALUE_READERS = READERS | names(
    "nonzero argwhere masked_select unique unique_consecutive equal allclose is_nonzero bincount repeat_interleave "
    "data_ptr untyped_storage"
)
"""Functions that read values, or whose results have a shape that depends on them."""
BACKWARD_HOOKS = "_backward_hooks", "_backward_pre_hooks"
HOOKS = "_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS


def plain_key(value: Any) -> Any:
    """Return a key that equals those of the same values of the same type alone; None if a value is not plain.

    1, True and 1.0 have different keys, and so have 0.0 and -0.0. Functions without a closure and classes are plain.
    """
    kind = type(value)
    is_slice = kind is slice and {type(value.start), type(value.stop), type(value.step)} <= PLAIN
    if is_slice or kind in PLAIN or isinstance(value, np.generic):
        return kind, repr(value)
    is_function = kind is FunctionType and value.__closure__ is None
    is_builtin = kind is BuiltinFunctionType and isinstance(value.__self__, type | ModuleType)
    return (kind, value) if is_function or is_builtin or isinstance(value, type | Enum) else None


class Same:
    """A fact about a value of which nothing is known but its identity."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(eq=False)
class State:
    """All that is known of modules and their attributes, without the values of tensors."""

    facts: dict[str, Any] = field(default_factory=dict)
    """By path, such as `.cell.scale`, the type and value of a plain value, or what else is known of a value."""
    tensors: dict[str, tuple[Tensor, Any]] = field(default_factory=dict)
    """By path, the tensors with their versions."""
    modules: dict[int, nn.Module] = field(default_factory=dict)
    """By `id`, the modules."""
    is_complete: bool = True
    """Whether the facts are all on which the structure of a call's results can depend."""

    @cached_property
    def has_backward_hooks(self) -> bool:
        """Whether a module has backward hooks, so that its calls must run one by one, undivided."""
        return has_hooks(self.modules.values(), BACKWARD_HOOKS)

    def changed_since(self, before: "State") -> list[str]:
        """Return the paths at which something changed."""
        facts = [path for path in {**before.facts, **self.facts} if before.facts.get(path) != self.facts.get(path)]
        old = {path: (id(tensor), version) for path, (tensor, version) in before.tensors.items()}
        return facts + [path for path, (t, version) in self.tensors.items() if old.get(path) != (id(t), version)]

    def add(self, value: Any, path: str, depth: int = 0) -> None:
        """Add what is known of a value, and of what it contains."""
        kind = type(value)
        if (key := plain_key(value)) is not None:
            self.facts[path] = key
        elif isinstance(value, Tensor) and kind is not Future:
            self.facts[path] = kind, Spec.of(value), value.requires_grad
            self.tensors[path] = value, version_of(value)
        elif isinstance(value, nn.Module):
            self.facts[path] = kind
            if id(value) not in self.modules:
                self.modules[id(value)] = value
                self._add_module(value, path)
        elif kind is ref:  # to a tensor that stands elsewhere, as in `nn.LSTM`
            self.facts[path] = kind
        elif isinstance(value, CONTAINERS) and len(value) <= MOST_ITEMS and depth < DEEPEST:
            self.facts[path] = kind, len(value)
            self.is_complete &= kind in CONTAINERS
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for name, item in items:
                self.add(item, f"{path}[{name!r}]", depth + 1)
        else:
            self.facts[path] = Same(value), len(value) if isinstance(value, CONTAINERS) else None
            self.is_complete = False
            for name, item in getattr(value, "__dict__", {}).items() if depth < DEEPEST else ():
                self.add(item, f"{path}.{name}", depth + 1)

    def _add_module(self, module: nn.Module, path: str) -> None:
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                for own, part in value.items():
                    self.add(part, f"{path}.{own}")
            elif not isinstance(value, dict) or value:  # most of a module's dicts are empty
                self.add(value, f"{path}.{name}")


def state_of(*modules: nn.Module) -> State:
    """Return the state of modules and of all their parts."""
    state = State({"hooks of all modules": bool(_has_any_global_hook())})
    for module in modules:
        state.add(module, name_of(module))
    return state


def version_of(tensor: Tensor) -> tuple[int | None, bool]:
    """Return how often a tensor was changed in place, and whether it requires a gradient.

    The number is None for a tensor of inference mode, which has no counter.
    """
    return None if tensor.is_inference() else tensor._version, tensor.requires_grad


def module_of(function: Any) -> nn.Module | None:
    """Return the module that a call of a module, or of a method of a module, runs."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def has_hooks(modules: Any, names: Sequence[str] = HOOKS) -> bool:
    """Return whether any of some modules has hooks of the given kinds, or all modules have hooks."""
    # No public method of a module tells of its hooks.
    return bool(_has_any_global_hook()) or any(getattr(module, name) for module in modules for name in names)


class Observer(TorchFunctionMode):
    """The recorder of a first call. It notes what a call for many samples could not do in the same way."""

    records = False

    def __init__(self) -> None:
        super().__init__()
        self.why_now = ""
        self.before: list[tuple[nn.Module, State]] = []
        """The modules that the call ran, each with its state before it ran."""
        self.modules: dict[int, nn.Module] = {}
        """By `id`, these modules and their parts."""

    def handles(self, module: nn.Module) -> bool:
        """Note a module that is about to run."""
        if id(module) not in self.modules:
            state = state_of(module)
            self.before.append((module, state))
            self.modules |= state.modules
        return False

    def changes(self, changed: Any, *args: Any) -> None:
        """Ignore a change, as the states are compared after the call."""

    def note(self, reason: str) -> None:
        """Note why the call must run at once."""
        self.why_now = self.why_now or reason

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_mask = name == "__getitem__" and any(
            getattr(part, "dtype", None) == torch.bool for part in _indices(args[1])
        )
        if name in VALUE_READERS or is_mask or (name == "where" and len(args) + len(kwargs) == 1):
            self.note(READS_VALUES)
        if counts_indices(func, args, kwargs):
            self.note(COUNTS_INDICES)
        return func(*args, **kwargs)

    def changed(self) -> list[str]:
        """Return the paths of what the call has changed in the modules that it ran."""
        return [path for module, before in self.before for path in state_of(module).changed_since(before)]


def _indices(index: Any) -> Sequence[Any]:
    return index if isinstance(index, tuple | list) else (index,)


def _random_numbers() -> tuple:
    """Return the states of the random numbers of Python and NumPy."""
    of_numpy = np.random.get_state(legacy=False)["state"]
    return random.getstate(), of_numpy["key"].tobytes(), of_numpy["pos"]


def observe(function: Any, arguments: Nested, leaves: Sequence[Tensor]) -> tuple[Kernel, Any, dict[int, nn.Module]]:
    """Make a call on the tensors of one sample.

    Args:
        arguments: the positional arguments and those by name.
        leaves: the tensors that differ between samples.

    Returns:
        The kernel of all calls like it, the call's result, and by `id` the modules that the call ran, and their parts.

    Raises:
        ValueError: the call changes a leaf in place, or a list or dict of its arguments. Only a copy has changed.
    """
    given = [leaf.clone() for leaf in leaves]
    versions, observer = [version_of(leaf) for leaf in given], Observer()
    args, kwargs = arguments.fill(given)
    contents = list(tree_iter((args, kwargs)))
    before = _random_numbers()
    with recording_into(observer), observer:
        if (module := module_of(function)) is not None:
            observer.handles(module)
        returned = function(*args, **kwargs)
    if [version_of(leaf) for leaf in given] != versions:
        raise in_place_error(name_of(function))
    if list(map(id, tree_iter((args, kwargs)))) != list(map(id, contents)):
        what = "changes a list or dict of its arguments, which cannot be recorded: return the new values"
        raise ValueError(f"{name_of(function)} {what}")
    result, tensors = split(returned)
    opaque = [part for part in result.parts if part is not LEAF and plain_key(part) is None]
    if _random_numbers() != before:
        observer.note("it draws random numbers that PyTorch does not make")
    if changed := observer.changed():
        kernel = Kernel(NOW, f"it changes {changed[0]}", changes=True)
    elif observer.why_now:
        kernel = Kernel(NOW, observer.why_now)
    elif has_hooks(observer.modules.values()):
        kernel = Kernel(NOW, "it has hooks, which are called for each sample")
    elif opaque:
        kernel = Kernel(ENTERED, f"it returns a {type(opaque[0]).__name__}")
    else:
        specs = list(map(Spec.of, given))
        # A result without a gradient may have been detached, or only have come from a sample without one.
        is_known = all(leaf.requires_grad for leaf in given)
        outputs, grads = [Spec.of(each) for each in tensors], [each.requires_grad or not is_known for each in tensors]
        kernel = kernel_of_result(function, arguments, specs, result, outputs, grads)
    return kernel, returned, observer.modules
