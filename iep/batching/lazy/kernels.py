"""What one recorded op computes: a module or function, found out once for all its calls alike, and run on a group.

Users write code for one sample. A group runs as `torch.vmap` of that code over its rows, or, where a plain batched
call is known to be the same (`direct.py`), as that. What can do neither runs singly, row by row, and says why. Shapes
and dtypes of the results are found by a run on fake tensors, which computes nothing.

Shapes: G rows of a group.
"""

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from iep.batching.lazy.direct import is_batched
from iep.batching.lazy.noted import module_of
from iep.batching.lazy.trial import trial_run

VMAP, DIRECT, SINGLY, NOW, STATIC = "batched by vmap", "batched", "singly", "at once", "static"
MOST_KERNELS = 256
"""That are remembered of one function or module: a number that differs from call to call would make ever more."""


class Spec(NamedTuple):
    """A tensor without its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def spec_of(tensor: Tensor) -> Spec:
    """Its shape, dtype and device."""
    return Spec(tensor.shape, tensor.dtype, tensor.device)


class Leaf(NamedTuple):
    """The place of a tensor in nested lists, tuples and dicts."""

    index: int


class Call(NamedTuple):
    """A function or module and its arguments, with a `Leaf` for every tensor that differs from node to node."""

    function: Callable
    args: tuple
    kwargs: dict[str, Any]

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        return self.function(*fill(self.args, leaves), **fill(self.kwargs, leaves))


@dataclass(eq=False)
class Kernel:
    """How calls of one key run, and what they return. It holds neither the function, by which it is remembered as long
    as that lives, nor tensors."""

    how: str
    reason: str | None = None
    """Why singly."""
    outputs: tuple[Spec, ...] = ()
    structure: Any = None
    """What a call returns, with a `Leaf` for each tensor."""
    has_grad: bool = True
    """Its results can have gradients where no argument has: of parameters, say. True where that is not known."""
    is_in_place: bool = False
    """It changes its first argument in place and returns it."""
    is_lasting: bool = True
    """It is the same in the next scope."""


@dataclass(eq=False)
class Known:
    """What has been found out about one function or module."""

    kernels: dict[tuple, Kernel] = field(default_factory=dict)
    warned: bool = False
    called: list[ref] = field(default_factory=list)
    """Modules that it called in trials."""

    def modules(self) -> list[nn.Module]:
        """Those that it called in trials."""
        return [module for one in self.called if (module := one()) is not None]

    def has_called(self, modules: Iterable[nn.Module]) -> None:
        """Take note of what was called in a trial."""
        seen = self.modules()
        self.called += [ref(module) for module in modules if module not in seen]

    def remember(self, key: tuple, kernel: Kernel) -> None:
        """Find `kernel` by `key` from now on, until `MOST_KERNELS` others have come."""
        self.kernels[key] = kernel
        if len(self.kernels) > MOST_KERNELS:
            for old in list(self.kernels)[:-MOST_KERNELS]:
                self.kernels.pop(old, None)  # another thread may be doing so too


_known: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
_known_methods: dict[Any, Known] = {}
"""Methods of tensors, which cannot be referred to weakly and are never freed."""


def _class_of_apply(function: Callable) -> type[torch.autograd.Function] | None:
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


def known(function: Callable) -> Known:
    """What has been found out about `function`; kept as long as it lives."""
    function = _class_of_apply(function) or function  # apply is made anew at each look at it
    try:
        return _known.setdefault(function, Known())
    except TypeError:
        return _known_methods.setdefault(function, Known())


def fill(structure: Any, leaves: Sequence[Any]) -> Any:
    """Nested lists, tuples, dicts and slices with `leaves` in their places."""
    kind = type(structure)
    if kind is Leaf:
        return leaves[structure.index]
    if kind is tuple or kind is list:
        return kind([fill(value, leaves) for value in structure])
    if isinstance(structure, dict):
        return {name: fill(value, leaves) for name, value in structure.items()}
    if kind is slice:
        return slice(*[fill(part, leaves) for part in (structure.start, structure.stop, structure.step)])
    if hasattr(kind, "n_sequence_fields"):
        return kind([fill(value, leaves) for value in structure])
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return kind(*[fill(value, leaves) for value in structure])
    return structure


def split(result: Any, tensors: list[Tensor]) -> Any:
    """`result` with leaves in its tensors' places; the tensors are appended to `tensors`."""
    if isinstance(result, Tensor):
        tensors.append(result)
        return Leaf(len(tensors) - 1)
    if isinstance(result, dict):
        return {name: split(value, tensors) for name, value in result.items()}
    if hasattr(type(result), "n_sequence_fields"):  # such as torch.return_types.max
        return type(result)([split(value, tensors) for value in result])
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*[split(value, tensors) for value in result])
    if isinstance(result, tuple | list):
        parts = [split(value, tensors) for value in result]
        return parts if isinstance(result, list) else tuple(parts)
    return result


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """All tensors in nested lists, tuples and dicts, in the order of the leaves that `split` puts in their places."""
    tensors: list[Tensor] = []
    split(result, tensors)
    return tuple(tensors)


