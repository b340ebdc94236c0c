"""Kernels, which run a group of calls that are alike. One kernel is made for all such calls.

Users write code for one sample. A group runs as `torch.vmap` of that code over its rows, or as one plain call if the
results are known to be the same (`direct.py`). Calls that allow neither run one by one, and the report gives the
reason. A trial run finds the structure of the results (`trial.py`).

Shapes: G rows of a group.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from iep.dynamic.direct import deferrable, is_batched
from iep.dynamic.future import in_place_error
from iep.dynamic.nested import Leaf, fill, mapped, split
from iep.dynamic.trial import REGISTRIES, trial_run

VMAP, DIRECT, SINGLY, NOW, STATIC = "batched by vmap", "batched", "singly", "at once", "static"
Autocast = tuple[tuple[str, torch.dtype], ...]
"""The kinds of devices for which autocast is enabled, each with its dtype."""
MOST_KERNELS = 256
"""The greatest number of kernels of one function or module that are kept."""


class Spec(NamedTuple):
    """The properties of a tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Any) -> "Spec":
        """Return the spec of a tensor or a future."""
        return cls(tensor.shape, tensor.dtype, tensor.device)


class Recorded(NamedTuple):
    """A function or module and its arguments, with a `Leaf` for every tensor that differs between samples."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def run(self, leaves: Sequence[Tensor], function: Callable | None = None) -> tuple[Any, list[Tensor]]:
        """Call `function`, or the recorded one if None; return the structure of the result and its tensors."""
        return split((function or self.function)(*fill(self.args, leaves), **fill(self.kwargs, leaves)))


@dataclass(eq=False)
class Kernel:
    """The way in which similar calls run, and the structure of their results. It holds no function and no tensors."""

    how: str
    reason: str | None = None
    """The reason why the calls are not batched; None if they are."""
    outputs: tuple[Spec, ...] = ()
    structure: Any = None
    """The result of a call, with a `Leaf` for each tensor."""
    grads: tuple[bool, ...] = ()
    """Whether each output can require a gradient; a detached tensor cannot."""


_of_modules: WeakKeyDictionary[nn.Module, dict[tuple, Kernel]] = WeakKeyDictionary()
_of_functions: dict[Callable, dict[tuple, Kernel]] = {}


def kernel_of(call: Recorded, key: tuple | None, specs: Sequence[Spec], sample: Callable[[], list[Tensor]]) -> Kernel:
    """Return the kernel that runs `call` on leaves with the given `specs`; warn if it cannot batch.

    Kernels of modules and of PyTorch's functions are kept for later scopes. Those of the user's functions are not, as
    these functions may depend on more than their arguments.

    Args:
        key: everything on which the kernel depends besides a module's parameters and parts; None if it has objects.
        sample: computes the leaves of one sample. It is called if a trial without values is not sufficient.
    """
    function, kernels = call.function, {}
    is_pytorchs = (getattr(function, "__module__", None) or "torch").startswith("torch")
    if key is not None and (isinstance(function, nn.Module) or is_pytorchs):
        kernels = (_of_modules if isinstance(function, nn.Module) else _of_functions).setdefault(function, kernels)
    key = key, state_of(function), *((Spec.of(tensor), tensor.requires_grad) for tensor in tensors_of(function))
    kernel = kernels[key] if key in kernels else _find_kernel(call, specs, sample)
    if kernel.how == SINGLY:
        _warn_singly(function, kernel.reason)
    if len(kernels) == MOST_KERNELS:  # a number that differs between calls adds a kernel for each value
        kernels.clear()
    if not (isinstance(function, nn.Module) and _has_statics(kernel.structure)):  # numbers may differ in another call
        kernels[key] = kernel
    return kernel


def _find_kernel(call: Recorded, specs: Sequence[Spec], sample: Callable[[], list[Tensor]]) -> Kernel:
    try:
        with trial_run(is_fake=True) as trial:
            leaves = list(map(_empty, specs))
            structure, tensors = call.run(leaves, trial.stand_in(call.function))
        reason = trial.why_singly()
    except DynamicOutputShapeException:
        return Kernel(NOW, "the shape of its result depends on values")
    except Exception as failure:
        depends = isinstance(failure, DataDependentOutputException)
        reason = "its control flow depends on values" if depends else _text(failure)
        with trial_run(is_fake=False) as trial:
            leaves = [leaf.clone() for leaf in sample()]
            structure, tensors = call.run(leaves, trial.stand_in(call.function))
    if any(leaf._version for leaf in leaves):
        raise in_place_error(name_of(call.function))
    outputs = tuple(map(Spec.of, tensors))
    if reason is None:
        how = DIRECT if is_batched(*call, specs) else VMAP
        return Kernel(how if tensors else STATIC, None, outputs, structure, tuple(one.requires_grad for one in tensors))
    how = NOW if not tensors or _has_statics(structure) else SINGLY
    return Kernel(how, reason, outputs, structure, tuple(one.dtype.is_floating_point for one in tensors))


def _empty(spec: Spec) -> Tensor:
    has_grad = spec.dtype.is_floating_point or spec.dtype.is_complex
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device, requires_grad=has_grad)
    return tensor.clone()  # autograd forbids changing a leaf in place; the user would see another error


def _has_statics(structure: Any) -> bool:
    found: list[bool] = []
    mapped(lambda part: found.append(part is not None and type(part) is not Leaf), structure)
    return any(found)


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


def run_group(call: Recorded, kernel: Kernel, grad: bool, autocast: Autocast, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `call`, (G, ...) each, on G rows of leaves in the modes that were active when recorded."""
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind in ("cpu", "cuda"):
                dtype = dict(autocast).get(kind)
                if dtype is not None or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, dtype is not None))
            results = _run(call, kernel, leaves)
    except Exception as failure:
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves]
        failure.add_note(f"raised by {len(leaves[0])} recorded calls of {name_of(call.function)} on shapes {shapes}")
        raise
    shapes, expected = [tuple(each.shape[1:]) for each in results], [tuple(spec.shape) for spec in kernel.outputs]
    if shapes != expected:
        if isinstance(call.function, nn.Module):
            _of_modules.pop(call.function, None)
        raise ValueError(
            f"{name_of(call.function)} returned shapes {shapes}, expected {expected}: it depends on more than its "
            "arguments; call it outside of the scope"
        )
    # In type promotion, a scalar of one sample has lower priority than a vector, and a group of scalars is a vector.
    return tuple(result.to(spec.dtype) for result, spec in zip(results, kernel.outputs, strict=True))


def _run(call: Recorded, kernel: Kernel, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    if kernel.how == DIRECT:
        return call.run(leaves, deferrable(call.function))[1]
    if kernel.how == VMAP:
        try:
            return torch.vmap(lambda *rows: tuple(call.run(rows)[1]), randomness="different")(*leaves)
        except Exception as failure:
            reason = f"vmap cannot: {_text(failure)}"
    rows = [call.run(row)[1] for row in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
    if kernel.how == VMAP:  # the code itself is valid, because it has run
        kernel.how, kernel.reason = SINGLY, reason
        _warn_singly(call.function, reason)
    return [torch.stack(results) for results in zip(*rows, strict=True)]


def _warn_singly(function: Callable, reason: str) -> None:
    warnings.warn(f"{name_of(function)} runs singly, sample by sample: {reason}", stacklevel=2)


def name_of(function: Callable) -> str:
    """Return a module's class, or a function's name without underscores around it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    name = getattr(function, "__name__", None) or repr(function)
    if is_autograd_function(function):
        return f"{function.__self__.__name__}.apply"
    if name == "__get__":  # an attribute of a tensor, such as T
        name = function.__self__.__name__
    return name.strip("_") or name
