"""Kernels, which run a group of calls that are alike. One kernel is made for all such calls.

Users write code for one sample. A group runs as `torch.vmap` of that code over its rows, or as one plain call if the
results are known to be the same (`rowwise.py`). Calls that allow neither run one by one, and the report gives the
reason. A run on fake tensors, which have no values, finds the structure of the results without side effects: twins with
the same parameters and copies of the buffers replace the modules.

Shapes: G rows of a group.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

# This is the name in PyTorch's documentation of fake tensors; there is no public one.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from iep.batching.layers import computed_by
from iep.dynamic.future import LEAF, Nested, in_place_error, recording_into, split
from iep.dynamic.rowwise import deferrable, is_batched

VMAP, DIRECT, SINGLY, NOW, STATIC = "batched by vmap", "batched", "singly", "at once", "static"
MOST_KERNELS = 256
"""The greatest number of kernels of one function or module that are kept."""
NO_RESULT, _ = split(None)
REGISTRIES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
"""The dicts of every module: parameters, buffers, parts and hooks of all kinds."""
_one_at_a_time = threading.RLock()
"""A lock for fake tensors, which wrongly share state between threads."""


class Spec(NamedTuple):
    """The properties of a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Any) -> "Spec":
        """Return the spec of a tensor or a future."""
        return cls(tensor.shape, tensor.dtype, tensor.device)


@dataclass(eq=False)
class Kernel:
    """The way in which similar calls run, and the structure of their results. It holds no function and no tensors."""

    how: str
    reason: str = ""
    """The reason why the calls are not batched; empty if they are."""
    outputs: tuple[Spec, ...] = ()
    result: Nested = NO_RESULT
    """The structure of the result of a call; not known if `how` is `NOW`."""
    grads: tuple[bool, ...] = ()
    """Whether each output can require a gradient; a detached tensor cannot."""


@dataclass(eq=False, slots=True)
class Op:
    """A call that is recorded, once or more."""

    index: int
    function: Callable
    """A function or module."""
    arguments: Nested
    """The positional arguments and those by name, with a placeholder for each tensor that differs between samples."""
    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """The kinds of devices for which autocast was enabled, each with its dtype."""
    kernel: Kernel
    columns: tuple[int, ...]
    """The columns of the results."""
    result_of: Callable[[list], Any]
    """The function from the tensors or futures of a call to its result."""
    noted: tuple
    """The state on which the calls depend besides their arguments, at the time of the first recorded call."""


_of_modules: WeakKeyDictionary[nn.Module, dict[tuple, Kernel]] = WeakKeyDictionary()
_of_functions: dict[Callable, dict[tuple, Kernel]] = {}


def kernel_of(function: Callable, arguments: Nested, modes: tuple, specs: Sequence[Spec]) -> Kernel:
    """Return the kernel of calls on leaves with the given `specs`, in the given modes of PyTorch.

    Kernels of modules and of PyTorch's functions are kept for later scopes. Those of the user's functions are not, as
    these functions may depend on more than their arguments.
    """
    kernels: dict[tuple, Kernel] = {}
    if isinstance(function, nn.Module):
        kernels = _of_modules.setdefault(function, kernels)
    elif (getattr(function, "__module__", None) or "torch").startswith("torch"):
        kernels = _of_functions.setdefault(function, kernels)
    described = [
        (Spec.of(part), part.requires_grad) if isinstance(part, Tensor) else (type(part), repr(part))
        for part in (*arguments.parts, *tensors_of(function))
    ]
    # A `repr` keeps no object alive, and distinguishes 1 from True.
    key = arguments.structure, *modes, *specs, state_of(function), *described
    kernel = kernels[key] if key in kernels else _find_kernel(function, arguments, specs)
    if len(kernels) == MOST_KERNELS:  # a number that differs between calls adds a kernel for each value
        kernels.clear()
    if not (isinstance(function, nn.Module) and _has_statics(kernel)):  # numbers may differ in another call
        kernels[key] = kernel
    return kernel


