"""Modules -> which functions may run in one call, an *op group*, and the callables of the op groups of a plan.

The modules say so themselves. A static method `grouped(members)` returns a callable for the rows of several functions,
which is used on any device. Triton's kernels (`fused.py`) can run modules that have no parameters but those of
convolutions of `layers.py`. Functions with such modules of one class must differ in nothing but their weights, and
treat every row by itself. Functions with other modules have calls of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from iep.batching.plan import OpGroup, Plan
from iep.kernels.layers import Conv2d

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""The attributes of a module that have its hooks."""


class Together(NamedTuple):
    """An op group of a plan, with the modules of its functions in order."""

    op_group: OpGroup
    members: Sequence[Any]


def architecture(module: nn.Module, by_kernels: bool = False) -> Any:
    """Return what modules of an op group have in common, or None if a module has calls of its own.

    Args:
        by_kernels: Triton's kernels run convolutions.
    """
    if hasattr(module, "grouped"):
        return type(module)
    if not by_kernels:
        return None
    convs: dict[str, Conv2d] = {}
    for name, part in module.named_modules():
        if type(part) is Conv2d and _keeps_grid(part):
            convs[name] = part
        elif _has_tensors(part):
            return None
    if not convs:
        return None
    shapes = [(name, conv.weight.shape, conv.dilation) for name, conv in convs.items()]
    return type(module), getattr(module, "conv_steps", None), *shapes


def grouped_modules(plan: Plan, modules: Mapping[int, Any]) -> dict[int, Callable[..., Any]]:
    """Return the callable of each op group whose modules have a method `grouped`, for one run of a plan.

    Args:
        modules: by op, the module of each function that the plan runs.
    """
    found = {}
    for number, (_, members) in together_of(plan, modules).items():
        if hasattr(members[0], "grouped"):
            found[number] = members[0].grouped(members)
    return found


def together_of(plan: Plan, modules: Mapping[int, Any]) -> dict[int, Together]:
    """Return the op groups of a plan, by number, each with the modules of its functions.

    Op groups in which a module has hooks are omitted, as the hooks are for the rows of its own function.
    """
    found = {}
    for number, op_group in plan.op_groups.items():
        members = [modules[op] for op in op_group.ops]
        if not any(_has_hooks(member) for member in members):
            found[number] = Together(op_group, members)
    return found


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(part, kind) for part in module.modules() for kind in HOOKS)


def _has_tensors(module: nn.Module) -> bool:
    """Return whether a module itself has parameters or buffers."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return len(own) > 0


def _keeps_grid(conv: nn.Conv2d) -> bool:
    """Return whether a convolution has a bias, stride 1 and results of the size of its inputs."""
    size = conv.kernel_size[0]
    dilation = conv.dilation[0]
    padding = size // 2 * dilation
    return (
        size % 2 == 1
        and conv.kernel_size == (size, size)
        and conv.dilation == (dilation, dilation)
        and conv.padding == (padding, padding)
        and conv.padding_mode == "zeros"
        and conv.stride == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
    )
