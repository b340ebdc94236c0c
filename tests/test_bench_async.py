"""`iep-bench async`: every way to train has its row, on threads and under the virtual clock; errors are one line."""

import json
from pathlib import Path

import pytest
from bench_cases import iep_bench

SMALL = ("--samples", 40, "--val-samples", 10, "--instance-size", 8, "--width", 4, "--epochs", 2, "--seed", 1)


@pytest.mark.parametrize("weights", ["current", "forward"])
def test_every_way_to_train_has_its_row_on_threads_and_simulated(weights: str, tmp_path: Path):
    arguments = (*SMALL, "--layers", 2, "--simulate", "4,3", "--backward-weights", weights, "--out", tmp_path)
    result = iep_bench("async", "list-reduction", *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "list-reduction.json").read_text())
    assert report["command"].startswith("iep-bench async list-reduction --samples 40")
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".txt", ".png"}
    found = [(each["clock"], each["workers"]) for each in report["comparisons"]]
    assert found == [("threads", 2), ("simulated", 3), ("simulated", 4)]
    for each in report["comparisons"]:
        synchronous, flushed, asynchronous = each["rows"]
        assert [row["name"] for row in each["rows"]] == ["synchronous", "flush every 4 instances", "asynchronous"]
        assert synchronous["facts"]["greatest staleness"] == flushed["facts"]["greatest staleness"] == 0
        assert synchronous["facts"]["updates"] == 2 * 5 * 4  # epochs, instances, ops
        assert flushed["facts"]["updates"] == 2 * 2 * 4
        assert asynchronous["samples_per_second"]["repeats"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", 0), "0 is not in the range 1<=x<=64"),
        (("--simulate", "4,many"), "expected integers separated by commas"),
        (("--backward-weights", "newest"), "'newest' is not one of 'current', 'forward'"),
        (("--bandwidth", 0), "0.0 is not in the range x>0"),
    ],
)
def test_invalid_options_are_errors_of_one_line(arguments: tuple, words: str):
    result = iep_bench("async", "list-reduction", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
