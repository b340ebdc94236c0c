"""`python -m benchmarks async`: every way to train has its row, on threads and under the virtual clock."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import laboratory

SMALL = ("--samples", 40, "--val-samples", 10, "--instance-size", 8, "--epochs", 2)


def measured(out: Path, *arguments: object, experiment: str = "list-reduction") -> dict[str, Any]:
    """Return the report of a small measurement."""
    width = () if experiment == "engine" else ("--width", 4)
    result = laboratory("async", experiment, *SMALL, *width, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return json.loads((out / f"{experiment}.json").read_text())


def test_every_way_to_train_has_its_row_on_threads_and_simulated(tmp_path: Path):
    report = measured(tmp_path, "--layers", 2, "--simulate", "4,3", "--seeds", 1)
    assert report["command"].startswith("python -m benchmarks async list-reduction --samples 40")
    found = [(each["clock"], each["workers"]) for each in report["comparisons"]]
    assert found == [("threads", 2), ("simulated", 3), ("simulated", 4)]
    for each in report["comparisons"]:
        synchronous, flushed, asynchronous = (row["facts"] for row in each["rows"])
        assert [row["name"] for row in each["rows"]] == ["synchronous", "flush every 4 instances", "asynchronous"]
        assert synchronous["greatest staleness"] == flushed["greatest staleness"] == 0
        assert (synchronous["updates per epoch"], flushed["updates per epoch"]) == (5 * 4, 2 * 4)  # instances, ops
        assert 0 < asynchronous["mean staleness"] <= asynchronous["greatest staleness"]


@pytest.mark.parametrize("experiment", ["tree-lstm", "deduction", "molecules"])
def test_other_experiments_train_in_the_same_ways(experiment: str, tmp_path: Path):
    small = ("--samples", 8, "--val-samples", 4, "--instance-size", 4, "--epochs", 1, "--simulate", 3)
    for each in measured(tmp_path, *small, "--target", 0.5, experiment=experiment)["comparisons"]:
        for facts in (row["facts"] for row in each["rows"]):
            ((score,),) = facts["scores"]
            is_reached = score <= 0.5 if experiment == "molecules" else score >= 0.5
            assert facts.get("epochs to target") == (1 if is_reached else None)


def test_an_engine_trains_on_preprocessed_questions(data: Path, tmp_path: Path):
    small = ("--samples", 30, "--val-samples", 9, "--epochs", 1, "--simulate", 3)
    (tmp_path / "ee.yaml").write_text("model: ee\nengine: {module_dim: 4, stem_widths: [], classifier_hidden: [8]}\n")
    given = ("--data", data, "--config", tmp_path / "ee.yaml", "engine.modules=tbd")
    for each in measured(tmp_path / "out", *small, *given, experiment="engine")["comparisons"]:
        assert each["instances"] == 4
        synchronous, flushed, _ = (row["facts"]["updates per epoch"] for row in each["rows"])
        assert synchronous > flushed > 3  # one update of the stem, the classifier and the modules at least


def test_lists_of_settings_have_a_row_for_each_combination(tmp_path: Path):
    settings = ("--max-active-keys", "1,2", "--min-update-frequency", "auto,1,1000000", "--simulate", 2)
    for each in measured(tmp_path, *settings)["comparisons"]:
        rows = {row["name"]: row for row in each["rows"]}
        combinations = [f"{keys} in flight, frequency {each}" for keys in (1, 2) for each in ("auto", 1, 1000000)]
        names = ["synchronous", "flush every 2 instances", *(f"asynchronous, {each}" for each in combinations)]
        assert [*rows] == names
        updates = [rows[name]["facts"]["updates per epoch"] for name in names[-3:]]
        assert updates[1] > updates[0] > updates[2] == 0
        if each["clock"] == "simulated":  # updates and second forward passes take simulated time
            often, never = rows[names[3]], rows[names[4]]
            assert often["seconds"]["total"]["median"] > never["seconds"]["total"]["median"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--simulate", "4,many"), "expected integers separated by commas"),
        (("--min-update-frequency", "auto,often"), "'often', expected auto or an integer of 1 or greater"),
        (("--target", 90), "90.0 is not in the range 0<=x<=1"),
    ],
)
def test_invalid_options_are_errors_of_one_line(arguments: tuple, words: str):
    result = laboratory("async", "list-reduction", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
