"""Families whose convolutions are Triton kernels: layers, and modules that are chains of convolutions.

A chain reads its arguments from the buffers of `execute.py` and writes its result there, so that a call consists of one
kernel for each convolution, forward and backward, and of adding the gradients of its arguments. The gradients of the
weights are one kernel a step for each layer.

Shapes: F functions, G rows of a call, N rows of all calls, M rows of a buffer, H W grid, C I and O channels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching import triton_conv
from iep.batching.families import ConvStep, Layer, family_module, groupable
from iep.batching.plan import Call, Family, Functions, Plan
from iep.batching.triton_conv import Maps

if TYPE_CHECKING:
    from iep.batching.execute import Buffers


def kernel_modules(plan: Plan, modules: Mapping[int, nn.Module]) -> dict[int, Callable[..., Any]]:
    """Return the callable of each family that can be grouped, for one run of a plan, as `family_modules` does.

    Modules that have `conv_steps` run in place if the plan has a single column, whose maps must be in channels-last
    format.
    """
    found: dict[int, Callable[..., Any]] = {}
    for op, (family, members) in groupable(plan, modules).items():
        steps = getattr(members[0], "conv_steps", None)
        if steps is not None and len(plan.columns) == 1:
            found[op] = ConvChain(family, members, steps)
        else:
            found[op] = family_module(family, members, KernelLayer)
    return found


class KernelLayer(Layer):
    """Convolutions as Triton kernels."""

    @staticmethod
    def in_order(weight_FTIO: Tensor) -> Tensor:
        """Return weights in whose memory input channels are adjacent, as the matrix units read TF32."""
        return weight_FTIO.mT.contiguous().mT

    @cached_property
    def _numbers(self) -> Tensor:
        return torch.arange(len(self.family.index), device=self.family.index.device)

    def conv(self, x_GIHW: Tensor, functions: Functions) -> Tensor:
        return self._conv(x_GIHW, self.weight_FTIO, self.bias_FO, functions)

    def input_gradient(self, gradient_GOHW: Tensor, functions: Functions) -> Tensor:
        return self._conv(gradient_GOHW, self.flipped, None, functions)

    def weight_gradients(self, kept: list[tuple[Tensor, Tensor, Functions]]) -> tuple[Tensor, Tensor]:
        x, gradient, functions = zip(*kept, strict=True)
        order_N = torch.cat([each.index for each in functions]).argsort(stable=True)
        x, gradient = (Maps(_channels_last(torch.cat(each)), order_N) for each in (x, gradient))
        ends_F = torch.stack([each.ends for each in functions]).sum(0, dtype=torch.int32)
        return triton_conv.weight_gradient(x, gradient, ends_F, self.size**2, self.dilation)

    def _conv(self, x_GIHW: Tensor, weight_FTIO: Tensor, bias_FO: Tensor | None, functions: Functions) -> Tensor:
        x_GHWI = _channels_last(x_GIHW)
        out_GHWO = x_GHWI.new_empty(*x_GHWI.shape[:3], weight_FTIO.shape[3])
        x = (Maps(x_GHWI, self._numbers[: len(x_GHWI)]),)
        triton_conv.conv(x, weight_FTIO, bias_FO, functions.ends, out_GHWO, self.dilation)
        return out_GHWO.permute(0, 3, 1, 2)


def _channels_last(x_GCHW: Tensor) -> Tensor:
    return x_GCHW.permute(0, 2, 3, 1).contiguous()


class ConvChain:
    """The modules of a family that consist of `ConvStep`s, for one step of training or inference.

    A value is read by at most one convolution, and added to at most one other result.

    Args:
        family: the functions of a plan of one column.
        members: their modules.
        steps: the convolutions, in order, of which the last makes the result.
    """

    def __init__(self, family: Family, members: Sequence[nn.Module], steps: Sequence[ConvStep]):
        self.steps = steps
        self._convs = [[member.get_submodule(step.conv) for member in members] for step in steps]
        self.data = _ChainData(family)
        self.layers: list[_ChainLayer] = []
        self._stacked: list[Tensor] = []

    def run_in_place(self, token: Tensor, buffers: "Buffers", call: Call) -> Tensor:
        """Write the results of a call into the buffers, and return the token of the next exchange."""
        data = self.data
        if not self.layers:
            data.values, data.numbers = buffers.maps(0), buffers.numbers
            self.layers = [_ChainLayer(data, *each) for each in zip(self.steps, self._convs, strict=True)]
            self._stacked = [tensor for layer in self.layers for tensor in layer.stack()]
            if torch.is_grad_enabled():
                data.made = [data.empty(layer, data.num_rows) for layer in self.layers[:-1]]
        functions = buffers.plan.functions(call)
        arguments = tuple([Maps(data.values, buffers.rows(each)) for each in call.arguments])
        if not torch.is_grad_enabled():
            made = [data.empty(layer, call.size) for layer in self.layers[:-1]]
            self.compute(call, functions, arguments, made)
            return token
        data.arguments.append(arguments)
        return _Chain.apply(token, self, buffers, call, functions, arguments, *self._stacked)

    def compute(self, call: Call, functions: Functions, arguments: tuple[Maps, ...], made: Sequence[Tensor]) -> None:
        """Compute the results of a call; `made` gets those of all steps but the last."""
        values = [*arguments, *(Maps(each, self.data.numbers) for each in made)]
        results = [*made, self.data.values[call.results[0].rows]]
        for step, layer, result in zip(self.steps, self.layers, results, strict=True):
            read = tuple([values[number] for number in step.reads])
            residual = None if step.residual is None else values[step.residual]
            how = (layer.weight_FTIO, layer.bias_FO, functions.ends, result, layer.dilation)
            triton_conv.conv(read, *how, residual, relu=True)


class _ChainData:
    """The tensors of a chain in one step. They do not refer to the chain, which is part of autograd's graph."""

    def __init__(self, family: Family):
        self.family = family
        self.num_rows = len(family.index)
        self.numbers: Tensor | None = None
        """The numbers from 0 on."""
        self.values: Tensor | None = None
        """The buffer of the column, (M, H, W, C)."""
        self.made: list[Tensor] = []
        """In training, the results of all steps but the last for the rows of all calls, (N, H, W, O) each."""
        self.arguments: list[tuple[Maps, ...]] = []
        """In training, the arguments of every call."""

    def empty(self, layer: "_ChainLayer", size: int) -> Tensor:
        """Return memory for the results of a layer."""
        return self.values.new_empty(size, *self.values.shape[1:3], layer.bias_FO.shape[1])


