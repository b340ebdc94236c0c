"""`iep-eval --report`: the page in a browser shows the evaluation's results, and its filters work."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clevr_files import write_images
from evaluate_cases import evaluate
from pages import chromium, opened
from playwright.sync_api import Browser, Page
from tiny_data import IMAGES, VAL

from iep.programs import program_tree

Row = dict[str, Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def made(data, run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Row, list[Row], Path]:
    """report.json, the rows of predictions.jsonl and the page of generator and engine on val, with all it can show."""
    out = tmp_path_factory.mktemp("page")
    write_images(out / "CLEVR", "val", IMAGES, (480, 320))
    evaluate(out / "lstm", "--baseline", run["lstm"], "--data", data)
    more = ["--against", "blind", out / "lstm", "--images", out / "CLEVR", "--name", "tiny"]
    report, rows, _ = evaluate(out, "--pg", run["pg"], "--ee", run["ee"], "--data", data, "--report", out, *more)
    return report, rows, out / "report.html"


@pytest.fixture
def page(browser: Browser, made) -> Iterator[Page]:
    with opened(browser, made[2]) as page:
        yield page


def texts(page: Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def listed(page: Page) -> list[int]:
    """The `question_index` of all questions that the filters let through, in their order."""
    while page.locator("#more").is_visible():
        page.locator("#more").click()
    return page.locator("article:visible").evaluate_all("all => all.map(a => Number(a.dataset.index))")


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def program_right(row: Row) -> bool:
    return row["program"] == row["predicted_program"]


def test_the_statistics_are_those_of_the_report_and_of_the_predictions(page: Page, made):
    report, rows, path = made
    blind = json.loads((path.parent / "lstm" / "report.json").read_text())
    assert texts(page, "h1") == [page.title()] == ["tiny on val"]
    exact, overall = (percent(report[name]["overall"]) for name in ("program_exact_match", "accuracy"))
    wrong = sum(not row["correct"] for row in rows)
    assert texts(page, ".tile .value") == [str(VAL), f"{overall}%", str(wrong), f"{exact}%"]
    columns = (report["accuracy"], report["program_exact_match"], report["baselines"]["most_common"], blind["accuracy"])
    names = texts(page, "table.by-type tbody th")
    for number, scores in enumerate(columns, 3):
        cells = dict(zip(names, texts(page, f"table.by-type tbody tr > :nth-child({number})"), strict=True))
        by_type = {"overall": scores["overall"], **scores["by_type"]}
        assert {name: cells[name] for name in by_type} == {name: percent(share) for name, share in by_type.items()}
    page.locator("summary", has_text="By question family").click()
    assert {*texts(page, "table.by-family tbody th")} == {str(row["family"]) for row in rows}
    accuracies = [float(text) for text in texts(page, "table.by-family tbody tr > :nth-child(3)")]
    assert accuracies == sorted(accuracies), "the worst come first"


def link(page: Page, table: str, name: str) -> None:
    page.locator(f"table.{table} [data-list]", has_text=re.compile(f"^{name}$")).dispatch_event("click")


FILTERS: tuple[tuple[Callable[[Page], object], Callable[[Row], bool]], ...] = (
    (lambda page: page.select_option("[data-filter=program]", "wrong"), lambda row: not program_right(row)),
    (
        lambda page: page.fill("[data-filter=text]", "query_material RED"),
        lambda row: "red" in row["question"] and "query_material" in [*row["program"], *row["predicted_program"]],
    ),
    (lambda page: link(page, "by-type", "query"), lambda row: row["type"].startswith("query")),
    (lambda page: link(page, "by-family", "3"), lambda row: row["family"] == 3),
)
"""How a filter is set, and which rows it keeps."""


def test_the_worst_come_first_and_filters_and_names_of_rows_list_their_questions(page: Page, made):
    wrong = sorted((row for row in made[1] if not row["correct"]), key=lambda row: -row["probability"])
    assert listed(page)[: len(wrong)] == [row["question_index"] for row in wrong]
    for set_filter, keep in FILTERS:
        set_filter(page)
        assert sorted(listed(page)) == sorted(row["question_index"] for row in made[1] if keep(row))
        assert 0 < len(listed(page)) < VAL
        link(page, "by-type", "overall")  # lists all
        assert len(listed(page)) == VAL


def test_a_question_shows_its_image_answers_programs_and_maps_and_fits_a_phone(page: Page, made):
    row = next(row for row in made[1] if not program_right(row))
    listed(page)
    card = page.locator(f'article[data-index="{row["question_index"]}"]')
    assert card.locator("h3").inner_text() == row["question"]
    assert card.locator(".true").inner_text() == row["answer"]
    assert f"{percent(row['probability'])}%" in card.locator(".answers").inner_text()
    image = card.locator("img").first
    assert image.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [320, 213]
    card.locator("summary", has_text="Program").click()
    card.locator("table").wait_for()
    for side, program in ((1, row["program"]), (2, row["predicted_program"])):
        assert card.locator(f"table.programs td:nth-child({side}) code:not(.filled-in)").all_inner_texts() == program
    marks = [card.locator(f"tr.differs td:nth-child({side}) code").all_inner_texts() for side in (1, 2)]
    assert [card.locator(tag).all_inner_texts() for tag in ("del", "ins")] == marks
    with_maps = page.locator("article:has(.maps)").first
    with_maps.locator("summary", has_text="Where each function looked").click()
    picture, heat = (with_maps.locator(".maps img").nth(n).bounding_box() for n in (0, 1))
    assert picture == heat
    depths = with_maps.locator(".maps figure").evaluate_all("all => all.map(a => +a.style.getPropertyValue('--depth'))")
    drawn = next(row for row in made[1] if row["question_index"] == int(with_maps.get_attribute("data-index")))
    assert depths == [node.depth for node in program_tree(drawn["predicted_program"]).nodes], "maps follow the tree"
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 390


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
    evaluate(tmp_path, "--baseline", checkpoint, "--data", other, "--name", f"<b>{evil}", "--report", tmp_path)
    with opened(browser, tmp_path / "report.html") as page:
        assert texts(page, "h1") == [page.title()] == [f"<b>{evil} on val"]
        assert any(text.startswith(evil) for text in texts(page, "article h3"))
        assert evil in texts(page, "article .true")
        page.locator("summary", has_text="Program").first.click()
        assert any(evil in text for text in page.locator("table.programs code").all_text_contents())
        assert page.locator("img, h1 *, article h3 *").count() == 0
        assert page.locator("script").count() == 2
