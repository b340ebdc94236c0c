"""Consecutive calls of cells -> one step of autograd that works on the buffers themselves: little is copied in or out.

A cell may know how to read its arguments where they lie and to write its results where they are to be (`Cell.in_place`
says whether it can here); calls in a row then run in one loop, forward and back, without PyTorch's steps in between.

Shapes: G rows of a call, K inputs of a layer, M its outputs.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.batching.call_in_place import CallInPlace, GradientTables, Rows, ValueTables
from iep.batching.deferred import Calls, linear_gradients, put_aside
from iep.batching.layout import Call

if TYPE_CHECKING:
    from iep.batching.cells import WeightsOfRun
    from iep.batching.exchange import Run


class Product(NamedTuple):
    """What a call leaves for the gradients of its layer."""

    layer: nn.Linear
    input: Rows
    """(G, K) what the weight was multiplied with."""
    gradient: Rows
    """(G, M) of its output."""


class CallsInPlace:
    """Calls one after the other."""

    def __init__(self, calls: Sequence[CallInPlace]):
        self._calls = calls
        self._layers = list({id(call.layer): call.layer for call in calls}.values())
        self.layers = [layer.of for layer in self._layers]

    def forward(self, run: "Run") -> list[Tensor]:
        """Make the results of all calls; returns what the way back needs of it.

        Raises:
            ValueError: the arguments are not what the cells take.
        """
        tables = ValueTables(run)
        for layer in self._layers:
            # On the way back the products of a layer's calls are one, for which its inputs lie side by side.
            layer.inputs_at = tables.keep(layer.weight.new_empty(layer.rows, layer.inputs)) if run.records else None
        for call in self._calls:
            call.forward(tables)
        return tables.kept

    def backward(self, run: "Run", kept: Sequence[Tensor]) -> Iterator[Product]:
        """Leave the gradients of all arguments in `run.gradients`, where those of the results are, the last call's
        first. It may be asked for again; `kept`, which `forward` returned, stays as it is."""
        run.begin_way_back()
        tables = GradientTables(run)
        rooms = {layer: layer.weight.new_empty(layer.rows, layer.outputs) for layer in self._layers}
        for call in reversed(self._calls):
            if not any(made.is_used for made in call.of.results):
                for taken in call.of.arguments:  # what is not a number shall not reach what no root depends on
                    tables.rows[taken.column][taken.uses].zero_()
                continue
            gradient = call.backward(tables, kept, rooms[call.layer])
            if call.taken is not None:
                call.scatter(tables, gradient.tensor())
                yield Product(call.layer.of, call.input(kept), gradient)


class InPlaceCalls(Function):
    """An earlier call's results into the buffers, then the calls. The token is that of `exchange.py`."""

    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        run: "Run",
        before: Call,
        calls: CallsInPlace,
        aside: Sequence[Calls | None],
        num_results: int,
        *tensors: Tensor | None,
    ) -> Tensor:
        """`aside` says where each layer's products are put; `tensors` are the results, then each layer's weight and
        bias."""
        results = tensors[:num_results]
        if results:
            run.keep(before, results)
        kept = calls.forward(run)
        # With what is given: autograd then notices when it is changed before the way back.
        given = results if before is run.layout.calls[0] else ()
        ctx.save_for_backward(*tensors[num_results:], *kept, *given)
        ctx.num_kept = len(kept)
        ctx.run, ctx.before, ctx.calls, ctx.aside, ctx.num_results = run, before, calls, aside, num_results
        ctx.set_materialize_grads(False)
        return token.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None) -> tuple[Tensor | None, ...]:
        """The gradients of the earlier call's results, and of each layer's (M, K) weight and (M,) bias."""
        run, layers = ctx.run, ctx.calls.layers
        first = 2 * len(layers)
        saved = ctx.saved_tensors  # once: whoever keeps them in other ways may make them anew each time
        weights, kept = saved[:first], saved[first : first + ctx.num_kept]
        sums: list[Tensor | None] = [None] * len(weights)
        places = {id(layer): place for place, layer in enumerate(layers)}
        waiting: dict[int, Product] = {}
        for product in ctx.calls.backward(run, kept):
            place = places[id(product.layer)]
            aside = ctx.aside[place]
            if aside is None:
                _add(sums, 2 * place, product, weights)
                continue
            last = waiting.get(place)
            if last is not None and product.input.then(last.input) and product.gradient.then(last.gradient):
                product = _joined(product, last)
            elif last is not None:
                put_aside(aside, last.input.tensor(), last.gradient.tensor())
            waiting[place] = product
        for place, product in waiting.items():
            put_aside(ctx.aside[place], product.input.tensor(), product.gradient.tensor())
        found = run.gradients_before(ctx.before, ctx.num_results, ctx.needs_input_grad[0])
        return None, None, None, None, None, None, *found, *sums


def apply_in_place(
    token: Tensor, run: "Run", before: Call, calls: CallsInPlace, results: tuple[Tensor, ...], weights: "WeightsOfRun"
) -> Tensor:
    """Run calls; returns the next token, or the same where nothing is recorded."""
    if not run.records:
        if results:
            run.keep(before, results)
        calls.forward(run)
        return token
    shared = [weights.of(layer) for layer in calls.layers]
    tensors = [tensor for weight, bias, _ in shared for tensor in (weight, bias)]
    aside = [calls for _, _, calls in shared]
    return InPlaceCalls.apply(token, run, before, calls, aside, len(results), *results, *tensors)


def _joined(first: Product, second: Product) -> Product:
    input = Rows(first.input.of, first.input.start, second.input.stop)
    return Product(first.layer, input, Rows(first.gradient.of, first.gradient.start, second.gradient.stop))


def _add(sums: list[Tensor | None], at: int, product: Product, weights: Sequence[Tensor | None]) -> None:
    """Add a call's gradients of its layer's weight and bias to their sums."""
    found = linear_gradients(product.gradient.tensor(), product.input.tensor(), weights[at], weights[at + 1])
    for place, gradient in enumerate(found, start=at):
        if gradient is not None:
            sums[place] = gradient if sums[place] is None else torch.add(sums[place], gradient, out=sums[place])
