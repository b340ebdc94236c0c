"""Functions and layers whose plain call on a group equals a call on each sample: no `torch.vmap` needed.

`torch.vmap` costs some 300 us a call whatever it runs. This is a table of what is known to be the same without it,
for leaves whose first axis is the group's; what is not in it is no error, only slower.

Shapes: G rows of a group.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook as _has_global_hooks

UNARY = frozenset(
    getattr(where, name)
    for names, wheres in (
        (
            "abs ceil cos erf exp expm1 floor log log10 log1p log2 neg reciprocal relu round rsqrt sigmoid sign sin "
            "sqrt square tan tanh trunc logical_not isnan isfinite isinf clamp detach",
            (torch, Tensor),
        ),
        ("__neg__ __abs__ __invert__ float double half bfloat16 long int bool", (Tensor,)),
        ("relu gelu silu elu selu softplus leaky_relu hardtanh mish logsigmoid dropout", (functional,)),
    )
    for name in names.split()
    for where in wheres
    if hasattr(where, name)
)
"""Of one tensor, each number by itself; other arguments are static."""

BINARY = frozenset(
    getattr(where, name)
    for names, wheres in (
        (
            "add sub mul div true_divide pow maximum minimum eq ne lt le gt ge logical_and logical_or remainder fmod",
            (torch, Tensor),
        ),
        (
            "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __eq__ "
            "__ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__",
            (Tensor,),
        ),
    )
    for name in names.split()
    for where in wheres
    if hasattr(where, name)
)
"""Of two tensors or a tensor and a number, each pair of numbers by itself."""

UNARY_LAYERS = (
    *(nn.Tanh, nn.Sigmoid, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.Softplus, nn.LeakyReLU, nn.Hardtanh),
    *(nn.Mish, nn.LogSigmoid, nn.Dropout, nn.Identity),
)
LAST_AXIS_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, *UNARY_LAYERS)
"""Layers that take any number of leading axes."""
IMAGE_LAYERS = {nn.Conv1d: 2, nn.Conv2d: 3, nn.Conv3d: 4, nn.MaxPool1d: 2, nn.MaxPool2d: 3, nn.AvgPool2d: 3}
"""Layers that take one leading axis or none, and a sample's number of axes."""


def is_batched(call: Any, specs: Sequence[Any]) -> bool:
    """Whether `call` is known to do for (G, ...) leaves what it does for each row of them."""
    function, leaves = call.function, _leaves(call)
    if leaves is None:
        return False
    if isinstance(function, nn.Module):
        return _is_batched_layer(function, [specs[leaf.index] for leaf in leaves], call.kwargs)
    if function is functional.linear:
        return _is_leaf(call.args[0]) and len(leaves) == 1
    if function is functional.embedding:
        return _is_leaf(call.args[0]) and len(leaves) == 1 and len(call.args) == 2
    if function in UNARY and len(leaves) == 1 and _is_leaf(call.args[0]) and not _tensors(call.args[1:], call.kwargs):
        return True
    return function in BINARY and len(call.args) == 2 and not call.kwargs and _is_batched_pair(call.args, specs)


def _leaves(call: Any) -> list | None:
    """The leaves among the arguments themselves; None where one lies deeper or is a keyword's."""
    deeper = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, list | dict | slice)]
    nested = [value for value in call.args if type(value) is tuple]
    if deeper or nested or any(map(_is_leaf, call.kwargs.values())):
        return None
    return [value for value in call.args if _is_leaf(value)]


def _is_leaf(value: Any) -> bool:
    return type(value).__name__ == "Leaf"


def _tensors(args: Sequence[Any], kwargs: dict) -> bool:
    return any(isinstance(value, Tensor) for value in (*args, *kwargs.values()))


def _is_batched_layer(layer: nn.Module, specs: list, kwargs: dict) -> bool:
    if type(layer) is nn.Sequential:
        return (
            len(specs) == 1
            and not kwargs
            and is_plain(layer)
            and all(type(part) in LAST_AXIS_LAYERS and is_plain(part) for part in layer)
        )
    if len(specs) != 1 or kwargs or not is_plain(layer):
        return False
    if type(layer) in LAST_AXIS_LAYERS:
        return True
    return IMAGE_LAYERS.get(type(layer)) == len(specs[0].shape) and getattr(layer, "padding_mode", "zeros") == "zeros"


def is_plain(layer: nn.Module) -> bool:
    """No hooks, no forward of its own, no embedding that looks at all of its input, nothing that changes its input in
    place."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    by_group = getattr(layer, "max_norm", None) is not None or getattr(layer, "scale_grad_by_freq", False)
    return not (
        hooks or _has_global_hooks() or "forward" in vars(layer) or by_group or getattr(layer, "inplace", False)
    )


def _is_batched_pair(args: tuple, specs: Sequence[Any]) -> bool:
    """Leaves of as many axes, leaves and numbers, or leaves and constants of no more axes; of one dtype, because a
    sample of no axes would weigh less than a group of them in what type the result has."""
    axes = [len(specs[value.index].shape) for value in args if _is_leaf(value)]
    constants = [value for value in args if isinstance(value, Tensor)]
    dtypes = {specs[value.index].dtype for value in args if _is_leaf(value)} | {value.dtype for value in constants}
    return len(set(axes)) == len(dtypes) == 1 and all(value.dim() <= axes[0] for value in constants)
