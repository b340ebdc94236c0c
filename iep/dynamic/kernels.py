"""Kernels, which run a group of calls that are alike. One kernel is made for all such calls.

Users write code for one sample. A group runs as `torch.vmap` of that code over its rows, or as one plain call if the
results are known to be the same (`rowwise.py`). Calls that allow neither run one by one, and the report gives the
reason. The kernel of a module or of a user's function is found by observing its first call (`observing.py`); the kernel
of one of PyTorch's functions by calling it on meta tensors, which have no values.

Shapes: G rows of a group.
"""

import gc
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from iep.dynamic.future import LEAF, Nested, in_place_error, split
from iep.dynamic.rowwise import counts_indices, is_batched, run_on_group
from iep.kernels.layers import computed_by

VMAP, LOOPED, DIRECT, SINGLY = "batched by vmap", "looped by vmap", "batched", "singly"
NOW, ENTERED = "at once", "entered"
"""Calls that are not recorded run at once; if they are entered, the calls that they make are recorded."""
NO_RESULT, _ = split(None)
READS_VALUES = "its control flow or a shape depends on values"
COUNTS_INDICES = "scale_grad_by_freq counts the indices of all samples"


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
    """The structure of the result of a call; not known if the calls are not recorded."""
    grads: tuple[bool, ...] = ()
    """Whether each output can require a gradient; a detached tensor cannot."""
    changes: bool = False
    """Whether the calls change a module. They then run at once."""
    has_run: bool = False
    """Whether a group has run by vmap, and was watched."""


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
    has_grad: bool
    """Whether the call reads parameters that require gradients, or may do so."""
    state: Any
    """The state of the function's module, with which the calls were recorded."""


def kernel_of_torch(function: Callable, arguments: Nested, specs: Sequence[Spec]) -> Kernel:
    """Return the kernel of calls of one of PyTorch's functions, found on meta tensors, which have no values.

    Args:
        arguments: the positional arguments and those by name.
        specs: the specs of the leaves of `arguments`.

    Raises:
        ValueError: the function changes a leaf in place.
    """
    if function in (functional.batch_norm, functional.instance_norm) and any(part is True for part in arguments.parts):
        return Kernel(NOW, "it changes running statistics")  # which a call on meta tensors does not show
    if counts_indices(function, *arguments.fill([LEAF] * len(specs))):
        return Kernel(NOW, COUNTS_INDICES)
    device = specs[0].device
    with torch.inference_mode(False):  # so that tensors count their changes in place
        leaves = [_on_meta(spec, spec.dtype.is_floating_point or spec.dtype.is_complex) for spec in specs]
        constants = {
            n: _on_meta(part, part.requires_grad) for n, part in enumerate(arguments.parts) if isinstance(part, Tensor)
        }
    own = device.type, str(device)
    parts = [
        "meta" if isinstance(part, str | torch.device) and str(part) in own else constants.get(n, part)
        for n, part in enumerate(arguments.parts)
    ]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            result, tensors = call_on(function, Nested(arguments.structure, parts), leaves)
    except NotImplementedError:
        return Kernel(NOW, READS_VALUES)
    except Exception as failure:  # if the user's code is wrong, it fails again when it runs
        return Kernel(NOW, _text(failure))
    if any(leaf._version for leaf in leaves):
        raise in_place_error(name_of(function))
    if any(tensor._version for tensor in constants.values()):
        return Kernel(NOW, "it changes an argument that all calls share")
    outputs = [Spec(each.shape, each.dtype, device if each.is_meta else each.device) for each in tensors]
    grads = [each.requires_grad for each in tensors]
    return kernel_of_result(function, arguments, specs, result, outputs, grads)


def _on_meta(spec: Spec | Tensor, requires_grad: bool) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta", requires_grad=requires_grad)
    return tensor.clone()  # autograd forbids changing a leaf in place; the user would see another error


def kernel_of_result(
    function: Callable,
    arguments: Nested,
    specs: Sequence[Spec],
    result: Nested,
    outputs: Sequence[Spec],
    grads: Sequence[bool],
) -> Kernel:
    """Return the kernel of calls on leaves with the given `specs`, whose results are known.

    Args:
        result, outputs, grads: the structure of the result of a call, the specs of its tensors, and whether each can
            require a gradient.
    """
    if not outputs:
        return Kernel(NOW, "it returns no tensor")
    args, kwargs = arguments.fill([LEAF] * len(specs))
    how = DIRECT if is_batched(function, args, kwargs, specs) else VMAP
    return Kernel(how, "", tuple(outputs), result, tuple(grads))


