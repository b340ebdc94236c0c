"""One comparison for everything: competitors take turns, figures follow from their times, files are whole."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from iep.bench.compare import Case, Competitor, Effort, arithmetic_limit, compare, spread
from iep.bench.tables import Benchmark, format_comparison, result_files, run_benchmark, short
from iep.runtime.signals import Stopped, handled

ONCE = Effort(repeat=1, max_seconds=0)


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
    rows = compare(Case({}, 1, pair), Effort(3, 60.0))
    assert log == ["a", "b"] * 4
    assert [row.seconds["all"].repeats for row in rows] == [3, 3]
    assert {row.seconds["total"].median for row in rows} == {1.0}


def test_speeds_and_ratios_of_a_row_follow_from_its_times():
    slow = competitor("slow", {"plan": 1.0, "run": 3.0, "other": 50.0}, total=("plan", "run"))
    quick = competitor("quick", {"plan": 0.5, "run": 1.5}, facts=lambda: {"calls": 7})
    limit = competitor("limit", {"run": 1.0})
    slow_row, quick_row, limit_row = compare(Case({}, 8, [slow, quick, limit], "slow"), ONCE)
    assert (slow_row.seconds["total"].median, slow_row.seconds["other"].median) == (4.0, 50.0)
    assert [row.samples_per_second.median for row in (slow_row, quick_row, limit_row)] == [2.0, 4.0, 8.0]
    assert [row.speedup for row in (slow_row, quick_row, limit_row)] == [1.0, 2.0, 4.0]
    assert [row.share_of_limit for row in (slow_row, quick_row, limit_row)] == [0.25, 0.5, 1.0]
    assert quick_row.facts == {"calls": 7}


def test_a_limit_that_no_timer_resolves_has_no_ratios():
    case = Case({}, 1, [competitor("slow", {"run": 1.0}), competitor("limit", {"run": 5e-7})], "slow")
    rows = compare(case, ONCE)
    assert [(row.speedup, row.share_of_limit) for row in rows] == [(1.0, None), (None, None)]
    assert "of limit" not in format_comparison(case, rows, "tree")


def test_a_competitor_that_runs_out_of_memory_is_left_out_with_the_reason():
    def too_large() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nand more lines")

    case = Case({}, 1, [Competitor("large", too_large), competitor("x", {"a": 1})])
    rows = compare(case, ONCE)
    assert [bool(row.seconds) for row in rows] == [False, True]
    text = format_comparison(case, rows, "sample")
    assert "large left out: not enough memory: CUDA out of memory. Tried to allocate 1 GiB." in text


def test_a_slow_competitor_stops_after_three_rounds_and_a_quick_one_after_all():
    slow, quick = (
        compare(Case({}, 1, [Competitor("x", lambda: {"a": 1.0})]), Effort(5, limit))[0] for limit in (0, 60)
    )
    assert (slow.seconds["a"].repeats, quick.seconds["a"].repeats) == (3, 5)


def test_the_spread_is_median_and_quartiles():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.lower, found.median, found.upper, found.repeats) == (2, 3, 4, 5)
    assert spread([7.0]).lower == spread([7.0]).median == 7
    found = spread([0.9872592010330129, 0.987259201033013])  # almost equal
    assert found.lower <= found.median <= found.upper


def test_the_limit_is_the_longer_of_arithmetic_and_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("iep.bench.compare.PROBE_BYTES", 1 << 20)
    few, many = (arithmetic_limit(flop, 1 << 30).measure()["computation"] for flop in (1, 1e14))
    assert 0 < few < many
    assert arithmetic_limit(1e9).measure()["computation"] > 0


def test_a_table_has_one_line_for_each_row_and_no_empty_column():
    rows = [competitor("a", {"run": 0.001}, facts=lambda: {"calls": 3, "bound": None}), competitor("b", {"run": 0.5})]
    case = Case({"phase": "train", "batch": 8}, 8, rows, "b")
    title, heading, first, second = format_comparison(case, compare(case, ONCE), "tree").splitlines()
    assert title == "train, batch 8; milliseconds for 8 trees, median of up to 1 rounds"
    assert heading.split() == ["strategy", "calls", "run", "trees/s", "quartiles", "speed-up"]
    assert first.split() == ["a", "3", "1", "8000", "8000-8000", "500.00x"]
    assert second.split() == ["b", "-", "500", "16", "16-16", "1.00x"]


def test_numbers_are_shown_with_four_digits():
    values = (None, "x", 0.012346, 86.75, 12345, 228900, 4.1e9)
    assert [*map(short, values)] == ["-", "x", "0.01235", "86.75", "12345", "228.9k", "4.1G"]


def test_an_interruption_leaves_whole_files_of_what_was_measured(tmp_path: Path):
    def cases():
        for size in (0, 1, 2):
            if size == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield Case({"n": size}, 1, [competitor("x", {"a": 1.0})])

    files = result_files(tmp_path / "new", "name")
    with pytest.raises(Stopped), handled():
        run_benchmark(Benchmark("what", cases(), "n", "sample"), ONCE, "command", files)
    assert [each["n"] for each in json.loads(files[0].read_text())["comparisons"]] == [0, 1]
    assert files[1].read_text().count("median of up to 1 rounds") == 2
    assert files[2].stat().st_size > 1000
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)
