"""A run's metrics over time: metrics.jsonl with one object per line, and the same numbers as TensorBoard events.

A tracker, Weights & Biases or trackio, gets the same numbers if the run names one.

Every row opens the files anew. TensorBoard's own writer has a thread, which would print the traceback of an error such
as that of a full disk.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from iep.errors import InputError
from iep.runtime.files import os_errors_name, write_bytes

METRICS, BOARD = "metrics.jsonl", "tensorboard"
VALIDATION = "validation_accuracy"
Row = dict[str, float]


class Records:
    """The metrics files of a run directory, to which rows of numbers are appended.

    Args:
        out: the run directory.
        step: the step of the checkpoint from which the run resumes. Later rows are dropped.
        validation_due: the checkpoint was saved before the validation of its step. The row of this validation is
            dropped as well.
        tracker: a run of a tracker, as `start_tracker` returns it.
    """

    def __init__(self, out: Path, step: int, validation_due: bool = False, tracker: Any = None):
        self._tracker = tracker
        self._metrics_path = out / METRICS
        kept = []
        if self._metrics_path.exists():
            kept = [row for row in read_rows(self._metrics_path) if row["step"] <= step]
            if validation_due:
                kept = [row for row in kept if row["step"] < step or VALIDATION not in row]
        write_bytes(self._metrics_path, b"".join(map(_line, kept)))
        (out / BOARD).mkdir(exist_ok=True)
        self._board_path = out / BOARD / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        # The second event makes TensorBoard ignore the earlier events of this run from that step on.
        start = SessionLog(status=SessionLog.START)
        self._show(Event(file_version="brain.Event:2"), Event(step=step, session_log=start))
        self._show(*(_event(row) for row in kept if row["step"] == step))

    def write(self, step: int, row: Row) -> None:
        """Append one row for `step`.

        Raises:
            OSError: the row cannot be written; the error names the file.
        """
        row = {"step": step, **row}
        with os_errors_name(self._metrics_path), open(self._metrics_path, "ab") as file:
            file.write(_line(row))
        self._show(_event(row))
        if self._tracker is not None:
            self._tracker.log({name: value for name, value in row.items() if name != "step"}, step=step)

    def _show(self, *events: Event) -> None:
        with os_errors_name(self._board_path), open(self._board_path, "ab") as file:
            for event in events:
                event.wall_time = time.time()
                RecordWriter(file).write(event.SerializeToString())


def start_tracker(package: str | None, out: Path, settings: Mapping[str, Any]) -> Any:
    """Start a run of a tracker, named after the directory `out`, which ends with the process; return None without one.

    Args:
        package: the name of a package with the interface of wandb.
        settings: the settings of the run, which the tracker shows.

    Raises:
        InputError: the package cannot start a run.
    """
    if package is None:
        return None
    try:
        return import_module(package).init(project="iep", name=out.name, config=dict(settings))
    except Exception as error:  # without a login or a network, say; each package has errors of its own
        raise InputError(f"tracker {package} cannot start: {' '.join(str(error).split())}") from None


def _event(row: Row) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in row.items() if name != "step"]
    return Event(step=row["step"], summary=Summary(value=values))


def _line(row: Row) -> bytes:
    return (json.dumps(row) + "\n").encode()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a metrics file. Incomplete lines, left by a kill or a full disk, are skipped.

    Raises:
        OSError: the file cannot be read.
    """
    rows = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
