"""Op groups whose convolutions are Triton kernels.

The module of one function runs the rows of all functions of its op group. The convolutions of `layers.py` in it use a
*bank*, the weights of the same convolution of every function, and each row those of its own function.

A module that is a chain of convolutions reads its arguments from the buffers of `execute.py` and writes its result
there, so that a call consists of one kernel for each convolution, forward and backward, and of adding the gradients of
its arguments. The gradients of the weights are one kernel a step for each convolution.

Shapes: F functions, G rows of a call, N rows of all calls, M rows of a buffer, H W grid, T taps, C I and O channels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.execute import Buffers
from iep.batching.plan import Call, Functions, OpGroup, Plan
from iep.kernels import triton_conv
from iep.kernels.deferred import Chains, first_token, token_of_pass
from iep.kernels.layers import Conv2d, autocast_dtype, computed_by
from iep.kernels.op_groups import grouped_modules, together_of
from iep.kernels.triton_conv import Maps


def kernel_modules(plan: Plan, modules: Mapping[int, nn.Module]) -> dict[int, Any]:
    """Return the callable of each op group, for one run of a plan.

    Modules that have `conv_steps` run in place if the plan has a single column, whose maps must be in channels-last
    format.

    Args:
        modules: by op, the module of each function that the plan runs.
    """
    found: dict[int, Any] = grouped_modules(plan, modules)
    for op, (op_group, members) in together_of(plan, modules).items():
        if op not in found:
            in_place = len(plan.columns) == 1 and getattr(members[0], "conv_steps", None) is not None
            found[op] = (ConvChain if in_place else ConvModule)(op_group, members)
    return found


class _Pairs(NamedTuple):
    """The inputs and output gradients from which the gradients of a bank are computed, N rows of each."""

    x: tuple[Maps, ...]
    """The inputs, of which the channels are concatenated, sorted by function."""
    gradient: Maps
    ends: Tensor
    """The end of the rows of each function, (F,) int32."""


class Bank:
    """One convolution of every function of an op group, for one step: a layer as `deferred.Chains` runs it.

    Args:
        convs: the convolutions.
        dtype: the dtype of the computation.
    """

    def __init__(self, convs: Sequence[Conv2d], dtype: torch.dtype):
        self.size, self.dilation = convs[0].kernel_size[0], convs[0].dilation[0]
        self.kept: dict[float, _Pairs | list[tuple[Tensor, Tensor, Functions, Tensor]]] = {}
        """By the number of the backward pass, the pairs of all calls, or what is kept of each call."""
        self.parameters = (*(conv.weight for conv in convs), *(conv.bias for conv in convs))
        self.is_trained = any(each.requires_grad for each in self.parameters)
        with torch.no_grad():
            weight_FOIhw, bias_FO = (
                torch.stack(each).to(dtype) for each in (self.parameters[: len(convs)], self.parameters[len(convs) :])
            )
            self.weight_FTIO, self.bias_FO = weight_FOIhw.permute(0, 3, 4, 2, 1).flatten(1, 2).contiguous(), bias_FO

    @cached_property
    def flipped(self) -> Tensor:
        """The weights of the convolution that computes the input's gradient, whose taps are reversed, (F, T, O, I)."""
        return self.weight_FTIO.flip(1).transpose(2, 3).contiguous()

    def compute(self, x_GIHW: Tensor, functions: Functions, numbers_G: Tensor) -> Tensor:
        """Convolve each row with the weights of its function, (G, O, H, W).

        Args:
            numbers_G: the numbers from 0 to G - 1.
        """
        # Not a view, so that modules may modify the result in place.
        return self._convolved(x_GIHW, self.weight_FTIO, self.bias_FO, functions, numbers_G).data

    def of_input(self, gradient_GOHW: Tensor, _: Tensor, functions: Functions, numbers_G: Tensor) -> Tensor:
        """Return the gradient of the input of a call, (G, I, H, W)."""
        return self._convolved(gradient_GOHW, self.flipped, None, functions, numbers_G)

    def of_parameters(self, kept: _Pairs | list[tuple[Tensor, Tensor, Functions, Tensor]]) -> Sequence[Tensor]:
        """Return the gradients of the weights of all functions, then those of the biases."""
        pairs = kept if isinstance(kept, _Pairs) else _joined(kept)
        found = [triton_conv.weight_gradient(x, *pairs[1:], self.size**2, self.dilation) for x in pairs.x]
        of_weight_FTIO, of_bias_FO = torch.cat([of_weight for of_weight, _ in found], dim=2), found[0][1]
        like, count = self.parameters[0], len(of_weight_FTIO)
        # One copy in the memory order of the parameters, so that autograd need not copy the gradient of each of them.
        of_weight_FOIhw = like.new_empty_strided((count, *like.shape), (like.numel(), *like.stride()))
        of_weight_FOIhw.copy_(of_weight_FTIO.unflatten(1, (self.size, self.size)).permute(0, 4, 3, 1, 2))
        return *of_weight_FOIhw, *of_bias_FO.to(like.dtype)

    def _convolved(
        self, x_GIHW: Tensor, weight_FTIO: Tensor, bias_FO: Tensor | None, functions: Functions, numbers_G: Tensor
    ) -> Tensor:
        x_GHWI = _channels_last(x_GIHW)
        out_GHWO = _empty(x_GHWI, len(x_GHWI), weight_FTIO)
        triton_conv.conv((Maps(x_GHWI, numbers_G),), weight_FTIO, bias_FO, functions.ends, out_GHWO, self.dilation)
        return out_GHWO.permute(0, 3, 1, 2)


