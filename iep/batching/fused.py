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
from iep.batching.families import Layer, family_module, groupable
from iep.batching.layers import ConvStep
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
        self._family = family
        self._convs = [[member.get_submodule(step.conv) for member in members] for step in steps]
        self.layers: list[_ChainLayer] = []
        self._stacked: list[Tensor] = []
        self.made: list[Tensor] = []
        """In training, the results of all steps but the last for the rows of all calls, (N, H, W, O) each."""

    def run_in_place(self, token: Tensor, buffers: "Buffers", call: Call) -> Tensor:
        """Write the results of a call into the buffers, and return the token of the next exchange."""
        values, is_recorded = buffers.maps(0), torch.is_grad_enabled()
        if not self.layers:
            self.layers = [_ChainLayer(self._family, convs, values.dtype) for convs in self._convs]
            self._stacked = [tensor for layer in self.layers for tensor in layer.stack()]
            if is_recorded:
                self.made = [layer.empty(values, len(self._family.index)) for layer in self.layers[:-1]]
        if is_recorded:
            return _Chain.apply(token, self, buffers, values, call, *self._stacked)
        self.compute(buffers, values, call, [layer.empty(values, call.size) for layer in self.layers[:-1]])
        return token

    def compute(self, buffers: "Buffers", stored: Tensor, call: Call, made: Sequence[Tensor]) -> None:
        """Compute the results of a call, and store them. Those of all steps but the last are written to `made`."""
        values = [Maps(stored, buffers.rows(each)) for each in call.arguments]
        values += [Maps(each, buffers.numbers) for each in made]
        ends, results = buffers.plan.functions(call).ends, [*made, stored[call.results[0].rows]]
        for step, layer, result in zip(self.steps, self.layers, results, strict=True):
            read = tuple([values[number] for number in step.reads])
            residual = None if step.residual is None else values[step.residual]
            how = (layer.weight_FTIO, layer.bias_FO, ends, result, layer.dilation)
            triton_conv.conv(read, *how, residual, relu=True)


class _ChainLayer(KernelLayer):
    """The convolution of one step of a chain."""

    def empty(self, values: Tensor, size: int) -> Tensor:
        """Return memory for results on the grid of `values`, (size, H, W, O)."""
        return values.new_empty(size, *values.shape[1:3], self.bias_FO.shape[1])

    def weight_gradients(self, kept: list) -> tuple[Tensor, Tensor]:
        """Return the gradients.

        `kept` is the gradient before the ReLU, (N, H, W, O), followed by the `Maps` that the step reads.
        """
        gradient, *read = kept
        how = (Maps(gradient, self.family.order), self.family.total_ends, self.size**2, self.dilation)
        found = [triton_conv.weight_gradient(x, *how) for x in read]
        return torch.cat([of_weight for of_weight, _ in found], dim=2), found[0][1]


class _Chain(Function):
    """Run a call of a chain. The backward pass adds the gradients of the arguments to those in the buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        chain: ConvChain,
        buffers: "Buffers",
        values: Tensor,
        call: Call,
        *_: Tensor,
    ) -> Tensor:
        # Autograd frees saved tensors after the backward pass. The chain is not kept, because it refers to the results
        # of all calls. `.data` does not share a version counter, which the writes of later calls increase.
        ctx.save_for_backward(values.data, *(each.data for each in chain.made))
        ctx.steps, ctx.layers, ctx.buffers, ctx.call = chain.steps, chain.layers, buffers, call
        ctx.set_materialize_grads(False)
        _, first = call.in_family
        chain.compute(buffers, values, call, [each[first : first + call.size] for each in chain.made])
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        buffers, call, number = ctx.buffers, ctx.call, torch._C._current_graph_task_id()
        of_result = buffers.gradient(call.results[0])
        if of_result is not None:
            values, *made = ctx.saved_tensors
            _, first = call.in_family
            end = first + call.size
            if not any(ctx.needs_input_grad[5:]):  # no weight is trained
                gradients = [layer.empty(values, call.size) for layer in ctx.layers]
            else:
                if number not in ctx.layers[0].kept:
                    _Chain._begin(ctx, number, values, made)
                gradients = [layer.kept[number][0][first:end] for layer in ctx.layers]
            threshold = torch.ops.aten.threshold_backward.grad_input
            result = values[call.results[0].rows]
            threshold(of_result.permute(0, 2, 3, 1), result, 0, grad_input=gradients[-1])
            of_arguments = _Chain._of_arguments(ctx, gradients, [each[first:end] for each in made])
            for argument, of_argument in zip(call.arguments, of_arguments, strict=True):
                buffers.add_gradient(argument, of_argument.permute(0, 3, 1, 2))
        if not ctx.needs_input_grad[0]:
            buffers.gradients.pop(number, None)
        return (None,) * len(ctx.needs_input_grad)

    @staticmethod
    def _begin(ctx: Any, number: int, values: Tensor, made: Sequence[Tensor]) -> None:
        """Allocate the gradients of all calls for a backward pass, and keep the inputs of the steps."""
        buffers, order_N, end = ctx.buffers, ctx.layers[0].family.order, ctx.call.in_family[1] + ctx.call.size
        calls = [each.arguments for each in buffers.plan.calls if each.op == ctx.call.op]
        read = [Maps(values, torch.cat([*map(buffers.rows, each)])[order_N]) for each in zip(*calls, strict=True)]
        read += [Maps(each, order_N) for each in made]
        for step, layer in zip(ctx.steps, ctx.layers, strict=True):
            gradient = layer.empty(values, len(order_N))
            gradient[end:].zero_()  # later calls, from which no gradient has come
            layer.kept[number] = [gradient, *(read[each] for each in step.reads)]

    @staticmethod
    def _of_arguments(ctx: Any, gradients: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """Fill `gradients`, of which the last is known, and return the gradients of the arguments, (G, H, W, C)."""
        given, found = len(ctx.call.arguments), []
        numbers, ends = ctx.buffers.numbers, ctx.buffers.plan.functions(ctx.call).ends
        added = {step.residual: gradient for step, gradient in zip(ctx.steps, gradients, strict=True)}
        for step, layer, gradient in reversed([*zip(ctx.steps, ctx.layers, gradients, strict=True)]):
            read = step.reads[0]
            residual = Maps(added[read], numbers) if read in added else None
            how = ((Maps(gradient, numbers),), layer.flipped, None, ends)
            if read >= given:
                triton_conv.conv(*how, gradients[read - given], layer.dilation, residual, mask_GHWO=made[read - given])
            else:
                of_read = gradient.new_empty(*gradient.shape[:3], layer.weight_FTIO.shape[2])
                triton_conv.conv(*how, of_read, layer.dilation, residual)
                found = list(of_read.chunk(given, dim=3))
        return found
