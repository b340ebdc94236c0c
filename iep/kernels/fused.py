"""Op groups whose convolutions are Triton kernels.

The module of one function runs the rows of all functions of its op group. The convolutions of `layers.py` in it use a
*bank*, which holds the weights of the same convolution of every function. Each row is convolved with the weights of its
own function.

A module that is a chain of convolutions reads its arguments from the buffers of `execute.py` and writes its result
there. A call then consists of one kernel for each convolution, forward and backward, and of adding the gradients of the
arguments. The gradients of the weights take one kernel for each convolution and step.

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
from iep.kernels.deferred import Chains, KeptCall, first_token, token_of_pass
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
    for number, (op_group, members) in together_of(plan, modules).items():
        if number in found:
            continue
        is_chain = getattr(members[0], "conv_steps", None) is not None
        if is_chain and len(plan.columns) == 1:
            found[number] = ConvChain(op_group, members)
        else:
            found[number] = ConvModule(op_group, members)
    return found


# Banks


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
        self.size = convs[0].kernel_size[0]
        self.dilation = convs[0].dilation[0]
        self.kept: dict[float, _Pairs | list[KeptCall]] = {}
        """By the number of the backward pass, the pairs of all calls, or what is kept of each call."""
        weights = [conv.weight for conv in convs]
        biases = [conv.bias for conv in convs]
        self.parameters = (*weights, *biases)
        self.is_trained = any(each.requires_grad for each in self.parameters)
        with torch.no_grad():
            weight_FOIhw = torch.stack(weights).to(dtype)
            weight_FhwIO = weight_FOIhw.permute(0, 3, 4, 2, 1)
            self.weight_FTIO = weight_FhwIO.flatten(1, 2).contiguous()
            self.bias_FO = torch.stack(biases).to(dtype)

    @cached_property
    def flipped(self) -> Tensor:
        """The weights of the convolution that computes the input's gradient, whose taps are reversed, (F, T, O, I)."""
        return self.weight_FTIO.flip(1).transpose(2, 3).contiguous()

    def compute(self, x_GIHW: Tensor, functions: Functions, numbers_G: Tensor) -> Tensor:
        """Convolve each row with the weights of its function, (G, O, H, W).

        Args:
            numbers_G: the numbers from 0 to G - 1.
        """
        result_GOHW = self._convolved(
            x_GIHW,
            self.weight_FTIO,
            self.bias_FO,
            functions,
            numbers_G,
        )
        return result_GOHW.data  # not a view, so that modules may modify the result in place

    def of_input(
        self,
        gradient_GOHW: Tensor,
        _: Tensor,
        functions: Functions,
        numbers_G: Tensor,
    ) -> Tensor:
        """Return the gradient of the input of a call, (G, I, H, W)."""
        return self._convolved(gradient_GOHW, self.flipped, None, functions, numbers_G)

    def of_parameters(self, kept: _Pairs | list[KeptCall]) -> Sequence[Tensor]:
        """Return the gradients of the weights of all functions, then the gradients of the biases."""
        pairs = kept if isinstance(kept, _Pairs) else _joined(kept)
        taps = self.size**2
        of_parts = []
        for x in pairs.x:
            of_part, of_bias_FO = triton_conv.weight_gradient(x, pairs.gradient, pairs.ends, taps, self.dilation)
            of_parts.append(of_part)
        of_weight_FTIO = torch.cat(of_parts, dim=2)

        # One copy in the memory order of the parameters, so that autograd need not copy the gradient of each of them.
        like = self.parameters[0]
        sizes = (len(of_weight_FTIO), *like.shape)
        strides = (like.numel(), *like.stride())
        of_weight_FOIhw = like.new_empty_strided(sizes, strides)
        of_weight_FhwIO = of_weight_FTIO.unflatten(1, (self.size, self.size))
        of_weight_FOIhw.copy_(of_weight_FhwIO.permute(0, 4, 3, 1, 2))
        return *of_weight_FOIhw, *of_bias_FO.to(like.dtype)

    def _convolved(
        self,
        x_GIHW: Tensor,
        weight_FTIO: Tensor,
        bias_FO: Tensor | None,
        functions: Functions,
        numbers_G: Tensor,
    ) -> Tensor:
        x_GHWI = _channels_last(x_GIHW)
        out_GHWO = _empty(x_GHWI, len(x_GHWI), weight_FTIO)
        triton_conv.conv(
            (Maps(x_GHWI, numbers_G),),
            weight_FTIO,
            bias_FO,
            functions.ends,
            out_GHWO,
            self.dilation,
        )
        return out_GHWO.permute(0, 3, 1, 2)