def _joined(calls: Sequence[tuple[Tensor, Tensor, Functions, Tensor]]) -> _Pairs:
    """Return the pairs of several calls, given input, output gradient and functions of each."""
    x, gradient, functions, _ = zip(*calls, strict=True)
    order_N = torch.cat([each.index for each in functions]).argsort(stable=True)
    x, gradient = (Maps(_channels_last(torch.cat(each)), order_N) for each in (x, gradient))
    return _Pairs((x,), gradient, torch.stack([each.ends for each in functions]).sum(0, dtype=torch.int32))


def _channels_last(x_GCHW: Tensor) -> Tensor:
    return x_GCHW.permute(0, 2, 3, 1).contiguous()


def _empty(values_MHWC: Tensor, size: int, weight_FTIO: Tensor) -> Tensor:
    """Return memory for results on the grid of `values_MHWC`, (size, H, W, O)."""
    return values_MHWC.new_empty(size, *values_MHWC.shape[1:3], weight_FTIO.shape[3])


def _maps(buffers: Buffers) -> Tensor:
    """Return all values of the single column, (M, H, W, C), of which some are not written yet.

    Raises:
        ValueError: the maps are not in channels-last format.
    """
    maps_MHWC = buffers.kinds[0].view(buffers.values[0]).permute(0, 2, 3, 1)
    if not maps_MHWC.is_contiguous():
        raise ValueError("inputs in channels-first format, but Triton's kernels need channels-last format")
    return maps_MHWC


class ConvModule:
    """The modules of an op group as one callable, for one step.

    Args:
        op_group: the functions of a plan.
        members: their modules, of which the first computes everything except convolutions.
    """

    def __init__(self, op_group: OpGroup, members: Sequence[nn.Module]):
        self._module, self._chains = members[0], Chains()
        alike = zip(*(each.modules() for each in members), strict=True)
        self._convs = {convs[0].weight: convs for convs in alike if isinstance(convs[0], Conv2d)}
        self._numbers = torch.arange(len(op_group.index), device=op_group.index.device)

    def __call__(self, functions: Functions, *arguments: Tensor) -> Any:
        """Return the results of the rows, (G, ...), which are sorted by function."""
        with computed_by(partial(self._conv, functions)):
            return self._module(*arguments)

    def _conv(self, functions: Functions, _: Callable, x_GIHW: Tensor, weight: Tensor, *__: Any) -> Tensor:
        """Return the result of the convolution that has a weight, (G, O, H, W)."""
        if (dtype := autocast_dtype(x_GIHW)) is not None:
            x_GIHW = x_GIHW.to(dtype)

        key, numbers_G = (weight, x_GIHW.dtype), self._numbers[: len(x_GIHW)]
        return self._chains.run(key, lambda: Bank(self._convs[weight], x_GIHW.dtype), x_GIHW, functions, numbers_G)


class ConvChain:
    """The modules of an op group that consist of `ConvStep`s, the last of which makes the result, for one step.

    A value is read by at most one convolution, and added to at most one other result.

    Args:
        op_group: the functions of a plan of one column.
        members: their modules.
    """

    def __init__(self, op_group: OpGroup, members: Sequence[Any]):
        self.op_group, self.steps = op_group, members[0].conv_steps
        self._convs = [[member.get_submodule(step.conv) for member in members] for step in self.steps]
        self.banks: list[Bank] = []
        self._tokens: Sequence[Tensor] = ()
        self.made: list[Tensor] = []
        """In training, the results of all steps but the last for the rows of all calls, (N, H, W, O) each."""

    def run_in_place(self, states: Sequence[Tensor], buffers: Buffers, call: Call) -> Sequence[Tensor]:
        """Write the results of a call into the buffers, and return the states of the columns after it."""
        values, is_recorded = _maps(buffers), torch.is_grad_enabled()
        if not self.banks:
            self.banks = [Bank(convs, values.dtype) for convs in self._convs]
            self._tokens = [first_token(bank) for bank in self.banks]
            if is_recorded:
                self.made = self._between(values, len(self.op_group.index))
        if is_recorded:
            state, *self._tokens = _Chain.apply(*states, self, buffers, values, call, *self._tokens)
            return (state,)
        self.compute(buffers, values, call, self._between(values, call.size))
        return ()

    def _between(self, values: Tensor, size: int) -> list[Tensor]:
        return [_empty(values, size, bank.weight_FTIO) for bank in self.banks[:-1]]

    def compute(self, buffers: Buffers, stored: Tensor, call: Call, made: Sequence[Tensor]) -> None:
        """Compute the results of a call, and store them. Those of all steps but the last are written to `made`."""
        values = [Maps(stored, buffers.rows(each)) for each in call.arguments]
        values += [Maps(each, buffers.numbers) for each in made]
        ends, results = buffers.plan.functions(call).ends, [*made, stored[call.results[0].rows]]
        for step, bank, result in zip(self.steps, self.banks, results, strict=True):
            read = tuple([values[number] for number in step.reads])
            residual = None if step.residual is None else values[step.residual]
            how = (bank.weight_FTIO, bank.bias_FO, ends, result, bank.dilation)
            triton_conv.conv(read, *how, residual, relu=True)


