"""The functions of a family -> one callable for `execute`, in which a convolution of all functions is one product.

The functions of a family have the same architecture and differ only in their weights. A call of the family runs the
first of them on the rows of all, except that each convolution uses the weights of the row's own function. The functions
therefore remain plain modules; a loop over them (`grouped.run_segments`) computes the same.

In plain PyTorch, a convolution is the product of patches and weights. `fused.py` does the same with Triton. Weight
gradients are computed once in the backward pass, over all calls, as by `deferred.py`.

Shapes: F functions, G rows of a call, N rows of all calls, P positions of a grid, T taps of a kernel, I and O channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from iep.batching.grouped import is_one_kernel, product, weight_product
from iep.batching.plan import Family, Functions, Plan


def family_modules(plan: Plan, modules: Mapping[int, nn.Module]) -> dict[int, Callable[..., Any]]:
    """Return the callable of each family that can be grouped, for one run of a plan.

    A family can be grouped if all its parameters are those of convolutions of stride 1 that keep the size of the grid,
    or if its modules have a static method `grouped`, which returns the callable of a sequence of them.

    Args:
        modules: by op, the module of each function that the plan runs.
    """
    return {op: family_module(*family, ProductLayer) for op, family in groupable(plan, modules).items()}


def family_module(family: Family, members: Sequence[nn.Module], layer: "type[Layer]") -> Callable[..., Any]:
    """Return the callable of a family that can be grouped, with this layer for convolutions that are not shared."""
    return members[0].grouped(members) if hasattr(members[0], "grouped") else FamilyModule(family, members, layer)


def groupable(plan: Plan, modules: Mapping[int, nn.Module]) -> dict[int, tuple[Family, list[nn.Module]]]:
    """Return the families of a plan that can be grouped, by number, with the modules of their functions."""
    found = {op: (family, [modules[each] for each in family.ops]) for op, family in plan.families.items()}
    return {
        op: (family, members)
        for op, (family, members) in found.items()
        if can_be_grouped(members[0]) and not any(map(_has_hooks, members[1:]))
    }


def can_be_grouped(module: nn.Module) -> bool:
    """Return whether functions with modules like this one can run in one call.

    Modules with hooks cannot: the hooks of the first module would run on the rows of all functions, and those of the
    others would not run.
    """
    return (hasattr(module, "grouped") or has_only_convolutions(module)) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(part, kind) for part in module.modules() for kind in kinds)


def has_only_convolutions(module: nn.Module) -> bool:
    """Return whether all parameters are those of convolutions that keep the grid, and there are no buffers."""
    owners = [part for part in module.modules() if [*part.parameters(recurse=False), *part.buffers(recurse=False)]]
    return bool(owners) and all(type(part) is nn.Conv2d and _keeps_grid(part) for part in owners)


def _keeps_grid(conv: nn.Conv2d) -> bool:
    size, dilation = conv.kernel_size[0], conv.dilation[0]
    is_square = conv.kernel_size == (size, size) and conv.dilation == (dilation, dilation) and size % 2 == 1
    is_plain = (conv.stride, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros") and conv.bias is not None
    return is_square and is_plain and conv.padding in ("same", (size // 2 * dilation,) * 2)


class FamilyModule:
    """The modules of a family as one callable, for one step.

    Args:
        family: the functions of a plan.
        members: their modules, of which the first computes everything except convolutions.
        layer: how convolutions are computed.
    """

    def __init__(self, family: Family, members: Sequence[nn.Module], layer: "type[Layer]"):
        self.family, self.template, self.layer = family, members[0], layer
        alike = zip(*(each.modules() for each in members), strict=True)
        self._convs = {id(convs[0].weight): convs for convs in alike if isinstance(convs[0], nn.Conv2d)}
        self._layers: dict[tuple[int, torch.dtype], tuple[Layer, tuple[Tensor, ...]]] = {}

    def __call__(self, functions: Functions, *arguments: Tensor) -> Any:
        """Return the results of the rows, (G, ...), which are sorted by function."""
        with _FamilyConvolutions(self, functions):
            return self.template(*arguments)

    def conv_of(self, weight: Tensor) -> nn.Conv2d | None:
        """Return the convolution of the template that has a weight, or None."""
        return self._convs.get(id(weight), (None,))[0]

    def layer_of(self, weight: Tensor, dtype: torch.dtype) -> "tuple[Layer, tuple[Tensor, ...]]":
        """Return the layer of a convolution of the template, given its weight, and the layer's stacked parameters."""
        key = id(weight), dtype
        if key not in self._layers:
            layer = self.layer(self.family, self._convs[id(weight)], dtype)
            self._layers[key] = layer, layer.stack()
        return self._layers[key]