def _joined(calls: Sequence[KeptCall]) -> _Pairs:
    """Return the pairs of several calls of a bank."""
    functions = [each.options[0] for each in calls]
    index_N = torch.cat([each.index for each in functions])
    order_N = index_N.argsort(stable=True)
    ends_KF = torch.stack([each.ends for each in functions])
    x_NHWI = _joined_maps([each.x for each in calls])
    gradient_NHWO = _joined_maps([each.gradient for each in calls])
    return _Pairs(
        x=(Maps(x_NHWI, order_N),),
        gradient=Maps(gradient_NHWO, order_N),
        ends=ends_KF.sum(0, dtype=torch.int32),
    )


def _joined_maps(maps: list[Tensor]) -> Tensor:
    return _channels_last(torch.cat(maps))


def _channels_last(x_GCHW: Tensor) -> Tensor:
    return x_GCHW.permute(0, 2, 3, 1).contiguous()


def _empty(values_MHWC: Tensor, size: int, weight_FTIO: Tensor) -> Tensor:
    """Return memory for results on the grid of `values_MHWC`, (size, H, W, O)."""
    _, height, width, _ = values_MHWC.shape
    return values_MHWC.new_empty(size, height, width, weight_FTIO.shape[3])


# Modules of any code


class ConvModule:
    """The modules of an op group as one callable, for one step.

    Args:
        op_group: the functions of a plan.
        members: their modules, of which the first computes everything except convolutions.
    """

    def __init__(self, op_group: OpGroup, members: Sequence[nn.Module]):
        self._module = members[0]
        self._chains = Chains()
        self._convs: dict[Tensor, Sequence[Any]] = {}
        """By the weight of the first function, the same convolution of every function."""
        for alike in zip(*(each.modules() for each in members), strict=True):
            if isinstance(alike[0], Conv2d):
                self._convs[alike[0].weight] = alike
        index = op_group.index
        self._numbers = torch.arange(len(index), device=index.device)

    def __call__(self, functions: Functions, *arguments: Tensor) -> Any:
        """Return the results of the rows, (G, ...), which are sorted by function."""
        with computed_by(partial(self._conv, functions)):
            return self._module(*arguments)

    def _conv(
        self,
        functions: Functions,
        _: Callable,
        x_GIHW: Tensor,
        weight: Tensor,
        *__: Any,
    ) -> Tensor:
        """Return the result of the convolution that has a weight, (G, O, H, W)."""
        dtype = autocast_dtype(x_GIHW) or x_GIHW.dtype
        x_GIHW = x_GIHW.to(dtype)

        def make() -> Bank:
            return Bank(self._convs[weight], dtype)

        numbers_G = self._numbers[: len(x_GIHW)]
        return self._chains.run((weight, dtype), make, x_GIHW, functions, numbers_G)


# Chains of convolutions, which run in place


