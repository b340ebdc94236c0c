"""Consecutive calls of LSTM cells, run by C code (`lstm.c`) on the buffers of `iep.batching` themselves.

A call is a product of PyTorch's and one C function, which reads the children's c where they lie and writes h and c
where others will read them.

Shapes: G cells of a call, A children, H width, K inputs of a layer, M outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from iep.batching.exchange import Run
from iep.batching.in_place import InPlace, Product, Rows
from iep.batching.layout import Argument, Call, Result
from iep.workloads.lstm_state import Step, is_plain, kernel, over_cells

if TYPE_CHECKING:
    from iep.workloads.lstm import LSTMCell


class LSTMInPlace(InPlace):
    """Calls of `LSTMCell`s; `of` says whether they can run so."""

    @classmethod
    def of(cls, run: Run, calls: Sequence[Call], cells: Sequence["LSTMCell"]) -> "LSTMInPlace | None":
        """None where PyTorch is to run the calls one by one: not on the CPU, under autocast, without a compiler."""
        layers = {id(layer): layer for layer in (cell.layer for cell in cells)}.values()
        dtype = cells[0].layer.weight.dtype
        if run.device.type != "cpu" or torch.is_autocast_enabled("cpu") or kernel("state", dtype) is None:
            return None
        tensors = [tensor for layer in layers for tensor in (layer.weight, layer.bias) if tensor is not None]
        columns = {each.column for call in calls for each in (*call.arguments, *call.results)}
        if not all(is_plain(tensor, dtype) for tensor in tensors):
            return None
        return cls(calls, cells) if all(run.layout.columns[column].stays for column in columns) else None

    def __init__(self, calls: Sequence[Call], cells: Sequence["LSTMCell"]):
        layers: dict[int, _Layer] = {}
        self._calls = []
        for call, cell in zip(calls, cells, strict=True):
            layer = cell.layer
            if id(layer) not in layers:
                layers[id(layer)] = _Layer(layer, cell.gates_pulled)
            self._calls.append(_Call(call, layers[id(layer)]))
        self._layers = list(layers.values())
        self.layers = [layer.of for layer in self._layers]

    def forward(self, run: Run) -> list[Tensor]:
        function = kernel("state", self._layers[0].weight.dtype)
        tables = _Tables(run)
        for layer in self._layers:
            # On the way back the products of a layer's calls are one, for which its inputs lie side by side.
            layer.inputs_at = tables.add(layer.weight.new_empty(layer.rows, layer.inputs)) if run.records else None
        for call in self._calls:
            call.forward(tables)
            over_cells(function, call.step)
        return tables.kept

    def backward(self, run: Run, kept: Sequence[Tensor]) -> Iterator[Product]:
        function = kernel("state_back", self._layers[0].weight.dtype)
        tables = _GradientTables(run)
        gradients = {layer: layer.weight.new_empty(layer.rows, layer.outputs) for layer in self._layers}
        for call in reversed(self._calls):
            if any(made.is_used for made in call.of.results):
                gradient = call.backward(tables, gradients[call.layer], kept, function)
                if call.has_product:
                    yield Product(call.layer.of, call.input.of(kept), gradient)
                continue
            for taken in call.of.arguments:  # what is not a number shall not reach what no root depends on
                run.gradients[taken.column].rows[taken.uses].zero_()


class _Layer:
    """A layer of some of the calls."""

    def __init__(self, layer: nn.Linear, is_added: bool):
        self.of = layer
        self.is_added = is_added
        """To gates that are pulled."""
        self.weight = layer.weight.detach()
        """(M, K)"""
        self.transposed = self.weight.T
        self.outputs, self.inputs = self.weight.shape
        self.zeros = self.weight.new_zeros(self.outputs)
        self.bias = self.zeros if layer.bias is None else layer.bias.detach()
        """(M,)"""
        self.rows = 0
        """Of all its calls' products."""
        self.inputs_at: int | None = None
        """Which of the tensors kept is (rows, K) the inputs of these."""


class _Tables:
    """The columns' values, and where they lie in memory, as the calls read and write them."""

    def __init__(self, run: Run):
        self.run = run
        self.kept: list[Tensor] = []
        """What the way back needs."""
        self._columns: dict[int, tuple[int, int]] = {}
        self._sources: dict[int, int] = {}

    def add(self, tensor: Tensor) -> int:
        """Keep a tensor; returns which of those kept it is."""
        self.kept.append(tensor)
        return len(self.kept) - 1

    def column(self, at: int, width: int, dtype: torch.dtype) -> tuple[int, int]:
        """Which of the tensors kept is (places, width) a column's values, and its address.

        Raises:
            ValueError: they are others.
        """
        if at not in self._columns:
            rows = self.run.room(at, width, dtype)
            self._columns[at] = self.add(rows), rows.data_ptr()
        return self._columns[at]

    def index(self, taken: Argument) -> int:
        """Address of what says which rows of its column an argument is."""
        if taken.column not in self._sources:
            self._sources[taken.column] = self.run.layout.columns[taken.column].sources.data_ptr()
        return self._sources[taken.column] + 8 * taken.uses.start


