"""A run's metrics over time: metrics.jsonl with one object per line, and the same numbers as TensorBoard events.

Events are written here rather than by TensorBoard's own writer, which writes in a thread: there, nobody could catch the
error of a full disk.
"""

import json
import os
import socket
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from iep.runtime.files import os_errors_name, write_bytes

METRICS, BOARD = "metrics.jsonl", "tensorboard"
VALIDATION = "validation_accuracy"
Row = dict[str, float]


class Records:
    """Append rows of numbers to a run directory; a resumed run drops the rows after its checkpoint.

    With `validation_due`, the checkpoint is from before its step's validation, which is dropped as well.
    """

    def __init__(self, out: Path, step: int, validation_due: bool = False):
        self._metrics_path = out / METRICS
        kept = []
        if self._metrics_path.exists():
            kept = [row for row in read_rows(self._metrics_path) if row["step"] <= step]
            if validation_due:
                kept = [row for row in kept if row["step"] < step or VALIDATION not in row]
            write_bytes(self._metrics_path, b"".join(map(_line, kept)))
        self._metrics = _open_unbuffered(self._metrics_path)
        (out / BOARD).mkdir(exist_ok=True)
        self._board_path = out / BOARD / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._board = _open_unbuffered(self._board_path)
        self._write_event(Event(file_version="brain.Event:2"))
        # Has TensorBoard drop the events of an interrupted run from that step on.
        self._write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        for row in kept:
            if row["step"] == step:
                self._show(row)

    def write(self, step: int, row: Row) -> None:
        """Append one row for `step`.

        Raises:
            OSError: the disk is full (names the file).
        """
        row = {"step": step, **row}
        with os_errors_name(self._metrics_path):
            self._metrics.write(_line(row))
        self._show(row)

    def _show(self, row: Row) -> None:
        """Write a row as a TensorBoard event."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
        self._write_event(Event(step=row["step"], summary=Summary(value=values)))

    def _write_event(self, event: Event) -> None:
        event.wall_time = time.time()
        with os_errors_name(self._board_path):
            RecordWriter(self._board).write(event.SerializeToString())

    def __enter__(self) -> "Records":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._metrics.close()
        self._board.close()


class _WholeWrites(FileIO):
    """A file without a buffer, so that a write that failed does not fail again on closing.

    If the system writes only a part, as on a disk that is nearly full, this writes the rest or raises.
    """

    def write(self, content: bytes) -> int:
        left = memoryview(content)
        while left:
            left = left[super().write(left) :]
        return len(content)


def _open_unbuffered(path: Path) -> FileIO:
    return _WholeWrites(path, "ab")


def _line(row: Row) -> bytes:
    return (json.dumps(row) + "\n").encode()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics file, without lines that a kill or a full disk cut short.

    Raises:
        OSError: the file cannot be read.
    """
    rows = []
    for line in path.read_bytes().splitlines(keepends=True):
        with suppress(ValueError, RecursionError):
            row = json.loads(line)
            if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows
