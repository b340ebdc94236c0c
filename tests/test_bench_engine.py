"""`iep-bench engine`: every strategy has its row; errors of every `iep-bench`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_cases import iep_bench, measure, report_of
from tiny_data import assert_one_error

from iep.bench.strategy import BEST, Strategy, parse_strategies
from iep.bench.workload import generated
from iep.config import BATCHING
from iep.programs import arity

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def comparisons(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The comparisons of a run of all strategies in both phases."""
    out = tmp_path_factory.mktemp("bench")
    given = ("--batch-sizes", 16, "--questions-per-image", 4, "--threads", 1, "--out", out)
    return report_of(measure(*given), out, "engine")


def test_every_strategy_has_a_row_in_every_phase(comparisons: list[dict[str, Any]]):
    assert [each["phase"] for each in comparisons] == ["train", "inference"]
    inference = [*BATCHING, f"{BEST}+sharing"]
    for each in comparisons:
        names = [row["name"] for row in each["rows"]]
        deferred = [f"{BEST}+sharing+defer"] if each["phase"] == "train" else []
        assert names == [*inference, *deferred]


def test_calls_lie_between_the_bound_and_nodes_and_sharing_runs_fewer_nodes(comparisons: list[dict[str, Any]]):
    for each in comparisons:
        rows = {row["name"]: row for row in each["rows"]}
        nodes = {name: row["facts"]["nodes"] for name, row in rows.items()}
        assert rows["vanilla"]["facts"]["calls"] == nodes["vanilla"]
        assert nodes[f"{BEST}+sharing"] < nodes[BEST]
        assert each["images"] == each["questions"] / 4
        for row in rows.values():
            assert set(row["seconds"]) == {"planning", "step", "total"}
            assert 0 < row["facts"]["bound"] <= row["facts"]["calls"] <= row["facts"]["nodes"]


def test_functions_that_share_their_weights_are_measured_in_few_calls_at_every_size(tmp_path: Path):
    given = ("--batch-sizes", "64,32", "--batching", "lookahead", "--threads", 1, "engine.modules=vector")
    given = (*given, "engine.classifier_pool=1")
    comparisons = report_of(measure(*given, "--out", tmp_path), tmp_path, "engine")
    sizes = [(each["questions"], each["phase"], each["minibatches"]) for each in comparisons]
    assert sizes == [(32, "train", 2), (32, "inference", 2), (64, "train", 1), (64, "inference", 1)]
    for comparison in comparisons:
        (facts,) = [row["facts"] for row in comparison["rows"] if row["name"] == "lookahead"]
        assert facts["calls"] < 40 < facts["nodes"]
        assert facts["bound"] is None


COUNT = "count filter_color[red] scene"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["engine", "--batching", "lookahed"], 2, ["did you mean 'lookahead'"]),
        (["engine", "--batch-sizes", "1,a"], 2, ["'1,a', expected integers separated by commas, such as 1,16,64"]),
        (["engine", "engine.module_dimm=4"], 1, ["engine.module_dimm", "did you mean 'module_dim'"]),
        (["engine", "--batch-sizes", "2", "engine.stem=none", "--feature-shape", "5", "3", "3"], 1, ["5 channels"]),
        (
            ["plan", "--program", COUNT, "--program", "count filter_colour[red]"],
            1,
            ["program 1, token 1", "did you mean"],
        ),
        (["engine", "--config", "mini/pg"], 1, ["mini/pg", "settings of pg, expected those of a model with an engine"]),
        (["plan", "--program", COUNT, "--program", ""], 1, ["program 1 is empty"]),
        (["plan", "--data", "no/such"], 1, ["no/such/vocab.json", "no such file"]),
        (["plan", "--program", COUNT, "--modules", "tbd", "--scene", "stem"], 1, ["scene is 'stem'", "modules iep"]),
    ],
)
def test_a_benchmark_that_cannot_run_is_an_error_with_its_reason(arguments: list[str], code: int, words: list[str]):
    result = iep_bench(*arguments)
    if code == 1:
        assert_one_error(result, *words)
    assert result.exit_code == code
    assert [word for word in words if word not in " ".join(result.stderr.split())] == []


def test_generated_programs_are_like_clevrs():
    workload = generated(100, 10, (3, 2, 2), largest=20, seed=3)
    tokens, lengths = workload.vocab.program, []
    assert len(tokens) == 44
    for row in workload.programs_QL.tolist():
        program = [tokens[token] for token in row if token > 3]
        awaited = np.cumsum([arity(token) - 1 for token in program]) + 1
        assert awaited[-1] == 0
        assert (awaited[:-1] > 0).all()
        lengths.append(len(program))
    assert 9 < np.mean(lengths) < 13
    assert len({tuple(row) for row in workload.programs_QL.tolist()}) > 60
    minibatch = workload.minibatch(15, 20, CPU)
    assert minibatch.image_rows_B.tolist() == [0] * 5 + [1] * 10 + [2] * 5
    assert minibatch.features_NCHW.shape == (3, 3, 2, 2)


def test_strategies_are_parsed_from_their_names():
    text = "vanilla,improved+sharing+triton+bfloat16,standard+defer,improved+bfloat16"
    assert ",".join(strategy.name for strategy in parse_strategies(text)) == text
    assert parse_strategies("vanilla, vanilla+float32") == [Strategy("vanilla")]
