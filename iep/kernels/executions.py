"""Plan, modules and inputs -> the values of the roots, in one of three ways: by calls, by kernels, or as CUDA graphs.

An engine runs its plans through this file alone. Triton is imported when the first plan needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.plan import Plan
from iep.kernels.deferred import weight_grad_context
from iep.kernels.layers import autocast_dtype
from iep.kernels.op_groups import grouped_modules
from iep.kernels.template import Template

MAPS = 0
"""The column of the maps, which kernels read."""
Modules = Mapping[int, nn.Module]
"""The module of every op."""
Inputs = Mapping[int, Tensor]
"""The inputs of each column that has inputs."""
Execution = Callable[[Plan, Graph, Modules, Inputs, bool], Sequence[Tensor]]
"""(plan, graph of the plan, modules, inputs, defer) -> the values of the roots. With `defer`, weight gradients are
deferred."""


def run_calls(
    plan: Plan,
    _: Graph,
    modules: Modules,
    inputs: Inputs,
    defer: bool,
) -> Sequence[Tensor]:
    """Run one function in each call, or all of one number of arguments if they share their weights."""
    op_groups = grouped_modules(plan, modules)
    callables: dict[int, Callable] = {**modules, **op_groups}
    return execute(plan, callables, inputs, weight_grad_context(defer))


def run_kernels(
    plan: Plan,
    _: Graph,
    modules: Modules,
    inputs: Inputs,
    defer: bool,
) -> Sequence[Tensor]:
    """Run all functions of an op group in each call, by Triton's kernels. Weight gradients are always deferred."""
    from iep.kernels.fused import kernel_modules  # which needs Triton

    op_groups = kernel_modules(plan, modules)
    callables: dict[int, Callable] = {**modules, **op_groups}
    converted = _for_kernels(inputs)
    return execute(plan, callables, converted, weight_grad_context(deferred=True))


class CudaGraphs:
    """Run all calls of a template as CUDA graphs, which the first plan captures.

    Args:
        template: the calls of the plans.
    """

    def __init__(self, template: Template):
        self.template = template
        self._captured: dict[tuple[torch.dtype, bool], Any] = {}
        """The graphs, by the dtype of the inputs and whether the inputs need gradients."""

    def __call__(
        self,
        plan: Plan,
        graph: Graph,
        modules: Modules,
        inputs: Inputs,
        defer: bool,
    ) -> Sequence[Tensor]:
        """Return the values of the roots. Weight gradients are always deferred."""
        from iep.kernels.cuda_graph import CapturedExecution  # which needs Triton

        maps_NCHW = _for_kernels(inputs)[MAPS]
        key = maps_NCHW.dtype, maps_NCHW.requires_grad
        if key not in self._captured:
            self._captured[key] = CapturedExecution(plan, modules, maps_NCHW)
        run = self._captured[key]
        ops, _ = graph.kinds
        results = run(plan, ops.tolist(), maps_NCHW)
        return (results[: len(graph.roots)],)


def _for_kernels(inputs: Inputs) -> Inputs:
    """Return the inputs in the dtype of autocast, in which kernels then compute, with maps in channels-last format."""
    dtype = autocast_dtype(inputs[MAPS])
    if dtype is not None:
        inputs = {column: each.to(dtype) for column, each in inputs.items()}
    maps_NCHW = inputs[MAPS].contiguous(memory_format=torch.channels_last)
    return {**inputs, MAPS: maps_NCHW}
