"""`iep-eval --report`: in windows of usual widths nothing of a table is cut off."""

from pathlib import Path

import pytest
from evaluate_cases import evaluate
from pages import chromium, opened

OVERFLOWS = """() => [...document.querySelectorAll('.scroll')].filter(box => box.scrollWidth > box.clientWidth).map(
    box => `${box.getAttribute('aria-label')}: ${box.scrollWidth} pixels in ${box.clientWidth}`)"""


@pytest.fixture(scope="module")
def page(data, run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose tables have all their columns."""
    out = tmp_path_factory.mktemp("layout")
    evaluate(out / "lstm", "--baseline", run["lstm"], "--data", data)
    models = ["--pg", run["pg"], "--ee", run["ee"], "--against", "blind", out / "lstm"]
    evaluate(out, *models, "--data", data, "--report", out)
    return out / "report.html"


@pytest.mark.parametrize("width", [1000, 1200, 1398, 1400, 1900])
def test_tables_fit_their_boxes_and_stand_side_by_side_where_there_is_room(page: Path, width: int):
    with chromium() as browser, opened(browser, page, width) as shown:
        assert shown.page.locator(".scroll").count() == 4
        assert shown.page.evaluate(OVERFLOWS) == []
        family, length = (shown.page.locator(f"#by-{name}").bounding_box() for name in ("family", "length"))
        assert (family["y"] == length["y"]) == (width >= 1400)
