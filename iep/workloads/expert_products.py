"""Rows sorted by expert and the experts' weights -> their matrix products: one call per expert, or one for all.

Three products make a layer of all experts and its way back; both kinds here offer them. `ProductsByExpert` multiplies
contiguous slices in a loop. `GroupedProducts` leaves the loop to PyTorch's grouped matrix product.

Shapes: R rows, sorted by expert; A active experts, those that have rows; E all experts; I, O a weight's two sizes.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from iep.workloads.reused_memory import ReusedMemory

FEW_ROWS = 64
"""An expert of fewer rows spends more time reading its weights than multiplying them."""
EXPERTS_PER_THREAD = 8
"""With fewer, threads share every product instead of the experts."""
MIN_SHARED_BYTES = 1 << 22
"""Of weights; below it threads cost more than they save."""


@dataclass(frozen=True, eq=False)
class Routing:
    """Which rows are whose, once tokens are sorted by expert."""

    order_R: Tensor
    """Which entry of the (T, K) assignments each row is."""
    inverse_R: Tensor
    """Which row each entry of the assignments is."""
    active: tuple[int, ...]
    """The experts that have rows, in order; all of them where counts were not asked for."""
    counts: tuple[int, ...]
    """How many rows each active expert has."""
    ends_E: Tensor
    """int32, where each expert's rows end."""


@dataclass(frozen=True, eq=False)
class ProductsByExpert:
    """One call per expert on a slice of the rows, written straight into a slice of the result.

    On a CPU with several threads they share out the experts, not every product of a few rows among themselves; and a
    weight that meets few rows is first read from end to end, which brings it near the processor two to three times as
    fast as a product of few rows does.
    """

    routing: Routing
    layers: tuple[Sequence[Tensor], Sequence[Tensor]]
    """Of each layer, A times (I, O)."""
    memory: ReusedMemory

    def rows(self, rows_RI: Tensor, layer: int) -> Tensor:
        """(R, O) each row by its expert's weight of that layer."""
        return self._by_rows(rows_RI, self.layers[layer])

    def rows_back(self, rows_RO: Tensor, layer: int) -> Tensor:
        """(R, I) each row by its expert's weight of that layer, transposed."""
        return self._by_rows(rows_RO, [weight.T for weight in self.layers[layer]])

    def weights(self, left_RI: Tensor, right_RO: Tensor) -> list[Tensor]:
        """A times (I, O), each active expert's sum over its rows of left times right: views of one block of memory."""
        shape = (len(self.routing.counts), left_RI.shape[1], right_RO.shape[1])
        results = list(self.memory.empty(shape, like=left_RI).unbind(0))
        lefts, rights = (rows.split(self.routing.counts) for rows in (left_RI, right_RO))

        def work(first: int, last: int) -> None:
            for n in range(first, last):
                torch.mm(lefts[n].T, rights[n], out=results[n])

        self._share(work, left_RI, shape)
        return results

    def _by_rows(self, rows: Tensor, weights: Sequence[Tensor]) -> Tensor:
        result = self.memory.empty((len(rows), weights[0].shape[1]), like=rows)
        sources, targets = rows.split(self.routing.counts), result.split(self.routing.counts)

        def work(first: int, last: int) -> None:
            read_first = rows.device.type == "cpu" and torch.get_num_threads() == 1
            for n in range(first, last):
                if read_first and len(sources[n]) < FEW_ROWS:
                    weights[n].sum()
                torch.mm(sources[n], weights[n], out=targets[n])

        self._share(work, rows, (len(weights), *weights[0].shape))
        return result

    def _share(self, work: Callable[[int, int], None], rows: Tensor, shape: tuple[int, ...]) -> None:
        """Run `work` on shares of the active experts, in as many threads as PyTorch may use, or in this one."""
        threads = torch.get_num_threads()
        size = shape[0] * shape[1] * shape[2] * rows.element_size()
        few = shape[0] < EXPERTS_PER_THREAD * threads or size < MIN_SHARED_BYTES
        if threads == 1 or few or rows.device.type != "cpu":
            work(0, shape[0])
        else:
            in_threads(work, shares(self.routing.counts, threads), threads)


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


def shares(counts: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Cut experts into `number` runs of about the same work: the rows of each, and the reading of its weights."""
    work = torch.tensor([0, *counts]).clamp(min=0) + FEW_ROWS // 2
    work[0] = 0
    done = work.cumsum(0)
    cuts = torch.searchsorted(done, done[-1] * torch.arange(1, number) // number).tolist()
    return [(first, last) for first, last in zip([0, *cuts], [*cuts, len(counts)], strict=True) if first < last]


def in_threads(work: Callable[[int, int], None], pieces: Sequence[tuple[int, int]], threads: int) -> None:
    """Run `work(first, last)` of every piece, each in a thread whose own products use no others."""

    inference = torch.is_inference_mode_enabled()

    def alone(first: int, last: int) -> None:
        with torch.inference_mode() if inference else torch.no_grad():
            work(first, last)

    torch.set_num_threads(1)
    others = [_workers().submit(alone, *piece) for piece in pieces[1:]]
    try:
        alone(*pieces[0])
    finally:
        wait(others)
        torch.set_num_threads(threads)
    for other in others:
        other.result()


@cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="experts")


os.register_at_fork(after_in_child=_workers.cache_clear)  # threads do not survive a fork


def _padded(tensor: Tensor, both: bool = False) -> Tensor:
    """Contiguous, with zeros after the last axis (and the one before it) up to a multiple of 16 bytes."""
    multiple = 16 // tensor.element_size()
    padding = [0, -tensor.shape[-1] % multiple, *([0, -tensor.shape[-2] % multiple] if both else [])]
    return functional.pad(tensor, padding) if any(padding) else tensor.contiguous()
