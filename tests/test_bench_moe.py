"""`iep-bench moe`: maps, tables, JSON and pictures of small layers of experts, whose figures add up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_cases import iep_bench
from PIL import Image
from placement_cases import ONE_GPU
from tiny_data import assert_one_error

from iep.bench.moe_bound import Speeds, bound, refused_for_memory
from iep.bench.moe_ways import BATCHED, GROUPED, LOOP, NAMES, VANILLA, sort_and_loop, uniform_experts
from iep.workloads.expert_products import grouped_refusal
from iep.workloads.experts import Experts

WIDTH, ENOUGH = (4, 8, 12), 5
WEIGHTS = 8 * (4 + 12)
QUICK = ("--width", *WIDTH, "--repeat", 2)
GRID = ("--experts", "3,1", "--tokens", "2,7", "--threads", "1,2")
NOT_HERE = [GROUPED] if grouped_refusal(torch.device("cpu"), torch.float32) else []
"""Older releases of PyTorch have no grouped product on a CPU."""
COLUMNS = {BATCHED: 3, LOOP: 6, VANILLA: 7}
"""Where a way's milliseconds are in a line of the table."""


@pytest.fixture(scope="module", autouse=True)
def small_machine() -> Iterator[None]:
    """Little is read to measure memory, and little multiplied; one token after the other for a few alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("iep.bench.moe_bound.PROBE_NUMBERS", 1000)
        patch.setattr("iep.bench.limit.SIDES", (8,))
        patch.setattr("iep.bench.moe_ways.ENOUGH_TOKENS", ENOUGH)
        patch.setattr("iep.bench.moe.ROUND_STEPS", 2)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a grid's files are."""
    out = tmp_path_factory.mktemp("moe")
    threads = torch.get_num_threads()
    result = iep_bench(
        "moe", *GRID, *QUICK, "--json", out / "all.json", "--out", out / "all.txt", "--picture", out / "all.png"
    )
    assert result.exit_code == 0, result.output
    assert (out / "all.txt").read_text().strip() in result.stdout
    assert torch.get_num_threads() == threads
    return out


def cells_of(out: Path) -> list[dict[str, Any]]:
    return json.loads((out / "all.json").read_text())["cells"]


