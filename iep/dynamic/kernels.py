"""How calls that are alike run on a group, found out once for all of them.

Users write code for one sample. A group runs as `torch.vmap` of that code over its rows, or as one plain call where
that is known to be the same (`direct.py`). What can do neither runs singly, row by row, and the report says why.

Shapes: G rows of a group.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from iep.dynamic.direct import is_batched
from iep.dynamic.future import in_place_error
from iep.dynamic.nested import Leaf, fill, mapped, split
from iep.dynamic.trial import REGISTRIES, fake_trial, real_trial

VMAP, DIRECT, SINGLY, NOW, STATIC = "batched by vmap", "batched", "singly", "at once", "static"
MOST_KERNELS = 256
"""The most kernels that are remembered of one function or module."""


class Spec(NamedTuple):
    """A tensor without its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Modes(NamedTuple):
    """The modes of PyTorch on which the result of a call depends."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    """The kinds of device for which autocast is on, and to which dtype."""


class Call(NamedTuple):
    """A function or module and its arguments, with a `Leaf` for every tensor that differs between samples."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        """Call the function with `leaves` in their places."""
        return self.function(*fill(self.args, leaves), **fill(self.kwargs, leaves))


@dataclass(eq=False)
class Kernel:
    """How calls that are alike run, and what they return. Holds neither their function nor tensors."""

    how: str
    reason: str | None = None
    """Why the calls are not batched."""
    outputs: tuple[Spec, ...] = ()
    structure: Any = None
    """What a call returns, with a `Leaf` for each tensor."""
    grads: tuple[bool, ...] = ()
    """Which outputs can require gradients; a detached tensor cannot."""


_of_modules: WeakKeyDictionary[nn.Module, dict[tuple, Kernel]] = WeakKeyDictionary()
_of_functions: dict[Callable, dict[tuple, Kernel]] = {}


def remembered_kernels(function: Callable) -> dict[tuple, Kernel]:
    """Return the kernels of a module, which are kept as long as it lives, or of a function of PyTorch, by key."""
    kernels = (_of_modules if isinstance(function, nn.Module) else _of_functions).setdefault(function, {})
    if len(kernels) > MOST_KERNELS:  # a number that differs from call to call makes ever more of them
        kernels.clear()
    return kernels


def state_of(function: Callable) -> tuple:
    """Return what of a module decides how its calls run, besides the values of its parameters and buffers."""
    parts = tuple(module.modules()) if (module := module_of(function)) is not None else ()
    return tuple(
        (type(part), part.training, "forward" in vars(part), *(tuple(vars(part).get(name, ())) for name in REGISTRIES))
        for part in parts
    )


def module_of(function: Callable) -> nn.Module | None:
    """Return the module that a call runs, which may be one of its methods."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def tensors_of(function: Callable) -> list[Tensor]:
    """Return the parameters and buffers of the module that a call runs."""
    module = module_of(function)
    return [] if module is None else [*module.parameters(), *module.buffers()]


