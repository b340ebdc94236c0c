"""The plans of one template -> their results and gradients, by two CUDA graphs that are captured once.

A CUDA graph starts all kernels of a forward or backward pass at once, so that a step no longer waits for Python
(PyTorch's documentation, CUDA semantics, "CUDA graphs"). The graphs read the index tensors, inputs and weights at fixed
addresses, where each step puts its own.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.execute import execute
from iep.batching.plan import Plan
from iep.kernels.fused import kernel_modules

WARM_UP = 3
"""The number of passes before the capture, in which kernels are compiled and their configurations are chosen."""


class CapturedExecution:
    """`execute` with Triton's kernels for the plans of one template, captured as CUDA graphs.

    The result and the gradients of a minibatch are overwritten by the next one.

    Args:
        plan: a plan of the template, on the GPU.
        modules: by op, the modules of all functions of the template's op groups. Later changes of their parameters must
            be made in place. Those that are frozen at the capture have no gradients afterwards either.
        inputs: the inputs of the plan, or fewer.
    """

    def __init__(self, plan: Plan, modules: Mapping[int, nn.Module], inputs: Tensor):
        self._plan = plan.map(torch.clone)
        self._modules = {op: with_own_nodes(each) for op, each in modules.items()}
        sizes = (plan.inputs[0].rows.stop, *inputs.shape[1:])
        self._inputs = inputs.new_zeros(sizes).contiguous(memory_format=torch.channels_last)
        self._inputs[: len(inputs)].copy_(inputs.detach())
        self._inputs.requires_grad_(inputs.requires_grad)
        self._parameters: dict[nn.Parameter, int] = {}
        """The trained parameters, and the op of the function of each."""
        self._captured: list[nn.Parameter] = []
        """The trained parameters of the captured modules, in the order of `_parameters`."""
        for op, module in modules.items():
            self._parameters |= dict.fromkeys(_trained(module), op)
            self._captured += _trained(self._modules[op])
        self._result: Any = None
        self._of_result: Any = None
        """The result of a plan and its gradient, tensors from the first pass on."""
        self._gradients: tuple[Tensor | None, ...] = ()
        self.num_runs = 0
        with torch.cuda.device_of(inputs):  # streams and graphs belong to the current device
            self._replay_forward, self._replay_backward = capture(self._forward, self._backward)

    def __call__(self, plan: Plan, ops: Collection[int], inputs: Tensor) -> Tensor:
        """Return the results of a plan, as `execute` does.

        Args:
            plan: a plan of the template, on the GPU.
            ops: the ops that the plan runs. The parameters of other functions have no gradients.

        Raises:
            RuntimeError: in training, a parameter has a gradient, which would be overwritten, before the forward or the
                backward pass; or, in the backward pass, another minibatch has run since.
        """
        if torch.is_grad_enabled():
            self._check_gradients()
        parameters = [each if op in ops else each.detach() for each, op in self._parameters.items()]
        return _Replay.apply(self, plan, inputs, *parameters)

    def _check_gradients(self) -> None:
        if any(each.grad is not None for each in self._parameters):
            raise RuntimeError("a CUDA graph would overwrite gradients: call zero_grad(set_to_none=True) before it")

    def begin(self, plan: Plan, inputs: Tensor) -> Tensor:
        """Replay the forward pass, and return its result."""
        for own, given in zip(self._plan.tensors, plan.tensors, strict=True):
            own.copy_(given)
        self._inputs[: len(inputs)].copy_(inputs)
        self._replay_forward()
        self.num_runs += 1
        return self._result.detach()

    def end(self, of_result: Tensor) -> tuple[Tensor | None, ...]:
        """Replay the backward pass, and return the gradients of all inputs and of the parameters."""
        self._check_gradients()
        self._of_result.copy_(of_result)
        self._replay_backward()
        return tuple([None if each is None else each.detach() for each in self._gradients])

    def _forward(self) -> None:
        device = self._inputs.device.type
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            op_groups = kernel_modules(self._plan, self._modules)
            callables: dict[int, Any] = {**self._modules, **op_groups}
            self._result = execute(self._plan, callables, self._inputs)
        if self._of_result is None:
            self._of_result = torch.zeros_like(self._result)

    def _backward(self) -> None:
        wanted = [each for each in (self._inputs, *self._captured) if each.requires_grad]
        if not wanted:
            return
        found = torch.autograd.grad(self._result, wanted, self._of_result, allow_unused=True)
        self._result = self._result.detach()  # frees what the nodes of its graph keep
        self._gradients = found if self._inputs.requires_grad else (None, *found)


def with_own_nodes(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares all tensors, but whose parameters have nodes of their own in autograd.

    The node of a parameter belongs to the stream of its first use. A captured backward pass cannot wait for another
    stream, and every later backward pass would wait for the stream of the capture.
    """
    known: dict[int, Tensor] = {}
    for parameter in module.parameters():
        known[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for buffer in module.buffers():
        known[id(buffer)] = buffer
    return copy.deepcopy(module, known)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [each for each in module.parameters() if each.requires_grad]


def capture(*passes: Callable[[], None]) -> list[Callable[[], None]]:
    """Return functions that replay passes, which run one after another and share memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            for each in passes:
                each()
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()
    replays = []
    for each in passes:
        graph = torch.cuda.CUDAGraph()
        # Threads of data loaders may use CUDA during the capture.
        with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
            each()
        replays.append(graph.replay)
    return replays


class _Replay(Function):
    """The passes of a `CapturedExecution`."""

    @staticmethod
    def forward(
        ctx: Any,
        captured: CapturedExecution,
        plan: Plan,
        inputs: Tensor,
        *_: Tensor,
    ) -> Tensor:
        ctx.captured = captured
        ctx.num_inputs = len(inputs)
        result = captured.begin(plan, inputs)
        ctx.run = captured.num_runs
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_result: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.run != ctx.captured.num_runs:
            raise RuntimeError("a CUDA graph has run another minibatch before the backward pass of this one")
        of_inputs, *of_parameters = ctx.captured.end(of_result)
        if of_inputs is not None:
            of_inputs = of_inputs[: ctx.num_inputs]
        return None, None, of_inputs, *of_parameters
