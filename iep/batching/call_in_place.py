"""A call of a cell that works on the buffers themselves: where its arguments and results lie, and their gradients.

What a kind of cell computes there, its `CallInPlace` says; which calls run so, one after the other, is `in_place.py`'s.

Shapes: G rows of a call, K inputs of a layer, M its outputs, F numbers of a value.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from iep.batching.layout import Argument, Call, Result

if TYPE_CHECKING:
    from iep.batching.exchange import Run


class Rows(NamedTuple):
    """Some rows of a matrix, one after the other."""

    of: Tensor
    start: int
    stop: int

    def then(self, other: "Rows") -> bool:
        """The other's begin where these end."""
        return self.of is other.of and self.stop == other.start

    def tensor(self) -> Tensor:
        """(rows, F)"""
        return self.of[self.start : self.stop]


def can_be_in_place(layer: nn.Linear, device: torch.device) -> bool:
    """Whether its calls may run in place: its weights are parameters there, of one dtype, and used in it."""
    if torch.is_autocast_enabled(device.type):
        return False
    weights = [weight for weight in (layer.weight, layer.bias) if weight is not None]
    # What is no parameter may be computed anew whenever it is asked for.
    plain = all(type(weight) is nn.Parameter and is_plain(weight.detach(), device) for weight in weights)
    return plain and len({weight.dtype for weight in weights}) == 1


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether it is numbers in that device's memory."""
    # A tensor of a subclass, such as one that only shapes are found with, may have no address.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.device == device


class LayerInPlace:
    """A layer of some of the calls."""

    def __init__(self, layer: nn.Linear):
        self.of = layer
        self.weight = layer.weight.detach()
        """(M, K)"""
        self.transposed = self.weight.T
        self.outputs, self.inputs = self.weight.shape
        self.zeros = self.weight.new_zeros(self.outputs)
        self.bias = self.zeros if layer.bias is None else layer.bias.detach().contiguous()
        """(M,)"""
        self.rows = 0
        """Of all its calls' products."""
        self.inputs_at: int | None = None
        """Which of the tensors kept is (rows, K) the inputs of these, where they are kept."""


class ValueTables:
    """The columns' values, and where they lie in memory, as the calls read and write them."""

    def __init__(self, run: "Run"):
        self.run = run
        self.kept: list[Tensor] = []
        """What the way back needs."""
        self._columns: dict[tuple[int, int, torch.dtype], tuple[int, int]] = {}
        self._sources: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> int:
        """Which of the tensors kept it then is."""
        self.kept.append(tensor)
        return len(self.kept) - 1

    def column(self, at: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
        """Which of the tensors kept is (places, width) a column's values, and its address.

        Raises:
            ValueError: they are others.
        """
        if (at, width, dtype) not in self._columns:
            rows = self.run.room(at, width, dtype)
            self._columns[at, width, dtype] = self.keep(rows), rows.data_ptr()
        return self._columns[at, width, dtype]

    def index(self, taken: Argument) -> int:
        """Address of what says which rows of its column an argument is."""
        if taken.column not in self._sources:
            self._sources[taken.column] = self.run.layout.columns[taken.column].sources.data_ptr()
        return self._sources[taken.column] + 8 * taken.uses.start


class GradientTables:
    """The gradients of the columns' values, and where they lie in memory."""

    def __init__(self, run: "Run"):
        self.run = run
        self.rows = [None if gradients is None else gradients.rows for gradients in run.gradients]
        """(uses + 1, F) of each column, the last of them zeros; None where it has none."""
        self._addresses = [0 if rows is None else rows.data_ptr() for rows in self.rows]
        self._takers = [column.takers.data_ptr() for column in run.layout.columns]
        self._made: list[Tensor] = []

    def of_use(self, taken: Argument, row_bytes: int) -> int:
        """Address of an argument's."""
        return self._addresses[taken.column] + taken.uses.start * row_bytes

    def of_result(self, made: Result, width: int, row_bytes: int) -> tuple[int, int | None, int]:
        """A result's: address of a table, that of an index into it, or None where the rows are the first ones, and how
        far it is from row to row."""
        table = self._addresses[made.column]
        if not made.is_used:
            return table + (len(self.rows[made.column]) - 1) * row_bytes, None, 0
        if made.first_use is not None:
            return table + made.first_use * row_bytes, None, width
        if made.extras.start == made.extras.stop:
            return table, self._takers[made.column] + 8 * made.results.start, width
        self._made.append(self.run.result_gradient(made))
        return self._made[-1].data_ptr(), None, width


class _Input(NamedTuple):
    """The input of a layer in a call."""

    table: int
    """Which of the tensors kept it is a part of."""
    first: int
    """Its first row there."""
    beside: int
    """How many rows there are one of its own."""


class CallInPlace(ABC):
    """A call of a cell."""

    def __init__(self, call: Call, layer: LayerInPlace, taken: Argument | None):
        """
        Args:
            taken: what the layer is applied to, several values side by side or one; None where it is to nothing.

        Raises:
            ValueError: the layer's inputs cannot be so many values.
        """
        self.of, self.layer, self.taken = call, layer, taken
        self.beside = taken.shape[1] if taken is not None and len(taken.shape) > 1 else 1
        """How many values are an input."""
        if layer.inputs % self.beside:
            raise ValueError(f"op {call.op}: a layer of {layer.inputs} inputs for {self.beside} values side by side")
        self.first = layer.rows
        """Row of the layer's products at which its own begin."""
        layer.rows += 0 if taken is None else call.rows
        self._input: _Input | None = None

    @abstractmethod
    def forward(self, tables: ValueTables) -> None:
        """Make the results where they are to be."""

    @abstractmethod
    def backward(self, tables: GradientTables, kept: Sequence[Tensor], room: Tensor) -> Rows:
        """Make the gradients of all arguments but for the layer's input; returns (G, M) that of its output, in `room`
        (rows, M) of the layer or elsewhere."""

    def gather(self, tables: ValueTables) -> Tensor:
        """(G, K) the layer's input: where it lies, if it does so in one piece, or a copy."""
        taken, layer, size = self.taken, self.layer, self.of.rows
        width = layer.inputs // self.beside
        at, _ = tables.column(taken.column, width, layer.weight.dtype)
        if taken.first_place is not None:
            self._input = _Input(at, taken.first_place, self.beside)
        elif tables.run.records:
            self._input = _Input(layer.inputs_at, self.first, 1)
            room = self.input(tables.kept).tensor().view(-1, width)
            torch.index_select(tables.kept[at], 0, tables.run.sources[taken.column][taken.block], out=room)
        else:
            rows = tables.kept[at].index_select(0, tables.run.sources[taken.column][taken.block])
            return rows.view(size, layer.inputs)
        return self.input(tables.kept).tensor()

    def input(self, kept: Sequence[Tensor]) -> Rows:
        """(G, K) what `gather` found."""
        at, first, beside = self._input
        if beside == 1:
            return Rows(kept[at], first, first + self.of.rows)
        rows = kept[at][first : first + beside * self.of.rows]
        return Rows(rows.view(-1, self.layer.inputs), 0, self.of.rows)

    def scatter(self, tables: GradientTables, gradient: Tensor) -> None:
        """Leave the gradient of the layer's input, made of (G, M) that of its output."""
        rows = tables.rows[self.taken.column][self.taken.uses]
        torch.mm(gradient, self.layer.weight, out=rows.view(-1, self.layer.inputs))
