"""Tokens, their experts and gates -> gated sums of what the experts make of them: by the token, by the expert, or by a
grouped matrix product.

All experts that a minibatch calls are known at once, so batching them is the degenerate case of a topological sort
(Suarez & Zhu, section 3.2): sort the tokens by expert, run each expert once on its contiguous rows, put the rows back
and add them up. Which tokens go where is `gating.py`'s.

Shapes: T tokens, K experts each, R = T K rows sorted by expert, D inputs, H hidden, O outputs, E experts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from iep.errors import InputError
from iep.workloads.compiled_experts import CompiledExperts, can_compile
from iep.workloads.expert_products import GroupedProducts, ProductsByExpert, Routing, grouped_refusal
from iep.workloads.reused_memory import ReusedMemory

Way = CompiledExperts | ProductsByExpert | GroupedProducts
EXECUTIONS = ("vanilla", "batched", "grouped")


class Experts(nn.Module):
    """E networks of one hidden layer each, relu(x W_hidden) W_output, without biases as in Shazeer et al.'s own.

    Every expert has parameters of its own, so that those which a minibatch does not call get no gradient (None, as if
    they had not been there) and cost nothing; all lie side by side in one block of memory, which a grouped product
    reads as it is. Gradients cannot be differentiated again.

    Attributes:
        execution: `vanilla` (a loop over tokens and their experts, the reference), `batched` (each expert once, on all
            its rows) or `grouped` (PyTorch's grouped matrix product; `batched` where there is none, see
            `grouped_refusal`).

    Raises:
        InputError: a size is less than 1, or there is no such execution.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, experts: int, execution: str = "batched"):
        super().__init__()
        if min(inputs, hidden, outputs, experts) < 1:
            raise InputError(f"{experts} experts of {inputs}-{hidden}-{outputs}, expected at least 1 of each")
        if execution not in EXECUTIONS:
            raise InputError(f"execution {execution!r}, expected one of {', '.join(EXECUTIONS)}")
        self.execution = execution
        self.sizes = inputs, hidden, outputs
        self.hidden_weights = _made(experts, inputs, hidden)
        self.output_weights = _made(experts, hidden, outputs)
        self._memory = ReusedMemory()

    def forward(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """(T, O) each token's sum over its experts of gate times what the expert makes of it.

        Args:
            experts_TK: int64, which experts.
            gates_TK: how much of each.

        Raises:
            InputError: shapes or dtypes do not fit, or there is no expert of a number.
        """
        kind = x_TD.device.type
        if not torch.is_autocast_enabled(kind):
            return self._sums(x_TD, experts_TK, gates_TK, self.hidden_weights[0].dtype)
        dtype = torch.get_autocast_dtype(kind)
        with torch.autocast(kind, enabled=False):
            return self._sums(x_TD.to(dtype), experts_TK, gates_TK.to(dtype), dtype)

    def one(self, x_D: Tensor, experts_K: Sequence[int], gates_K: Tensor) -> Tensor:
        """(O,) what the layer makes of one token: the reference, in plain PyTorch."""
        layers = [
            [weights[e].to(x_D.dtype) for e in experts_K] for weights in (self.hidden_weights, self.output_weights)
        ]
        results = [(x_D @ hidden).relu() @ output for hidden, output in zip(*layers, strict=True)]
        return sum(gate * result for gate, result in zip(gates_K, results, strict=True))

    def grouped_refusal(self) -> str | None:
        """Why `grouped` runs as `batched` with these weights, in PyTorch's words; None where it does not."""
        return grouped_refusal(self.hidden_weights[0].device, self.hidden_weights[0].dtype)

    def _sums(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
        """As `forward`, in a dtype that may be another than the weights'."""
        self._check(x_TD, experts_TK, gates_TK, dtype)
        if not experts_TK.numel():
            return x_TD @ x_TD.new_zeros(self.sizes[0], self.sizes[2])
        if self.execution == "vanilla":
            tokens = zip(x_TD, experts_TK.tolist(), gates_TK, strict=True)
            return torch.stack([self.one(*token) for token in tokens])
        routing = route(experts_TK, len(self.hidden_weights))
        layers = [_active(weights, routing, dtype) for weights in (self.hidden_weights, self.output_weights)]
        weights = [weight for layer in layers for weight in layer]
        if self.execution == "grouped" and grouped_refusal(x_TD.device, dtype) is None:
            stacks = _stacked(self.hidden_weights).to(dtype), _stacked(self.output_weights).to(dtype)
            way = GroupedProducts(routing, stacks, self._memory)
        elif can_compile(x_TD, self.sizes, weights):
            way = CompiledExperts(routing, layers, self._memory)
        else:
            way = ProductsByExpert(routing, layers, self._memory)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_TD, gates_TK, *weights)):
            return _GatedSum.apply(x_TD, gates_TK, way, *weights)
        return way.forward(x_TD, gates_TK, keep=False)[0]

    def _check(self, x_TD: Tensor, experts_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> None:
        number = len(self.hidden_weights)
        if x_TD.dim() != 2 or x_TD.shape[1] != self.sizes[0]:
            raise InputError(f"experts got inputs {tuple(x_TD.shape)}, expected (tokens, {self.sizes[0]})")
        if experts_TK.dim() != 2 or experts_TK.shape != gates_TK.shape or len(experts_TK) != len(x_TD):
            given = f"experts {tuple(experts_TK.shape)} and gates {tuple(gates_TK.shape)}"
            raise InputError(f"{given} for {len(x_TD)} tokens, expected ({len(x_TD)}, k) of both")
        if x_TD.dtype != dtype or gates_TK.dtype != dtype:
            raise InputError(f"inputs {x_TD.dtype} and gates {gates_TK.dtype}, expected the weights' {dtype}")
        device = self.hidden_weights[0].device
        if any(each.device != device for each in (x_TD, gates_TK, experts_TK)):
            given = f"inputs on {x_TD.device}, gates on {gates_TK.device}, experts on {experts_TK.device}"
            raise InputError(f"{given}, expected the weights' {device}")
        if experts_TK.dtype != torch.int64:
            raise InputError(f"experts are {experts_TK.dtype}, expected torch.int64")
        if experts_TK.numel() and not 0 <= int(experts_TK.min()) <= int(experts_TK.max()) < number:
            raise InputError(f"experts {int(experts_TK.min())} to {int(experts_TK.max())}, expected 0 to {number - 1}")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Experts":
        """As for every module, whatever moves or converts it; then lay the weights side by side again."""
        super()._apply(fn, recurse)
        self._lay_side_by_side()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy, or of what was pickled."""
        super().__setstate__(state)
        self._lay_side_by_side()

    def _lay_side_by_side(self) -> None:
        for weights in (self.hidden_weights, self.output_weights):
            for weight, piece in zip(weights, _stacked(weights).unbind(0), strict=True):
                weight.data = piece


def route(experts_TK: Tensor, experts: int) -> Routing:
    """Sort the (T, K) assignments, at least one, by expert; those of one expert keep their order."""
    flat_R = experts_TK.flatten()
    order_R = flat_R.argsort(stable=True)
    counts_E = torch.bincount(flat_R, minlength=experts)
    counts = counts_E.tolist()
    active = tuple(expert for expert, count in enumerate(counts) if count)
    return Routing(
        order_R=order_R,
        active=active,
        counts=tuple(counts[expert] for expert in active),
        counts_E=counts_E,
    )


class _GatedSum(Function):
    """The layer's result; on the way back the gradients of tokens, gates and the active experts' weights."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gates_TK: Tensor, way: Way, *weights: Tensor) -> Tensor:
        result_TO, *kept = way.forward(x_TD, gates_TK, keep=True)
        ctx.save_for_backward(*kept, *weights)  # the weights so that PyTorch notices when they are changed meanwhile
        ctx.way, ctx.kept = way, len(kept)
        return result_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_TO: Tensor) -> tuple[Tensor | None, ...]:
        of_x, _, _, *of_weights = ctx.needs_input_grad
        kept = ctx.saved_tensors[: ctx.kept]
        x_TD, gates_TK, weights = ctx.way.backward(gradient_TO, kept, of_x, any(of_weights))
        return x_TD, gates_TK, None, *(weights or (None for _ in of_weights))


