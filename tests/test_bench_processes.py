"""`iep-bench processes`: a row for each number of processes, from real runs; a run that fails is one line."""

import sys
from pathlib import Path

import pytest
from bench_cases import iep_bench, report_of
from tiny_data import assert_one_error, tiny

from iep.bench import measure_processes
from iep.bench.compare import Effort, compare

CONFIG = "model: lstm\n"


def test_speeds_are_medians_of_runs_without_their_first_metrics(monkeypatch: pytest.MonkeyPatch):
    runs = {1: [[1.0, 100.0, 110.0], [1.0, 90.0, 120.0]], 2: [[1.0, 150.0, 160.0], [1.0, 170.0, 180.0]]}
    monkeypatch.setattr(measure_processes, "train", lambda data, config, count, *_: runs[count].pop(0))
    (case,) = measure_processes.processes_benchmark(Path(), Path(), (1, 2), 100, ()).cases
    one, two = compare(case, Effort(2, 3600))
    assert (one.name, two.name) == ("1 process", "2 processes")
    assert one.samples_per_second.median == pytest.approx(105, abs=0.01)
    assert two.samples_per_second.median == pytest.approx(164.4, abs=0.1)
    assert two.speedup == pytest.approx(two.samples_per_second.median / one.samples_per_second.median)


def test_real_runs_become_a_table_and_a_report(data: Path, tmp_path: Path):
    (tmp_path / "lstm.yaml").write_text(CONFIG)
    asked = ("--data", data, "--config", tmp_path / "lstm.yaml", "--processes", 1, "--iterations", 4, "--repeat", 1)
    result = iep_bench("processes", *asked, "--out", tmp_path / "out", *tiny("lstm"))
    (comparison,) = report_of(result, tmp_path / "out", "processes")
    (row,) = comparison["rows"]
    assert (row["name"], row["speedup"]) == ("1 process", 1.0)


def test_a_run_that_fails_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What fails here stands in for torchrun, whose start takes seconds."""
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'Error: vocab.json: no such file' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    (tmp_path / "lstm.yaml").write_text(CONFIG)
    result = iep_bench("processes", "--data", tmp_path, "--config", tmp_path / "lstm.yaml", "--processes", 1)
    assert_one_error(result, "training with 1 process failed", "vocab.json: no such file")