class _Chain(Function):
    """Run a call of a chain. The backward pass adds the gradients of the arguments to those in the buffers."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, chain: ConvChain, buffers: Buffers, values: Tensor, call: Call, *tokens: Tensor
    ) -> tuple[Tensor, ...]:
        # Autograd frees saved tensors after the backward pass. The chain is not kept, because it refers to the results
        # of all calls. `.data` does not share a version counter, which the writes of later calls increase.
        ctx.save_for_backward(values.data, *(each.data for each in chain.made))
        ctx.op_group, ctx.steps, ctx.banks = chain.op_group, chain.steps, chain.banks
        ctx.buffers, ctx.call = buffers, call
        ctx.set_materialize_grads(False)
        assert call.in_op_group is not None
        _, first = call.in_op_group
        chain.compute(buffers, values, call, [each[first : first + call.size] for each in chain.made])
        return state.detach(), *(each.clone() for each in tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_state: Tensor | None, *of_tokens: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of the state and the tokens, and keep the gradients of all steps for the weights."""
        buffers, call, of_token = ctx.buffers, ctx.call, token_of_pass(of_tokens[0])
        buffers.gradients, number = {0: of_state}, of_token.item()
        of_result = buffers.gradient(call.results[0])
        if of_result is not None:
            values, *made = ctx.saved_tensors
            _, first = call.in_op_group
            end = first + call.size
            if not any(bank.is_trained for bank in ctx.banks):
                gradients = [_empty(values, call.size, bank.weight_FTIO) for bank in ctx.banks]
            else:
                if number not in ctx.banks[0].kept:
                    _Chain._begin(ctx, number, values, made)
                gradients = [bank.kept[number].gradient.buffer[first:end] for bank in ctx.banks]
            threshold = torch.ops.aten.threshold_backward.grad_input
            result = values[call.results[0].rows]
            threshold(of_result.permute(0, 2, 3, 1), result, 0, grad_input=gradients[-1])
            of_arguments = _Chain._of_arguments(ctx, gradients, [each[first:end] for each in made])
            for argument, of_argument in zip(call.arguments, of_arguments, strict=True):
                buffers.add_gradient(argument, of_argument.permute(0, 3, 1, 2))
        of_state, buffers.gradients = buffers.gradients[0], {}
        return of_state, None, None, None, None, *[of_token] * len(of_tokens)

    @staticmethod
    def _begin(ctx: Any, number: float, values: Tensor, made: Sequence[Tensor]) -> None:
        """Allocate the gradients of all calls for a backward pass, and keep the inputs of the steps."""
        buffers, op_group, end = ctx.buffers, ctx.op_group, ctx.call.in_op_group[1] + ctx.call.size
        calls = [each.arguments for each in buffers.plan.calls if each.op == ctx.call.op]
        order_N = op_group.order
        read = [Maps(values, torch.cat([*map(buffers.rows, each)])[order_N]) for each in zip(*calls, strict=True)]
        read += [Maps(each, order_N) for each in made]
        for step, bank in zip(ctx.steps, ctx.banks, strict=True):
            gradient = _empty(values, len(order_N), bank.weight_FTIO)
            gradient[end:].zero_()  # later calls, from which no gradient has come
            x = tuple([read[each] for each in step.reads])
            bank.kept[number] = _Pairs(x, Maps(gradient, order_N), op_group.total_ends)

    @staticmethod
    def _of_arguments(ctx: Any, gradients: Sequence[Tensor], made: Sequence[Tensor]) -> list[Tensor]:
        """Fill `gradients`, of which the last is known, and return the gradients of the arguments, (G, H, W, C)."""
        given, found = len(ctx.call.arguments), []
        numbers, ends = ctx.buffers.numbers, ctx.buffers.plan.functions(ctx.call).ends
        added = {step.residual: gradient for step, gradient in zip(ctx.steps, gradients, strict=True)}
        for step, bank, gradient in reversed([*zip(ctx.steps, ctx.banks, gradients, strict=True)]):
            read = step.reads[0]
            residual = Maps(added[read], numbers) if read in added else None
            how = ((Maps(gradient, numbers),), bank.flipped, None, ends)
            if read >= given:
                triton_conv.conv(*how, gradients[read - given], bank.dilation, residual, mask_GHWO=made[read - given])
            else:
                of_read = _empty(gradient, len(gradient), bank.flipped)
                triton_conv.conv(*how, of_read, bank.dilation, residual)
                found = list(of_read.chunk(given, dim=3))
        return found
