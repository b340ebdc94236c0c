"""Reports of lazy scopes: the calls that ran together, the others, and the reasons. A report prints as a table."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from iep.dynamic.kernels import SINGLY, name_of
from iep.dynamic.recording import Op


class OpReport(NamedTuple):
    """The calls of one module or function that are alike."""

    name: str
    """The name, with a number in brackets if several modules of one class or functions have the same name."""
    shapes: str
    """The shapes of the results."""
    how: str
    reason: str | None
    """The reason why the calls are not batched; None if they are."""
    nodes: int
    """The number of recorded calls that have run; with `share`, equal calls count once."""
    calls: int
    """The number of groups in which they ran."""
    largest: int
    """The number of nodes of the largest group."""


@dataclass
class BatchingReport:
    """The calls that a scope has run so far."""

    flushes: Counter[str] = field(default_factory=Counter)
    """The number of runs by their reason."""
    ran_at_once: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The number of calls that could not be recorded, by their name and the reason."""
    plans_reused: int = 0
    seconds_recording: float = 0.0
    """The time in the scope, including the user's own code, without planning and executing."""
    seconds_planning: float = 0.0
    seconds_executing: float = 0.0
    _sizes: dict[tuple, list[int]] = field(default_factory=dict, repr=False)

    def add(self, op: Op, size: int) -> None:
        """Count a group of `size` nodes."""
        shapes = " ".join("x".join(map(str, column.shape)) or "()" for column in op.columns)
        row = (op.call.function, *map(id, op.constants)), shapes, op.kernel.how, op.kernel.reason
        self._sizes.setdefault(row, []).extend([1] * size if op.kernel.how == SINGLY else [size])

    @property
    def ops(self) -> tuple[OpReport, ...]:
        """The calls that ran, in the order of recording."""
        numbers: dict[str, dict[tuple, int]] = {}
        for identity, *_ in self._sizes:
            alike = numbers.setdefault(name_of(identity[0]), {})
            alike.setdefault(identity, len(alike) + 1)
        found = []
        for (identity, *row), sizes in self._sizes.items():
            name = name_of(identity[0])
            number = f" ({numbers[name][identity]})" if len(numbers[name]) > 1 else ""
            found.append(OpReport(name + number, *row, sum(sizes), len(sizes), max(sizes)))
        return tuple(found)

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
        total = f"{_count(self.nodes, 'node')} in {_count(self.calls, 'call')}"
        lines.append(f"{total}, batching ratio {self.batching_ratio:.1f}")
        lines += [f"ran {_count(count, 'time')}: {why}" for why, count in self.flushes.most_common()]
        for (name, why), count in self.ran_at_once.most_common():
            lines.append(f"{name} was not recorded and ran at once {_count(count, 'time')}: {why}")
        phases = ("recording", "planning", "executing")
        times = ", ".join(f"{phase} {1e3 * getattr(self, f'seconds_{phase}'):.1f} ms" for phase in phases)
        lines.append(f"{times}; {self.plans_reused} of {self.flushes.total()} plans reused")
        return "\n".join(lines)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
