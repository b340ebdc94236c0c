"""The functions of a family -> one callable for `execute`, in which a convolution of all functions is one product.

The functions of a family have the same architecture and differ only in their weights. A call of the family runs the
first of them on the rows of all, except that each convolution uses the weights of the row's own function. The functions
therefore remain plain modules; a loop over them (`grouped.run_segments`) computes the same.

A convolution is the product of patches and weights. Its weight gradient is computed once in the backward pass, over all
calls, as by `deferred.py`.

Shapes: F functions, G rows of a call, N rows of all calls, P positions of a grid, T taps of a kernel, I and O channels,
K = T I.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

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

    A family can be grouped if all its parameters are those of convolutions of stride 1 that keep the size of the grid.

    Args:
        modules: by op, the module of each function that the plan runs.
    """
    found = {op: FamilyModule(family, [modules[each] for each in family.ops]) for op, family in plan.families.items()}
    return {op: family for op, family in found.items() if can_be_grouped(family.template)}


def can_be_grouped(module: nn.Module) -> bool:
    """Return whether all parameters are those of convolutions of stride 1 that keep the grid, and there are no
    buffers."""
    owners = [part for part in module.modules() if [*part.parameters(recurse=False), *part.buffers(recurse=False)]]
    return bool(owners) and all(isinstance(part, nn.Conv2d) and _keeps_grid(part) for part in owners)