def call_on(function: Callable, arguments: Nested, leaves: Iterable[Tensor]) -> tuple[Nested, list[Tensor]]:
    """Call a function on leaves, and return the structure of its result and its tensors."""
    args, kwargs = arguments.fill(leaves)
    return split(function(*args, **kwargs))


def _text(failure: Exception) -> str:
    return f"{type(failure).__name__}: {next(iter(str(failure).strip().splitlines()), '')}"


def is_autograd_function(function: Callable) -> bool:
    """Return whether a function is the `apply` of a `torch.autograd.Function`."""
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


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
        raise _differs(op, f"shapes {shapes}", expected)
    # In type promotion, a scalar of one sample has lower priority than a vector, and a group of scalars is a vector.
    return tuple(result.to(spec.dtype) for result, spec in zip(results, op.kernel.outputs, strict=True))


def _run(op: Op, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    kernel = op.kernel
    if kernel.how == DIRECT:
        return _call(op, leaves, run_on_group(op.function))
    if kernel.how in (VMAP, LOOPED):
        try:
            return _run_vmap(op, leaves)
        except CallError:
            raise
        except Exception as failure:
            reason = f"vmap cannot: {_text(failure)}"
    samples = zip(*(leaf.unbind(0) for leaf in leaves), strict=True)
    rows = [_call(op, sample) for sample in samples]
    if kernel.how != SINGLY:  # the code itself is valid, because it has run
        kernel.how, kernel.reason = SINGLY, reason
    warnings.warn(f"{name_of(op.function)} runs singly, sample by sample: {kernel.reason}", stacklevel=2)
    return [torch.stack(results) for results in zip(*rows, strict=True)]


def _run_vmap(op: Op, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    run = partial(torch.vmap, randomness="different")
    with computed_by(None):  # vmap does not compose with deferral
        if op.kernel.has_run:
            return run(lambda *row: tuple(_call(op, row)))(*leaves)
        rows = _Rows()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results = run(lambda *row: rows.call(op, row))(*leaves)
    if rows.are_kept():
        raise CallError(
            f"{name_of(op.function)} keeps a tensor that it computes outside of its arguments, results and attributes, "
            "as in a global list: call it outside of the scope"
        )
    for each in caught:
        if (slow := re.search(r"batching rule for (aten::\w+)", str(each.message))) is None:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        else:
            op.kernel.how, op.kernel.reason = LOOPED, f"vmap runs {slow[1]} sample by sample"
    op.kernel.has_run = True
    return results


class _Rows(TorchFunctionMode):
    """Follows the tensors that vmap computes from its rows. They are unusable afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, ref] = {}

    def call(self, op: Op, row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Make the call of a row."""
        self._follow(row)
        with self:
            return tuple(_call(op, row))

    def _follow(self, values: Any) -> None:
        self._tensors |= {id(value): ref(value) for value in tree_iter(values) if isinstance(value, Tensor)}

    def _follows(self, value: Any) -> bool:
        return isinstance(value, Tensor) and (known := self._tensors.get(id(value))) is not None and known() is value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(map(self._follows, tree_iter((args, kwargs)))):
            self._follow(result)
        return result

    def are_kept(self) -> bool:
        """Return whether the user's code has kept one of the tensors."""
        if any(known() is not None for known in self._tensors.values()):
            gc.collect()  # as PyTorch's compiler leaves cycles of references
        return any(known() is not None for known in self._tensors.values())


class CallError(ValueError):
    """A call cannot run in a group, although the first call of its kind did not show it."""


def _differs(op: Op, what: str, expected: Any) -> CallError:
    why = "it depends on more than its arguments and the state of its module"
    return CallError(f"{name_of(op.function)} returned {what}, expected {expected}: {why}")


def _call(op: Op, leaves: Iterable[Tensor], function: Callable | None = None) -> list[Tensor]:
    result, tensors = call_on(function or op.function, op.arguments, leaves)
    if result != op.kernel.result:
        raise _differs(op, f"{result.structure}", op.kernel.result.structure)
    return tensors


def name_of(function: Callable) -> str:
    """Return a module's class, or a function's name without underscores around it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    name = getattr(function, "__qualname__" if is_autograd_function(function) else "__name__", None)
    return name.strip("_") if name else repr(function)
