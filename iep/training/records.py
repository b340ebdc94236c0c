"""A run's numbers over time: metrics.jsonl, one object a line, and the same to TensorBoard."""

import json
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter

from iep.files import os_errors_name, write_bytes

METRICS = "metrics.jsonl"


class Records:
    """Append rows of numbers to a run directory; a resumed run drops what was recorded after its checkpoint."""

    def __init__(self, out: Path, step: int):
        self._path, self._board_path = out / METRICS, out / "tensorboard"
        if self._path.exists():
            write_bytes(self._path, b"".join(_rows_until(self._path, step)))
        # Without a buffer: what a full disk did not take would be written, and fail, again on closing.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed in __exit__
        with os_errors_name(self._board_path):
            self._board = SummaryWriter(str(self._board_path), purge_step=step + 1)

    def write(self, step: int, row: dict[str, float]) -> None:
        """Append one row for `step`.

        Raises:
            OSError: the disk is full (names the file, or TensorBoard's directory).
        """
        with os_errors_name(self._path):
            self._file.write((json.dumps({"step": step, **row}) + "\n").encode())
        with os_errors_name(self._board_path):
            for name, value in row.items():
                self._board.add_scalar(name, value, step)

    def __enter__(self) -> "Records":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        with os_errors_name(self._board_path):
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
