"""A tensor that is not computed yet: what calls inside a lazy scope return, and what further calls take.

A future knows its shape, dtype and device. Functions of PyTorch, methods and operators on it are recorded; whatever
needs the numbers themselves (`float`, `bool`, `item`, NumPy, printing, attributes such as `grad_fn`) has them computed.
When its scope has ended it behaves as the tensor that it stands for. What is recorded, and how it runs, is
`recording.py`'s and `scope.py`'s.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from iep.batching.lazy.current import is_in_forward, loses_gradient
from iep.batching.lazy.noted import version_of

OPERATORS = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__"),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__or__", "__xor__", "__getitem__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
)
IN_PLACE_OPERATORS = (
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__"),
)
READERS = (
    *("__bool__", "__float__", "__int__", "__index__", "__complex__", "__contains__", "__array__", "__repr__"),
    *("__format__", "item", "tolist", "numpy", "cpu", "cuda", "__deepcopy__", "__reduce_ex__"),
)
"""Methods that need the numbers, or give away the tensor."""
VIEWS = ("T", "mT", "H", "mH", "real", "imag", "data")
"""Attributes of a tensor that are functions of it."""
OF_GRADIENTS = frozenset(("register_hook", "register_post_accumulate_grad_hook", "retain_grad"))
"""Methods that are about the gradient of the tensor itself, which no future has."""


class Backward(NamedTuple):
    """A call of a future's `backward` that is put off."""

    future: "Future"
    gradient: Any
    version: int | None
    """How often a gradient that is a tensor had been changed in place."""
    retain_graph: bool
    inputs: tuple[Any, ...] | None

    def is_with(self, other: "Backward") -> bool:
        """Whether both can be one call."""
        ids = [None if one.inputs is None else list(map(_identity, one.inputs)) for one in (self, other)]
        return ids[0] == ids[1]

    def check(self) -> None:
        """Refuse a gradient that was changed since."""
        if isinstance(self.gradient, Tensor) and version_of(self.gradient) != self.version:
            raise ValueError(
                f"a gradient of shape {tuple(self.gradient.shape)} was changed in place after backward was called with "
                "it, and before the scope's end, when backward runs"
            )


def _identity(tensor: Any) -> Any:
    return (id(tensor._column), tensor._address) if type(tensor) is Future else id(tensor)


