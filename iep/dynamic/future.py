"""Futures, which are tensors that are not computed yet, and the recorder to which the calls of a thread go.

Inside a lazy scope, calls return futures. A future knows its shape, dtype and device. PyTorch's functions, methods and
operators on it are recorded (`recording.py`). Operations that need its values (`float`, `bool`, `item`, printing,
NumPy) run everything recorded so far. After its scope has ended, a future behaves like the tensor that it represents.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

# PyTorch has no public name for it yet.
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_map_only, tree_unflatten


def names(words: str) -> frozenset[str]:
    """Return a set of words."""
    return frozenset(words.split())


IN_PLACE_OPERATORS = names("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem set delete")
READERS = names(
    "__bool__ __float__ __int__ __index__ __complex__ __contains__ __array__ __repr__ __format__ __deepcopy__ "
    "__reduce_ex__ item tolist numpy cpu cuda"
)
"""Methods that need the values of the tensor, or expose it."""
SHAPES = names("dim ndimension size numel nelement element_size is_floating_point is_complex is_signed")
"""Functions of a tensor's shape and dtype alone."""
FACTORIES = names(
    "new new_empty new_zeros new_ones new_full new_tensor "
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like"
)
"""Functions that make a new tensor, given only the shape, dtype and device of another one."""
VIEWS = names("T mT H mH real imag data")
"""Attributes of a tensor that compute another tensor."""
AFTER_SCOPE = names("backward grad register_hook register_post_accumulate_grad_hook retain_grad")
"""Methods and functions that need the autograd graph of a computed tensor."""
LEAF = object()
"""The placeholder for a tensor in a nested structure."""
LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (__file__, torch.__file__))


current_recorder: ContextVar[Any] = ContextVar("current_recorder", default=None)
"""The object that is told of calls and changes of modules in this thread: a scope, the observer of a call, or None.

It has the attribute `records`, whether functions on futures are recorded, and the methods `handles(module)`, whether to
call `call(module, args, kwargs)` in place of a module; `changes(module, name, value)`, called before a change; and
`note(reason)`, called with the reason why the call that is running cannot be recorded.
"""


@contextmanager
def recording_into(recorder: Any) -> Iterator[None]:
    """Send the calls of this thread to `recorder`; with None they run as usual."""
    token = current_recorder.set(recorder)
    try:
        yield
    finally:
        current_recorder.reset(token)


class Future(Tensor):
    """One result of a recorded call. `shape`, `dtype`, `device` and `ndim` are known at once; `value` computes it.

    A future cannot be changed in place. To PyTorch's own code it is a tensor on the device "meta".
    """

    __hash__ = object.__hash__
    _recording: Any
    _column: int
    _address: int
    _carries_grad: bool = False
    _value: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """The tensor. Inside the scope, reading it runs everything recorded so far.

        Raises:
            ValueError: the scope ended with an exception before the tensor was computed, or a recorded call that runs
                reads the future without having it as an argument.
        """
        if (recorder := current_recorder.get()) is not None:
            recorder.note("it reads a future that is not one of its arguments")
        if self._value is None:
            self._recording.run(f"a value is read at {_users_line()}")
        assert self._value is not None
        return self._value

    shape = property(lambda self: self._recording.specs[self._column].shape)
    dtype = property(lambda self: self._recording.specs[self._column].dtype)
    device = property(lambda self: self._recording.specs[self._column].device)
    ndim = property(lambda self: len(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch_function(torch.unbind, (self,), {}))

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return torch_function(func, args, kwargs or {})


def torch_function(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Record a function of PyTorch on futures; run it now if it cannot be recorded, or their scopes have ended."""
    name = func.__name__
    if name in SHAPES:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if name == "__get__" and getattr(func.__self__, "__name__", "") not in VIEWS:  # type: ignore[attr-defined]
        return func(args[0].value)
    if _changes_in_place(func) or kwargs.get("inplace") or kwargs.get("out") is not None:
        raise in_place_error(name)
    first = args[0] if args else None
    while isinstance(first, list | tuple) and first:
        first = first[0]  # usually a future, which is found faster than by a walk
    futures = (part for part in chain([first], tree_iter((args, kwargs))) if type(part) is Future)
    recording = next((future._recording for future in futures if not future._recording.is_over), None)
    if name in FACTORIES and type(first) is Future:
        empty = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        return func(empty, *values_of(args[1:]), **values_of(kwargs))
    recorder = current_recorder.get()
    if recording is None or recorder is None or not recorder.records or name in READERS:
        forbid_lost_gradients()
        return func(*values_of(args), **values_of(kwargs))
    if name in AFTER_SCOPE:
        raise ValueError(f"{name} of a future inside its scope: call it after the scope")
    return recording.record(func, args, kwargs)


def in_place_error(what: str) -> ValueError:
    """Return the error for an operation that changes a tensor in place."""
    return ValueError(
        f"{what} changes a tensor in place, which cannot be recorded: write it out of place, as a = a + b for a += b"
    )


@cache
def _changes_in_place(func: Callable) -> bool:
    name = func.__name__
    return name.strip("_") in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def forbid_lost_gradients() -> None:
    """Raise a ValueError in the `forward` of a `torch.autograd.Function`; only there, both gradient modes are off."""
    # No public name tells whether forward gradients are on.
    if not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled()):
        raise ValueError(
            "a torch.autograd.Function was given a future, whose gradient it would lose: call "
            "batch.wrap(MyFunction.apply) in its place, or after the scope give it the future's value"
        )


def values_of(arguments: Any) -> Any:
    """Return nested arguments in which tensors replace all futures."""
    return tree_map_only(Future, attrgetter("value"), arguments)


class Nested(NamedTuple):
    """A nested structure without its tensors."""

    structure: TreeSpec
    parts: list[Any]
    """The values in the structure, in order, with `LEAF` in place of each tensor."""

    def fill(self, tensors: Iterable[Any]) -> Any:
        """Return the structure with the given tensors in place of its leaves."""
        following = iter(tensors)
        return tree_unflatten([next(following) if part is LEAF else part for part in self.parts], self.structure)


def split(value: Any, is_leaf: Callable[[Any], bool] = torch.is_tensor) -> tuple[Nested, list[Any]]:
    """Return the structure of a nested value, and its tensors in order."""
    parts, structure = tree_flatten(value)
    nested = Nested(structure, [LEAF if is_leaf(part) else part for part in parts])
    return nested, [part for part in parts if is_leaf(part)]


def _users_line() -> str:
    """Return the file and line of the innermost caller outside of this package and PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
