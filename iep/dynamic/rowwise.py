"""Common functions and layers for which a plain call on a group equals one call for each sample.

`torch.vmap` takes about 300 us per call for any function. Functions that are not listed here are correct but slower.

Shapes: G rows of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from iep.dynamic.future import LEAF
from iep.kernels.layers import linear


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
CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
SEQUENCES = (nn.RNN, nn.GRU, nn.LSTM)
"""Recurrent layers, which accept one more axis than a sample has, or a longer one."""


def is_batched(function: Any, args: tuple, kwargs: dict[str, Any], specs: Sequence[Any]) -> bool:
    """Return whether a call on (G, ...) tensors is known to have the same results as a call on each of their rows.

    Args:
        args, kwargs: the arguments, with `LEAF` for each tensor that differs between samples.
        specs: the specs of these tensors for one sample.
    """
    if type(function) in CELLS + SEQUENCES:
        parts = tree_leaves((args, kwargs))
        num_axes = {len(spec.shape) for spec in specs}
        are_leaves = args[:1] == (LEAF,) and all(part is LEAF or part is None for part in parts)
        return are_leaves and len(num_axes) == 1 and _runs_nothing_else(function)
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


def counts_indices(function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an embedding scales its gradient by the number of equal indices of all samples."""
    positions = {functional.embedding: 5, functional.embedding_bag: 5, torch.embedding: 3, torch.embedding_bag: 3}
    at = positions.get(function, len(args))
    return bool(kwargs.get("scale_grad_by_freq", args[at] if at < len(args) else False))


def run_on_group(function: Callable) -> Callable:
    """Return the function that runs a group of calls for which `is_batched` is true. It may defer weight gradients."""
    if type(function) is nn.Linear:
        return partial(linear, weight=function.weight, bias=function.bias)
    if isinstance(function, CELLS + SEQUENCES):
        return partial(_run_recurrent, function)
    return linear if function is functional.linear else function


def _run_recurrent(layer: nn.RNNCellBase | nn.RNNBase, input: Tensor, hx: Any = None) -> Any:
    """Run a recurrent layer on G samples, (G, ...) each, with G as its batch axis, or as a part of it.

    Args:
        input: (G, D) or (G, B, D) for a cell, otherwise (G, T, D), or with a batch axis as the layer expects it.
        hx: the states before, (G, H), (G, layers, H) or with a batch axis each.
    """
    if isinstance(layer, nn.RNNBase):
        own_axis, state_axis, has_batch = 0 if layer.batch_first else 1, 1, input.dim() == 4
    else:
        own_axis, state_axis, has_batch = 0, 0, input.dim() == 3

    def merge(axis: int, value: Tensor) -> Tensor:
        value = value.movedim(0, axis)
        return value.flatten(axis, axis + 1) if has_batch else value

    def divide(axis: int, value: Tensor) -> Tensor:
        value = value.unflatten(axis, (len(input), -1)) if has_batch else value
        return value.movedim(axis, 0)

    result = layer(merge(own_axis, input), tree_map_only(Tensor, partial(merge, state_axis), hx))
    if isinstance(layer, nn.RNNCellBase):
        return tree_map_only(Tensor, partial(divide, 0), result)
    output, states = result
    return divide(own_axis, output), tree_map_only(Tensor, partial(divide, state_axis), states)


def _runs_nothing_else(layer: nn.Module) -> bool:
    """Return whether calls of a layer run only the `forward` of its class, without hooks."""
    parts = [part for registry in vars(layer).values() if isinstance(registry, dict) for part in registry.values()]
    return "forward" not in vars(layer) and all(isinstance(part, Tensor | None) for part in parts)