def find_kernel(call: Call, specs: Sequence[Spec], sample: Callable[[], list[Tensor]]) -> Kernel:
    """Return how `call` runs on leaves like `specs`.

    Args:
        sample: computes the leaves of one sample; called where a trial without numbers is not enough.

    Raises:
        ValueError: the call changes one of its arguments in place.
        Exception: what the call itself raises.
    """
    try:
        with fake_trial() as trial:
            leaves = [_leaf(spec) for spec in specs]
            versions = [leaf._version for leaf in leaves]
            result = call._replace(function=trial.stand_in(call.function))(leaves)
        reason = trial.why_singly()
    except DynamicOutputShapeException:
        return Kernel(NOW, "the shape of its result depends on values")
    except Exception as failure:
        reason = "its control flow depends on values"
        if not isinstance(failure, DataDependentOutputException):
            reason = _text(failure)
        with real_trial(sample()) as (trial, leaves):
            versions = [leaf._version for leaf in leaves]
            result = call._replace(function=trial.stand_in(call.function))(leaves)
    if [leaf._version for leaf in leaves] != versions:
        raise in_place_error(name_of(call.function))
    structure, tensors = split(result)
    outputs = tuple(Spec(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
    if reason is None:
        how = DIRECT if is_batched(*call, specs) else VMAP
        return Kernel(how if tensors else STATIC, None, outputs, structure, tuple(one.requires_grad for one in tensors))
    how = NOW if not tensors or has_statics(structure) else SINGLY
    return Kernel(how, reason, outputs, structure, tuple(one.dtype.is_floating_point for one in tensors))


def _leaf(spec: Spec) -> Tensor:
    """Return a tensor with a gradient, where it can have one; not a leaf of autograd, which may not be changed."""
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
    return tensor.requires_grad_().clone() if torch.is_grad_enabled() and (tensor.is_floating_point() or tensor.is_complex()) else tensor


def has_statics(structure: Any) -> bool:
    """Return whether there are numbers or other objects among the tensors."""
    found: list[bool] = []
    mapped(lambda part: found.append(part is not None and type(part) is not Leaf), structure)
    return any(found)


def _text(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"


def run_group(call: Call, kernel: Kernel, modes: Modes, *leaves: Tensor) -> tuple[Tensor, ...]:
    """Return the results of `call` on G rows of leaves, (G, ...) each, in the modes in which it was recorded.

    Raises:
        ValueError: the results are not those that the kernel says.
        Exception: what the call itself raises, with a note that names it.
    """
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(modes.grad))
            for kind in ("cpu", "cuda"):
                dtype = dict(modes.autocast).get(kind)
                if dtype is not None or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, dtype is not None))
            return _run(call, kernel, leaves)
    except Exception as failure:
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves]
        failure.add_note(
            f"raised by {name_of(call.function)} on {len(leaves[0])} recorded calls with arguments of shapes {shapes}"
        )
        raise


def _run(call: Call, kernel: Kernel, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if kernel.how == VMAP:
        try:
            results = torch.vmap(lambda *rows: tuple(split(call(rows))[1]), randomness="different")(*leaves)
        except Exception as failure:
            results = _run_singly(call, kernel, leaves)  # raises what is wrong with the code itself
            kernel.how, kernel.reason = SINGLY, f"vmap cannot: {_text(failure)}"
            warn_singly(call.function, kernel.reason)
            return results
    elif kernel.how == DIRECT:
        results = tuple(split(call(leaves))[1])
    else:
        return _run_singly(call, kernel, leaves)
    _check(call, kernel, [(result.shape[1:], result.dtype) for result in results], torch.can_cast)
    # A number of one sample counts for less than a vector in the dtype of a result; a group of numbers is a vector.
    return tuple(result.to(spec.dtype) for result, spec in zip(results, kernel.outputs, strict=True))


def _run_singly(call: Call, kernel: Kernel, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    rows = [split(call(row))[1] for row in zip(*(leaf.unbind(0) for leaf in leaves), strict=True)]
    for row in rows:
        _check(call, kernel, [(result.shape, result.dtype) for result in row], torch.dtype.__eq__)
    return tuple(torch.stack(results) for results in zip(*rows, strict=True))


def _check(call: Call, kernel: Kernel, found: list[tuple], is_dtype: Callable[[Any, Any], bool]) -> None:
    expected = [(spec.shape, spec.dtype) for spec in kernel.outputs]
    if [shape for shape, _ in found] == [shape for shape, _ in expected] and all(
        is_dtype(dtype, other) for (_, dtype), (_, other) in zip(found, expected, strict=True)
    ):
        return
    if isinstance(call.function, nn.Module):
        _of_modules.pop(call.function, None)
    texts = [" and ".join(f"{dtype} of shape {tuple(shape)}" for shape, dtype in kinds) for kinds in (found, expected)]
    raise ValueError(
        f"{name_of(call.function)} returned tensors of {texts[0]}, after {texts[1]} for a call alike: it depends on "
        "more than its arguments; call it outside of the scope"
    )


def warn_singly(function: Callable, reason: str) -> None:
    """Warn that calls of a function are not batched."""
    warnings.warn(f"{name_of(function)} runs singly, sample by sample: {reason}", stacklevel=2)


def name_of(function: Callable) -> str:
    """Return a module's class, or a function's name without underscores around it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{owner.__name__}.apply"
    name = getattr(function, "__name__", None) or repr(function)
    if name == "__get__":  # an attribute of a tensor, such as T
        name = getattr(owner, "__name__", name)
    return name.strip("_") or name
