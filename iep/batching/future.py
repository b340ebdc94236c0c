"""A tensor that is not computed yet: what calls inside a lazy scope return, and what further calls take.

A future knows its shape, dtype and device. Functions of PyTorch, methods and operators on it are recorded; whatever
needs the numbers themselves (`float`, `bool`, `item`, NumPy, printing, attributes such as `grad_fn`) has them computed.
When its scope has ended it behaves as the tensor that it stands for. What is recorded, and how it runs, is
`recording.py`'s and `scope.py`'s.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__"),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__getitem__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)
READERS = (
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__", "__repr__"),
    *("__format__", "item", "tolist", "numpy", "cpu", "cuda", "__deepcopy__", "__reduce_ex__"),
)
"""Methods that need the numbers, or give away the tensor."""
VIEWS = ("T", "mT", "H", "mH", "real", "imag", "data")
"""Attributes of a tensor that are functions of it."""


class Future:
    """One result of a recorded call; made by `iep.batching.scope` only.

    `shape`, `dtype`, `device` and `ndim` are known at once; `value` computes.
    """

    __slots__ = ("__weakref__", "_address", "_column", "_value")

    def __init__(self, column: Any, address: int):
        self._column = column
        self._address = address
        self._value = None

    @property
    def value(self) -> Tensor:
        """The tensor; inside its scope this runs what it depends on."""
        if self._value is None:
            self._value = self._column.recording.read(self._address)
        return self._value

    @property
    def shape(self) -> torch.Size:
        return self._column.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._column.dtype

    @property
    def device(self) -> torch.device:
        return self._column.device

    @property
    def ndim(self) -> int:
        return len(self._column.shape)

    def dim(self) -> int:
        return len(self._column.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self._column.shape if dim is None else self._column.shape[dim]

    def numel(self) -> int:
        return self._column.shape.numel()

    def backward(self, gradient: Tensor | None = None) -> None:
        """As a tensor's; inside its scope it is put off to the scope's end, all of them together."""
        if self._value is None:
            self._column.recording.backward_later(self, gradient)
        else:
            self._value.backward(gradient)

    def __len__(self) -> int:
        if not self._column.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._column.shape[0]

    def __iter__(self) -> Iterator["Future"]:
        return iter(torch.unbind(self))

    def __getattr__(self, name: str) -> Any:
        function = getattr(Tensor, name)  # what no tensor has is an AttributeError
        if name in VIEWS:
            return torch_function(function.__get__, (self,))
        if callable(function):
            return partial(_method, name, function, self)
        return getattr(self.value, name)

    def __hash__(self) -> int:
        return id(self)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return torch_function(func, args, kwargs or {})


def torch_function(func: Callable, args: tuple, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Record a function on futures; run it at once where all of them have been computed."""
    kwargs = kwargs or {}
    if args and type(args[0]) is Future and args[0]._value is None:
        return args[0]._column.recording.record(func, args, kwargs)
    pending = first_pending((*args, *kwargs.values()))
    if pending is None:
        return func(*values_of(args), **values_of(kwargs))
    return pending._column.recording.record(func, args, kwargs)


def first_pending(arguments: Any) -> Future | None:
    """Some future in nested lists, tuples and dicts that has no value yet."""
    for argument in arguments:
        if type(argument) is Future:
            if argument._value is None:
                return argument
        elif isinstance(argument, list | tuple | dict):
            inner = first_pending(argument.values() if isinstance(argument, dict) else argument)
            if inner is not None:
                return inner
    return None


def values_of(arguments: Any, but_of: Any = None) -> Any:
    """Nested lists, tuples and dicts with the tensors in their futures' places, but for futures of one recording."""
    if type(arguments) is Future:
        return arguments if arguments._column.recording is but_of else arguments.value
    if isinstance(arguments, dict):
        return {name: values_of(value, but_of) for name, value in arguments.items()}
    if isinstance(arguments, slice):
        return slice(*(values_of(part, but_of) for part in (arguments.start, arguments.stop, arguments.step)))
    if isinstance(arguments, tuple) and hasattr(arguments, "_fields"):
        return type(arguments)(*(values_of(value, but_of) for value in arguments))
    if type(arguments) in (list, tuple):
        return type(arguments)(values_of(value, but_of) for value in arguments)
    return arguments


def _method(name: str, function: Callable, future: Future, *args: Any, **kwargs: Any) -> Any:
    if name.endswith("_") and not name.endswith("__"):
        raise ValueError(f"{name} changes a future in place; inside a scope write it out of place")
    return torch_function(function, (future, *args), kwargs)


def _operator(name: str) -> Callable:
    function = getattr(Tensor, name)

    def operate(self: Future, *others: Any) -> Any:
        return torch_function(function, (self, *others))

    return operate


def _reader(name: str) -> Callable:
    def read(self: Future, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.value, name)(*args, **kwargs)

    return read


def _refuse_item_assignment(self: Future, *_: Any) -> None:
    raise ValueError("assigning to an element changes a future in place; inside a scope write it out of place")


for _name in OPERATORS:
    setattr(Future, _name, _operator(_name))
for _name in READERS:
    setattr(Future, _name, _reader(_name))
Future.__setitem__ = _refuse_item_assignment
