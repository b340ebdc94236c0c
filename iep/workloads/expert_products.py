"""Tokens, their experts and gates -> the layer's result and its gradients by PyTorch's matrix products: expert by
expert, or in one call.

Three products make a layer of all experts and its way back; both kinds here offer them. `ProductsByExpert` multiplies
contiguous slices in a loop. `GroupedProducts` leaves the loop to PyTorch's grouped matrix product.

Shapes: T tokens, K experts each, R = T K rows sorted by expert; A active experts, those that have rows; E all experts;
D inputs, H hidden, O outputs; I, O also a weight's two sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn import functional

from iep.workloads.reused_memory import ReusedMemory

Gradients = tuple[Tensor | None, Tensor, list[Tensor] | None]
"""Of x (T, D), of gates (T, K), and of the active experts' weights: all hidden ones, then all output ones."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows are whose, once tokens are sorted by expert."""

    order_R: Tensor
    """Which entry of the (T, K) assignments each row is."""
    active: tuple[int, ...]
    """The experts that have rows, in order."""
    counts: tuple[int, ...]
    """How many rows each active expert has."""
    counts_E: Tensor
    """How many rows each expert has."""

    @cached_property
    def inverse_R(self) -> Tensor:  # noqa: N802
        """Which row each entry of the assignments is."""
        positions_R = torch.arange(len(self.order_R), device=self.order_R.device)
        return torch.empty_like(self.order_R).scatter_(0, self.order_R, positions_R)

    @cached_property
    def ends_E(self) -> Tensor:  # noqa: N802
        """int32, where each expert's rows end."""
        return self.counts_E.cumsum(0).to(torch.int32)