class _FamilyConvolutions(TorchFunctionMode):
    """A mode in which the convolutions of a family's template use the weights of each row's function."""

    def __init__(self, family: FamilyModule, functions: Functions):
        super().__init__()
        self.family, self.functions = family, functions

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not functional.conv2d:
            return func(*args, **(kwargs or {}))
        conv = self.family.conv_of(args[1]) if len(args) > 1 else None
        if conv is None or kwargs or args[2:] != (conv.bias, conv.stride, conv.padding, conv.dilation, conv.groups):
            raise ValueError("a module calls conv2d directly; grouped execution needs calls of its nn.Conv2d layers")
        x_GIHW, device = args[0], args[0].device.type
        if torch.is_autocast_enabled(device) and x_GIHW.dtype != torch.float64:
            x_GIHW = x_GIHW.to(torch.get_autocast_dtype(device))
        layer, stacked = self.family.layer_of(args[1], x_GIHW.dtype)
        return _Conv.apply(x_GIHW, *stacked, layer, self.functions)


class Layer:
    """One convolution of every function of a family, for one step.

    Args:
        family: the functions of a plan.
        convs: their convolutions.
        dtype: the dtype of the computation.
    """

    def __init__(self, family: Family, convs: Sequence[nn.Conv2d], dtype: torch.dtype):
        self.family, self.convs, self.dtype = family, convs, dtype
        self.size, self.dilation = convs[0].kernel_size[0], convs[0].dilation[0]
        self.kept: dict[int, list] = {}
        """By backward pass, what `weight_gradients` needs of the calls."""

    def stack(self) -> tuple[Tensor, ...]:
        """Stack the weights and biases, and return them with their graph.

        The graph refers to the layer, which keeps them without it: a cycle of references would keep a step's memory.
        """
        stacked = _Stacked.apply(self, *(conv.weight for conv in self.convs), *(conv.bias for conv in self.convs))
        self.weight_FTIO, self.bias_FO = (each.detach() for each in stacked)
        return stacked

    @staticmethod
    def in_order(weight_FTIO: Tensor) -> Tensor:
        """Return weights in the memory order in which they are read."""
        return weight_FTIO.contiguous()

    @cached_property
    def flipped(self) -> Tensor:
        """The weights of the convolution that computes the input's gradient, whose taps are reversed, (F, T, O, I)."""
        return self.in_order(self.weight_FTIO.flip(1).transpose(2, 3))

    def conv(self, x_GIHW: Tensor, functions: Functions) -> Tensor:
        """Return the maps of the rows, (G, O, H, W)."""
        raise NotImplementedError

    def input_gradient(self, gradient_GOHW: Tensor, functions: Functions) -> Tensor:
        """Return the gradient of the input, (G, I, H, W)."""
        raise NotImplementedError

    def weight_gradients(self, kept: list) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weights, (F, T, I, O), and of the biases, (F, O)."""
        raise NotImplementedError


@contextmanager
def _precision_of_convolutions() -> Iterator[None]:
    """Compute products of float32 on GPUs in the precision of PyTorch's convolutions, which is TF32 by default."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        matmul.allow_tf32 = before


