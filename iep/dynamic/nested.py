"""Nested lists, tuples, dicts and slices, which are arguments and results of modules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Leaf:
    """A placeholder for a tensor in a nested structure."""

    index: int


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return `value` with `change` applied to everything inside that is not a container."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    if kind is slice:
        return slice(*[mapped(change, part) for part in (value.start, value.stop, value.step)])
    if isinstance(value, tuple):  # a named tuple, or one of `torch.return_types`
        parts = [mapped(change, part) for part in value]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return change(value)


def split(value: Any, is_leaf: Callable[[Any], bool] = torch.is_tensor) -> tuple[Any, list]:
    """Return `value` with a `Leaf` in place of each tensor, and the tensors in order."""
    leaves: list[Any] = []

    def take_out(part: Any) -> Any:
        if not is_leaf(part):
            return part
        leaves.append(part)
        return Leaf(len(leaves) - 1)

    return mapped(take_out, value), leaves


def fill(structure: Any, values: Sequence[Any]) -> Any:
    """Return `structure` with the given values in place of its leaves."""
    return mapped(lambda part: values[part.index] if type(part) is Leaf else part, structure)