def _made(experts: int, inputs: int, outputs: int) -> nn.ParameterList:
    """A weight for each expert, initialised as PyTorch does linear layers, all in one block of memory."""
    weights_EIO = torch.empty(experts, inputs, outputs).uniform_(-(inputs**-0.5), inputs**-0.5)
    return nn.ParameterList(nn.Parameter(weight_IO) for weight_IO in weights_EIO)


def _active(weights: nn.ParameterList, routing: Routing, dtype: torch.dtype) -> list[Tensor]:
    every = list(weights._parameters.values())  # 300 times as fast as one by one
    active = [every[expert] for expert in routing.active]
    return active if active[0].dtype == dtype else [weight.to(dtype) for weight in active]


def _stacked(weights: nn.ParameterList) -> Tensor:
    """(E, I, O) all weights, without a gradient: their own memory where they lie side by side in it, else a copy."""
    pieces = [weight.detach() for weight in weights._parameters.values()]
    first = pieces[0]
    size, start = first.numel() * first.element_size(), first.data_ptr()
    room = first.untyped_storage().data_ptr() + first.untyped_storage().nbytes() - start
    side_by_side = all(piece.data_ptr() == start + n * size for n, piece in enumerate(pieces))
    if start and side_by_side and room >= len(pieces) * size and all(piece.is_contiguous() for piece in pieces):
        return first.as_strided((len(pieces), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(pieces)