def find_kernel(call: Call, specs: Sequence[Spec], sample: Callable[[], list[Tensor]]) -> Kernel:
    """How `call` runs on leaves like `specs`.

    Args:
        sample: computes the leaves of one sample, where a run on fake tensors does not do.

    Raises:
        ValueError: it changes in place what it takes, and it is not its first argument, which it returns.
    """
    try:
        with _one_at_a_time:
            result, reason, leaves = _fake_run(call, specs)
    except DynamicOutputShapeException:
        return Kernel(NOW, "the shape of its result depends on values")
    except Exception as failure:
        return _kernel_by_trial(call, sample(), failure)
    tensors: list[Tensor] = []
    structure = split(result, tensors)
    facts = {
        "structure": structure,
        "outputs": tuple(map(spec_of, tensors)),
        # What a function of the user's finds outside of its arguments may have a gradient another time.
        "has_grad": _is_users_function(call.function) or any(tensor.requires_grad for tensor in tensors),
        "is_in_place": _is_in_place(call, leaves, result),
        # Numbers and texts among the results may be of what the user's code finds outside of its arguments.
        "is_lasting": not (
            isinstance(call.function, nn.Module | FunctionType | MethodType) and _has_statics(structure)
        ),
    }
    if not tensors:
        return Kernel(STATIC, **facts)
    if reason is not None:
        return Kernel(SINGLY, reason, **facts)
    return Kernel(DIRECT if is_batched(call, specs) else VMAP, **facts)


def _is_users_function(function: Callable) -> bool:
    return type(function) is FunctionType or (type(function) is MethodType and module_of(function) is None)


def _is_in_place(call: Call, leaves: Sequence[Tensor], result: Any) -> bool:
    """Whether a run, which began with new leaves, has changed its first argument in place and returned it."""
    changed = [leaf for leaf in leaves if leaf._version > 0]
    if not changed:
        return False
    if len(changed) == 1 and result is leaves[0] is changed[0] and call.args[:1] == (Leaf(0),):
        return True
    raise ValueError(changes_argument(call.function))


def changes_argument(function: Callable) -> str:
    """Why a function or module is refused that changes what it takes."""
    return f"{name_of(function)} changes in place a tensor that it takes; inside a scope write it out of place"


_one_at_a_time = threading.RLock()
"""Runs on fake tensors, which share more between threads than they should."""


def _fake_run(call: Call, specs: Sequence[Spec]) -> tuple[Any, str | None, list[Tensor]]:
    """What `call` returns on fake tensors, in what way it is unsafe to batch, if it is, and these tensors."""
    # Outside of inference mode, in which tensors do not count how often they are changed.
    with (
        _without_inference_mode(),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        trial_run(mode.from_tensor) as trial,
    ):
        leaves = [torch.empty(spec.shape, dtype=spec.dtype, device=spec.device) for spec in specs]
        with trial.watch:
            result = call._replace(function=trial.of(call.function))(leaves)
        known(call.function).has_called(trial.modules_but(call.function))
        return result, trial.why_singly(call.function), leaves


@contextmanager
def _without_inference_mode() -> Iterator[None]:
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