class _GradientTables:
    """The gradients of the columns' values, and where they lie in memory."""

    def __init__(self, run: Run):
        self.run = run
        self.rows = [None if gradients is None else gradients.rows for gradients in run.gradients]
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
    rows: int

    def of(self, kept: Sequence[Tensor]) -> Rows:
        return Rows(kept[self.table], self.first, self.first + self.rows)


class _Call:
    """A call of a cell."""

    def __init__(self, call: Call, layer: _Layer):
        self.of, self.layer = call, layer
        self.pulled = call.arguments[0] if len(call.arguments) != 2 else None
        self.h, self.c = call.arguments[-2:] if len(call.arguments) > 1 else (None, None)
        self.has_product = self.h is not None or not layer.is_added
        self.first = layer.rows
        """Row of the layer's products at which its own begin."""
        layer.rows += call.rows if self.has_product else 0
        children = 0 if self.h is None else self.h.shape[1]
        # Gates that are pulled are those of a cell with a child, whether it has one or not.
        forgets = max(children, 1) if layer.is_added else children
        self.width = layer.outputs // (3 + forgets)
        self.row_bytes = self.width * layer.weight.element_size()
        self.step = Step(cells=call.rows, forgets=forgets, children=children, width=self.width)
        self.input: _Input | None = None

    def forward(self, tables: _Tables) -> None:
        """Make the product, and the step ready that makes h and c of it."""
        step, layer, dtype = self.step, self.layer, self.layer.weight.dtype
        step.gates, step.bias = layer.zeros.data_ptr(), layer.bias.data_ptr()
        if self.has_product:
            self.input = self._input(tables)
            gates = torch.mm(self.input.of(tables.kept).tensor(), layer.transposed)
            tables.add(gates)
            step.gates, step.gates_stride = gates.data_ptr(), layer.outputs
        if layer.is_added:
            _, added = tables.column(self.pulled.column, layer.outputs, dtype)
            first = self.pulled.first_place
            step.bias = added + (first or 0) * layer.outputs * layer.weight.element_size()
            step.bias_index = tables.index(self.pulled) if first is None else None
            step.bias_stride = layer.outputs
        if self.c is not None:
            step.c_children = tables.column(self.c.column, self.width, dtype)[1]
            step.children_index = tables.index(self.c)
        for name, made in zip(("h", "c", "pushed"), self.of.results, strict=False):
            _, values = tables.column(made.column, self.width, dtype)
            setattr(step, name, values + made.places.start * self.row_bytes)

    def _input(self, tables: _Tables) -> _Input:
        taken, layer, size = self.h or self.pulled, self.layer, self.step.cells
        width = layer.inputs if self.h is None else self.width
        at, _ = tables.column(taken.column, width, layer.weight.dtype)
        if width == layer.inputs and taken.first_place is not None:
            return _Input(at, taken.first_place, size)
        index = tables.run.sources[taken.column][taken.block]
        if layer.inputs_at is None:
            rows = tables.kept[at].index_select(0, index)
            return _Input(tables.add(rows.view(size, layer.inputs)), 0, size)
        room = tables.kept[layer.inputs_at][self.first : self.first + size].view(-1, width)
        torch.index_select(tables.kept[at], 0, index, out=room)
        return _Input(layer.inputs_at, self.first, size)

    def backward(
        self, tables: _GradientTables, room: Tensor, kept: Sequence[Tensor], function: Callable[..., None]
    ) -> Rows:
        """Make the gradients of all arguments; returns (G, M) that of the gates, in `room` (rows, M) of the layer where
        they are not pulled."""
        step, layer = self.step, self.layer
        gradient = Rows(room, self.first, self.first + step.cells)
        if layer.is_added:
            gradient = Rows(tables.rows[self.pulled.column], self.pulled.uses.start, self.pulled.uses.stop)
        gates = gradient.tensor()
        step.d_gates = gates.data_ptr()
        if self.c is not None:
            step.d_children = tables.of_use(self.c, self.row_bytes)
        for name, made in zip(("dh", "dc", "dpushed"), self.of.results, strict=False):
            table, index, stride = tables.of_result(made, self.width, self.row_bytes)
            setattr(step, name, table)
            setattr(step, f"{name}_index", index)
            setattr(step, f"{name}_stride", stride)
        over_cells(function, step)
        if self.has_product:
            taken = self.h or self.pulled
            torch.mm(gates, layer.weight, out=tables.rows[taken.column][taken.uses].view(-1, layer.inputs))
        return gradient
