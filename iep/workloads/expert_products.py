"""Rows sorted by expert and the experts' weights -> their matrix products, expert by expert or in one call.

Three products make a layer of all experts and its way back; both kinds here offer them. `ProductsByExpert` multiplies
contiguous slices in a loop: C code's (`experts.c`) on the CPU where experts have few rows, else PyTorch's.
`GroupedProducts` leaves the loop to PyTorch's grouped matrix product.

Shapes: R rows, sorted by expert; A active experts, those that have rows; E all experts; I, O a weight's two sizes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from iep.workloads import native
from iep.workloads.reused_memory import ReusedMemory

FEW_ROWS = {"rows": 512, "rows_back": 64, "weights": 512}
"""Up to how many rows of an expert the C code is ahead of PyTorch's products, by far where there are 10."""
IN_TORCH: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows": lambda weight, left, right: torch.mm(left, weight, out=right),
    "rows_back": lambda weight, left, right: torch.mm(right, weight.T, out=left),
    "weights": lambda weight, left, right: torch.mm(left.T, right, out=weight),
}
ALIGNED = 128
"""The C code wants rows of a multiple of so many bytes."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows are whose, once tokens are sorted by expert."""

    order_R: Tensor
    """Which entry of the (T, K) assignments each row is."""
    inverse_R: Tensor
    """Which row each entry of the assignments is."""
    active: tuple[int, ...]
    """The experts that have rows, in order."""
    counts: tuple[int, ...]
    """How many rows each active expert has."""
    ends_E: Tensor
    """int32, where each expert's rows end."""


@dataclass(frozen=True, eq=False)
class ProductsByExpert:
    """One product per expert on a slice of the rows, written straight into a slice of the result."""

    routing: Routing
    layers: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Of each layer, A times (I, O)."""
    memory: ReusedMemory

    def rows(self, rows_RI: Tensor, layer: int) -> Tensor:
        """(R, O) each row by its expert's weight of that layer."""
        weights = self.layers[layer]
        result_RO = self.memory.empty((len(rows_RI), weights[0].shape[1]), like=rows_RI)
        self._multiply("rows", weights, rows_RI, result_RO)
        return result_RO

    def rows_back(self, rows_RO: Tensor, layer: int) -> Tensor:
        """(R, I) each row by its expert's weight of that layer, transposed."""
        weights = self.layers[layer]
        result_RI = self.memory.empty((len(rows_RO), weights[0].shape[0]), like=rows_RO)
        self._multiply("rows_back", weights, result_RI, rows_RO)
        return result_RI

    def weights(self, left_RI: Tensor, right_RO: Tensor) -> list[Tensor]:
        """A times (I, O), each active expert's sum over its rows of left times right: views of one block of memory."""
        shape = (len(self.routing.counts), left_RI.shape[1], right_RO.shape[1])
        results = list(self.memory.empty(shape, like=left_RI).unbind(0))
        self._multiply("weights", results, left_RI, right_RO)
        return results

    def _multiply(self, name: str, weights: Sequence[Tensor], left_RI: Tensor, right_RO: Tensor) -> None:
        """One of the three products; its result's memory is among the arguments."""
        counts, lasts = self.routing.counts, list(accumulate(self.routing.counts))
        kernel = _kernel(name, weights, left_RI, right_RO)
        few = [n for n, count in enumerate(counts) if count <= FEW_ROWS[name]] if kernel else []
        if len(few) < torch.get_num_threads():  # they share out experts
            few = []
        if few:
            firsts = [lasts[n] - counts[n] for n in few]
            table = [firsts, [lasts[n] for n in few], [weights[n].data_ptr() for n in few]]
            table = torch.tensor(table, device="cpu")
            addresses = (*(row.data_ptr() for row in table), left_RI.data_ptr(), right_RO.data_ptr())
            native.over_rows(kernel, len(few), len(few) * weights[0].numel(), (*weights[0].shape, *addresses))
        for n in sorted(set(range(len(counts))).difference(few)):
            rows = slice(lasts[n] - counts[n], lasts[n])
            IN_TORCH[name](weights[n], left_RI[rows], right_RO[rows])


def hidden_back(gradient_RH: Tensor, hidden_RH: Tensor, gates_R: Tensor) -> Tensor:
    """(R,) the gates' gradients; `gradient_RH`, by a row's result without its gate, is made that before the rectifier.

    Of a gate: gradient times result, which is (hidden W) gradient = hidden (W gradient).
    """
    kernel = None
    if all(each.is_cpu and each.is_contiguous() for each in (gradient_RH, hidden_RH, gates_R)):
        kernel = native.function("experts", "hidden_back", gates_R.dtype, "lllpppp")
    if kernel is None:
        of_gates_R = torch.linalg.vecdot(gradient_RH, hidden_RH)
        gradient_RH.mul_(gates_R[:, None]).mul_(hidden_RH > 0)
        return of_gates_R
    of_gates_R = torch.empty_like(gates_R)
    addresses = [each.data_ptr() for each in (gates_R, hidden_RH, gradient_RH, of_gates_R)]
    native.over_rows(kernel, len(gates_R), gradient_RH.numel(), (gradient_RH.shape[1], *addresses))
    return of_gates_R


def _kernel(name: str, weights: Sequence[Tensor], *rows: Tensor) -> Callable[..., None] | None:
    """The C function for tensors of this kind; None where PyTorch is to do it."""
    if not rows[0].is_cpu or any(each.shape[1] * each.element_size() % ALIGNED for each in rows):
        return None
    if not all(each.is_contiguous() and each.dtype == rows[0].dtype for each in (*rows, *weights)):
        return None
    return native.function("experts", name, rows[0].dtype, "llllppppp")


@dataclass(frozen=True, eq=False)
class GroupedProducts:
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