class Future:
    """One result of a recorded call; made by `iep.batching.scope` only.

    `shape`, `dtype`, `device` and `ndim` are known at once; `value` computes.

    `h += 1` changes what every name of this future stands for, as it does of a tensor; what was recorded before, and a
    part of it that was taken before (`h[0]`), is not changed. Other changes in place are refused.
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
        """As the tensor's; known without computing."""
        return self._column.shape

    @property
    def dtype(self) -> torch.dtype:
        """As the tensor's; known without computing."""
        return self._column.dtype

    @property
    def device(self) -> torch.device:
        """As the tensor's; known without computing."""
        return self._column.device

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._column.shape)

    def dim(self) -> int:
        """The number of axes."""
        return len(self._column.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or its entry for the axis `dim`."""
        return self._column.shape if dim is None else self._column.shape[dim]

    def numel(self) -> int:
        """How many numbers it has."""
        return self._column.shape.numel()

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """As a tensor's; inside its scope it is put off to the scope's end, all of them together.

        Raises:
            ValueError: it is put off, and `create_graph`: a scope's gradients cannot be differentiated. At the scope's
                end: `gradient` was changed in place by then.
        """
        inputs = (inputs,) if isinstance(inputs, Tensor | Future) else inputs
        if self._value is not None or self._column.recording.is_over:
            self.value.backward(values_of(gradient), retain_graph, create_graph, values_of(inputs))
            return
        if create_graph:
            raise ValueError("backward's create_graph: gradients of what a scope computes cannot be differentiated")
        # What they stand for now, which the scope's end finds even if `h += 1` or the like changes them until then.
        inputs = None if inputs is None else tuple(map(_as_of_now, inputs))
        version = version_of(gradient) if isinstance(gradient, Tensor) else None
        self._column.recording.backwards.append(
            Backward(_as_of_now(self), _as_of_now(gradient), version, bool(retain_graph), inputs)
        )

    def become(self, other: Any, what: str) -> None:
        """Stand for another value from now on, as a tensor that is changed in place; `what` changes it.

        Raises:
            ValueError: the other is of another shape or dtype, or this stands for a tensor from outside.
        """
        recording = self._column.recording
        if self._address < 0 and self._address not in recording.changed:
            raise ValueError(from_outside(what))
        if (other.shape, other.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"{what} makes {other.dtype} of shape {tuple(other.shape)}, which a future of {self.dtype} and shape "
                f"{tuple(self.shape)} cannot hold"
            )
        if type(other) is Future:
            self._column, self._address, self._value = other._column, other._address, other._value
        else:
            self._value = other
            if not recording.is_over:  # what is recorded from now on takes the other
                self._column, self._address = recording.take_over(other)

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
        if name in OF_GRADIENTS and self._value is None:
            raise ValueError(f"{name} of a future: it has no gradient of its own; use its value after the scope's end")
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


def _as_of_now(value: Any) -> Any:
    """Another future for what a future stands for now, which stays; what is none, as it is."""
    if type(value) is not Future:
        return value
    kept = Future(value._column, value._address)
    kept._value = value._value
    value._column.recording.futures.append(ref(kept))
    return kept


def torch_function(func: Callable, args: tuple, kwargs: Mapping[str, Any] | None = None) -> Any:
    """Record a function on futures; run it at once where all of them have been computed."""
    kwargs = kwargs or {}
    if _changes_in_place(func) or kwargs.get("out") is not None:
        raise _refused(func.__name__ if "out" not in kwargs else f"{func.__name__} with out=")
    if kwargs.get("inplace"):
        return _in_place(func, args, kwargs)
    if args and type(args[0]) is Future and args[0]._value is None:
        return args[0]._column.recording.record(func, args, kwargs)
    pending = first_pending((*args, *kwargs.values()))
    if pending is None:
        if is_in_forward() and any(type(value) is Future and value._value.requires_grad for value in args):
            raise loses_gradient()
        return func(*values_of(args), **values_of(kwargs))
    return pending._column.recording.record(func, args, kwargs)


def _in_place(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """A function of `torch.nn.functional` with `inplace=True`: its first argument becomes the result."""
    if not args or type(args[0]) is not Future:
        raise _refused(f"{func.__name__} with inplace=True")
    result = torch_function(func, args, {**kwargs, "inplace": False})
    args[0].become(result, func.__name__)
    return args[0]


@cache
def _changes_in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", *IN_PLACE_OPERATORS) or (name.endswith("_") and not name.endswith("__"))


def _refused(what: str) -> ValueError:
    return ValueError(f"{what} changes a tensor in place; inside a scope write it out of place, a = a + b for a += b")


def from_outside(what: str) -> str:
    """Why `what` is refused that changes a tensor which is no future."""
    return f"{what} changes in place a tensor from outside; inside a scope write it out of place"


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


def futures_in(arguments: Any) -> Iterator[Future]:
    """All futures in nested lists, tuples and dicts."""
    if type(arguments) is Future:
        yield arguments
    elif isinstance(arguments, list | tuple | dict):
        for argument in arguments.values() if isinstance(arguments, dict) else arguments:
            yield from futures_in(argument)


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


def _in_place_operator(name: str) -> Callable:
    function = getattr(Tensor, name.replace("__i", "__"))

    def change(self: Future, other: Any) -> Future:
        self.become(torch_function(function, (self, other)), name)
        return self

    return change


def _refuse_item_assignment(self: Future, *_: Any) -> None:
    raise _refused("assigning to an element")


for _name in OPERATORS:
    setattr(Future, _name, _operator(_name))
for _name in IN_PLACE_OPERATORS:
    setattr(Future, _name, _in_place_operator(_name))
for _name in READERS:
    setattr(Future, _name, _reader(_name))
Future.__setitem__ = _refuse_item_assignment
