"""Reports of lazy scopes: the calls that ran together, the others, and the reasons. A report prints as a table."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from iep.dynamic.kernels import ENTERED, LOOPED, NOW, SINGLY, Kernel, name_of


@dataclass
class OpReport:
    """The calls of one module or function that are alike."""

    name: str
    shapes: str
    """The shapes of the results."""
    how: str
    reason: str
    """The reason why the calls are not batched; empty if they are."""
    nodes: int = 0
    """The number of recorded calls that have run; with `share`, equal calls count once."""
    calls: int = 0
    """The number of groups in which they ran."""
    largest: int = 0
    """The number of nodes of the largest group."""


@dataclass
class BatchingReport:
    """The calls that a scope has run so far."""

    flushes: Counter[str] = field(default_factory=Counter)
    """The number of runs by their reason."""
    ran_at_once: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of calls that could not be recorded, by their name and the reason."""
    plans_reused: int = 0
    _rows: dict[tuple, OpReport] = field(default_factory=dict, repr=False)

    def add_first(self, function: Callable, kernel: Kernel) -> None:
        """Count the first call of its kind, which has run by itself."""
        if kernel.how in (NOW, ENTERED):
            self.ran_at_once[name_of(function), kernel.reason] += 1
        else:
            self.add(function, kernel, 1)

    def add(self, function: Callable, kernel: Kernel, size: int) -> None:
        """Count a group of `size` nodes."""
        shapes = " ".join("x".join(map(str, spec.shape)) or "()" for spec in kernel.outputs)
        kind = shapes, kernel.how, kernel.reason
        row = self._rows.setdefault((function, *kind), OpReport(name_of(function), *kind))
        is_single = row.how in (SINGLY, LOOPED)
        row.nodes += size
        row.calls += size if is_single else 1
        row.largest = max(row.largest, 1 if is_single else size)

    @property
    def ops(self) -> tuple[OpReport, ...]:
        """The calls that ran, in the order of recording. Each module has rows of its own."""
        return tuple(self._rows.values())

    @property
    def nodes(self) -> int:
        """The number of recorded calls that have run."""
        return sum(op.nodes for op in self.ops)

    @property
    def calls(self) -> int:
        """The number of groups in which they ran."""
        return sum(op.calls for op in self.ops)

    @property
    def batching_ratio(self) -> float:
        """The number of calls without batching divided by that with batching (Zha et al. 2019, section 3)."""
        return self.nodes / self.calls if self.calls else 1.0

    def __str__(self) -> str:
        rows = [("op", "results", "nodes", "calls", "mean", "largest", "how")]
        for op in sorted(self.ops, key=lambda op: -op.nodes):
            how = f"{op.how}: {op.reason}" if op.reason else op.how
            numbers = (str(op.nodes), str(op.calls), f"{op.nodes / op.calls:.1f}", str(op.largest))
            rows.append((op.name, op.shapes, *numbers, how))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(f"{self.nodes} nodes in {self.calls} calls, batching ratio {self.batching_ratio:.1f}")
        lines += [f"ran {count} x: {why}" for why, count in self.flushes.most_common()]
        for (name, why), count in self.ran_at_once.most_common():
            lines.append(f"{name} was not recorded and ran at once {count} x: {why}")
        lines.append(f"{self.plans_reused} of {self.flushes.total()} plans reused")
        return "\n".join(lines)