def _kernel_by_trial(call: Call, leaves: list[Tensor], failure: Exception) -> Kernel:
    """How `call` runs, by running it on one sample after fake tensors have failed; raises what that raises."""
    with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad(), trial_run(Tensor.clone) as trial:
        leaves = [leaf.clone() for leaf in leaves]
        before = [leaf._version for leaf in leaves]
        result = call._replace(function=trial.of(call.function))(leaves)
    if [leaf._version for leaf in leaves] != before:
        raise ValueError(changes_argument(call.function)) from failure
    tensors: list[Tensor] = []
    structure = split(result, tensors)
    is_layer = isinstance(call.function, nn.Module | FunctionType | MethodType)
    reason = "its control flow depends on values" if "data-dependent" in _text(failure) else _text(failure)
    if not tensors or not is_layer or _has_statics(structure):
        return Kernel(NOW, reason)
    return Kernel(SINGLY, reason, tuple(map(spec_of, tensors)), structure)


def _text(failure: Exception) -> str:
    name = type(failure).__name__
    if "DataDependent" in name:
        return "data-dependent"
    return f"{name}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"


def _has_statics(structure: Any) -> bool:
    if isinstance(structure, Leaf) or structure is None:
        return False
    if isinstance(structure, dict):
        return any(map(_has_statics, structure.values()))
    return not isinstance(structure, tuple | list) or any(map(_has_statics, structure))


def run(kernel: Kernel, call: Call, leaves: Sequence[Tensor], warn: Callable[[str], None]) -> tuple[Tensor, ...]:
    """The results of `call` on G rows of leaves, (G, ...) each; `warn` is told why they run singly if vmap cannot."""
    if kernel.how == DIRECT:
        return _as_found(kernel, call, tensors_of(call(leaves)))
    if kernel.how == VMAP:
        # What fails half-way may have changed its first argument already.
        own = (leaves[0].clone(), *leaves[1:]) if kernel.is_in_place else leaves
        try:
            results = torch.vmap(lambda *rows: tensors_of(call(rows)), randomness="different")(*own)
        except Exception as failure:
            results = _singly(kernel, call, leaves)  # what is wrong with the code itself is raised here
            kernel.how, kernel.reason = SINGLY, f"vmap cannot: {_text(failure)}"
            warn(kernel.reason)
            return results
        return _as_found(kernel, call, results)
    return _singly(kernel, call, leaves)


def _singly(kernel: Kernel, call: Call, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    parts = [leaf.unbind(0) for leaf in leaves]
    if kernel.is_in_place:
        parts[0] = [row.clone() for row in parts[0]]  # autograd forbids changing one of several views
    rows = [tensors_of(call(row)) for row in zip(*parts, strict=True)]
    for row in rows:
        kinds = [(result.shape, result.dtype) for result in row]
        if kinds != [(spec.shape, spec.dtype) for spec in kernel.outputs]:
            raise _is_other_than_found(kernel, call, kinds)
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def _as_found(kernel: Kernel, call: Call, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of a group, of the shapes and dtypes that were found out for one sample."""
    kinds, found = [(result.shape[1:], result.dtype) for result in results], kernel.outputs
    if [shape for shape, _ in kinds] != [spec.shape for spec in found] or not all(
        torch.can_cast(dtype, spec.dtype) for (_, dtype), spec in zip(kinds, found, strict=True)
    ):
        raise _is_other_than_found(kernel, call, kinds)
    # A sample's number weighs less than a vector in what dtype both make; a group of numbers is a vector itself.
    return tuple(result.to(spec.dtype) for result, spec in zip(results, found, strict=True))


def _is_other_than_found(kernel: Kernel, call: Call, kinds: list[tuple]) -> ValueError:
    known(call.function).kernels.clear()
    return ValueError(
        f"{name_of(call.function)} returned tensors of {_text_of(kinds)}, after {_text_of(kernel.outputs)} for a "
        "call alike: it depends on more than its arguments; call it outside the scope, or in a scope anew"
    )


def _text_of(kinds: Sequence[tuple]) -> str:
    return " and ".join(f"{kind[1]} of shape {tuple(kind[0])}" for kind in kinds)


def warn_singly(function: Callable, reason: str) -> None:
    """Once for each function or module."""
    facts = known(function)
    if not facts.warned:
        facts.warned = True
        warnings.warn(f"{name_of(function)} is run singly, sample by sample: {reason}", stacklevel=2)


def name_of(function: Callable) -> str:
    """What a reader knows it by: a module's class, or a function's name without underscores around it."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if _class_of_apply(function) is not None:
        return f"{function.__self__.__name__}.apply"
    name = getattr(function, "__name__", None) or repr(function)
    if name == "__get__":  # a tensor's attribute, such as T
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return name.strip("_") or name