def _find_kernel(function: Callable, arguments: Nested, specs: Sequence[Spec]) -> Kernel:
    try:
        with fake_run() as fake:
            leaves = list(map(_empty, specs))
            result, tensors = _call(fake.stand_in(function), arguments, leaves)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return Kernel(NOW, "its control flow or a shape depends on values")
    except Exception as failure:  # if the user's code is wrong, it fails again when it runs
        return Kernel(NOW, _text(failure))
    if any(leaf._version for leaf in leaves):
        raise in_place_error(name_of(function))
    reason = fake.why_singly()
    args, kwargs = arguments.fill([LEAF] * len(specs))
    is_rowwise = is_batched(function, args, kwargs, specs)
    how = SINGLY if reason else DIRECT if is_rowwise else VMAP
    kernel = Kernel(how, reason, tuple(map(Spec.of, tensors)), result, tuple(one.requires_grad for one in tensors))
    if not tensors or (reason and _has_statics(kernel)):
        kernel.how = NOW if reason else STATIC
    return kernel


def _call(function: Callable, arguments: Nested, leaves: Iterable[Tensor]) -> tuple[Nested, list[Tensor]]:
    args, kwargs = arguments.fill(leaves)
    return split(function(*args, **kwargs))


def _empty(spec: Spec) -> Tensor:
    has_grad = spec.dtype.is_floating_point or spec.dtype.is_complex
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device, requires_grad=has_grad)
    return tensor.clone()  # autograd forbids changing a leaf in place; the user would see another error


def _has_statics(kernel: Kernel) -> bool:
    return any(part is not None and part is not LEAF for part in kernel.result.parts)


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {next(iter(str(failure).strip().splitlines()), '')}"


def is_autograd_function(function: Callable) -> bool:
    """Return whether a function is the `apply` of a `torch.autograd.Function`."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def tensors_of(function: Callable) -> list[Tensor]:
    """Return the parameters and buffers of the module that a call runs."""
    return [tensor for part in _parts_of(function) for tensor in (*part.parameters(False), *part.buffers(False))]


def state_of(function: Callable) -> tuple:
    """Return the state of a module, besides its parameters and buffers, that decides how its calls run."""
    return tuple(
        (type(part), part.training, "forward" in vars(part), *(tuple(vars(part).get(name, ())) for name in REGISTRIES))
        for part in _parts_of(function)
    )


def _parts_of(function: Callable) -> list[nn.Module]:
    module = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return list(module.modules()) if isinstance(module, nn.Module) else []


def run_group(op: Op, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the results of calls, (G, ...) each, on G rows of leaves in the modes that were active when recorded."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(op.grad))
        for kind in ("cpu", "cuda"):
            dtype = dict(op.autocast).get(kind)
            if dtype is not None or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, dtype is not None))
        results = _run(op, leaves)
    shapes, expected = [tuple(each.shape[1:]) for each in results], [tuple(spec.shape) for spec in op.kernel.outputs]
    if shapes != expected:
        why = "it depends on more than its arguments"
        raise ValueError(f"{name_of(op.function)} returned shapes {shapes}, expected {expected}: {why}")
    # In type promotion, a scalar of one sample has lower priority than a vector, and a group of scalars is a vector.
    return tuple(result.to(spec.dtype) for result, spec in zip(results, op.kernel.outputs, strict=True))


def _run(op: Op, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    kernel = op.kernel
    if kernel.how == DIRECT:
        return _call(deferrable(op.function), op.arguments, leaves)[1]
    if kernel.how == VMAP:
        try:
            run = torch.vmap(lambda *row: tuple(_call(op.function, op.arguments, row)[1]), randomness="different")
            with computed_by(None):  # deferred weight gradients do not work within vmap
                return run(*leaves)
        except Exception as failure:
            reason = f"vmap cannot: {_text(failure)}"
    samples = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    rows = [_call(op.function, op.arguments, sample)[1] for sample in samples]
    if kernel.how == VMAP:  # the code itself is valid, because it has run
        kernel.how, kernel.reason = SINGLY, reason
    warnings.warn(f"{name_of(op.function)} runs singly, sample by sample: {kernel.reason}", stacklevel=2)
    return [torch.stack(results) for results in zip(*rows, strict=True)]


def name_of(function: Callable) -> str:
    """Return a module's class, or a function's name without underscores around it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    name = getattr(function, "__qualname__" if is_autograd_function(function) else "__name__", None)
    return name.strip("_") if name else repr(function)