class ConvChain:
    """The modules of an op group that consist of `ConvStep`s, the last of which makes the result, for one step.

    A value is read by at most one convolution, and added to at most one other result.

    Args:
        op_group: the functions of a plan of one column.
        members: their modules.
    """

    def __init__(self, op_group: OpGroup, members: Sequence[Any]):
        self.op_group = op_group
        self.steps = members[0].conv_steps
        self._convs = [[member.get_submodule(step.conv) for member in members] for step in self.steps]
        self.banks: list[Bank] = []
        self._tokens: Sequence[Tensor] = ()
        self.made: list[Tensor] = []
        """In training, the results of all steps but the last for the rows of all calls, (N, H, W, O) each."""

    def run_in_place(
        self,
        states: Sequence[Tensor],
        buffers: Buffers,
        call: Call,
    ) -> Sequence[Tensor]:
        """Write the results of a call into the buffers, and return the states of the columns after it."""
        values = _maps(buffers)
        is_recorded = torch.is_grad_enabled()
        if not self.banks:
            self._begin(values, is_recorded)
        if not is_recorded:
            made = self._between(values, call.size)
            self.compute(buffers, values, call, made)
            return ()
        state, *self._tokens = _Chain.apply(*states, self, buffers, values, call, *self._tokens)
        return (state,)

    def _begin(self, values: Tensor, is_recorded: bool) -> None:
        """Make the banks, and in training memory for the results between steps."""
        self.banks = [Bank(convs, values.dtype) for convs in self._convs]
        self._tokens = [first_token(bank) for bank in self.banks]
        if is_recorded:
            num_rows = len(self.op_group.index)
            self.made = self._between(values, num_rows)

    def _between(self, values: Tensor, size: int) -> list[Tensor]:
        return [_empty(values, size, bank.weight_FTIO) for bank in self.banks[:-1]]

    def compute(
        self,
        buffers: Buffers,
        stored: Tensor,
        call: Call,
        made: Sequence[Tensor],
    ) -> None:
        """Compute the results of a call, and store them in the rows of the call.

        Args:
            stored: all values, of which the call reads and writes some.
            made: memory for the results of all steps but the last.
        """
        ends = buffers.plan.functions(call).ends
        values = [Maps(stored, buffers.rows(each)) for each in call.arguments]
        values += [Maps(each, buffers.numbers) for each in made]
        results = [*made, stored[call.results[0].rows]]
        for step, bank, result in zip(self.steps, self.banks, results, strict=True):
            triton_conv.conv(
                tuple([values[number] for number in step.reads]),
                bank.weight_FTIO,
                bank.bias_FO,
                ends,
                result,
                bank.dilation,
                residual=None if step.residual is None else values[step.residual],
                relu=True,
            )


def _maps(buffers: Buffers) -> Tensor:
    """Return all values of the single column, (M, H, W, C), of which some are not written yet.

    Raises:
        ValueError: the maps are not in channels-last format.
    """
    maps_MCHW = buffers.kinds[0].view(buffers.values[0])
    maps_MHWC = maps_MCHW.permute(0, 2, 3, 1)
    if not maps_MHWC.is_contiguous():
        raise ValueError("inputs in channels-first format, but Triton's kernels need channels-last format")
    return maps_MHWC


