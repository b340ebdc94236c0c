"""Evaluation in two processes: the files of one, whatever the number of batches."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from processes import together

from iep.config import Evaluation
from iep.evaluation.html_report import PAGE, Page
from iep.evaluation.outcome import ANSWERS, ANSWERS_JSON, PREDICTIONS, REPORT
from iep.evaluation.run_evaluation import evaluate

MEASURED = ("questions_per_second", "peak_memory_gb")


def _evaluate(settings: Evaluation, out: Path) -> bool:
    return evaluate(settings, out, Page(out)) is not None


@pytest.mark.parametrize("batch_size", [4, 100])
@pytest.mark.parametrize(("programs", "by_image"), [("predicted", True), ("ground-truth", False)])
def test_two_processes_write_the_files_of_one(data, run, tmp_path: Path, programs: str, by_image: bool, batch_size):
    settings = Evaluation(data, pg=run["pg"], ee=run["ee"], programs=programs, device="cpu")
    settings = replace(settings, batch_size=batch_size, order_by_image=by_image)
    assert evaluate(settings, tmp_path / "one", Page(tmp_path / "one"))
    assert together(_evaluate, settings, tmp_path / "two") == [True, False]
    one, two = (tmp_path / name for name in ("one", "two"))
    for name in (PREDICTIONS, ANSWERS, ANSWERS_JSON):
        assert (two / name).read_bytes() == (one / name).read_bytes()
    lengths = [len((out / PAGE).read_text()) for out in (one, two)]
    assert lengths[0] == pytest.approx(lengths[1], abs=200), "they differ in measured times and in paths"
    reports = [json.loads((out / REPORT).read_text()) for out in (one, two)]
    assert all(report[name] > 0 for report in reports for name in MEASURED)
    unmeasured = [{name: value for name, value in report.items() if name not in MEASURED} for report in reports]
    assert unmeasured[0] == unmeasured[1]
