"""`iep-eval --report`: the page's numbers, orders and curves in a browser are those of the terminal, however few."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluate_cases import evaluate
from pages import chromium, opened
from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_a_single_step_is_a_dot_in_the_middle_and_its_number_stands_clear_of_the_word(browser, data, run, tmp_path):
    checkpoint = shutil.copy(run["lstm"], tmp_path / "best.pt")
    rows = [{"step": 7, "loss": 2.5, "validation_accuracy": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(tmp_path / "out", "--baseline", checkpoint, "--data", data, "--report", tmp_path / "out")
    with opened(browser, tmp_path / "out" / "report.html") as shown:
        assert shown.page.locator("figure").count() == 2
        for chart in shown.page.locator("figure svg").all():
            frame, dot = chart.bounding_box(), chart.locator("circle").bounding_box()
            assert frame["x"] + frame["width"] / 3 < dot["x"] < frame["x"] + 2 * frame["width"] / 3
            assert dot["width"] > 8
            word, number = (chart.get_by_text(text, exact=True).bounding_box() for text in ("step", "7"))
            assert word["x"] + word["width"] < number["x"]
            assert number["x"] < dot["x"] + dot["width"] / 2 < number["x"] + number["width"]


def test_the_first_step_of_a_curve_stands_clear_of_the_word(browser: Browser, data, run, tmp_path: Path):
    checkpoint = shutil.copy(run["lstm"], tmp_path / "best.pt")
    rows = [{"step": step, "loss": 1.0} for step in (20_000, 40_000, 60_000)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate(tmp_path / "out", "--baseline", checkpoint, "--data", data, "--report", tmp_path / "out")
    with opened(browser, tmp_path / "out" / "report.html") as shown:
        word, number = (shown.page.get_by_text(text, exact=True).bounding_box() for text in ("step", "20k"))
        assert word["x"] + word["width"] < number["x"]


def test_a_page_that_lists_no_question_says_so_and_counts_those_that_were_evaluated(browser, data, run, tmp_path: Path):
    arguments = ["--baseline", run["lstm"], "--data", data, "--report", tmp_path, "--num-samples", 12]
    evaluate(tmp_path, *arguments, "--report-questions", 0)
    with opened(browser, tmp_path / "report.html") as shown:
        assert shown.text("#questions .hint").startswith("None of 12 questions is listed (--report-questions 0).")
        assert shown.found() == "0 questions of 12 evaluated"
