"""Modules -> which functions may run in one call, an *op group*, and the callables of the op groups of a plan.

The modules say so themselves. A static method `grouped(members)` returns a callable for the rows of several functions,
which is used on any device. Modules whose parameters are all those of convolutions of `layers.py` can run by Triton's
kernels (`fused.py`); functions with such modules of one class must differ in nothing but their weights, and treat every
row by itself. Functions with other modules have calls of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from iep.batching.plan import OpGroup, Plan
from iep.kernels.layers import Conv2d


def architecture(module: nn.Module, by_kernels: bool = False) -> Any:
    """Return what modules of an op group have in common, or None if a module has calls of its own.

    Args:
        by_kernels: Triton's kernels run convolutions.
    """
    if hasattr(module, "grouped"):
        return type(module)
    named = dict(module.named_modules())
    convs = {name: part for name, part in named.items() if type(part) is Conv2d and _keeps_grid(part)}
    others = [part for name, part in named.items() if name not in convs]
    if not (by_kernels and convs) or any([*part.parameters(False), *part.buffers(False)] for part in others):
        return None
    shapes = [(name, conv.weight.shape, conv.dilation) for name, conv in convs.items()]
    return type(module), getattr(module, "conv_steps", None), *shapes


def grouped_modules(plan: Plan, modules: Mapping[int, Any]) -> dict[int, Callable[..., Any]]:
    """Return the callable of each op group whose modules have a method `grouped`, for one run of a plan.

    Args:
        modules: by op, the module of each function that the plan runs.
    """
    together = together_of(plan, modules)
    return {op: members[0].grouped(members) for op, (_, members) in together.items() if hasattr(members[0], "grouped")}


def together_of(plan: Plan, modules: Mapping[int, Any]) -> dict[int, tuple[OpGroup, Sequence[Any]]]:
    """Return the op groups of a plan, by number, each with the modules of its functions.

    Op groups in which a module has hooks are omitted, as the hooks are for the rows of its own function.
    """
    found = {op: (op_group, [modules[each] for each in op_group.ops]) for op, op_group in plan.op_groups.items()}
    return {op: (op_group, members) for op, (op_group, members) in found.items() if not any(map(_has_hooks, members))}


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(part, kind) for part in module.modules() for kind in kinds)


def _keeps_grid(conv: nn.Conv2d) -> bool:
    """Return whether a convolution has a bias, stride 1 and results of the size of its inputs."""
    size, dilation = conv.kernel_size[0], conv.dilation[0]
    is_square = conv.kernel_size == (size, size) and conv.dilation == (dilation, dilation) and size % 2 == 1
    is_plain = (conv.stride, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros") and conv.bias is not None
    return is_square and is_plain and conv.padding == (size // 2 * dilation,) * 2
