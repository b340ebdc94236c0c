"""`iep-bench processes`: a table of one process and several, from real runs; a run that fails is one line."""

import json
from pathlib import Path

import pytest
from bench_cases import iep_bench
from tiny_data import TINY, assert_one_error

from iep.bench.processes import REPORT, TABLE, _compare, format_rows

CONFIG = "model: lstm\n"


def run_of(losses: list[float], speeds: list[float]) -> list[dict[str, float]]:
    return [{"loss": loss, "questions_per_second": speed} for loss, speed in zip(losses, speeds, strict=True)]


def test_speeds_are_medians_over_all_rows_but_the_first_of_each_run_and_losses_those_of_the_first_run():
    one = [run_of([4.0, 2.0, 1.0], [1, 100, 110]), run_of([4.0, 2.0, 1.0], [1, 90, 120])]
    two = [run_of([4.2, 2.0, 1.1], [1, 150, 160]), run_of([4.0, 1.5, 1.0], [1, 170, 180])]
    first, second = _compare({1: one, 2: two})
    assert (first.questions_per_second.median, first.speedup, first.loss_difference) == (105, 1.0, 0.0)
    assert (second.questions_per_second.median, second.questions_per_second.repeats) == (165, 4)
    assert second.speedup == pytest.approx(165 / 105)
    assert second.loss_difference == pytest.approx(0.25)
    assert (first.first_difference, second.first_difference) == (0.0, pytest.approx(0.05))
    lines = format_rows([first, second]).splitlines()
    assert lines[0].split("  ")[0].strip() == "processes"
    assert lines[2].split() == ["2", str(second.threads), "165", "157.5-172.5", "1.57x", "5.0e-02", "2.5e-01"]


def test_real_runs_become_a_table_and_a_report(data: Path, tmp_path: Path):
    (tmp_path / "lstm.yaml").write_text(CONFIG)
    out, asked = tmp_path / "out", ("--processes", "1", "--iterations", "4", "--repeat", "1")
    given = ("--data", data, "--config", tmp_path / "lstm.yaml", *asked)
    result = iep_bench("processes", *given, "--out", out, *TINY)
    assert result.exit_code == 0, result.output
    (row,) = json.loads((out / REPORT).read_text())["rows"]
    assert row["processes"] == 1
    assert row["questions_per_second"]["repeats"] == 3
    assert row["questions_per_second"]["median"] > 0
    assert (out / TABLE).read_text().startswith(f"$ iep-bench processes --data {data}")
    assert (out / TABLE).read_text().strip() in result.output


def test_a_run_that_fails_is_one_line(tmp_path: Path):
    (tmp_path / "lstm.yaml").write_text(CONFIG)
    result = iep_bench("processes", "--data", tmp_path, "--config", tmp_path / "lstm.yaml", "--processes", 1)
    assert_one_error(result, "training with 1 processes failed", "vocab.json: no such file")
