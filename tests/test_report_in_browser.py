"""`iep-eval --report`: the page in a browser shows what the evaluation's other files hold, and its controls work."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from clevr_files import write_images
from evaluate_cases import evaluate
from pages import Opened, chromium, opened
from playwright.sync_api import Browser, Page
from tiny_data import IMAGES, TEST, VAL, arrays

from iep.programs import QUESTION_TYPES
from iep.runtime.records import read_rows


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def made(data, run, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    """report.json, the rows of predictions.jsonl and the page of generator and engine on val, with all it can show."""
    out = tmp_path_factory.mktemp("page")
    write_images(out / "CLEVR", "val", IMAGES, (480, 320))
    evaluate(out / "lstm", "--baseline", run["lstm"], "--data", data)
    more = ["--against", "blind", out / "lstm", "--images", out / "CLEVR", "--name", "tiny"]
    models = ["--pg", run["pg"], "--ee", run["ee"].parent]
    report, rows, _ = evaluate(out, *models, "--data", data, "--report", out, *more)
    return report, rows, out / "report.html"


@contextmanager
def reported(browser: Browser, out: Path, *arguments: object) -> Iterator[Opened]:
    """The page of an evaluation that is written to `out`."""
    evaluate(out, *arguments, "--report", out)
    with opened(browser, out / "report.html") as shown:
        yield shown


@pytest.fixture
def shown(browser: Browser, made) -> Iterator[Opened]:
    with opened(browser, made[2]) as shown:
        yield shown


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def indices(rows: list[dict[str, Any]], keep: Callable[[dict[str, Any]], bool]) -> list[int]:
    return [row["question_index"] for row in rows if keep(row)]


def program_right(row: dict[str, Any]) -> bool:
    return row["program"] == row["predicted_program"]


# What the page shows


def test_the_header_says_what_was_evaluated(shown: Opened, made, run):
    report, rows, _ = made
    assert shown.text("h1") == shown.page.title() == "tiny on val"
    wrong = sum(not row["correct"] for row in rows)
    exact, overall = (percent(report[name]["overall"]) for name in ("program_exact_match", "accuracy"))
    assert shown.texts(".tile .value") == [str(VAL), f"{overall}%", str(wrong), f"{exact}%"]
    facts = dict(zip(shown.texts("#facts dt"), shown.texts("#facts dd"), strict=True))
    assert facts["Checkpoint (pg)"] == str(run["pg"])
    assert facts["Programs"] == "predicted"
    assert "UTC" in facts["Made"]
    shown.page.locator(".settings summary").click()
    settings = dict(zip(shown.texts("#settings dt"), shown.texts("#settings dd"), strict=True))
    assert settings["beam_size"] == "1"
    assert settings["ee"] == str(run["ee"].parent)


def test_accuracies_by_type_are_those_of_the_report_and_of_the_earlier_one(shown: Opened, made):
    report, _, path = made
    blind = json.loads((path.parent / "lstm" / "report.json").read_text())
    assert shown.texts("table.by-type thead th button") == [
        *("Type", "Questions", "Accuracy", "Programs exact", "most_common", "blind"),
    ]
    most_common = report["baselines"]["most_common"]
    columns = (report["accuracy"], report["program_exact_match"], most_common, blind["accuracy"])
    shown.page.locator("table.by-type thead button", has_text="Type").click()  # whole names
    names = shown.column("table.by-type", 1)
    assert set(names) == {"overall", *QUESTION_TYPES, "compare integer", "query", "compare"}
    for number, scores in enumerate(columns, 3):
        cells = dict(zip(names, shown.column("table.by-type", number), strict=True))
        by_type = {"overall": scores["overall"], **scores["by_type"]}
        assert {name: cells[name] for name in by_type} == {name: percent(share) for name, share in by_type.items()}
        assert {*by_type} == {"overall", *QUESTION_TYPES}
    overall = shown.page.locator("table.by-type tbody tr", has_text="overall").locator(".fill.right")
    width = overall.evaluate("bar => parseFloat(bar.style.width)")
    assert width == pytest.approx(100 * report["accuracy"]["overall"], abs=1e-3)


@pytest.mark.parametrize(("table", "key"), [("by-family", "family"), ("by-length", "length")])
def test_accuracies_by_family_and_length_are_those_of_the_predictions(shown: Opened, made, table: str, key: str):
    rows = [row | {"length": sum(token != "scene" for token in row["program"])} for row in made[1]]
    kinds = sorted({row[key] for row in rows})
    assert shown.column(f"table.{table}", 1) == [str(kind) for kind in kinds]
    for number, good in ((3, lambda row: row["correct"]), (4, program_right)):
        of_kind = [[good(row) for row in rows if row[key] == kind] for kind in kinds]
        assert shown.column(f"table.{table}", number) == [percent(sum(part) / len(part)) for part in of_kind]
    assert shown.column(f"table.{table}", 2) == [str(sum(row[key] == kind for row in rows)) for kind in kinds]


def test_the_confusion_counts_every_question_once(shown: Opened, made):
    counts = Counter((row["answer"], row["predicted_answer"]) for row in made[1])
    cells = shown.page.locator("button.cell").evaluate_all(
        "all => all.map(a => [a.dataset.true, a.dataset.predicted, a.textContent])"
    )
    assert {(true, predicted): int(count) for true, predicted, count in cells} == counts
    order = shown.texts("table.confusion tbody th")
    assert order.index("no") < order.index("yes") < order.index("1") < order.index("2") < order.index("blue")


def test_training_curves_are_those_of_the_runs_given_as_file_or_as_directory(shown: Opened, run):
    titles = shown.texts(".run h3")
    assert [title.partition(":")[0] for title in titles] == ["pg", "ee"]
    for number, model in enumerate(("pg", "ee")):
        recorded = [row["loss"] for row in read_rows(run[model].parent / "metrics.jsonl") if "loss" in row]
        loss = shown.page.locator(".run").nth(number).locator("figure", has_text="Loss")
        points = loss.locator("polyline").get_attribute("points").split()
        assert len(points) == len(recorded)
        assert float(loss.locator(".key b").inner_text()) == pytest.approx(recorded[-1], rel=1e-2)
        loss.locator("svg").focus()
        shown.page.keyboard.press("ArrowLeft")
        shown.page.keyboard.press("ArrowLeft")
        assert float(loss.locator(".key b").inner_text()) == pytest.approx(recorded[-2], rel=1e-2)
        assert loss.locator(".when").inner_text() == f"at step {len(recorded) - 1}"
        loss.locator("svg").hover(position={"x": 60, "y": 50})
        assert loss.locator(".when").inner_text() != f"at step {len(recorded) - 1}"


# What its controls do


def test_a_heading_sorts_downwards_upwards_and_back(shown: Opened):
    before = shown.column("table.by-length", 1)
    heading = shown.page.locator("table.by-length thead button", has_text="Accuracy")

    def accuracies() -> list[float]:
        return [float(text) for text in shown.column("table.by-length", 3)]

    heading.click()
    assert accuracies() == sorted(accuracies(), reverse=True)
    assert heading.locator("..").get_attribute("aria-sort") == "descending"
    heading.press("Enter")
    assert accuracies() == sorted(accuracies())
    heading.press("Space")
    assert shown.column("table.by-length", 1) == before
    assert heading.locator("..").get_attribute("aria-sort") == "none"


def test_the_worst_come_first_and_buttons_change_the_order(shown: Opened, made):
    rows = made[1]
    wrong = sorted((row for row in rows if not row["correct"]), key=lambda row: -row["probability"])
    assert shown.found() == f"{VAL} questions"
    listed = shown.listed()
    assert listed[: len(wrong)] == [row["question_index"] for row in wrong]
    assert sorted(listed) == sorted(row["question_index"] for row in rows)
    shown.page.locator("#order-index").click()
    assert shown.listed() == sorted(listed)
    shown.page.locator("#order-index").click()
    assert shown.listed() == sorted(listed, reverse=True)
    shown.page.locator("#order-probability").click()
    by_index = {row["question_index"]: row["probability"] for row in rows}
    shares = [by_index[index] for index in shown.listed()]
    assert shares == pytest.approx(sorted(shares, reverse=True), abs=1e-4)


FILTERS: tuple[tuple[Callable[[Page], None], Callable[[dict[str, Any]], bool]], ...] = (
    (lambda page: page.select_option("#filter-answer", "wrong"), lambda row: not row["correct"]),
    (lambda page: page.select_option("#filter-program", "wrong"), lambda row: not program_right(row)),
    (lambda page: page.select_option("#filter-type", label="query"), lambda row: row["type"].startswith("query")),
    (lambda page: page.select_option("#filter-family", "3"), lambda row: row["family"] == 3),
    (
        lambda page: page.fill("#filter-text", "query_material RED"),
        lambda row: "red" in row["question"] and "query_material" in [*row["program"], *row["predicted_program"]],
    ),
    (lambda page: link(page, "by-type", "compare integer"), lambda row: row["type"].startswith("compare integer")),
    (lambda page: link(page, "by-family", "3"), lambda row: row["family"] == 3),
    (lambda page: link(page, "by-length", "5"), lambda row: sum(token != "scene" for token in row["program"]) == 5),
)
"""How a filter is set, and which rows it keeps."""


def link(page: Page, table: str, name: str) -> None:
    page.locator(f"table.{table} .link").get_by_text(name, exact=True).click()


def test_each_filter_and_the_name_of_each_row_lists_its_questions(shown: Opened, made):
    shown.page.locator("#order-index").click()
    for choose, keep in FILTERS:
        choose(shown.page)
        assert shown.listed() == indices(made[1], keep)
        assert 0 < len(shown.listed()) < VAL
        shown.page.locator(".chip", has_text="all filters").click()
        assert len(shown.listed()) == VAL
    FILTERS[0][0](shown.page)
    FILTERS[1][0](shown.page)
    assert shown.listed() == indices(made[1], lambda row: FILTERS[0][1](row) and FILTERS[1][1](row))
    shown.page.fill("#filter-text", "zebra")
    assert (shown.listed(), shown.found()) == ([], "0 questions")


def test_a_cell_of_the_confusion_lists_its_questions(shown: Opened, made):
    rows = made[1]
    shown.page.locator("#order-index").click()
    (true, predicted), count = Counter((row["answer"], row["predicted_answer"]) for row in rows).most_common(1)[0]
    place = f'[data-true="{true}"][data-predicted="{predicted}"]'
    shown.page.locator(f"button.cell{place}").click()
    wanted = indices(rows, lambda row: (row["answer"], row["predicted_answer"]) == (true, predicted))
    assert shown.listed() == wanted
    assert len(wanted) == count
    assert shown.texts(".chip") == [f"true: {true} ✕", f"predicted: {predicted} ✕", "all filters ✕"]
    shown.page.locator(".chip", has_text="predicted:").click()
    assert shown.listed() == indices(rows, lambda row: row["answer"] == true)


def test_arrow_keys_move_between_the_cells_and_enter_opens_one(shown: Opened):
    first = shown.page.locator("button.cell").first
    first.focus()
    shown.page.keyboard.press("ArrowRight")
    focused = shown.page.locator("button.cell:focus")
    assert (first.get_attribute("tabindex"), focused.get_attribute("tabindex")) == ("-1", "0")
    wanted = int(focused.inner_text())
    shown.page.keyboard.press("Enter")
    assert len(shown.listed()) == wanted


def test_a_questions_details_are_those_of_the_prediction(shown: Opened, made):
    row = next(row for row in made[1] if not program_right(row))
    shown.listed()
    card = shown.page.locator(f'article[data-index="{row["question_index"]}"]')
    assert card.locator("h3").inner_text() == row["question"]
    assert card.locator(".true").inner_text() == row["answer"]
    assert card.locator(".predicted").inner_text() == f"{row['predicted_answer']} {'✓' if row['correct'] else '✗'}"
    assert f"{percent(row['probability'])}%" in card.locator(".answers").inner_text()
    for answer, share in row["runners_up"].items():
        assert f"{answer} {percent(share)}%" in card.locator(".rest").inner_text()
    card.locator("summary").first.click()
    card.locator("table").wait_for()
    for side, program in ((1, row["program"]), (2, row["predicted_program"])):
        tokens = card.locator(f"table.programs td:nth-child({side}) code:not(.filled-in)").all_inner_texts()
        assert tokens == program
    differing = card.locator("tr.differs")
    assert differing.count() > 0
    marks = [differing.locator(f"td:nth-child({side}) code").all_inner_texts() for side in (1, 2)]
    assert [card.locator(tag).all_inner_texts() for tag in ("del", "ins")] == marks
    assert card.locator("td:nth-child(1) ins, td:nth-child(2) del").count() == 0
    assert len({row["image_index"] for row in made[1]}) == made[2].read_text().count("data:image/jpeg;") == IMAGES
    image = card.locator("img")
    assert image.get_attribute("alt") == f"Image {row['image_index']}"
    assert image.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [320, 213]
    right = next(row for row in made[1] if program_right(row))
    card = shown.page.locator(f'article[data-index="{right["question_index"]}"]')
    card.locator("summary").first.press("Enter")
    card.locator("table").wait_for()
    assert card.locator("tr.differs, ins, del").count() == 0


def test_a_wrong_answer_shows_where_each_function_looked_over_its_image(shown: Opened, made):
    rows = {row["question_index"]: row for row in made[1] if not row["correct"]}
    with_maps = shown.page.locator("article:has(.maps)")
    assert set(with_maps.evaluate_all("all => all.map(a => Number(a.dataset.index))")) <= set(rows)
    card = with_maps.first
    card.locator("summary", has_text="Where each function looked").click()
    names = card.locator(".maps code").all_inner_texts()
    program = rows[int(card.get_attribute("data-index"))]["predicted_program"]
    assert [name for name in names if name != "scene"] == [name for name in program if name != "scene"][: len(names)]
    picture, heat = (card.locator(".maps img").nth(n).bounding_box() for n in (0, 1))
    assert picture == heat


def test_the_page_and_its_statistics_are_no_wider_than_a_narrow_window(shown: Opened):
    shown.page.set_viewport_size({"width": 400, "height": 900})
    shown.open_programs()
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 400
    excess = (
        "[...document.querySelectorAll('.statistics')].map(each => each.scrollWidth - each.parentElement.clientWidth)"
    )
    assert not any(shown.page.evaluate(excess))


# Where something is missing


def test_a_split_without_answers_gets_a_report_of_what_is_known(browser: Browser, data, run, tmp_path: Path):
    arguments = ("--pg", run["pg"], "--ee", run["ee"], "--data", data, "--split", "test")
    with reported(browser, tmp_path, *arguments) as shown:
        rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
        assert shown.texts(".tile .value") == [str(TEST), "unknown", "unknown"]
        assert shown.text("#confusion .empty") == "The split has no answers to compare with."
        assert "No images were given" in shown.text("#questions .hint")
        assert shown.page.locator("article img, article .no-picture").count() == 0
        assert "families are unknown" in shown.text("#by-family")
        shown.page.locator("#order-index").click()
        assert shown.listed() == [row["question_index"] for row in rows]
        assert shown.texts("article .predicted") == [row["predicted_answer"] for row in rows]
        shown.open_programs()
        tokens = shown.page.locator("table.programs code:not(.filled-in):not(.ignored)").all_inner_texts()
        assert set(tokens) <= {token for row in rows for token in row["predicted_program"]}
        assert shown.texts("table.programs thead th") == ["Predicted program"] * TEST


def test_a_generator_or_a_baseline_alone_gets_a_report_too(browser: Browser, data, run, tmp_path: Path):
    def overall(part: str) -> str:
        return f"{percent(json.loads((tmp_path / 'report.json').read_text())[part]['overall'])}%"

    with reported(browser, tmp_path, "--pg", run["pg"], "--data", data) as shown:
        tiles = dict(zip(shown.texts(".tile .label"), shown.texts(".tile .value"), strict=True))
        assert (tiles["Accuracy"], tiles["Programs exact"]) == ("unknown", overall("program_exact_match"))
        assert shown.text("#confusion .empty") == "No network answers."
        assert len(shown.listed()) == VAL
    arguments = ("--baseline", run["lstm"], "--data", data, "--num-samples", 12, "--report-questions", 0)
    with reported(browser, tmp_path, *arguments) as shown:
        tiles = dict(zip(shown.texts(".tile .label"), shown.texts(".tile .value"), strict=True))
        assert tiles["Accuracy"] == overall("accuracy")
        assert "Programs exact" not in tiles
        assert shown.text("#questions .hint").startswith("None of 12 questions is listed (--report-questions 0).")
        assert shown.found() == "0 questions of 12 evaluated"


def test_missing_metrics_and_images_are_reported(browser: Browser, data, run, tmp_path: Path):
    alone = shutil.copy(run["lstm"], tmp_path / "alone.pt")
    paths = write_images(tmp_path / "CLEVR", "val", IMAGES)
    paths[3].unlink()
    paths[2].write_bytes(b"no image")
    arguments = ("--baseline", alone, "--data", data, "--images", tmp_path / "CLEVR")
    with reported(browser, tmp_path, *arguments) as shown:
        assert shown.text("#training .empty") == "No metrics.jsonl with training curves beside this checkpoint."
        assert "2 images could not be shown, such as:" in shown.text("#questions .hint")
        shown.listed()
        about = Counter(arrays(VAL)["image_idxs"].tolist())
        assert Counter(shown.texts(".no-picture")) == {f"no image {image}": about[image] for image in (2, 3)}
        assert shown.page.locator("article img").count() == VAL - about[2] - about[3]


def test_nothing_in_the_data_is_run_or_read_as_html(browser: Browser, data, run, tmp_path: Path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    other = Path(shutil.copytree(data, tmp_path / "data"))
    vocab = json.loads((other / "vocab.json").read_text())
    for kind, token in (("question", "Are"), ("answer", "yes"), ("program", "exist")):
        tokens = vocab[f"{kind}_token_to_idx"]
        vocab[f"{kind}_token_to_idx"] = {evil if name == token else name: index for name, index in tokens.items()}
    checkpoint = tmp_path / "evil.pt"
    torch.save(torch.load(run["lstm"], weights_only=True) | {"vocab": vocab}, checkpoint)
    (other / "vocab.json").write_text(json.dumps(vocab))
    with reported(browser, tmp_path, "--baseline", checkpoint, "--data", other, "--name", f"<b>{evil}") as shown:
        assert shown.text("h1") == shown.page.title() == f"<b>{evil} on val"
        assert any(text.startswith(evil) for text in shown.texts("article h3"))
        assert evil in shown.texts("article .true")
        shown.open_programs()
        assert evil in shown.texts("table.programs code")
        assert shown.page.locator("img, h1 *, article h3 *").count() == 0
        assert shown.page.locator("script").count() == 2


def test_a_long_split_is_listed_in_part_and_counted_whole(browser: Browser, data, run, tmp_path: Path, made):
    report, rows, _ = made
    arguments = ("--pg", run["pg"], "--ee", run["ee"], "--data", data, "--report-questions", 8)
    with reported(browser, tmp_path, *arguments) as shown:
        assert "Listed are 8 of 26 questions" in shown.text("#questions .hint")
        assert shown.found() == "8 questions of 26 evaluated"
        assert shown.column("table.by-type", 3)[0] == percent(report["accuracy"]["overall"])
        listed = shown.listed()
        assert len(set(listed)) == 8
        worst = max((row for row in rows if not row["correct"]), key=lambda row: row["probability"])
        assert listed[0] == worst["question_index"]
        shown.page.locator("table.by-type .link", has_text="exist").click()
        assert shown.found().endswith(" of 2 evaluated")
        shown.page.locator(".chip", has_text="all filters").click()
        shown.page.select_option("#filter-answer", "wrong")
        wrong = sum(not row["correct"] for row in rows)
        assert shown.found().endswith(f" of {wrong} evaluated")
        shown.page.select_option("#filter-program", "right")
        assert "evaluated" not in shown.found()
