"""`iep-bench tree-lstm`, `tree-fc` and `tagger`: tables, JSON and pictures of small networks, whose figures add up."""

import json
from pathlib import Path

import pytest
from bench_cases import iep_bench
from PIL import Image
from tiny_data import assert_one_error

from iep.bench.contest import FLOP_LIMIT, LIMIT, PER_INSTANCE
from iep.bench.hand_ways import HAND, PACKED

QUICK = ("--repeat", 1, "--threads", 1, "--words", 30)
STRATEGIES = ("height", "agenda", "lookahead")
DEFERRED = tuple(f"{name}+defer" for name in STRATEGIES)
COMMANDS = {
    "tree-lstm": ("--width", 4, "--batch-sizes", "33,40"),
    "tree-fc": ("--width", 4, "--leaves", "2,8", "--batch-size", 3),
    "tagger": ("--width", 4, "--batch-sizes", "33,40"),
}
SST = "(3 (2 It) (4 (2 's) (4 good)))\n(1 (2 no) (0 way))\n"


@pytest.fixture(scope="module", params=COMMANDS)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The command, and where it wrote its files."""
    out = tmp_path_factory.mktemp(request.param)
    files = ("--json", out / "all.json", "--out", out / "all.txt", "--picture", out / "all.png")
    result = iep_bench(request.param, *COMMANDS[request.param], *QUICK, *files)
    assert result.exit_code == 0, result.output
    assert (out / "all.txt").read_text().strip() in result.stdout
    return request.param, out


def test_every_way_is_measured_in_the_phases_that_it_is_for(measured: tuple[str, Path]):
    command, out = measured
    hand = PACKED if command == "tagger" else HAND
    comparisons = json.loads((out / "all.json").read_text())["comparisons"]
    assert [each["phase"] for each in comparisons] == ["training", "inference"] * 2
    for comparison in comparisons:
        deferred = DEFERRED if comparison["phase"] == "training" else ()
        names = [row["name"] for row in comparison["rows"]]
        seen = [f"{name}, shapes seen" for name in (STRATEGIES[-1], *deferred[-1:])]
        assert names == [PER_INSTANCE, *STRATEGIES, *deferred, *seen, hand, LIMIT, FLOP_LIMIT]


def test_figures_of_the_report_add_up(measured: tuple[str, Path]):
    comparisons = json.loads((measured[1] / "all.json").read_text())["comparisons"]
    for comparison in comparisons:
        rows = {row["name"]: row for row in comparison["rows"]}
        size, cells = comparison["batch_size"], comparison["cells"]
        limit = rows[LIMIT]["computation"]["median"]
        base = size / rows[PER_INSTANCE]["samples_per_second"]["median"]
        assert rows[PER_INSTANCE]["calls"] == pytest.approx(cells)
        for row in rows.values():
            construction = 0 if row["construction"] is None else row["construction"]["median"]
            took = construction + row["computation"]["median"]
            assert row["samples_per_second"]["median"] == pytest.approx(size / took)
            assert row["share_of_limit"] == pytest.approx(limit / took)
            assert row["speedup"] == pytest.approx(base / took)
        for name in STRATEGIES:
            assert rows[name]["batching_ratio"] == pytest.approx(cells / rows[name]["calls"])
        operations = comparison["flop"] / comparison["flop_per_second"]
        assert rows[FLOP_LIMIT]["computation"]["median"] == pytest.approx(operations)


def test_the_table_begins_with_its_command_and_has_a_part_a_comparison(measured: tuple[str, Path]):
    command, out = measured
    text = (out / "all.txt").read_text()
    assert text.startswith(f"$ iep-bench {command} --width 4")
    assert len(text.split("\n\n")) == 1 + 4


def test_the_picture_is_one(measured: tuple[str, Path]):
    with Image.open(measured[1] / "all.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10


def test_trees_of_a_file_are_measured(tmp_path: Path):
    (tmp_path / "train.txt").write_text(SST)
    given = ("--width", 4, "--batch-sizes", 2, "--repeat", 1, "--threads", 1, "--phase", "inference")
    result = iep_bench("tree-lstm", *given, "--sst", tmp_path / "train.txt", "--batching", "lookahead")
    assert result.exit_code == 0, result.output
    assert "6 words, trees of" in result.output
    assert "inference, batch 2, 1 thread: 8 cells" in result.output


def test_pairs_are_measured_one_after_the_other_and_in_a_lazy_scope(tmp_path: Path):
    given = ("--cell", "child-sum", "--width", 4, "--batch-sizes", 33, *QUICK, "--json", tmp_path / "all.json")
    result = iep_bench("tree-lstm", *given, "--batching", "height,lookahead+defer")
    assert result.exit_code == 0, result.output
    training, inference = json.loads((tmp_path / "all.json").read_text())["comparisons"]
    names = [[row["name"] for row in each["rows"]] for each in (training, inference)]
    by_modules, by_operators = ["height", "lookahead+defer"], "lookahead+defer, operators"
    assert names[0] == [PER_INSTANCE, *by_modules, by_operators, LIMIT, FLOP_LIMIT]
    assert names[1] == [PER_INSTANCE, "height", by_operators, LIMIT, FLOP_LIMIT]
    rows = {row["name"]: row for row in training["rows"]}
    assert rows["height"]["construction"]["median"] > 0
    assert rows["height"]["calls"] < rows[by_operators]["calls"] < rows[PER_INSTANCE]["calls"] * 20


def test_several_numbers_of_threads_are_measured_and_all_is_one():
    given = ("--width", 4, "--leaves", 2, "--repeat", 1, "--words", 9, "--threads", "1,2,2", "--no-per-instance")
    result = iep_bench("tree-fc", *given, "--batching", "height", "--phase", "training")
    assert result.exit_code == 0, result.output
    assert [result.output.count(f", {threads}: ") for threads in ("1 thread", "2 threads")] == [1, 1]
    assert PER_INSTANCE not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tree-lstm", "--sst", "{tmp}/none.txt"), ["none.txt: no such file"]),
        (("tree-lstm", "--sst", "{tmp}/train.txt"), ["train.txt: 2 trees, expected at least 256", "--batch-sizes"]),
        (("tagger", "--wikiner", "{tmp}/none"), ["none: no such file"]),
        (("tagger", "--wikiner", "{tmp}/train.txt"), ["train.txt, line 1, token 1"]),
        (("tree-fc", "--out", "{tmp}/x", "--json", "{tmp}/x"), ["results of several kinds in one file"]),
        (("tree-fc", "--json", "{tmp}/train.txt/x.json"), ["x.json", "its directory is a file"]),
        (("tree-fc", "--json", "/proc/x.json"), ["/proc/x.json"]),
        (("tree-fc", "--max-seconds", "nan"), ["--max-seconds is nan"]),
        (("tree-fc", "--width", "900000000", "--leaves", "2"), ["not enough memory"]),
    ],
)
def test_what_cannot_be_measured_is_named_in_one_line(tmp_path: Path, arguments: tuple[str, ...], words: list[str]):
    (tmp_path / "train.txt").write_text(SST)
    result = iep_bench(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert_one_error(result, *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tree-lstm", "--sick", "."), "--sick is not for --cell binary"),
        (("tree-lstm", "--cell", "child-sum", "--sst", "x"), "--sst is not for --cell child-sum"),
        (("tagger", "--wikiner", "x", "--words", "9"), "--words is not for --wikiner"),
        (("tree-lstm", "--batching", "lokahead"), "did you mean 'lookahead'?"),
        (("tree-fc", "--batching", "height+bfloat16"), "float32 alone"),
        (("tree-fc", "--threads", "some"), "'some'"),
        (("tagger", "--picture", "x.gif"), ".png, .svg, .pdf"),
        (("tree-fc", "--leaves", "1"), "1 is not in the range"),
        (("tree-lstm", "--threads", "99999"), "99999 is not in the range"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: tuple[str, ...], words: str):
    result = iep_bench(*arguments)
    assert result.exit_code == 2
    assert words in result.output