def _keeps_grid(conv: nn.Conv2d) -> bool:
    size, dilation = conv.kernel_size[0], conv.dilation[0]
    is_square = conv.kernel_size == (size, size) and conv.dilation == (dilation, dilation) and size % 2 == 1
    is_plain = (conv.stride, conv.groups, conv.padding_mode) == ((1, 1), 1, "zeros") and conv.bias is not None
    return is_square and is_plain and conv.padding == (size // 2 * dilation,) * 2


class Kernel(NamedTuple):
    """The size and the dilation of a convolution's kernel."""

    size: int
    dilation: int

    def taps(self, x_GIHW: Tensor) -> Tensor:
        """Return a view of the maps, padded, from which each tap reads, (G, H, W, size, size, I)."""
        x_GHWI, edge = x_GIHW.permute(0, 2, 3, 1), self.size // 2 * self.dilation
        height, width, channels = x_GHWI.shape[1:]
        if edge:
            x_GHWI = functional.pad(x_GHWI, (0, 0, edge, edge, edge, edge))
        rows, down, right, across = x_GHWI.stride()
        sizes = (len(x_GHWI), height, width, self.size, self.size, channels)
        return x_GHWI.as_strided(sizes, (rows, down, right, self.dilation * down, self.dilation * right, across))


class FamilyModule:
    """The modules of a family as one callable, for one step.

    Args:
        family: the functions of a plan.
        members: their modules, of which the first computes everything except convolutions.
    """

    def __init__(self, family: Family, members: Sequence[nn.Module]):
        self.family, self.template = family, members[0]
        alike = zip(*(each.modules() for each in members), strict=True)
        self._convs = {id(convs[0].weight): convs for convs in alike if isinstance(convs[0], nn.Conv2d)}
        self._layers: dict[tuple[int, torch.dtype], _Layer] = {}

    def __call__(self, functions: Functions, *arguments: Tensor) -> Any:
        """Return the results of the rows, (G, ...), which are sorted by function."""
        positions = arguments[0].shape[2:].numel()
        with _Grouped(self, functions._replace(ends=functions.ends * positions)):
            return self.template(*arguments)

    def conv(self, x_GIHW: Tensor, weight: Tensor, functions: Functions) -> Tensor:
        """Return the maps of a convolution, (G, O, H, W), given the weight of the template's."""
        device = x_GIHW.device.type
        if torch.is_autocast_enabled(device) and x_GIHW.dtype != torch.float64:
            x_GIHW = x_GIHW.to(torch.get_autocast_dtype(device))
        key = id(weight), x_GIHW.dtype
        if key not in self._layers:
            self._layers[key] = _Layer(self.family, self._convs[id(weight)], x_GIHW.dtype)
        return self._layers[key](x_GIHW, functions)


class _Grouped(TorchFunctionMode):
    """A mode in which the convolutions of a family's template use the weights of each row's function."""

    def __init__(self, family: FamilyModule, functions: Functions):
        super().__init__()
        self.family, self.functions = family, functions

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.conv2d:
            return self.family.conv(args[0], args[1], self.functions)
        return func(*args, **(kwargs or {}))


class _Layer:
    """One convolution of every function of a family, for one step."""

    def __init__(self, family: Family, convs: Sequence[nn.Conv2d], dtype: torch.dtype):
        self.kernel = Kernel(convs[0].kernel_size[0], convs[0].dilation[0])
        self.dtype = dtype
        self.kept: dict[int, list[tuple[Tensor, Tensor, Functions]]] = {}
        """The inputs and the output gradients of all calls, by backward pass."""
        parameters = [*(conv.weight for conv in convs), *(conv.bias for conv in convs)]
        self.weight_FKO, self.bias_FO = _Stacked.apply(self, *parameters)
        with torch.no_grad():
            self.bias_NO = self.bias_FO[family.index]

    @cached_property
    def flipped(self) -> Tensor:
        """The weights of the convolution that computes the input's gradient, (F, T O, I), which has the taps in reverse."""
        weight_FTIO = self.weight_FKO.detach().unflatten(1, (self.kernel.size**2, -1))
        return weight_FTIO.flip(1).transpose(2, 3).flatten(1, 2)

    def __call__(self, x_GIHW: Tensor, functions: Functions) -> Tensor:
        return _Conv.apply(x_GIHW, self.weight_FKO, self.bias_FO, self, functions)


def _products(x_GPK: Tensor, weight_FKO: Tensor, functions: Functions) -> Tensor:
    """Return the products of each row and the weight of its function, (G, P, O)."""
    rows, positions, width = x_GPK.shape
    if is_one_kernel(x_GPK, weight_FKO.shape[1:]):
        found = product(x_GPK.reshape(-1, width), weight_FKO, functions.ends)
        return found.view(rows, positions, -1)
    return x_GPK @ weight_FKO[functions.index]


def _maps(rows_GPO: Tensor, like: Tensor) -> Tensor:
    """Return rows of positions as maps in channels-last format, on the grid of `like`."""
    return rows_GPO.unflatten(1, like.shape[2:]).permute(0, 3, 1, 2)


class _Stacked(Function):
    """Return the weights, (F, K, O), and biases, (F, O), of convolutions.

    The backward pass runs after that of all calls and returns the parameters' gradients.
    """

    @staticmethod
    def forward(ctx: Any, layer: _Layer, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        ctx.layer, count = layer, len(parameters) // 2
        weight_FOIhw = torch.stack(parameters[:count])
        weight_FKO = weight_FOIhw.permute(0, 3, 4, 2, 1).flatten(1, 3)
        return weight_FKO.to(layer.dtype), torch.stack(parameters[count:]).to(layer.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        kernel = ctx.layer.kernel
        kept = ctx.layer.kept.pop(torch._C._current_graph_task_id(), None)
        if kept is None:
            return (None,) * len(ctx.needs_input_grad)
        x, gradient, functions = zip(*kept, strict=True)
        index_N, ends_F = torch.cat([each.index for each in functions]), sum(each.ends for each in functions)
        order_N = index_N.argsort(stable=True)
        x_NIHW, gradient_NOHW = torch.cat(x)[order_N], torch.cat(gradient)[order_N]
        gradient_NPO = gradient_NOHW.permute(0, 2, 3, 1).flatten(1, 2)
        of_weight = _weight_gradients(kernel, x_NIHW, gradient_NPO, Functions(index_N[order_N], ends_F, 0))
        of_bias_FO = gradient_NPO.new_zeros(len(ends_F), gradient_NPO.shape[2])
        of_bias_FO.index_add_(0, index_N[order_N], gradient_NPO.sum(1))
        return None, *chain(of_weight, of_bias_FO)


def _weight_gradients(kernel: Kernel, x_NIHW: Tensor, gradient_NPO: Tensor, functions: Functions) -> Tensor:
    """Return the gradients of the weights, (F, O, I, size, size)."""
    taps_NHWhwI = kernel.taps(x_NIHW)
    inputs, outputs = x_NIHW.shape[1], gradient_NPO.shape[2]
    is_grouped = is_one_kernel(x_NIHW, (inputs, outputs))
    found = []
    for tap in range(kernel.size**2):
        x_NPI = taps_NHWhwI[:, :, :, tap // kernel.size, tap % kernel.size].flatten(1, 2)
        if is_grouped:
            rows = x_NPI.reshape(-1, inputs), gradient_NPO.reshape(-1, outputs)
            found.append(weight_product(*rows, functions.ends))
        else:
            of_row_NIO = x_NPI.mT @ gradient_NPO
            sums_FIO = of_row_NIO.new_zeros(len(functions.ends), inputs, outputs)
            found.append(sums_FIO.index_add_(0, functions.index, of_row_NIO))
    return torch.stack(found, dim=-1).unflatten(-1, (kernel.size, kernel.size)).transpose(1, 2)


class _Conv(Function):
    """Convolve each row with the weights of its function. The backward pass keeps data for the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_GIHW: Tensor, weight_FKO: Tensor, bias_FO: Tensor, layer: _Layer, functions: Functions
    ) -> Tensor:
        ctx.save_for_backward(x_GIHW)
        ctx.layer, ctx.functions = layer, functions
        ctx.set_materialize_grads(False)
        patches_GPK = layer.kernel.taps(x_GIHW).flatten(3).flatten(1, 2)
        bias_G1O = layer.bias_NO[functions.first : functions.first + len(x_GIHW), None]
        return _maps(_products(patches_GPK, weight_FKO, functions) + bias_G1O, x_GIHW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_GOHW: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient_GOHW is None:
            return None, None, None, None, None
        (x_GIHW,), layer = ctx.saved_tensors, ctx.layer
        layer.kept.setdefault(torch._C._current_graph_task_id(), []).append((x_GIHW, gradient_GOHW, ctx.functions))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        patches_GPK = layer.kernel.taps(gradient_GOHW).flatten(3).flatten(1, 2)
        return _maps(_products(patches_GPK, layer.flipped, ctx.functions), x_GIHW), None, None, None, None
