"""A run's numbers over time: metrics.jsonl, one object a line, and the same as TensorBoard's events.

Events are written in place rather than by TensorBoard's own writer, whose thread would meet a full disk where nobody
can catch the error.
"""

import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from iep.files import os_errors_name, write_bytes

METRICS, BOARD = "metrics.jsonl", "tensorboard"


class Records:
    """Append rows of numbers to a run directory; a resumed run drops what was recorded after its checkpoint."""

    def __init__(self, out: Path, step: int):
        self._metrics_path = out / METRICS
        if self._metrics_path.exists():
            write_bytes(self._metrics_path, b"".join(_rows_until(self._metrics_path, step)))
        self._metrics = _open_unbuffered(self._metrics_path)
        (out / BOARD).mkdir(exist_ok=True)
        self._board_path = out / BOARD / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._board = _open_unbuffered(self._board_path)
        self._write_event(Event(file_version="brain.Event:2"))
        # Tells TensorBoard to forget what an earlier part of this run wrote from that step on.
        self._write_event(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, step: int, row: dict[str, float]) -> None:
        """Append one row for `step`.

        Raises:
            OSError: the disk is full (names the file).
        """
        with os_errors_name(self._metrics_path):
            self._metrics.write((json.dumps({"step": step, **row}) + "\n").encode())
        values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items()]
        self._write_event(Event(step=step, summary=Summary(value=values)))

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


def _open_unbuffered(path: Path) -> BinaryIO:
    """`path`, open for appending; without a buffer, a write that failed does not fail again on closing."""
    return open(path, "ab", buffering=0)


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