class ProductLayer(Layer):
    """Convolutions as products of patches and weights, in plain PyTorch."""

    def __init__(self, family: Family, convs: Sequence[nn.Conv2d], dtype: torch.dtype):
        super().__init__(family, convs, dtype)
        self._position_ends: dict[int, Tensor] = {}
        """For each number of positions P, the end of each function's rows times P, (K, F) int32."""

    @cached_property
    def bias_NO(self) -> Tensor:  # noqa: N802
        """The bias of each row of all calls."""
        return self.bias_FO[self.family.index]

    @_precision_of_convolutions()
    def conv(self, x_GIHW: Tensor, functions: Functions) -> Tensor:
        bias_G1O = self.bias_NO[functions.first : functions.first + len(x_GIHW), None]
        return _maps(self._products(x_GIHW, self.weight_FTIO, functions) + bias_G1O, x_GIHW)

    @_precision_of_convolutions()
    def input_gradient(self, gradient_GOHW: Tensor, functions: Functions) -> Tensor:
        return _maps(self._products(gradient_GOHW, self.flipped, functions), gradient_GOHW)

    @_precision_of_convolutions()
    def weight_gradients(self, kept: list[tuple[Tensor, Tensor, Functions]]) -> tuple[Tensor, Tensor]:
        x, gradient, functions = (list(each) for each in zip(*kept, strict=True))
        kept.clear()
        index_N = torch.cat([each.index for each in functions])
        ends_F = torch.stack([each.ends for each in functions]).sum(0, dtype=torch.int32)
        order_N = index_N.argsort(stable=True)
        index_N, taps_NHWhwI = index_N[order_N], self._taps(_joined(x, order_N))
        gradient_NPO = _joined(gradient, order_N).permute(0, 2, 3, 1).flatten(1, 2)
        positions, outputs = gradient_NPO.shape[1:]
        of_bias_FO = gradient_NPO.new_zeros(len(ends_F), outputs).index_add_(0, index_N, gradient_NPO.sum(1))
        position_ends_F = ends_F * positions
        is_grouped = is_one_kernel(taps_NHWhwI, (taps_NHWhwI.shape[-1], outputs))
        of_taps = []
        for x_NHWI in chain(*(each.unbind(3) for each in taps_NHWhwI.unbind(3))):
            x_NPI = x_NHWI.flatten(1, 2)
            if is_grouped:
                of_taps.append(weight_product(x_NPI.flatten(0, 1), gradient_NPO.flatten(0, 1), position_ends_F))
            else:
                of_row_NIO = x_NPI.mT @ gradient_NPO
                sums_FIO = of_row_NIO.new_zeros(len(ends_F), *of_row_NIO.shape[1:])
                of_taps.append(sums_FIO.index_add_(0, index_N, of_row_NIO))
        return torch.stack(of_taps, dim=1), of_bias_FO

    def _taps(self, x_GIHW: Tensor) -> Tensor:
        """Return a view of the padded maps from which each tap reads, (G, H, W, size, size, I)."""
        x_GHWI, edge = x_GIHW.permute(0, 2, 3, 1), self.size // 2 * self.dilation
        rows, height, width, channels = x_GHWI.shape
        if edge:
            x_GHWI = functional.pad(x_GHWI, (0, 0, edge, edge, edge, edge))
        row, down, right, across = x_GHWI.stride()
        sizes = (rows, height, width, self.size, self.size, channels)
        return x_GHWI.as_strided(sizes, (row, down, right, self.dilation * down, self.dilation * right, across))

    def _products(self, x_GIHW: Tensor, weight_FTIO: Tensor, functions: Functions) -> Tensor:
        """Return the products of each row's patches and the weights of its function, (G, P, O)."""
        patches_GPK, weight_FKO = self._taps(x_GIHW).flatten(3).flatten(1, 2), weight_FTIO.flatten(1, 2)
        rows, positions, width = patches_GPK.shape
        if is_one_kernel(patches_GPK, weight_FKO.shape[1:]):
            if positions not in self._position_ends:
                self._position_ends[positions] = self.family.ends * positions
            ends_F = self._position_ends[positions][functions.call]
            found = product(patches_GPK.reshape(-1, width), weight_FKO, ends_F)
            return found.view(rows, positions, -1)
        return patches_GPK @ weight_FKO[functions.index]


def _joined(parts: list[Tensor], order_N: Tensor) -> Tensor:
    """Concatenate the parts, empty the list to free them, and return the rows in the given order."""
    joined = torch.cat(parts)
    parts.clear()
    return joined[order_N]


def _maps(rows_GPO: Tensor, like: Tensor) -> Tensor:
    """Return rows of positions as maps in channels-last format, on the grid of `like`."""
    return rows_GPO.unflatten(1, like.shape[2:]).permute(0, 3, 1, 2)


class _Stacked(Function):
    """Return the weights, (F, T, I, O), and biases, (F, O), of convolutions.

    The backward pass runs after that of all calls and returns the parameters' gradients.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.like, count = layer, parameters[0], len(parameters) // 2
        ctx.set_materialize_grads(False)
        weight_FTIO = torch.stack(parameters[:count]).to(layer.dtype).permute(0, 3, 4, 2, 1).flatten(1, 2)
        return layer.in_order(weight_FTIO), torch.stack(parameters[count:]).to(layer.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        layer, kept = ctx.layer, ctx.layer.kept.pop(torch._C._current_graph_task_id(), None)
        if kept is None:
            return (None,) * len(ctx.needs_input_grad)
        of_weight_FTIO, of_bias_FO = layer.weight_gradients(kept)
        like, count = ctx.like, len(of_weight_FTIO)
        # One copy in the memory order of the parameters, so that autograd need not copy the gradient of each of them.
        of_weight_FOIhw = like.new_empty_strided((count, *like.shape), (like.numel(), *like.stride()))
        of_weight_FOIhw.copy_(of_weight_FTIO.unflatten(1, (layer.size, layer.size)).permute(0, 4, 3, 1, 2))
        return None, *of_weight_FOIhw, *of_bias_FO.to(like.dtype)


class _Conv(Function):
    """Convolve each row with the weights of its function. The backward pass keeps data for the weights' gradients."""

    @staticmethod
    def forward(ctx: Any, x_GIHW: Tensor, _: Tensor, __: Tensor, layer: Layer, functions: Functions) -> Tensor:
        ctx.save_for_backward(x_GIHW)
        ctx.layer, ctx.functions = layer, functions
        ctx.set_materialize_grads(False)
        return layer.conv(x_GIHW, functions).data  # not a view, so that modules may modify it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_GOHW: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient_GOHW is None:
            return None, None, None, None, None
        (x_GIHW,), layer, functions = ctx.saved_tensors, ctx.layer, ctx.functions
        if ctx.needs_input_grad[1]:
            layer.kept.setdefault(torch._C._current_graph_task_id(), []).append((x_GIHW, gradient_GOHW, functions))
        of_x = layer.input_gradient(gradient_GOHW, functions) if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None