class _Products:
    """What both kinds do with their three products."""

    routing: Routing
    memory: ReusedMemory

    def forward(self, x_TD: Tensor, gates_TK: Tensor, keep: bool) -> tuple[Tensor, ...]:
        """(T, O) the layer's result; and what the way back needs, if it is to be kept."""
        k = gates_TK.shape[1]
        x_RD = self._rows_of_tokens(x_TD, k)
        gates_R = gates_TK.flatten()[self.routing.order_R]
        hidden_RH = self.rows(x_RD, layer=0).relu_()
        result_RO = self.rows(hidden_RH, layer=1).mul_(gates_R[:, None])
        return self._sums_of_rows(result_RO, k), *((x_RD, hidden_RH, gates_R) if keep else ())

    def backward(self, gradient_TO: Tensor, kept: Sequence[Tensor], of_x: bool, of_weights: bool) -> Gradients:
        """The gradients of x if `of_x`, of gates, and of the weights if `of_weights`.

        Of a gate: gradient times result, which is (hidden W) gradient = hidden (W gradient).
        """
        x_RD, hidden_RH, gates_R = kept
        k = len(gates_R) // len(gradient_TO)
        gradient_RO = self._rows_of_tokens(gradient_TO, k)
        gradient_RH = self.rows_back(gradient_RO, layer=1)
        gates_TK = torch.linalg.vecdot(gradient_RH, hidden_RH)[self.routing.inverse_R].view(-1, k)
        gradient_RH.mul_(gates_R[:, None]).mul_(hidden_RH > 0)
        x_TD = self._sums_of_rows(self.rows_back(gradient_RH, layer=0), k) if of_x else None
        if not of_weights:
            return x_TD, gates_TK, None
        gradient_RO.mul_(gates_R[:, None])
        return x_TD, gates_TK, [*self.weights(x_RD, gradient_RH), *self.weights(hidden_RH, gradient_RO)]

    def _rows_of_tokens(self, values_TX: Tensor, k: int) -> Tensor:
        """(R, X) the token of every row."""
        rows_RX = self.memory.empty((len(self.routing.order_R), values_TX.shape[1]), like=values_TX)
        return torch.index_select(values_TX, 0, self.routing.order_R // k, out=rows_RX)

    def _sums_of_rows(self, values_RX: Tensor, k: int) -> Tensor:
        """(T, X) the sum of every token's rows."""
        width = values_RX.shape[1]
        by_token_RX = self.memory.empty(tuple(values_RX.shape), like=values_RX)
        torch.index_select(values_RX, 0, self.routing.inverse_R, out=by_token_RX)
        if k == 1:
            return by_token_RX
        result_TX = self.memory.empty((len(values_RX) // k, width), like=values_RX)
        return torch.sum(by_token_RX.view(-1, k, width), dim=1, out=result_TX)


@dataclass(frozen=True, eq=False)
class ProductsByExpert(_Products):
    """One product per expert on a slice of the rows, written straight into a slice of the result."""

    routing: Routing
    layers: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Of each layer, A times (I, O)."""
    memory: ReusedMemory

    def rows(self, rows_RI: Tensor, layer: int) -> Tensor:
        """(R, O) each row by its expert's weight of that layer."""
        weights = self.layers[layer]
        result_RO = self.memory.empty((len(rows_RI), weights[0].shape[1]), like=rows_RI)
        for weight, left, right in zip(weights, self._split(rows_RI), self._split(result_RO), strict=True):
            torch.mm(left, weight, out=right)
        return result_RO

    def rows_back(self, rows_RO: Tensor, layer: int) -> Tensor:
        """(R, I) each row by its expert's weight of that layer, transposed."""
        weights = self.layers[layer]
        result_RI = self.memory.empty((len(rows_RO), weights[0].shape[0]), like=rows_RO)
        for weight, left, right in zip(weights, self._split(result_RI), self._split(rows_RO), strict=True):
            torch.mm(right, weight.T, out=left)
        return result_RI

    def weights(self, left_RI: Tensor, right_RO: Tensor) -> list[Tensor]:
        """A times (I, O), each active expert's sum over its rows of left times right: views of one block of memory."""
        shape = (len(self.routing.counts), left_RI.shape[1], right_RO.shape[1])
        results = list(self.memory.empty(shape, like=left_RI).unbind(0))
        for weight, left, right in zip(results, self._split(left_RI), self._split(right_RO), strict=True):
            torch.mm(left.T, right, out=weight)
        return results

    def _split(self, rows_RX: Tensor) -> tuple[Tensor, ...]:
        return rows_RX.split(self.routing.counts)


@dataclass(frozen=True, eq=False)
class GroupedProducts(_Products):
    """One call for all experts: PyTorch's grouped matrix product.

    It wants rows of a multiple of 16 bytes and strides that say where each is: what has others is padded with zeros,
    and what is expanded is written out.
    """

    routing: Routing
    layers: tuple[Tensor, Tensor]
    """Of each layer, (E, I, O)."""
    memory: ReusedMemory

    def rows(self, rows_RI: Tensor, layer: int) -> Tensor:
        """(R, O) each row by its expert's weight of that layer."""
        weights_EIO = self.layers[layer]
        return self._grouped(_padded(rows_RI), _padded(weights_EIO, both=True))[:, : weights_EIO.shape[2]]

    def rows_back(self, rows_RO: Tensor, layer: int) -> Tensor:
        """(R, I) each row by its expert's weight of that layer, transposed."""
        weights_EIO = self.layers[layer]
        return self._grouped(_padded(rows_RO), _padded(weights_EIO, both=True).mT)[:, : weights_EIO.shape[1]]

    def weights(self, left_RI: Tensor, right_RO: Tensor) -> list[Tensor]:
        """A times (I, O), each active expert's sum over its rows of left times right."""
        sums = self._grouped(_padded(left_RI).T, _padded(right_RO))[:, : left_RI.shape[1], : right_RO.shape[1]]
        every = sums.unbind(0)
        return [every[expert] for expert in self.routing.active]

    def _grouped(self, left: Tensor, right: Tensor) -> Tensor:
        return grouped_mm(left, right, offs=self.routing.ends_E)


def grouped_mm(left: Tensor, right: Tensor, offs: Tensor) -> Tensor:
    """PyTorch's grouped matrix product under whichever name this release has it."""
    public = getattr(functional, "grouped_mm", None)
    return (public or torch._grouped_mm)(left, right, offs=offs)


@cache
def grouped_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this build of PyTorch has no grouped matrix product for that device and dtype; None where it has one.

    All three products are tried, on a few numbers.
    """
    wide = 16 // dtype.itemsize
    rows, weights = (
        torch.zeros(3, wide, dtype=dtype, device=device),
        torch.zeros(2, wide, wide, dtype=dtype, device=device),
    )
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    try:
        for left, right in ((rows, weights), (rows, weights.mT), (rows.T, rows)):
            grouped_mm(left, right, ends)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} on {device}, {dtype}: {str(error).splitlines()[0]}"
    return None


def _padded(tensor: Tensor, both: bool = False) -> Tensor:
    """Contiguous, with zeros after the last axis (and the one before it) up to a multiple of 16 bytes."""
    multiple = 16 // tensor.element_size()
    padding = [0, -tensor.shape[-1] % multiple, *([0, -tensor.shape[-2] % multiple] if both else [])]
    return functional.pad(tensor, padding) if any(padding) else tensor.contiguous()
