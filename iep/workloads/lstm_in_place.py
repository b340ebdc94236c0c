"""Calls of LSTM cells, run by C code (`lstm.c`) on the buffers of `iep.batching` themselves.

A call is a product of PyTorch's and one C function, which reads the children's c where they lie and writes h and c
where others will read them.

Shapes: G cells of a call, A children, H width, M = (3 + A) H outputs of the layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from iep.batching.call_in_place import CallInPlace, GradientTables, LayerInPlace, Rows, ValueTables
from iep.batching.layout import Call
from iep.workloads.lstm_state import Step, kernel, over_cells


class LSTMCallInPlace(CallInPlace):
    """A call of an `LSTMCell`, whose doc says what it takes and makes."""

    def __init__(self, call: Call, layer: LayerInPlace, gates_pulled: bool):
        self.pulled = call.arguments[0] if len(call.arguments) != 2 else None
        h, self.c = call.arguments[-2:] if len(call.arguments) > 1 else (None, None)
        super().__init__(call, layer, h or (None if gates_pulled else self.pulled))
        self.is_added = gates_pulled
        children = 0 if h is None else h.shape[1]
        # Gates that are pulled are those of a cell with a child, whether it has one or not.
        forgets = max(children, 1) if gates_pulled else children
        self.width = layer.outputs // (3 + forgets)
        if layer.outputs != (3 + forgets) * self.width:
            raise ValueError(f"op {call.op}: a layer of {layer.outputs} outputs for gates of {children} children")
        self.row_bytes = self.width * layer.weight.element_size()
        self._kept: dict[str, tuple[int, int]] = {}
        """By field of the step, which of the tensors kept it lies in, and how many bytes from its beginning."""
        self.step = Step(cells=call.rows, forgets=forgets, children=children, width=self.width)

    def forward(self, tables: ValueTables) -> None:
        """The product by PyTorch, (G, M), then h and c, (G, H) each, by `state` in lstm.c."""
        step, layer, dtype = self.step, self.layer, self.layer.weight.dtype
        self._kept.clear()
        step.gates, step.bias = layer.zeros.data_ptr(), layer.bias.data_ptr()
        if self.taken is not None:
            gates = torch.mm(self.gather(tables), layer.transposed)
            step.gates, step.gates_stride = gates.data_ptr(), layer.outputs
            if tables.run.records:
                self._kept["gates"] = tables.keep(gates), 0
        if self.is_added:
            first = self.pulled.first_place
            offset = (first or 0) * layer.outputs * layer.weight.element_size()
            self._place("bias", tables.column(self.pulled.column, layer.outputs, dtype), offset)
            step.bias_index = tables.index(self.pulled) if first is None else None
            step.bias_stride = layer.outputs
        if self.c is not None:
            self._place("c_children", tables.column(self.c.column, self.width, dtype), 0)
            step.children_index = tables.index(self.c)
        for name, made in zip(("h", "c", "pushed"), self.of.results, strict=False):
            self._place(name, tables.column(made.column, self.width, dtype), made.places.start * self.row_bytes)
        over_cells(kernel("state", dtype), step)

    def _place(self, name: str, table: tuple[int, int], offset: int) -> None:
        """Where a field of the step lies: so many bytes after the address of one of the tensors kept."""
        at, address = table
        setattr(self.step, name, address + offset)
        self._kept[name] = at, offset

    def backward(self, tables: GradientTables, kept: Sequence[Tensor], room: Tensor) -> Rows:
        """(G, M) the gates' gradients, and those of the children's c, (G, A, H), by `state_back` in lstm.c."""
        step, layer = self.step, self.layer
        for name, (at, offset) in self._kept.items():  # they may lie elsewhere by now: autograd's hooks can move them
            setattr(step, name, kept[at].data_ptr() + offset)
        gradient = Rows(room, self.first, self.first + step.cells)
        if self.is_added:
            gradient = Rows(tables.rows[self.pulled.column], self.pulled.uses.start, self.pulled.uses.stop)
        step.d_gates = gradient.tensor().data_ptr()
        if self.c is not None:
            step.d_children = tables.of_use(self.c, self.row_bytes)
        for name, made in zip(("dh", "dc", "dpushed"), self.of.results, strict=False):
            table, index, stride = tables.of_result(made, self.width, self.row_bytes)
            setattr(step, name, table)
            setattr(step, f"{name}_index", index)
            setattr(step, f"{name}_stride", stride)
        over_cells(kernel("state_back", layer.weight.dtype), step)
        return gradient
