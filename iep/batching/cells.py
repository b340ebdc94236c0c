"""Cells: a linear layer, then what knows its own gradients -> one step of autograd for each call, exchange included.

For the innermost modules of networks that run many small calls, where the steps of autograd around a product take
longer than the product: what a module of plain PyTorch code does in half a dozen, a cell does in one. Its layer's
gradients are computed once, over all calls, where weight gradients are deferred.

Shapes: G rows of a call, K inputs of the layer, M its outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.call_in_place import CallInPlace, LayerInPlace
from iep.batching.deferred import Calls, linear_gradients, put_aside, share_linear
from iep.batching.layout import Call

if TYPE_CHECKING:
    from iep.batching.exchange import Run


class Cell(ABC):
    """A module for `execute`. Gradients cannot be differentiated again."""

    @property
    @abstractmethod
    def layer(self) -> nn.Linear:
        """With a bias or without."""

    @abstractmethod
    def factor(self, arguments: Sequence[Tensor]) -> Tensor | None:
        """(G, K) what the layer's weight is multiplied with; None where it is with nothing."""

    @abstractmethod
    def results(self, product: Tensor | None, bias: Tensor | None, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the module makes of (G, M) `factor @ weight.T`, to which `bias` is still to be added."""

    @abstractmethod
    def gradients(
        self,
        product: Tensor | None,
        bias: Tensor | None,
        arguments: Sequence[Tensor],
        results: Sequence[Tensor],
        given: Sequence[Tensor | None],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """From those of the results, of which not all are None: (G, M) that of product and bias, and the arguments' but
        for what goes through the factor."""

    @abstractmethod
    def through_factor(self, gradient: Tensor, gradients: list[Tensor | None], arguments: Sequence[Tensor]) -> None:
        """Add (G, K) the factor's gradient to those of the arguments."""

    def in_place(self, call: Call, layer: LayerInPlace) -> CallInPlace | None:
        """What runs a call on the buffers themselves, its `layer` being that of this cell on the device at hand; None
        where it is run as the methods above say."""
        return None

    def __call__(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Its results without gradients.

        Raises:
            ValueError: gradients are asked for: those `execute` alone gives.
        """
        if torch.is_grad_enabled():
            raise ValueError("a cell that is called by itself has no gradients; call it within torch.no_grad()")
        factor, layer = self.factor(arguments), self.layer
        product = None if factor is None else torch.mm(factor, layer.weight.T)
        return self.results(product, layer.bias, arguments)


class WeightsOfRun:
    """What the calls of each cell take in place of its layer's weight and bias in one run."""

    def __init__(self, defer: bool):
        self.defer = defer
        self.shared: dict[int, tuple[Tensor, Tensor | None, Calls | None]] = {}

    def of(self, layer: nn.Linear) -> tuple[Tensor, Tensor | None, Calls | None]:
        """Weight, bias, and where calls put aside what their gradients need; None where they compute them at once."""
        if id(layer) not in self.shared:
            alone = (layer.weight, layer.bias, None)
            self.shared[id(layer)] = share_linear(layer.weight, layer.bias) if self.defer else alone
        return self.shared[id(layer)]


class CellCall(Function):
    """An earlier call's results into the buffers, then a cell's arguments out of them and its results into them; on the
    way back the gradients. The token is that of `exchange.py`."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        run: "Run",
        before: Call,
        call: Call,
        cell: Cell,
        calls: Calls | None,
        weight: Tensor,
        bias: Tensor | None,
        *results: Tensor,
    ) -> Tensor:
        """`calls` is where the layer's products are put aside; `results` are those of the call before."""
        arguments = run.exchange(before, call, results)
        factor = cell.factor(arguments)
        product = None if factor is None else torch.mm(factor, weight.T)
        made = run.checked(call, cell.results(product, bias, arguments))
        run.keep(call, made)
        # With what is given: autograd then notices when it is changed before the way back.
        given = results if before is run.layout.calls[0] else ()
        ctx.save_for_backward(factor, product, weight, bias, *arguments, *made, *given)
        ctx.run, ctx.before, ctx.call, ctx.cell, ctx.calls = run, before, call, cell, calls
        ctx.num_results, ctx.num_arguments = len(results), len(arguments)
        ctx.set_materialize_grads(False)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        """The gradients of (M, K) weight and (M,) bias, None where put aside, and of the earlier call's results."""
        run, cell = ctx.run, ctx.cell
        factor, product, weight, bias, *rest = ctx.saved_tensors
        end = ctx.num_arguments + len(ctx.call.results)
        arguments, made = rest[: ctx.num_arguments], rest[ctx.num_arguments : end]
        given = run.result_gradients(ctx.call)
        gradients: list[Tensor | None] = [None] * len(arguments)
        d_weight = d_bias = None
        if any(gradient is not None for gradient in given):
            d_product, gradients = cell.gradients(product, bias, arguments, made, given)
            if factor is not None:
                factor, d_product = factor.to(weight.dtype), d_product.to(weight.dtype)  # they differ under autocast
                cell.through_factor(torch.mm(d_product, weight), gradients, arguments)
                if ctx.calls is not None:
                    put_aside(ctx.calls, factor, d_product)
                else:
                    d_weight, d_bias = linear_gradients(d_product, factor, weight, bias)
        run.take_gradients(ctx.call, gradients)
        found = run.gradients_before(ctx.before, ctx.num_results, ctx.needs_input_grad[0])
        return None, None, None, None, None, None, d_weight, d_bias, *found
