"""A run's numbers over time: metrics.jsonl, one object a line, and the same to TensorBoard."""

import json
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from iep.files import write_bytes

METRICS = "metrics.jsonl"


class Records:
    """Append rows of numbers to a run directory; a resumed run drops what was recorded after its checkpoint."""

    def __init__(self, out: Path, step: int):
        path = out / METRICS
        if path.exists():
            write_bytes(path, b"".join(_rows_until(path, step)))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in __exit__
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, row: dict[str, float]) -> None:
        """Append one row for `step`."""
        self._file.write(json.dumps({"step": step, **row}) + "\n")
        self._file.flush()
        for name, value in row.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> "Records":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._board.close()


def _rows_until(path: Path, step: int) -> list[bytes]:
    """Whole lines of a metrics file up to `step`; a line cut short by a kill is dropped."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            recorded = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if recorded <= step and line.endswith(b"\n"):
            kept.append(line)
    return kept
