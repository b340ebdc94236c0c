"""Common functions and layers for which a plain call on a group equals one call for each sample.

`torch.vmap` takes about 300 us per call for any function. Functions that are not listed here are correct but slower.

Shapes: G rows of a group.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from iep.batching.layers import linear
from iep.dynamic.future import LEAF


def _named(names: str, *owners: Any) -> frozenset:
    return frozenset(getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name))


UNARY = (
    _named("abs neg exp log sqrt square sin cos erf sigmoid tanh relu clamp detach", torch, Tensor)
    | _named("__neg__ __abs__ float double bfloat16 long", Tensor)
    | _named("relu gelu silu elu softplus leaky_relu logsigmoid dropout", functional)
)
"""Elementwise functions of one tensor; further arguments are static."""
BINARY = _named("add sub mul div pow maximum minimum eq ne lt le gt ge", torch, Tensor) | _named(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__",
    Tensor,
)
"""Elementwise functions of two tensors, or of a tensor and a number."""
LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU)
"""Layers that accept any number of leading axes."""


def is_batched(function: Any, args: tuple, kwargs: dict[str, Any], specs: Sequence[Any]) -> bool:
    """Return whether a call on (G, ...) tensors is known to have the same results as a call on each of their rows.

    Args:
        args, kwargs: the arguments, with `LEAF` for each tensor that differs between samples.
        specs: the specs of these tensors for one sample.
    """
    is_leaf = [value is LEAF for value in args]
    if sum(is_leaf) != len(specs):
        return False
    if function in BINARY and len(args) == 2 and not kwargs:
        # Both broadcast in the same way with a leading axis, and have one dtype, because in type promotion a scalar has
        # lower priority than a group of scalars.
        constants = [value for value in args if isinstance(value, Tensor)]
        axes, dtypes = {len(spec.shape) for spec in specs}, {tensor.dtype for tensor in (*specs, *constants)}
        return len(axes) == len(dtypes) == 1 and all(value.dim() <= len(specs[0].shape) for value in constants)
    if len(specs) != 1 or not is_leaf[0]:
        return False
    if isinstance(function, nn.Module):
        return type(function) in LAYERS and len(args) == 1 and not kwargs and _runs_nothing_else(function)
    if function in UNARY:
        return not any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs)))
    return function in (functional.linear, functional.embedding)


def deferrable(function: Callable) -> Callable:
    """Return what computes the same as a function for which `is_batched` is true, but may defer weight gradients."""
    if type(function) is nn.Linear:
        return partial(linear, weight=function.weight, bias=function.bias)
    return linear if function is functional.linear else function


def _runs_nothing_else(layer: nn.Module) -> bool:
    """Return whether calls of a layer run only the `forward` of its class, without hooks."""
    parts = [part for registry in vars(layer).values() if isinstance(registry, dict) for part in registry.values()]
    return "forward" not in vars(layer) and all(isinstance(part, Tensor | None) for part in parts)