class FakeRun(TorchFunctionMode):
    """The receiver of module calls during a run with fake tensors, which passes them to twins.

    As a mode of functions it also notices `scale_grad_by_freq`, which no result of a run on fake tensors shows.
    """

    def __init__(self, mode: FakeTensorMode):
        super().__init__()
        self._mode = mode
        self._twins: dict[nn.Module, nn.Module] = {}
        self._buffers: dict[nn.Module, list[tuple]] = {}
        """The buffers of every twin before its call."""
        self._counts_indices = False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._counts_indices |= bool(kwargs and kwargs.get("scale_grad_by_freq"))
        return func(*args, **(kwargs or {}))

    def handles(self, module: nn.Module) -> bool:
        """Return whether a module is not a twin itself."""
        return module not in self._buffers

    def call(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the module's twin."""
        return self._twin_of(module)(*args, **kwargs)

    def stand_in(self, function: Callable) -> Callable:
        """Return the replacement of a function, module or method of a module."""
        if isinstance(function, nn.Module):
            return self._twin_of(function)
        if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module):
            return MethodType(function.__func__, self._twin_of(function.__self__))
        return function

    def why_singly(self) -> str:
        """Return the reason why a call on many samples would silently differ from one call for each, or ""."""
        for twin, before in self._buffers.items():
            if has_backward_hooks(twin):
                return f"{type(twin).__name__} has backward hooks, which are called for each sample"
            changed = [name for name, *state in _buffers_of(twin) if (name, *state) not in before]
            if changed:
                return f"{type(twin).__name__} changes its buffer {changed[0]}"
        return "scale_grad_by_freq counts the indices of all samples" if self._counts_indices else ""

    def _twin_of(self, module: nn.Module) -> nn.Module:
        if module in self._twins:
            return self._twins[module]
        twin = self._twins[module] = object.__new__(type(module))
        vars(twin).update({name: copy(value) if name in REGISTRIES else value for name, value in vars(module).items()})
        for name, part in module.named_children():
            setattr(twin, name, self._twin_of(part))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(twin, name, self._mode.from_tensor(buffer))
        self._buffers[twin] = _buffers_of(twin)
        return twin


def has_backward_hooks(function: Callable) -> bool:
    """Return whether a module or a part of it has backward hooks, so that its calls must run one by one, undivided."""
    # No public method of a module tells of its hooks.
    return any(part._backward_hooks or part._backward_pre_hooks for part in _parts_of(function))


def _buffers_of(module: nn.Module) -> list[tuple[str, int, int]]:
    return [(name, id(buffer), buffer._version) for name, buffer in module.named_buffers(recurse=False)]


@contextmanager
def fake_run() -> Iterator[FakeRun]:
    """Run a block with fake tensors. Inference mode is off, so that tensors count their changes in place."""
    grad, is_cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # it would keep fake weights
    try:
        with _one_at_a_time, FakeTensorMode(allow_non_fake_inputs=True) as mode:
            run = FakeRun(mode)
            with torch.inference_mode(False), torch.set_grad_enabled(grad), recording_into(run), run:
                yield run
    finally:
        torch.set_autocast_cache_enabled(is_cached)