def timings_of(cell: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {timing["name"]: timing for timing in cell["timings"]}


def test_every_cell_is_measured_in_every_way_phase_and_number_of_threads(measured: Path):
    found = [tuple(cell[name] for name in ("phase", "threads", "experts", "tokens")) for cell in cells_of(measured)]
    assert found == [
        (phase, threads, experts, tokens)
        for phase in ("training", "inference")
        for threads in (1, 2)
        for experts in (1, 3)
        for tokens in (2, 7)
    ]
    assert all(list(timings_of(cell)) == list(NAMES) for cell in cells_of(measured))


def test_figures_of_the_report_add_up(measured: Path):
    for cell in cells_of(measured):
        timings = timings_of(cell)
        medians = {name: timing["seconds"]["median"] for name, timing in timings.items() if timing["seconds"]}
        assert [name for name in NAMES if name not in medians] == NOT_HERE
        least = cell["bound"]
        assert least["seconds"] == max(least["memory"], least["products"])
        assert least["memory"] == pytest.approx(least["bytes"] / least["bytes_per_second"])
        assert least["products"] == pytest.approx(least["flop"] / least["flop_per_second"])
        others = [medians[name] for name in (GROUPED, LOOP) if name in medians]
        assert cell["over_others"] == pytest.approx(min(others) / medians[BATCHED])
        for name in medians:
            timing = timings[name]
            assert timing["speedup"] == pytest.approx(medians[VANILLA] / medians[name])
            assert timing["over_bound"] == pytest.approx(medians[name] / least["seconds"])
            assert timing["tokens_run"] == min(cell["tokens"], ENOUGH if name == VANILLA else 7)


def test_the_bound_counts_what_is_called_and_in_training_two_readings_and_one_writing(measured: Path):
    for cell in cells_of(measured):
        active = uniform_experts(cell["tokens"], cell["experts"], 1, seed=0).unique().numel()
        times = 3 if cell["phase"] == "training" else 1
        assert cell["active"] == active
        assert cell["bound"]["bytes"] == 4 * active * WEIGHTS * times
        assert cell["bound"]["flop"] == 2 * cell["tokens"] * WEIGHTS * times


def test_the_bound_is_the_longer_of_memory_and_products():
    few, many = (bound(WIDTH, active=3, rows=rows, training=False, speeds=Speeds(100.0, 1000.0)) for rows in (1, 999))
    assert few.seconds == few.memory == 4 * 3 * WEIGHTS / 100
    assert many.seconds == many.products == 2 * 999 * WEIGHTS / 1000


def test_table_and_map_show_the_figures_of_the_json(measured: Path):
    heading, *parts = (measured / "all.txt").read_text().strip().split("\n\n")
    cells = cells_of(measured)
    assert heading.startswith("$ iep-bench moe --experts 3,1")
    assert len(parts) == 2 * 4
    for part in range(4):
        table, speedups = parts[2 * part].splitlines(), parts[2 * part + 1].splitlines()
        here = cells[4 * part : 4 * part + 4]
        assert table[0].startswith(f"{here[0]['phase']}, k 1, {here[0]['threads']} thread")
        for cell, line in zip(here, map(str.split, table[2:]), strict=True):
            timings = timings_of(cell)
            assert line[:3] == [str(cell[name]) for name in ("experts", "tokens", "active")]
            for name, column in COLUMNS.items():
                mark = "*" if name == VANILLA and cell["tokens"] == 7 else ""
                assert line[column] == f"{1000 * timings[name]['seconds']['median']:.4g}{mark}"
            in_map = speedups[2 + (1, 3).index(cell["experts"])].split()[1 + (2, 7).index(cell["tokens"])]
            assert in_map == line[-1]
            assert float(in_map.rstrip("*")) == pytest.approx(timings[BATCHED]["speedup"], rel=0.005, abs=0.005)
            assert in_map.endswith("*") == (cell["tokens"] == 7)
        # After it, where this PyTorch has no grouped product, there is a line that says so.
        assert f"* vanilla ran the first {ENOUGH} tokens; scaled to all of them" in speedups


def test_the_picture_is_one(measured: Path):
    with Image.open(measured / "all.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10


def test_cells_that_memory_does_not_allow_are_empty_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("iep.bench.moe_run.available_memory", lambda device: 7000.0)
    files = ("--json", tmp_path / "all.json", "--picture", tmp_path / "all.svg")
    given = ("--experts", "2,50", "--tokens", 2, "--threads", 1, "--phase", "inference")
    result = iep_bench("moe", *given, *QUICK, *files)
    assert result.exit_code == 0, result.output
    fits, does_not = cells_of(tmp_path)
    assert timings_of(fits)[BATCHED]["left_out"] is None
    assert does_not["bound"] is does_not["over_others"] is timings_of(does_not)[BATCHED]["seconds"] is None
    reason = refused_for_memory(WIDTH, 50, 2, False, 7000.0)
    assert f"- 50 experts, 2 tokens: batched, grouped, sort and loop, vanilla left out: {reason}" in result.output
    assert result.output.split("experts \\ tokens")[1].splitlines()[2].split() == ["50", "-"]
    assert "speed-up of batched over vanilla" in (tmp_path / "all.svg").read_text()


def test_what_takes_longer_than_it_may_is_left_out_and_said_so(tmp_path: Path):
    given = ("--experts", 2, "--tokens", "2,3", "--threads", 1, "--phase", "training", "--max-seconds", 0)
    files = ("--json", tmp_path / "all.json", "--picture", tmp_path / "all.png")
    result = iep_bench("moe", *given, *QUICK, *files)
    assert result.exit_code == 0, result.output
    for cell in cells_of(tmp_path):
        assert all(timing["seconds"] is None for timing in timings_of(cell).values())
        assert "s with 2 tokens is longer than --max-seconds" in timings_of(cell)[BATCHED]["left_out"]
        assert f"- 2 experts, {cell['tokens']} tokens: batched left out: " in result.output


def test_training_needs_more_memory_than_inference():
    assert refused_for_memory(WIDTH, 9, 2, False, 9000.0) is None
    assert "9e-06 GB are available" in refused_for_memory(WIDTH, 9, 2, True, 9000.0)


@pytest.mark.parametrize("k", [1, 3])
def test_the_plain_loop_gives_what_vanilla_does_and_every_gradient(k: int):
    layer = Experts(*WIDTH, 5, execution="vanilla").double()
    chosen = uniform_experts(9, 5, k, seed=1)
    results = []
    for forward in (layer, lambda *inputs: sort_and_loop(layer, *inputs)):
        torch.manual_seed(0)
        x = torch.randn(9, WIDTH[0], dtype=torch.float64, requires_grad=True)
        gates = torch.rand(9, k, dtype=torch.float64, requires_grad=True)
        layer.zero_grad(set_to_none=True)
        outputs = forward(x, chosen, gates)
        (outputs**2).sum().backward()
        results.append([outputs, x.grad, gates.grad, *(weight.grad for weight in layer.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_experts_of_a_token_are_different_and_all_are_as_likely():
    chosen = uniform_experts(6000, 6, 3, seed=2)
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert chosen.unique().tolist() == [0, 1, 2, 3, 4, 5]
    for column in chosen.unbind(1):
        assert (column.bincount(minlength=6) - 1000).abs().max() < 150
    assert torch.equal(chosen, uniform_experts(6000, 6, 3, seed=2))
    assert not torch.equal(chosen, uniform_experts(6000, 6, 3, seed=3))


def test_there_is_no_device_of_that_name():
    assert_one_error(iep_bench("moe", "--device", "abacus"), "abacus")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--experts", "3,2", "--k", 3), "3 different experts of 2"),
        (("--experts", "many"), "'many'"),
        (("--tokens", "0"), "0"),
        (("--width", 4, 0, 4), "--width"),
        (("--threads", "some"), "'some'"),
        (("--picture", "x.gif"), ".png, .svg, .pdf"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: tuple[object, ...], words: str):
    result = iep_bench("moe", *arguments)
    assert result.exit_code == 2
    assert words in result.output


@ONE_GPU
def test_a_gpu_is_measured_with_the_first_number_of_threads(tmp_path: Path):
    given = ("--experts", 4, "--tokens", 8, "--k", 2, "--threads", "2,1", "--device", "cuda")
    result = iep_bench("moe", *given, *QUICK, "--json", tmp_path / "all.json")
    assert result.exit_code == 0, result.output
    assert [cell["threads"] for cell in cells_of(tmp_path)] == [2, 2]
