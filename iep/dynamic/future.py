"""Futures, which are tensors that are not computed yet, and the recording to which the calls of a thread go.

Inside a lazy scope, calls return futures. A future knows its shape, dtype and device. PyTorch's functions, methods and
operators on it are recorded (`recording.py`). Operations that need its values (`float`, `bool`, `item`, printing,
NumPy) run everything recorded so far. After its scope has ended, a future behaves like the tensor that it represents.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from iep.dynamic.nested import mapped

OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs "
    "invert and or xor getitem eq ne lt le gt ge"
)
IN_PLACE_OPERATORS = "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor setitem"
READERS = (
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__", "__repr__"),
    *("__format__", "item", "tolist", "numpy", "cpu", "cuda", "__deepcopy__", "__reduce_ex__"),
)
"""Methods that need the values of the tensor, or expose it."""
VIEWS = ("T", "mT", "H", "mH", "real", "imag", "data")
"""Attributes of a tensor that compute another tensor."""
AFTER_SCOPE = ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad")
"""Methods and functions that need the autograd graph of a computed tensor."""
LIBRARIES = tuple(os.path.join(os.path.dirname(path), "") for path in (__file__, torch.__file__))


class _Current(threading.local):
    recorder: Any = None


current = _Current()
"""The recording or trial run to which the calls of this thread go; None outside of scopes."""


@contextmanager
def recording_into(recorder: Any) -> Iterator[None]:
    """Send the calls of this thread to `recorder`; with None they run as usual."""
    before, current.recorder = current.recorder, recorder
    try:
        yield
    finally:
        current.recorder = before


class Future:
    """One result of a recorded call. `shape`, `dtype`, `device` and `ndim` are known at once; `value` computes it.

    A future cannot be changed in place.
    """

    __slots__ = ("__weakref__", "_address", "_column", "_value")
    __hash__ = object.__hash__

    def __init__(self, column: Any, address: int, value: Tensor | None = None):
        self._column = column
        self._address = address
        self._value = value

    @property
    def value(self) -> Tensor:
        """The tensor. Inside the scope, reading it runs everything recorded so far.

        Raises:
            ValueError: the scope ended with an exception before the tensor was computed.
        """
        if self._value is None:
            self._column.recording.run(f"a value is read at {_users_line()}")
        return self._value

    shape, dtype, device = (property(attrgetter(f"_column.{name}")) for name in ("shape", "dtype", "device"))
    ndim = property(lambda self: len(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["Future"]:
        return iter(torch.unbind(self))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(Tensor, name)  # raises AttributeError if tensors have no such attribute
        if name in VIEWS:
            return torch_function(attribute.__get__, (self,), {})
        if callable(attribute):
            return partial(_method, attribute, self)
        return getattr(self.value, name)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return torch_function(func, args, kwargs or {})


def torch_function(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Record a function of PyTorch on futures; run it now if their scopes have ended."""
    if _changes_in_place(func) or kwargs.get("inplace") or kwargs.get("out") is not None:
        raise in_place_error(func.__name__)
    if args and type(args[0]) is Future and not args[0]._column.recording.is_over:
        recording = args[0]._column.recording
    else:
        recording = _open_recording((args, kwargs))
    if recording is None:
        if is_in_forward() and any(type(value) is Future and value.value.requires_grad for value in args):
            raise lost_gradient()
        return func(*values_of(args), **values_of(kwargs))
    if func.__name__ in AFTER_SCOPE:
        raise ValueError(f"{func.__name__} of a future inside its scope: call it after the scope")
    return recording.record(func, args, kwargs)


def in_place_error(what: str) -> ValueError:
    """Return the error for an operation that changes a tensor in place."""
    return ValueError(
        f"{what} changes a tensor in place, which cannot be recorded: write it out of place, as a = a + b for a += b"
    )


@cache
def _changes_in_place(func: Callable) -> bool:
    name = func.__name__
    return name.strip("_") in IN_PLACE_OPERATORS.split() or (name.endswith("_") and not name.endswith("__"))


def is_in_forward() -> bool:
    """Return whether the `forward` of a `torch.autograd.Function` runs; only there, both gradient modes are off."""
    return not (torch.is_grad_enabled() or torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def lost_gradient() -> ValueError:
    """Return the error for a future in the `forward` of a `torch.autograd.Function`."""
    return ValueError(
        "a torch.autograd.Function was given a future, whose gradient it would lose: call batch.wrap(MyFunction.apply) "
        "in its place, or after the scope give it the future's value"
    )


def _open_recording(arguments: Any) -> Any:
    """Return the recording of a future in nested arguments whose scope is open, if there is one."""
    for value in arguments.values() if isinstance(arguments, dict) else arguments:
        if type(value) is Future:
            found = None if value._column.recording.is_over else value._column.recording
        else:
            found = _open_recording(value) if isinstance(value, tuple | list | dict) else None
        if found is not None:
            return found
    return None


def values_of(arguments: Any, but_of: Any = None) -> Any:
    """Return nested arguments in which tensors replace all futures except those of the recording `but_of`."""

    def value_of(part: Any) -> Any:
        return part.value if type(part) is Future and part._column.recording is not but_of else part

    return mapped(value_of, arguments)


def _users_line() -> str:
    """Return the file and line of the innermost caller outside of this package and PyTorch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _method(function: Callable, future: Future, *args: Any, **kwargs: Any) -> Any:
    return torch_function(function, (future, *args), kwargs)


def _operator(name: str) -> Callable:
    function = getattr(Tensor, name)
    return lambda self, *others: torch_function(function, (self, *others), {})


def _reader(name: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.value, name)(*args, **kwargs)


for _name in (*OPERATORS.split(), *IN_PLACE_OPERATORS.split()):
    setattr(Future, f"__{_name}__", _operator(f"__{_name}__"))
for _name in READERS:
    setattr(Future, _name, _reader(_name))
