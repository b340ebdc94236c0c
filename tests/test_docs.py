"""The README and the documents beside it name files that are there, and show what the code prints."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from iep.bench.workload import encode
from iep.cli.settings import as_markdown, settings
from iep.execution_engine.choices import make_module_set
from iep.execution_engine.program_plan import plan_programs
from iep.execution_engine.roles import roles_of
from iep.models.checkpoint import DEFAULT_FILE
from iep.vocab import Vocab

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md", "benchmarks/README.md")]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))


def by_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """Return the document's headings as GitHub turns them into anchors of links."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=by_name)
def test_links_lead_to_existing_files_and_headings_and_named_scripts_and_configs_exist(document: Path):
    text = document.read_text()
    for link in re.findall(r"\]\((?!https?:)([^)\s]*)\)", text):
        name, _, part = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not part or part in anchors(target), link
    named = re.findall(r"\b(?:scripts/\w+\.(?:sh|py)|configs/[\w/-]+\.yaml)", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_site_is_built_without_warnings(tmp_path: Path):
    """Every page is in the menu, and every link leads to a page, an image or a heading of the site."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/docs/guide.html").exists()


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


NOT_RUN = {
    "from swift.rewards import": "ms-swift is not installed",
}
"""A part of each block that is not run, with the reason."""


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if python_blocks(each)], ids=by_name)
def test_the_python_code_of_a_page_runs(document: Path, data: Path, runs: dict[str, Path], tmp_path: Path, monkeypatch):
    """A block that begins with imports is a script of its own; others continue the one before them."""
    for name in ("joint", "tbd", "pg"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        shutil.copy(DEFAULT_FILE, tmp_path / "runs" / name / "best.safetensors")
    (tmp_path / "runs/quick").mkdir()
    (tmp_path / "runs/quick/data").symlink_to(data)
    (tmp_path / "runs/quick/ee").symlink_to(runs["ee"])
    shutil.copy(ROOT / "data/sample/images/val/CLEVR_val_000002.png", tmp_path / "image.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    model = nn.ModuleDict({"cell": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
    model.encode = model.cell
    given: dict[str, Any] = {"model": model, "trees": list(torch.rand(2, 4)), "labels": torch.tensor([0, 1])}
    if document.name == "README.md":  # which refers to another page for its example
        exec(python_blocks(ROOT / "docs/architecture.md")[0], given)
    if document.name == "add_a_module.md":  # its first blocks are a file, which the last one imports
        (tmp_path / "gated.py").write_text("\n".join(python_blocks(document)[:-1]))
        monkeypatch.delitem(sys.modules, "gated", raising=False)
    script, ran = "", 0
    for block in python_blocks(document):
        script = block if re.match("from |import ", block) else f"{script}\n{block}"
        if not any(part in block for part in NOT_RUN):
            exec(compile(script, by_name(document), "exec"), dict(given))
            ran += 1
    assert ran, "no block of the page has run"


def test_the_plan_of_the_architecture_page_is_the_one_that_is_printed():
    text = (ROOT / "docs/architecture.md").read_text()
    programs = [program.split() for program in re.findall(r"^example \d: (.*)$", text, re.MULTILINE)]
    assert len(programs) == 4
    vocab = Vocab.clevr()
    modules = make_module_set("iep", dim=1, residual=True, norm="none", scene="stem")
    plan = plan_programs(encode(programs, vocab), vocab.program, roles_of(vocab.program, modules)).plan
    assert f"```\n{plan}\n```" in text


@pytest.mark.parametrize("page", ["architecture", "dynamic_networks"])
def test_the_core_by_hand_prints_what_its_page_shows(page: str, capsys: pytest.CaptureFixture):
    text = (ROOT / f"docs/{page}.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "make_plan(graph" in block)
    exec(code, {})
    assert f"```\n{capsys.readouterr().out}```" in text


HEADLINES = [
    (r"end at (\d+)%", "docs/quick_start.md", r"^overall .* ([\d.]+)$"),
    (r"most common answers score (\d+)%", "docs/quick_start.md", r"^overall +\d+ +([\d.]+)"),
    (r"answers \[([\d.]+)%\]", "benchmarks/results/2026-11-27-demo.txt", r"^overall .* ([\d.]+) +[\d.]+$"),
    (
        r"most common answer of each question type\s+scores ([\d.]+)%",
        "benchmarks/results/2026-11-27-demo.txt",
        r"^overall +\d+ +([\d.]+)",
    ),
    (
        r"trains on ([\d,]+)\s+questions/s one node",
        "benchmarks/results/2026-11-26-gpu.txt",
        r"^vanilla .* ([\d.]+) +[\d.]+-[\d.]+ +1.00x",
    ),
    (
        r"on ([\d,]+) by\s+`lookahead`",
        "benchmarks/results/2026-11-26-gpu.txt",
        r"^lookahead  .* ([\d.]+) +[\d.]+-[\d.]+ +[\d.]+x",
    ),
    (
        r"\[([\d,]+)\]\(docs/architecture.md#three-ways-to-execute\) with",
        "benchmarks/results/2026-11-26-gpu.txt",
        r"^lookahead\+sharing\+cuda_graph\+bfloat16 .* (\d+) ",
    ),
]
"""A number in README.md, and the file that it comes from, with the number there."""


@pytest.mark.parametrize(("stated", "file", "measured"), HEADLINES)
def test_the_numbers_of_the_readme_are_those_that_were_measured(stated: str, file: str, measured: str):
    text, results = ((ROOT / name).read_text() for name in ("README.md", file))
    number, expected = (
        re.search(pattern, each, re.MULTILINE)[1] for pattern, each in ((stated, text), (measured, results))
    )
    assert abs(float(number.replace(",", "")) - float(expected)) <= 0.5 * 10 ** -len(number.partition(".")[2])


SPEEDS = {
    "full size (128 channels, 14x14), training, 64 questions": "full-size-train-64",
    "full size, inference, 256 questions about 26 images": "full-size-inference-256",
    "small (16 channels, 7x7), training, 256 questions": "small-train",
    "small, training, 1,024 questions": "small-train",
}
"""The rows of the README's table of speeds, and the file of benchmarks/results/ that each comes from."""


@pytest.mark.parametrize(("row", "file"), SPEEDS.items())
def test_the_speeds_of_the_readme_are_those_that_were_measured(row: str, file: str):
    stated = re.search(
        rf"^\| {re.escape(row)} \| float32 \|(.*)\n\| \| bfloat16 \|(.*)$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE,
    )
    questions = row.rpartition(", ")[2].split()[0].replace(",", "")
    results = (ROOT / f"benchmarks/results/2026-11-27-{file}.txt").read_text()
    case = re.search(rf"^\w+, questions {questions},.*\n(?:.+\n?)+", results, re.MULTILINE)[0]
    measured = dict(re.findall(r"^(\S+) .* ([\d.]+)x$", case, re.MULTILINE))
    for suffix, cells in zip(("", "+bfloat16"), stated.groups(), strict=True):
        for strategy, cell in zip(
            ("vanilla", "improved", "lookahead", "lookahead+sharing"), cells.split("|"), strict=False
        ):
            if speed := cell.strip(" *x"):
                assert float(f"{float(measured[strategy + suffix]):.3g}") == float(speed)


def test_every_setting_has_a_meaning_on_the_page_of_settings():
    """If this fails, run python -m iep.cli.settings > docs/settings.md."""
    assert (ROOT / "docs/settings.md").read_text().rstrip() == as_markdown()
    assert all(meaning for *_, meaning, _ in settings())
