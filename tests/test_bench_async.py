"""`iep-bench async`: every way to train has its row, on threads and under the virtual clock; errors are one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import iep_bench
from PIL import Image

SMALL = ("--samples", 40, "--val-samples", 10, "--instance-size", 8, "--width", 4, "--epochs", 2)


def measured(out: Path, *arguments: object, workload: str = "list-reduction") -> dict[str, Any]:
    """Return the report of a small measurement."""
    result = iep_bench("async", workload, *SMALL, *arguments, "--out", out)
    assert result.exit_code == 0, result.output
    return json.loads((out / f"{workload}.json").read_text())


@pytest.mark.parametrize("weights", ["current", "forward"])
def test_every_way_to_train_has_its_row_on_threads_and_simulated(weights: str, tmp_path: Path):
    report = measured(tmp_path, "--layers", 2, "--simulate", "4,3", "--backward-weights", weights, "--seeds", 1)
    assert report["command"].startswith("iep-bench async list-reduction --samples 40")
    found = [(each["clock"], each["workers"]) for each in report["comparisons"]]
    assert found == [("threads", 2), ("simulated", 3), ("simulated", 4)]
    for each in report["comparisons"]:
        synchronous, flushed, asynchronous = each["rows"]
        assert [row["name"] for row in each["rows"]] == ["synchronous", "flush every 4 instances", "asynchronous"]
        assert synchronous["facts"]["greatest staleness"] == flushed["facts"]["greatest staleness"] == 0
        assert synchronous["facts"]["updates per epoch"] == 5 * 4  # instances, ops
        assert flushed["facts"]["updates per epoch"] == 2 * 4
        ops = synchronous["details"]["ops"]
        updates = {name: op["updates per epoch"] for name, op in ops.items()}
        assert updates == {"Embedding": 5, "Linear": 5, "Cell 2": 5, "Cell 3": 5}
        of_ops = [op["greatest staleness"] for op in asynchronous["details"]["ops"].values()]
        assert asynchronous["facts"]["greatest staleness"] == max(of_ops)
        assert asynchronous["samples_per_second"]["repeats"] == 2
    endings = (".json", ".txt", ".png", "-timeline.png", "-staleness.png")
    assert {path.name for path in tmp_path.iterdir()} == {f"list-reduction{each}" for each in endings}
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10


@pytest.mark.parametrize("workload", ["tree-lstm", "deduction", "molecules"])
def test_other_workloads_train_in_the_same_ways(workload: str, tmp_path: Path):
    small = ("--samples", 8, "--val-samples", 4, "--instance-size", 4, "--epochs", 1, "--simulate", 3)
    for each in measured(tmp_path, *small, "--target", 0.5, workload=workload)["comparisons"]:
        for row in each["rows"]:
            ((score,),) = row["details"]["scores"]
            is_reached = score <= 0.5 if workload == "molecules" else score >= 0.5
            assert row["facts"]["epochs to target"] == ("1" if is_reached else "not reached")


def test_an_engine_trains_on_preprocessed_questions(data: Path, tmp_path: Path):
    small = ("--samples", 30, "--val-samples", 9, "--instance-size", 8, "--epochs", 1, "--simulate", 3)
    (tmp_path / "ee.yaml").write_text("model: ee\nengine: {module_dim: 4, stem_widths: [], classifier_hidden: [8]}\n")
    settings = ("--data", data, "--config", tmp_path / "ee.yaml", "engine.modules=tbd", "--replicas", "stem=2,exist=2")
    result = iep_bench("async", "engine", *small, *settings, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for each in json.loads((tmp_path / "out" / "engine.json").read_text())["comparisons"]:
        assert each["instances"] == 4
        for row in each["rows"]:
            assert {"stem", "exist", "classifier"} <= row["details"]["ops"].keys()
            assert row["details"]["ops"]["classifier"]["updates per epoch"] in (1, 4)


def test_a_replica_is_updated_after_its_own_share_of_the_instances(tmp_path: Path):
    """Each of two epochs has five instances. One embedding is called ten times, two are called six and four times."""
    for replicas, updates in (((), 2), (("--replicas", "Embedding=2"), 1)):
        for each in measured(tmp_path, "--min-update-frequency", 5, "--simulate", 3, *replicas)["comparisons"]:
            assert each["rows"][2]["details"]["ops"]["Embedding"]["updates per epoch"] == updates / 2


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


def test_epochs_and_seconds_to_the_target_are_those_of_the_first_epoch_that_reached_it(tmp_path: Path):
    reached, larger = set(), ("--samples", 160, "--val-samples", 100, "--width", 16, "--epochs", 3)
    for each in measured(tmp_path, *larger, "--learning-rate", 0.02, "--target", 0.2, "--simulate", 2)["comparisons"]:
        for row in each["rows"]:
            (scores,), (seconds,) = row["details"]["scores"], row["details"]["seconds"]
            first = next((number for number, score in enumerate(scores, 1) if score >= 0.2), None)
            expected = (f"{first:.4g}", f"{sum(seconds[:first]):.4g}") if first else ("not reached", "not reached")
            assert (row["facts"]["epochs to target"], row["facts"]["seconds to target"]) == expected
            reached.add(first)
    assert None in reached
    assert len(reached) > 1


def test_rows_of_several_seeds_have_means_and_ranges(tmp_path: Path):
    several, one = (
        measured(tmp_path, "--seeds", seeds, "--target", 0.9, "--simulate", 2)["comparisons"][1]["rows"]
        for seeds in ("1,2,3", "1")
    )
    for row in several:
        assert row["samples_per_second"]["repeats"] == 3 * 2
        last = [100 * scores[-1] for scores in row["details"]["scores"]]
        assert row["facts"]["accuracy"] == f"{sum(last) / 3:.1f}% ({min(last):.1f}%..{max(last):.1f}%)"
        assert row["facts"]["epochs to target"] == "not reached by 3 of 3"
    assert several[0]["details"]["scores"][0] == one[0]["details"]["scores"][0]
    assert one[0]["facts"]["accuracy"] == f"{100 * one[0]['details']['scores'][0][-1]:.1f}%"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--workers", 0), "0 is not in the range 1<=x<=64"),
        (("--simulate", "4,many"), "expected integers separated by commas"),
        (("--max-active-keys", "1,0"), "0 is not in the range"),
        (("--min-update-frequency", "auto,often"), "'often', expected auto or an integer of 1 or greater"),
        (("--min-update-frequency", "0"), "'0', expected auto or an integer of 1 or greater"),
        (("--replicas", "Sell=2"), "'Sell=2' names no op, expected NAME=N with one of Embedding, Linear, Cell"),
        (("--replicas", "Cell=1"), "replicas: 'Cell=1', expected Cell=N with N of 2 or more"),
        (("--seeds", ""), "expected integers separated by commas"),
        (("--target", 90), "90.0 is not in the range 0<=x<=1"),
        (("--backward-weights", "newest"), "'newest' is not one of 'current', 'forward'"),
        (("--bandwidth", 0), "0.0 is not in the range x>0"),
    ],
)
def test_invalid_options_are_errors_of_one_line(arguments: tuple, words: str):
    result = iep_bench("async", "list-reduction", *arguments)
    assert result.exit_code == (1 if "--replicas" in arguments else 2)
    assert words in result.output
    assert "Traceback" not in result.output
