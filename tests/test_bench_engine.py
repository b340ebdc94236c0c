"""`iep-bench engine`: every strategy has its row, figures agree with each other, files are whole, mistakes one line."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import TINY_ENGINE, iep_bench, measure
from PIL import Image
from tiny_data import VAL, assert_one_error

from iep.bench import engine as bench_engine
from iep.bench import run as bench_run
from iep.bench.case import Case, Setting
from iep.bench.engine import PARTS, Effort, compare
from iep.bench.measure import peak_memory, spread
from iep.bench.strategy import BEST, Strategy, parse_strategies
from iep.bench.workload import clevr_vocab, generated
from iep.config import BATCHING
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.modules import UnaryModule
from iep.programs import arity

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run of all strategies, in both phases, at two sizes."""
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_engine, "MIN_QUESTIONS", 8)
        result = measure("--batch-sizes", "8,2", "--repeat", 2, "--questions-per-image", 4, "--out", out)
    assert result.exit_code == 0, result.output
    (out / "stdout").write_text(result.stdout)
    return out


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "engine.json").read_text())


@pytest.fixture(scope="module")
def rows(report: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every row with its comparison."""
    return [(comparison, row) for comparison in report["comparisons"] for row in comparison["rows"]]


def test_every_strategy_has_a_row_in_every_phase_and_size(report: dict[str, Any]) -> None:
    found = {
        (comparison["phase"], comparison["batch_size"]): [row["strategy"] for row in comparison["rows"]]
        for comparison in report["comparisons"]
    }
    inference = [*BATCHING, f"{BEST}+sharing", "limit", "limit+sharing"]
    train = [*BATCHING, f"{BEST}+sharing", f"{BEST}+sharing+defer", "limit", "limit+sharing"]
    assert found == {(phase, size): {"inference": inference, "train": train}[phase] for phase, size in found}
    assert list(found) == [("inference", 2), ("train", 2), ("inference", 8), ("train", 8)]


def test_questions_a_second_and_seconds_a_minibatch_agree(rows: list) -> None:
    for comparison, row in rows:
        seconds = row["seconds"]["end_to_end"]["median"]
        assert row["questions_per_second"]["median"] * seconds == pytest.approx(comparison["batch_size"])
        for values in (*row["seconds"].values(), row["questions_per_second"]):
            if values is not None:
                assert 0 < values["least"] <= values["lower"] <= values["median"] <= values["upper"] <= values["most"]
                assert values["repeats"] == 2


def test_end_to_end_lies_between_planning_and_step_added_up_round_for_round(rows: list) -> None:
    for _, row in rows:
        parts = ("modules", "stem_classifier") if row["batching"] == "limit" else ("planning", "step")
        seconds = [row["seconds"][part] for part in parts]
        least, most = (sum(part[end] for part in seconds) for end in ("least", "most"))
        assert least <= row["seconds"]["end_to_end"]["median"] <= most


def test_no_strategy_has_fewer_calls_than_the_bound_or_more_than_nodes(rows: list) -> None:
    for _, row in rows:
        if row["batching"] != "limit":
            assert 0 < row["lower_bound"] <= row["calls"] <= row["nodes"]


def test_vanilla_calls_every_node_and_is_what_the_others_are_compared_with(rows: list) -> None:
    medians = {}
    for comparison, row in rows:
        key = comparison["phase"], comparison["batch_size"]
        if row["strategy"] == "vanilla":
            assert row["calls"] == row["nodes"]
            assert row["speedup"] == {"end_to_end": 1.0, "modules": 1.0}
            medians[key] = row["seconds"]
        for part in ("end_to_end", "modules"):
            ratio = medians[key][part]["median"] / row["seconds"][part]["median"]
            assert row["speedup"][part] == pytest.approx(ratio)
        assert comparison["baseline"] == "vanilla"


def test_a_limit_calls_each_function_once_and_is_the_measure_of_its_strategies(rows: list) -> None:
    workload = generated(8, 4, (3, 3, 3), largest=8)
    functions = {token for token in workload.programs_QL.ravel().tolist() if token > 3}
    limits = {}
    for comparison, row in reversed(rows):
        key = comparison["phase"], comparison["batch_size"], row["sharing"], row["precision"]
        if row["batching"] == "limit":
            limits[key] = row["seconds"]["end_to_end"]["median"]
            assert row["lower_bound"] is row["peak_memory"] is row["seconds"]["step"] is None
            assert row["calls"] == len(functions) or comparison["batch_size"] == 2
        assert row["share_of_limit"] == pytest.approx(limits[key] / row["seconds"]["end_to_end"]["median"])


def test_small_minibatches_are_measured_on_several(report: dict[str, Any]) -> None:
    assert {(each["batch_size"], each["minibatches"]) for each in report["comparisons"]} == {(2, 4), (8, 1)}


def test_sharing_runs_fewer_nodes_on_fewer_images(rows: list) -> None:
    nodes = {(row["strategy"], comparison["batch_size"]): row["nodes"] for comparison, row in rows}
    assert nodes[f"{BEST}+sharing", 8] < nodes[BEST, 8] == nodes["vanilla", 8]
    assert {comparison["images"] for comparison, _ in rows if comparison["batch_size"] == 8} == {2}


def test_the_report_says_what_ran_where(out: Path, report: dict[str, Any]) -> None:
    assert report["command"].startswith("iep-bench engine --device cpu ")
    assert report["command"].endswith(f" --batch-sizes 8,2 --repeat 2 --questions-per-image 4 --out {out}")
    assert report["engine"]["module_dim"] == 2
    assert report["workload"]["feature_shape"] == [3, 3, 3]
    assert report["machine"]["threads"] == torch.get_num_threads()
    assert report["machine"]["torch"] == torch.__version__
    text = (out / "engine.txt").read_text()
    assert f"$ {report['command']}" in text
    assert all(line in (out / "stdout").read_text() for line in text.splitlines())
    for comparison in report["comparisons"]:
        for row in comparison["rows"]:
            assert f"\n{row['strategy']} " in text


def test_the_picture_is_one(out: Path) -> None:
    with Image.open(out / "engine.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(picture.width * picture.height)) > 10


def test_an_interruption_leaves_whole_files_of_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return compare(*arguments, **options)

    monkeypatch.setattr(bench_run, "compare", interrupted)
    result = measure("--batch-sizes", "1,2,3", "--batching", "vanilla", "--phase", "inference", "--out", tmp_path)
    assert result.exit_code == 130
    report = json.loads((tmp_path / "engine.json").read_text())
    assert [comparison["batch_size"] for comparison in report["comparisons"]] == [1, 2]
    Image.open(tmp_path / "engine.png").load()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine.json", "engine.png", "engine.txt"]


@pytest.mark.parametrize(("name", "last"), [("channels-first", False), ("channels-last", True), (None, True)])
def test_the_memory_format_asked_for_is_that_of_the_maps(name: str | None, last: bool, monkeypatch, tmp_path: Path):
    seen = []
    take = UnaryModule.forward
    monkeypatch.setattr(UnaryModule, "forward", lambda self, x: seen.append(x) or take(self, x))
    arguments = [] if name is None else ["--memory-format", name]
    # Big enough that a format is more than a name: two channels, three columns.
    result = measure("--batch-sizes", 4, "--phase", "inference", "--batching", "vanilla", "--out", tmp_path, *arguments)
    assert result.exit_code == 0, result.output
    assert seen
    assert {x.is_contiguous(memory_format=torch.channels_last) for x in seen} == {last}
    assert json.loads((tmp_path / "engine.json").read_text())["memory_format"] == name


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engine.json").mkdir()
    monkeypatch.setattr(bench_run, "compare", lambda *arguments, **options: pytest.fail("measured"))
    result = measure("--batch-sizes", 1, "--out", tmp_path)
    assert_one_error(result, f"{tmp_path / 'engine.json'}: a directory, expected a file")


def test_strategies_take_turns() -> None:
    workload = generated(4, 1, (3, 3, 3), largest=4)
    engine = ExecutionEngine(workload.vocab.program, 32, 3, 3, 3, module_dim=2, stem_widths=())
    strategies, heard = parse_strategies("vanilla,improved+defer,improved"), []
    compare(workload, engine, strategies, "inference", 4, Effort(3, 60.0), CPU, progress=heard.append)
    assert heard == ["vanilla", "improved", "limit"] * 4


def test_memory_that_does_not_suffice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nand more lines")

    monkeypatch.setattr(bench_run, "compare", too_large)
    assert_one_error(measure("--batch-sizes", "4"), "minibatches of 4 questions", "CUDA out of memory")


def test_real_data_is_measured_as_it_lies_there(data: Path, tmp_path: Path) -> None:
    result = iep_bench(
        *("engine", "--device", "cpu", "--data", data, "--batch-sizes", VAL, "--repeat", 1, "--phase", "train"),
        *("--batching", "improved+sharing,vanilla", "--precision", "float32,bfloat16", "--out", tmp_path),
        *TINY_ENGINE,
    )
    assert result.exit_code == 0, result.output
    (comparison,) = json.loads((tmp_path / "engine.json").read_text())["comparisons"]
    assert comparison["images"] < VAL
    both = ["improved+sharing", "improved+sharing+bfloat16", "vanilla", "vanilla+bfloat16"]
    limits = ["limit+sharing", "limit+sharing+bfloat16", "limit", "limit+bfloat16"]
    assert [row["strategy"] for row in comparison["rows"]] == [*both, *limits]
    memory = {row["strategy"]: row["peak_memory"] for row in comparison["rows"]}
    assert memory["vanilla+bfloat16"] < memory["vanilla"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batching", "lookahed"], ["lookahed", "scheduler"]),
        (["--batching", "vanilla+sharin"], ["'sharin'", "did you mean 'sharing'"]),
        (["--precision", "float16"], ["float16", "float32, bfloat16"]),
        (["--phase", "training"], ["training"]),
        (["--batch-sizes", "4,x"], ["x"]),
        (["--batch-sizes", "0"], ["0"]),
        (["--repeat", "0"], ["0"]),
        (["--split", "val"], ["--split is for --data"]),
        (["--data", ".", "--questions-per-image", "2"], ["--questions-per-image is not for --data"]),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: list[str], words: list[str]) -> None:
    result = iep_bench("engine", *arguments)
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine.module_dimm=4"], ["engine.module_dimm", "did you mean 'module_dim'"]),
        (["batch_size=4"], ["batch_size=4", "engine.key=value"]),
        (["--device", "gpu"], ["gpu"]),
        (["engine.stem=pixels", "--feature-shape", "5", "3", "3"], ["5 channels"]),
        (["--data", "no/such"], ["no/such/vocab.json", "no such file"]),
        (["--config", "no.yaml"], ["no.yaml", "no such file"]),
    ],
)
def test_what_cannot_be_measured_is_named_in_one_line(arguments: list[str], words: list[str]) -> None:
    assert_one_error(iep_bench("engine", "--batch-sizes", "2", *arguments), *words)


def test_a_split_with_too_few_questions_or_no_programs_is_named(data: Path, tmp_path: Path) -> None:
    assert_one_error(iep_bench("engine", "--data", data, "--batch-sizes", VAL + 1), str(data), f"{VAL} questions")
    assert_one_error(iep_bench("engine", "--data", data, "--split", "test"), "test_questions.h5", "no programs")
    shutil.copy(data / "vocab.json", tmp_path)
    shutil.copy(data / "val_questions.h5", tmp_path)
    assert_one_error(iep_bench("engine", "--data", tmp_path), "val_features.h5", "no such file")


def test_made_programs_are_clevrs() -> None:
    workload = generated(100, 10, (3, 2, 2), largest=20, seed=3)
    tokens = workload.vocab.program
    assert len(tokens) == 44
    lengths = []
    for row in workload.programs_QL.tolist():
        program = [tokens[token] for token in row if token > 3]
        awaited = np.cumsum([arity(token) - 1 for token in program]) + 1
        assert awaited[-1] == 0
        assert (awaited[:-1] > 0).all()
        lengths.append(len(program))
    assert 9 < np.mean(lengths) < 13
    assert len({tuple(row) for row in workload.programs_QL.tolist()}) > 60
    minibatch = workload.minibatch(15, 20)
    assert minibatch.image_rows_B.tolist() == [0] * 5 + [1] * 10 + [2] * 5
    assert minibatch.features_NCHW.shape == (3, 3, 2, 2)
    assert torch.equal(minibatch.features_of_questions, minibatch.features_NCHW[minibatch.image_rows_B])


def test_all_is_every_scheduler_and_then_one_thing_more_at_a_time() -> None:
    strategies = parse_strategies("all")
    assert strategies[: len(BATCHING)] == [Strategy(name) for name in BATCHING]
    assert strategies[len(BATCHING) :] == [Strategy(BEST, sharing=True), Strategy(BEST, sharing=True, defer=True)]
    assert parse_strategies("all+sharing") == [Strategy(name, sharing=True) for name in BATCHING]


def test_strategies_are_read_as_they_are_named() -> None:
    text = "vanilla,improved+sharing+defer+bfloat16,improved+bfloat16"
    assert ",".join(strategy.name for strategy in parse_strategies(text)) == text


def test_flags_overrule_names_and_precisions_cross() -> None:
    assert [s.name for s in parse_strategies("vanilla,vanilla+sharing", sharing=False)] == ["vanilla"]
    assert [s.name for s in parse_strategies("vanilla", sharing=True, defer=True)] == ["vanilla+sharing+defer"]
    names = [s.name for s in parse_strategies("vanilla,improved+bfloat16", precisions="float32,bfloat16")]
    assert names == ["vanilla", "vanilla+bfloat16", "improved+bfloat16"]


def test_a_slow_strategy_stops_after_three_rounds_and_a_quick_one_after_all() -> None:
    effort = Effort(repeat=10, max_seconds=5.0)
    assert [effort.is_enough(rounds, 6.0) for rounds in range(5)] == [False, False, False, True, True]
    assert not effort.is_enough(9, 4.9)
    assert effort.is_enough(10, 0.1)
    assert Effort(repeat=1, max_seconds=0.0).is_enough(1, 0.0)


def test_the_spread_is_median_quartiles_and_extremes() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.least, found.lower, found.median, found.upper, found.most) == (1, 2, 3, 4, 5)
    assert spread([7.0]).lower == spread([7.0]).median == 7


def test_peak_memory_is_the_most_held_at_once() -> None:
    def run() -> None:
        first = torch.zeros(1000)
        second = torch.zeros(500)
        del first
        torch.zeros(700)
        del second

    assert peak_memory(run, [CPU]) == peak_memory(run, [CPU]) == 4 * 1500


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "improved+sharing+defer", "improved+bfloat16"])
@pytest.mark.parametrize("modules", ["iep", "tbd"])
def test_a_part_calls_the_modules_as_the_step_does(name: str, training: bool, modules: str) -> None:
    (strategy,) = parse_strategies(name)
    vocab = clevr_vocab()
    size = {"modules": modules, "module_dim": 2, "stem_widths": ()}
    engine = ExecutionEngine(vocab.program, len(vocab.answer), 3, 3, 3, **size).train(training)
    minibatch = generated(6, 3, (3, 3, 3), largest=6).minibatch(0, 6)
    case = Case(Setting(engine, training, CPU), strategy.in_phase("train" if training else "inference"), minibatch)
    seen: list[tuple[str, tuple, torch.dtype]] = []
    for token, module in engine.named_children():
        module.register_forward_pre_hook(
            lambda _, given, token=token: seen.append((token, tuple(x.shape for x in given), given[0].dtype))
        )

    def calls_of(part: str) -> list:
        run = case.ready(part)
        seen.clear()
        run()
        return list(seen)

    step = calls_of("step")
    assert len(step) == len(case.plan.schedule) + 2
    assert calls_of("modules") == step[1:-1]
    assert calls_of("stem_classifier") == [step[0], step[-1]]
    assert calls_of("gather_scatter") == []
    gradients = {
        part: {name for name, p in engine.named_parameters() if p.grad is not None}
        for part in PARTS
        if part != "planning" and calls_of(part) is not None
    }
    assert gradients["gather_scatter"] == set()
    assert gradients["modules"] | gradients["stem_classifier"] == gradients["step"]
    assert bool(gradients["step"]) == training