class _Chain(Function):
    """Run a call of a chain. The backward pass adds the gradients of the arguments to the gradients in the buffers."""

    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        chain: ConvChain,
        buffers: Buffers,
        values: Tensor,
        call: Call,
        *tokens: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the call, and return the new state and the tokens of its layers."""
        # Autograd frees saved tensors after the backward pass. The chain is not kept, because it refers to the results
        # of all calls. `.data` does not share a version counter, which the writes of later calls increase.
        ctx.save_for_backward(values.data, *(each.data for each in chain.made))
        ctx.op_group = chain.op_group
        ctx.steps = chain.steps
        ctx.banks = chain.banks
        ctx.buffers = buffers
        ctx.call = call
        ctx.set_materialize_grads(False)
        own = _rows_of(call)
        made = [each[own] for each in chain.made]
        chain.compute(buffers, values, call, made)
        return state.detach(), *(each.clone() for each in tokens)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        of_state: Tensor | None,
        *of_tokens: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the state and the tokens, and keep the gradients of all steps for the weights."""
        buffers = ctx.buffers
        of_token = token_of_pass(of_tokens[0])
        buffers.gradients = {0: of_state}
        of_result = buffers.gradient(ctx.call.results[0])
        if of_result is not None:
            _Chain._add_gradients(ctx, of_result, of_token.item())
        of_state = buffers.gradients[0]
        buffers.gradients = {}
        return of_state, None, None, None, None, *[of_token] * len(of_tokens)

    @staticmethod
    def _add_gradients(ctx: Any, of_result: Tensor, number: float) -> None:
        """Add the gradients of the arguments to the gradients in the buffers.

        Args:
            of_result: the gradient of the call's result, (G, O, H, W).
            number: the number of the backward pass.
        """
        call = ctx.call
        own = _rows_of(call)
        values, *made = ctx.saved_tensors
        if any(bank.is_trained for bank in ctx.banks):
            if number not in ctx.banks[0].kept:
                _Chain._begin(ctx, number, values, made)
            kept = [bank.kept[number] for bank in ctx.banks]
            gradients = [each.gradient.buffer[own] for each in kept]
        else:
            gradients = [_empty(values, call.size, bank.weight_FTIO) for bank in ctx.banks]

        backward_of_relu = torch.ops.aten.threshold_backward.grad_input
        backward_of_relu(
            of_result.permute(0, 2, 3, 1),
            values[call.results[0].rows],
            0,
            grad_input=gradients[-1],
        )
        made_here = [each[own] for each in made]
        of_arguments = _Chain._of_arguments(ctx, gradients, made_here)
        for argument, of_argument in zip(call.arguments, of_arguments, strict=True):
            ctx.buffers.add_gradient(argument, of_argument.permute(0, 3, 1, 2))

    @staticmethod
    def _begin(ctx: Any, number: float, values: Tensor, made: Sequence[Tensor]) -> None:
        """Allocate the gradients of all calls for a backward pass, and keep the inputs of the steps."""
        buffers = ctx.buffers
        order_N = ctx.op_group.order
        calls = [each for each in buffers.plan.calls if each.op == ctx.call.op]
        read = []
        for arguments in zip(*(each.arguments for each in calls), strict=True):
            rows_N = torch.cat([buffers.rows(each) for each in arguments])
            read.append(Maps(values, rows_N[order_N]))
        read += [Maps(each, order_N) for each in made]
        end = _rows_of(ctx.call).stop
        for step, bank in zip(ctx.steps, ctx.banks, strict=True):
            gradient = _empty(values, len(order_N), bank.weight_FTIO)
            gradient[end:].zero_()  # later calls, from which no gradient has come
            bank.kept[number] = _Pairs(
                x=tuple([read[each] for each in step.reads]),
                gradient=Maps(gradient, order_N),
                ends=ctx.op_group.total_ends,
            )

    @staticmethod
    def _of_arguments(
        ctx: Any,
        gradients: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> list[Tensor]:
        """Fill `gradients`, of which the last is known, and return the gradients of the arguments, (G, H, W, C)."""
        numbers = ctx.buffers.numbers
        ends = ctx.buffers.plan.functions(ctx.call).ends
        num_arguments = len(ctx.call.arguments)
        steps = [*zip(ctx.steps, ctx.banks, gradients, strict=True)]
        added = {step.residual: gradient for step, _, gradient in steps}
        of_arguments: list[Tensor] = []
        for step, bank, gradient in reversed(steps):
            read = step.reads[0]
            between = read - num_arguments
            is_between = between >= 0
            of_read = gradients[between] if is_between else _empty(gradient, len(gradient), bank.flipped)
            triton_conv.conv(
                (Maps(gradient, numbers),),
                bank.flipped,
                None,
                ends,
                of_read,
                bank.dilation,
                residual=Maps(added[read], numbers) if read in added else None,
                mask_GHWO=made[between] if is_between else None,
            )
            if not is_between:
                of_arguments = list(of_read.chunk(num_arguments, dim=3))
        return of_arguments


def _rows_of(call: Call) -> slice:
    """Return the rows of a call among the rows of all calls of its op group."""
    assert call.in_op_group is not None
    _, first = call.in_op_group
    return slice(first, first + call.size)
