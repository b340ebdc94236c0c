"""What a lazy scope did: which calls ran together, which did not, and why. Printed, a report is a table."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from iep.batching.graph import Graph
from iep.batching.layout import Layout
from iep.batching.lazy.kernels import SINGLY, name_of
from iep.batching.lazy.lowering import Lowered
from iep.batching.lazy.recording import Recording
from iep.batching.schedulers import most_on_a_path


@dataclass(frozen=True)
class OpReport:
    """Calls of one module or function that are alike."""

    name: str
    shapes: str
    """Of its results."""
    nodes: int
    calls: int
    largest: int
    """Nodes of the largest group."""
    waits: int
    """The most of its nodes that wait for one another: with fewer calls it cannot do."""
    how: str
    reason: str | None
    """Why singly."""


@dataclass(frozen=True)
class Report:
    """Numbers of one scope so far."""

    ops: tuple[OpReport, ...]
    flushes: Counter[str]
    """How often something was run, by what asked for it."""
    ran_at_once: Counter[tuple[str, str]]
    """Calls that could not be put off: their name and why."""
    plans_reused: int
    seconds_recording: float
    """In the scope, the user's own code included, less what follows."""
    seconds_planning: float
    seconds_executing: float

    @property
    def nodes(self) -> int:
        """Recorded calls that have run; with `share`, equal ones count once."""
        return sum(op.nodes for op in self.ops)

    @property
    def calls(self) -> int:
        """Groups in which they ran."""
        return sum(op.calls for op in self.ops)

    @property
    def batching_ratio(self) -> float:
        """Calls without batching over calls with it (Zha et al. 2019, section 3)."""
        return self.nodes / self.calls if self.calls else 1.0

    def __str__(self) -> str:
        rows = [("op", "results", "nodes", "calls", "mean", "largest", "waits", "how")]
        for op in sorted(self.ops, key=lambda op: -op.nodes):
            how = f"{op.how}: {op.reason}" if op.reason else op.how
            mean = f"{op.nodes / op.calls:.1f}"
            rows.append((op.name, op.shapes, str(op.nodes), str(op.calls), mean, str(op.largest), str(op.waits), how))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.append(f"{self.nodes} nodes in {self.calls} calls, batching ratio {self.batching_ratio:.1f}")
        runs = sum(self.flushes.values())
        lines += [f"ran {times} times: {why}" for why, times in self.flushes.most_common()]
        lines += [f"{name} ran at once {times} times: {why}" for (name, why), times in self.ran_at_once.most_common()]
        lines.append(
            f"recording {self.seconds_recording * 1e3:.1f} ms, planning {self.seconds_planning * 1e3:.1f} ms "
            f"({self.plans_reused} of {runs} plans reused), executing {self.seconds_executing * 1e3:.1f} ms"
        )
        return "\n".join(lines)


@dataclass
class Tally:
    """What a scope counts as it goes."""

    rows: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """By op, the rows of its calls."""
    graphs: list[Graph] = field(default_factory=list)
    flushes: Counter[str] = field(default_factory=Counter)
    plans_reused: int = 0
    seconds_planning: float = 0.0
    seconds_executing: float = 0.0
    seconds_in_all: float = 0.0

    def add(
        self, lowered: Lowered, layout: Layout, why: str, was_there: bool, planning: float, executing: float
    ) -> None:
        """Count one run: `why` says what asked for it, `was_there` whether its plan was reused; times in seconds."""
        for call in layout.calls[1:-1]:
            self.rows[call.op].append(call.rows)
        self.graphs.append(lowered.graph)
        self.flushes[why] += 1
        self.plans_reused += was_there
        self.seconds_planning += planning
        self.seconds_executing += executing

    def report(self, recording: Recording) -> Report:
        """All that was counted so far, of ops and calls of `recording`."""
        waits: Counter[int] = Counter()
        for graph in self.graphs:
            waits.update(most_on_a_path(graph))
        ops = []
        for index, rows in sorted(self.rows.items()):
            op = recording.ops[index]
            shapes = " ".join("x".join(map(str, column.shape)) or "()" for column in op.columns)
            kernel = op.kernel
            if kernel.how == SINGLY:
                rows = [1] * sum(rows)
            ops.append(
                OpReport(
                    name_of(op.call.function),
                    shapes,
                    sum(rows),
                    len(rows),
                    max(rows),
                    waits[index],
                    kernel.how,
                    kernel.reason,
                )
            )
        return Report(
            ops=tuple(ops),
            flushes=Counter(self.flushes),
            ran_at_once=Counter(recording.ran_at_once),
            plans_reused=self.plans_reused,
            seconds_recording=max(0.0, self.seconds_in_all - self.seconds_planning - self.seconds_executing),
            seconds_planning=self.seconds_planning,
            seconds_executing=self.seconds_executing,
        )