class _ChainLayer(KernelLayer):
    """The convolution of one step of a chain."""

    def __init__(self, data: _ChainData, step: ConvStep, convs: Sequence[nn.Conv2d]):
        super().__init__(data.family, convs, data.values.dtype)
        self.data, self.step = data, step

    def weight_gradients(self, kept: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the gradients, given that of the step before its ReLU, for the rows of all calls, alone in `kept`."""
        data, order_N, given = self.data, self.family.order, len(self.data.arguments[0])
        gradient = Maps(kept[0], order_N)
        found = []
        for number in self.step.reads:
            if number < given:
                rows_N = torch.cat([arguments[number].rows for arguments in data.arguments])
                x = Maps(data.values, rows_N[order_N])
            else:
                x = Maps(data.made[number - given], order_N)
            how = (self.family.total_ends, self.size**2, self.dilation)
            found.append(triton_conv.weight_gradient(x, gradient, *how))
        return torch.cat([of_weight for of_weight, _ in found], dim=2), found[0][1]


class _Chain(Function):
    """Run a call of a chain. The backward pass adds the gradients of the arguments to those in the buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        chain: ConvChain,
        buffers: "Buffers",
        call: Call,
        functions: Functions,
        arguments: tuple[Maps, ...],
        *_: Tensor,
    ) -> Tensor:
        ctx.chain, ctx.buffers, ctx.call, ctx.functions = chain, buffers, call, functions
        ctx.set_materialize_grads(False)
        ctx.made = [each[functions.first : functions.first + call.size] for each in chain.data.made]
        chain.compute(call, functions, arguments, ctx.made)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        chain, buffers, call, functions = ctx.chain, ctx.buffers, ctx.call, ctx.functions
        data = chain.data
        of_result, number = buffers.gradient(call.results[0]), torch._C._current_graph_task_id()
        if of_result is not None:
            end = functions.first + call.size
            for layer in chain.layers:
                if number not in layer.kept:
                    layer.kept[number] = [data.empty(layer, data.num_rows)]
                    layer.kept[number][0][end:].zero_()  # later calls, from which no gradient has come
            gradients = [layer.kept[number][0][functions.first : end] for layer in chain.layers]
            result = data.values[call.results[0].rows]
            threshold = torch.ops.aten.threshold_backward.grad_input
            threshold(of_result.permute(0, 2, 3, 1), result, 0, grad_input=gradients[-1])
            for argument, of_argument in zip(call.arguments, _Chain._of_arguments(ctx, gradients), strict=True):
                buffers.add_gradient(argument, of_argument.permute(0, 3, 1, 2))
        if not ctx.needs_input_grad[0]:
            buffers.gradients.pop(number, None)
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def _of_arguments(ctx: Any, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Fill `gradients`, of which the last is known, and return the gradients of the arguments, (G, H, W, C)."""
        chain, functions, given = ctx.chain, ctx.functions, len(ctx.call.arguments)
        found: list[Tensor] = []
        added = {step.residual: gradient for step, gradient in zip(chain.steps, gradients, strict=True)}
        for step, layer, gradient in reversed([*zip(chain.steps, chain.layers, gradients, strict=True)]):
            read = step.reads[0]
            residual = Maps(added[read], chain.data.numbers) if read in added else None
            how = ((Maps(gradient, chain.data.numbers),), layer.flipped, None, functions.ends)
            if read >= given:
                mask = ctx.made[read - given]
                triton_conv.conv(*how, gradients[read - given], layer.dilation, residual, mask_GHWO=mask)
            else:
                of_read = gradient.new_empty(*gradient.shape[:3], layer.weight_FTIO.shape[2])
                triton_conv.conv(*how, of_read, layer.dilation, residual)
                found = list(of_read.chunk(given, dim=3))
        return found
