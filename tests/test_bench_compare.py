"""One comparison for everything: competitors take turns, figures follow from their times, files are whole."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from iep.bench.compare import Case, Competitor, Effort, arithmetic_limit, compare, peak_memory, spread
from iep.bench.report import Benchmark, format_comparison, result_files, run_benchmark, short
from iep.errors import InputError
from iep.signals import Stopped, handled

ONCE = Effort(repeat=1, max_seconds=0)


def competitor(name: str, *rounds: dict[str, float], log: list | None = None, **options: object) -> Competitor:
    """One whose rounds take what they are said to take, after one that does not count."""
    times = iter([dict.fromkeys(rounds[0], 99.0), *rounds])

    def measure() -> dict[str, float]:
        if log is not None:
            log.append(name)
        return next(times)

    return Competitor(name, measure, **options)


def test_competitors_take_turns_after_a_round_that_does_not_count():
    log: list[str] = []
    pair = [competitor(name, *[{"all": 1.0}] * 3, log=log) for name in "ab"]
    comparison = compare(Case({}, 1, pair), Effort(3, 60.0))
    assert log == ["a", "b"] * 4
    assert [row.seconds["all"].repeats for row in comparison.rows] == [3, 3]
    assert {row.seconds["total"].median for row in comparison.rows} == {1.0}


def test_without_a_warm_up_every_round_counts():
    row = compare(Case({}, 1, [Competitor("a", lambda: {"all": 2.0})], warm_up=False), ONCE).rows[0]
    assert row.seconds["total"].median == 2.0


def test_figures_of_a_row_follow_from_its_times():
    slow = competitor("slow", {"plan": 1.0, "run": 3.0, "other": 50.0}, total=("plan", "run"))
    quick = competitor("quick", {"plan": 0.5, "run": 1.5}, facts=lambda: {"calls": 7})
    limit = competitor("limit", {"run": 1.0})
    slow_row, quick_row, limit_row = compare(Case({}, 8, [slow, quick, limit], "slow"), ONCE).rows
    assert (slow_row.seconds["total"].median, slow_row.seconds["other"].median) == (4.0, 50.0)
    assert [row.samples_per_second.median for row in (slow_row, quick_row, limit_row)] == [2.0, 4.0, 8.0]
    assert [row.speedup for row in (slow_row, quick_row, limit_row)] == [1.0, 2.0, 4.0]
    assert [row.share_of_limit for row in (slow_row, quick_row, limit_row)] == [0.25, 0.5, 1.0]
    assert quick_row.facts == {"calls": 7}


def test_totals_are_added_up_round_by_round():
    rounds = [{"a": 1.0, "b": 3.0}, {"a": 3.0, "b": 1.0}, {"a": 9.0, "b": 9.0}]
    row = compare(Case({}, 1, [competitor("x", *rounds)]), Effort(3, 60.0)).rows[0]
    assert (row.seconds["a"].median, row.seconds["b"].median, row.seconds["total"].median) == (3.0, 3.0, 4.0)


def test_without_baseline_or_limit_there_is_neither_speedup_nor_share():
    row = compare(Case({}, 1, [competitor("x", {"a": 1.0})], "vanilla"), ONCE).rows[0]
    assert row.speedup is row.share_of_limit is None


def test_what_does_not_fit_into_memory_is_left_out_with_the_reason():
    def too_large() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nand more lines")

    case = Case(
        {}, 1, [Competitor("large", too_large), Competitor("asked", left_out="no time"), competitor("x", {"a": 1})]
    )
    comparison = compare(case, ONCE)
    assert [bool(row.seconds) for row in comparison.rows] == [False, False, True]
    text = format_comparison(comparison, "sample")
    assert "large left out: not enough memory: CUDA out of memory. Tried to allocate 1 GiB." in text
    assert "asked left out: no time" in text


def test_other_errors_are_not_hidden():
    def fail() -> dict[str, float]:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        compare(Case({}, 1, [Competitor("x", fail)]), ONCE)


def test_a_case_has_its_threads_and_leaves_others_as_they_were():
    before, seen = torch.get_num_threads(), []
    compare(
        Case({"threads": 2}, 1, [Competitor("x", lambda: seen.append(torch.get_num_threads()) or {"a": 1.0})]), ONCE
    )
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_a_slow_competitor_stops_after_three_rounds_and_a_quick_one_after_all():
    effort = Effort(repeat=10, max_seconds=5.0)
    assert [effort.is_enough(rounds, 6.0) for rounds in range(5)] == [False, False, False, True, True]
    assert not effort.is_enough(9, 4.9)
    assert effort.is_enough(10, 0.1)
    assert ONCE.is_enough(1, 0.0)
    with pytest.raises(InputError, match="--max-seconds is nan"):
        Effort(1, float("nan"))


def test_the_spread_is_median_and_quartiles():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.lower, found.median, found.upper, found.repeats) == (2, 3, 4, 5)
    assert spread([7.0]).lower == spread([7.0]).median == 7


def test_the_limit_is_the_longer_of_arithmetic_and_memory():
    few, many = (arithmetic_limit(flop, 1 << 30).measure()["computation"] for flop in (1, 1e14))
    assert 0 < few < many
    assert arithmetic_limit(1e9).measure()["computation"] > 0


def test_peak_memory_is_the_most_held_at_once():
    def run() -> None:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        torch.zeros(700)
        del second

    cpu = torch.device("cpu")
    assert peak_memory(run, cpu) == peak_memory(run, cpu) == 4 * 1500
    assert peak_memory(run, cpu, cpu) is None


def test_a_table_has_a_line_a_row_and_no_empty_column():
    rows = [competitor("a", {"run": 0.001}, facts=lambda: {"calls": 3, "bound": None}), competitor("b", {"run": 0.5})]
    setting = {"phase": "train", "threads": 1, "batch": 8}
    title, heading, first, second = format_comparison(compare(Case(setting, 8, rows, "b"), ONCE), "tree").splitlines()
    assert title == "train, threads 1, batch 8; milliseconds for 8 trees, median of 1 round"
    assert heading.split() == ["strategy", "calls", "run", "trees/s", "quartiles", "speed-up"]
    assert first.split() == ["a", "3", "1", "8000", "8000-8000", "500.00x"]
    assert second.split() == ["b", "-", "500", "16", "16-16", "1.00x"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        ("x", "x"),
        (0.012346, "0.01235"),
        (86.75, "86.75"),
        (12345, "12345"),
        (228900, "228.9k"),
        (4.1e9, "4.1G"),
    ],
)
def test_numbers_are_shown_with_four_digits(value: object, text: str):
    assert short(value) == text


def test_an_interruption_leaves_whole_files_of_what_was_measured(tmp_path: Path):
    def cases():
        for size in (0, 1, 2):
            if size == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield Case({"n": size}, 1, [competitor("x", {"a": 1.0})])

    files = result_files(tmp_path / "new", "name")
    with pytest.raises(Stopped), handled():
        run_benchmark(Benchmark("what", cases(), "n", "sample"), ONCE, "command", files, say=lambda text: None)
    assert [each["n"] for each in json.loads(files[0].read_text())["comparisons"]] == [0, 1]
    assert files[1].read_text().count("median of 1 round") == 2
    assert files[2].stat().st_size > 1000
    assert sorted((tmp_path / "new").iterdir()) == sorted(files)


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path):
    (tmp_path / "name.json").mkdir()
    with pytest.raises(OSError, match="a directory, expected a file"):
        result_files(tmp_path, "name")
    assert result_files(None, "name") == []
