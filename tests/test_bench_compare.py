"""One comparison for everything: competitors take turns, figures follow from their times, the file is whole."""

import json
import os
import signal
from pathlib import Path

import pytest

from iep.bench.compare import Benchmark, Case, Competitor, compare, run_benchmark, table
from iep.runtime.signals import Stopped, handled


def competitor(name: str, *rounds: dict[str, float], log: list | None = None, **options: object) -> Competitor:
    """Return a competitor whose rounds take the given times, after a warm-up round."""
    times = iter([dict.fromkeys(rounds[0], 99.0), *rounds])

    def measure() -> dict[str, float]:
        if log is not None:
            log.append(name)
        return next(times)

    return Competitor(name, measure, **options)


def test_competitors_take_turns_after_a_round_that_does_not_count():
    log: list[str] = []
    pair = [competitor(name, *[{"all": 1.0}] * 3, log=log) for name in "ab"]
    rows = compare(Case({}, 1, pair), 3, 60.0)
    assert log == ["a", "b"] * 4
    assert [row["seconds"]["all"]["repeats"] for row in rows] == [3, 3]
    assert {row["seconds"]["total"]["median"] for row in rows} == {1.0}


def test_totals_and_speedups_of_a_row_follow_from_its_times():
    slow = competitor("slow", {"plan": 1.0, "run": 3.0})
    quick = competitor("quick", {"plan": 0.5, "run": 1.5}, facts=lambda: {"calls": 7})
    rows = compare(Case({}, 8, [slow, quick], "slow"), 1, 0)
    assert [row["seconds"]["total"]["median"] for row in rows] == [4.0, 2.0]
    assert [row["speedup"] for row in rows] == [1.0, 2.0]
    assert rows[1]["facts"] == {"calls": 7}


@pytest.mark.parametrize(("max_seconds", "rounds"), [(0, 3), (60, 5)])
def test_a_slow_competitor_stops_after_three_rounds_and_a_quick_one_after_all(max_seconds: float, rounds: int):
    (row,) = compare(Case({}, 1, [Competitor("x", lambda: {"a": 1.0})]), 5, max_seconds)
    assert row["seconds"]["a"]["repeats"] == rounds


def test_a_table_has_one_line_for_each_row_and_no_empty_column():
    facts = {"calls": 3, "bound": None, "in the JSON file alone": [1, 2]}
    rows = [competitor("a", {"run": 0.001}, facts=lambda: facts), competitor("b", {"run": 0.5})]
    case = Case({"phase": "train", "batch": 8}, 8, rows, "b")
    title, heading, first, second = table(case, compare(case, 1, 0), "tree").splitlines()
    assert title == "train, batch 8; milliseconds for 8 trees, median of up to 1 rounds"
    assert heading.split() == ["strategy", "calls", "run", "trees/s", "quartiles", "speed-up"]
    assert first.split() == ["a", "3", "1", "8000", "8000-8000", "500.00x"]
    assert second.split() == ["b", "-", "500", "16", "16-16", "1.00x"]


def test_an_interruption_leaves_a_whole_file_of_what_was_measured(tmp_path: Path):
    def cases():
        for size in (0, 1, 2):
            if size == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield Case({"n": size}, 1, [competitor("x", {"a": 1.0})])

    with pytest.raises(Stopped), handled():
        run_benchmark(Benchmark("what", cases(), "sample"), 1, 0, "command", "name", tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["name.json"]
    report = json.loads((tmp_path / "new/name.json").read_text())
    assert [each["n"] for each in report["comparisons"]] == [0, 1]
