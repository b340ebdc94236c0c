"""The commonest functions and layers whose plain call on a group equals a call for each sample.

`torch.vmap` costs some 300 us a call whatever it runs. What is missing here is not wrong, only slower.

Shapes: G rows of a group.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from iep.dynamic.future import Leaf, split


def _named(names: str, *places: Any) -> frozenset:
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


UNARY = (
    _named("abs neg exp log sqrt rsqrt square sin cos erf sigmoid tanh relu clamp detach", torch, Tensor)
    | _named("__neg__ __abs__ float double bfloat16 long", Tensor)
    | _named("relu gelu silu elu softplus leaky_relu logsigmoid dropout", functional)
)
"""Functions of each number of one tensor by itself; further arguments are static."""
BINARY = _named("add sub mul div pow maximum minimum eq ne lt le gt ge", torch, Tensor) | _named(
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __eq__ __ne__ __lt__ __le__ "
    "__gt__ __ge__",
    Tensor,
)
"""Functions of each pair of numbers, of two tensors or of a tensor and a number."""
LAYERS = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, nn.SiLU),
    *(nn.ELU, nn.Softplus, nn.LeakyReLU, nn.LogSigmoid),
)
"""Layers that accept any number of leading axes."""
IMAGE_LAYERS = {nn.Conv1d: 2, nn.Conv2d: 3, nn.Conv3d: 4, nn.MaxPool1d: 2, nn.MaxPool2d: 3, nn.AvgPool2d: 3}
"""Layers that accept one leading axis or none, and the number of axes of a sample."""


def is_batched(function: Any, args: tuple, kwargs: dict[str, Any], specs: Sequence[Any]) -> bool:
    """Return whether a call is known to do for (G, ...) tensors what it does for each row of them.

    Args:
        args, kwargs: with a `Leaf` for each tensor that differs between samples.
        specs: of these tensors for one sample.
    """
    leaves = [value for value in args if type(value) is Leaf]
    if len(leaves) != len(specs) or not leaves or (type(args[0]) is not Leaf and function not in BINARY):
        return False
    if isinstance(function, nn.Module):
        return len(args) == 1 and not kwargs and _is_batched_layer(function, len(specs[0].shape))
    if function in (functional.linear, functional.embedding):
        return len(leaves) == 1
    if function in UNARY:
        return len(leaves) == 1 and not split((args, kwargs))[1]
    return function in BINARY and len(args) == 2 and not kwargs and _is_batched_pair(args, specs)


def _is_batched_layer(layer: nn.Module, axes: int) -> bool:
    if type(layer) is nn.Sequential:
        return _is_plain(layer) and all(type(part) in LAYERS and _is_plain(part) for part in layer)
    is_image = IMAGE_LAYERS.get(type(layer)) == axes and getattr(layer, "padding_mode", "zeros") == "zeros"
    return (type(layer) in LAYERS or is_image) and _is_plain(layer)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether calls of the layer run its class's `forward` and no hooks."""
    hooks = [one for registry in vars(layer).values() if isinstance(registry, dict) for one in registry.values()]
    return "forward" not in vars(layer) and all(isinstance(one, Tensor | nn.Module | None) for one in hooks)


def _is_batched_pair(args: tuple, specs: Sequence[Any]) -> bool:
    """Return whether both broadcast alike with a leading axis, and have one dtype: a number by itself would count for
    less than a group of numbers in what dtype the result has."""
    constants = [value for value in args if isinstance(value, Tensor)]
    axes = {len(spec.shape) for spec in specs}
    dtypes = {tensor.dtype for tensor in (*specs, *constants)}
    return len(axes) == len(dtypes) == 1 and all(value.dim() <= len(specs[0].shape) for value in constants)
