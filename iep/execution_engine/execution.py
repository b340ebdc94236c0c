"""The ways to run the module calls of a plan: the plan, modules and the values of `scene` -> the values of the roots.

`choices.EXECUTIONS` describes them. A way that is an object keeps what it needs from one minibatch to the next.

Shapes: B programs, C H W maps.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from iep.batching.execute import execute
from iep.batching.layers import autocast_dtype
from iep.batching.op_groups import grouped_modules
from iep.batching.template import Template
from iep.execution_engine.program_plan import ProgramPlan
from iep.execution_engine.roles import MAP

Modules = Mapping[int, nn.Module]
"""The module of every op."""
Inputs = Mapping[int, Tensor]
"""The value of `scene` in each kind."""
Execution = Callable[[ProgramPlan, Modules, Inputs, bool], Sequence[Tensor]]
"""(plan, modules, inputs, defer) -> the programs' results, (B, C, H, W), then the attentions if the plan returns them.
With `defer`, the weight gradients of calls are deferred."""


def run_calls(plan: ProgramPlan, modules: Modules, inputs: Inputs, defer: bool) -> Sequence[Tensor]:
    """Run one function in each call, or all of one number of arguments if they share their weights."""
    return execute(plan.plan, {**modules, **grouped_modules(plan.plan, modules)}, inputs, defer)


def run_kernels(plan: ProgramPlan, modules: Modules, inputs: Inputs, defer: bool) -> Sequence[Tensor]:
    """Run all functions of an op group in each call, by Triton's kernels, which always defer weight gradients."""
    from iep.batching.fused import kernel_modules  # which needs Triton

    return execute(plan.plan, {**modules, **kernel_modules(plan.plan, modules)}, _for_kernels(inputs), True)


class CudaGraphs:
    """Run all calls of a template as CUDA graphs, which the first plan captures.

    Args:
        template: the calls of the plans.
    """

    def __init__(self, template: Template):
        self.template = template
        self._captured: dict[tuple[torch.dtype, bool], Any] = {}
        """The graphs, by dtype and whether the stem is trained."""

    def __call__(self, plan: ProgramPlan, modules: Modules, inputs: Inputs, defer: bool) -> Sequence[Tensor]:
        """Return the programs' results."""
        from iep.batching.cuda_graph import CapturedExecution  # which needs Triton

        stems_NCHW = _for_kernels(inputs)[MAP]
        key = stems_NCHW.dtype, stems_NCHW.requires_grad
        if key not in self._captured:
            self._captured[key] = CapturedExecution(plan.plan, modules, stems_NCHW)
        results = self._captured[key](plan.plan, plan.graph.kinds[0].tolist(), stems_NCHW)
        return (results[: len(plan.graph.roots)],)


def _for_kernels(inputs: Inputs) -> Inputs:
    """Return inputs in the dtype of autocast, in which kernels then compute, with maps in channels-last format."""
    if (dtype := autocast_dtype(inputs[MAP])) is not None:
        inputs = {kind: each.to(dtype) for kind, each in inputs.items()}
    return {**inputs, MAP: inputs[MAP].contiguous(memory_format=torch.channels_last)}
