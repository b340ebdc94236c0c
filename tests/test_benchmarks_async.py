"""`python -m benchmarks async`: every way to train has its row, on threads and under the virtual clock."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import laboratory
from PIL import Image

SMALL = ("--samples", 40, "--val-samples", 10, "--instance-size", 8, "--epochs", 2)


def measured(out: Path, *arguments: object, experiment: str = "list-reduction") -> dict[str, Any]:
    """Return the report of a small measurement."""
    width = () if experiment == "engine" else ("--width", 4)
    result = laboratory("async", experiment, *SMALL, *width, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return json.loads((out / f"{experiment}.json").read_text())


@pytest.mark.parametrize("weights", ["current", "forward"])
def test_every_way_to_train_has_its_row_on_threads_and_simulated(weights: str, tmp_path: Path):
    report = measured(tmp_path, "--layers", 2, "--simulate", "4,3", "--backward-weights", weights, "--seeds", 1)
    assert report["command"].startswith("python -m benchmarks async list-reduction --samples 40")
    found = [(each["clock"], each["workers"]) for each in report["comparisons"]]
    assert found == [("threads", 2), ("simulated", 3), ("simulated", 4)]
    for each in report["comparisons"]:
        synchronous, flushed, asynchronous = (row["facts"] for row in each["rows"])
        assert [row["name"] for row in each["rows"]] == ["synchronous", "flush every 4 instances", "asynchronous"]
        assert synchronous["greatest staleness"] == flushed["greatest staleness"] == 0
        assert (synchronous["updates per epoch"], flushed["updates per epoch"]) == (5 * 4, 2 * 4)  # instances, ops
        assert synchronous["updates"] == {"Embedding": 5, "Linear": 5, "Cell 2": 5, "Cell 3": 5}
        assert 0 < asynchronous["mean staleness"] <= asynchronous["greatest staleness"]
    endings = (".json", ".txt", ".png", "-timeline.png")
    assert {path.name for path in tmp_path.iterdir()} == {f"list-reduction{each}" for each in endings}
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10


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
    given = ("--data", data, "--config", tmp_path / "ee.yaml", "engine.modules=tbd", "--replicas", "stem=2,exist=2")
    for each in measured(tmp_path / "out", *small, *given, experiment="engine")["comparisons"]:
        assert each["instances"] == 4
        for updates in (row["facts"]["updates"] for row in each["rows"]):
            assert {"stem", "exist", "classifier"} <= updates.keys()
            assert updates["classifier"] in (1, 4)


def test_a_replica_is_updated_after_its_own_share_of_the_instances(tmp_path: Path):
    """Each of two epochs has five instances. One embedding is called ten times, two are called six and four times."""
    for replicas, updates in (((), 2), (("--replicas", "Embedding=2"), 1)):
        for each in measured(tmp_path, "--min-update-frequency", 5, "--simulate", 3, *replicas)["comparisons"]:
            assert each["rows"][2]["facts"]["updates"]["Embedding"] == updates / 2


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


def test_columns_are_means_over_the_seeds_and_the_target_counts_if_every_seed_reached_it(tmp_path: Path):
    larger = ("--samples", 160, "--val-samples", 100, "--width", 16, "--epochs", 2, "--learning-rate", 0.02)
    reached = set()
    for each in measured(tmp_path, *larger, "--seeds", "1,2", "--target", 0.05, "--simulate", 2)["comparisons"]:
        for facts in (row["facts"] for row in each["rows"]):
            assert facts["accuracy"] == pytest.approx(sum(scores[-1] for scores in facts["scores"]) / 2)
            first = [
                next((n for n, score in enumerate(scores, 1) if score >= 0.05), None) for scores in facts["scores"]
            ]
            reached.add(None not in first)
            assert facts.get("epochs to target") == (sum(first) / 2 if all(first) else None)
            if all(first):
                taken = [sum(seconds[:n]) for seconds, n in zip(facts["seconds"], first, strict=True)]
                assert facts["seconds to target"] == pytest.approx(sum(taken) / 2)
    assert True in reached


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", 0), "0 is not in the range 1<=x<=64"),
        (("--simulate", "4,many"), "expected integers separated by commas"),
        (("--max-active-keys", "1,0"), "0 is not in the range"),
        (("--min-update-frequency", "auto,often"), "'often', expected auto or an integer of 1 or greater"),
        (("--replicas", "Sell=2"), "'Sell=2', expected NAME=N with N of 2 or more and one of Embedding, Linear, Cell"),
        (("--replicas", "Cell=1"), "'Cell=1', expected NAME=N with N of 2 or more"),
        (("--seeds", ""), "expected integers separated by commas"),
        (("--target", 90), "90.0 is not in the range 0<=x<=1"),
        (("--bandwidth", 0), "0.0 is not in the range x>0"),
    ],
)
def test_invalid_options_are_errors_of_one_line(arguments: tuple, words: str):
    result = laboratory("async", "list-reduction", *arguments)
    assert result.exit_code == (1 if "--replicas" in arguments else 2)
    assert words in result.output
    assert "Traceback" not in result.output
