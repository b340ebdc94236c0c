"""`iep-bench tree-lstm`, `tree-fc` and `tagger`: networks batched by hand equal one sample after the other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_cases import iep_bench, report_of
from tiny_data import assert_one_error

from iep.bench.measure_networks import (
    LEVELS,
    PACKED,
    PER_INSTANCE,
    Network,
    binary_network,
    child_sum_network,
    levels_of,
    minibatches_of,
    tagger_network,
    tree_fc_network,
)
from iep.bench.strategy import parse_strategies
from iep.workloads.sentences import wikiner_like
from iep.workloads.trees import Tree, complete_trees, sick_like, sst_like

WORDS, WIDTH = 20, 6
STRATEGIES = parse_strategies("height,lookahead+sharing,lookahead+defer")
LONE = Tree(np.array([[-1, -1]]), np.array([3]), 2)
QUICK = ("--repeat", 1, "--threads", 1, "--words", 30, "--width", 4)
NETWORKS: dict[str, tuple[Callable[..., Network], Callable[[np.random.Generator], list]]] = {
    "binary": (binary_network, lambda rng: [*sst_like(9, WORDS, rng), LONE]),
    "lone leaves": (binary_network, lambda rng: [LONE, LONE]),
    "child-sum": (child_sum_network, lambda rng: sick_like(5, WORDS, rng)),
    "full of 2": (tree_fc_network, lambda rng: complete_trees(3, 2, WORDS, rng)),
    "full of 7": (tree_fc_network, lambda rng: complete_trees(3, 7, WORDS, rng)),
    "tagger": (tagger_network, lambda rng: wikiner_like(7, WORDS, 9, rng)),
}


def made(name: str) -> tuple[Network, list]:
    torch.manual_seed(0)
    make, samples = NETWORKS[name]
    return make(WORDS, WIDTH, STRATEGIES), samples(np.random.default_rng(0))


def gradients(network: Network) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in network.model.parameters() if parameter.requires_grad]
    return [each.to_dense() if each.is_sparse else each for each in found if each is not None]


@pytest.mark.parametrize("name", NETWORKS)
def test_every_competitor_computes_the_same_loss_and_gradients(name: str):
    network, samples = made(name)
    for training in (True, False):
        for way in network.ways:
            way.compute(way.construct(samples), training)
    losses, found = [], []
    for way in network.ways:
        losses.append(float(way.compute(way.construct(samples), True)))
        if way.name != PER_INSTANCE and name != "tagger":  # the packed one has parameters of its own
            found.append(gradients(network))
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    for other in found[1:]:
        for gradient, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_a_level_holds_all_vertices_of_one_depth():
    levels = levels_of([*complete_trees(3, 8, WORDS, np.random.default_rng(0)), LONE])
    assert levels.leaves == (24, 0, 0, 1)
    assert [order is None for order in levels.orders] == [True, True, True, False]


def test_minibatches_of_each_size_are_drawn_from_all_samples():
    samples = list(range(70))
    made = {size["batch"]: minibatches for size, minibatches in minibatches_of(samples, (70, 1, 16, 64))}
    assert {size: len(minibatches) for size, minibatches in made.items()} == {1: 64, 16: 4, 64: 1, 70: 1}
    assert made[16][1] == samples[16:32]


@pytest.mark.parametrize(
    ("command", "given", "hand", "unit"),
    [
        ("tree-lstm", ("--batch-sizes", "40,33"), LEVELS, "batch"),
        ("tree-fc", ("--leaves", "8,2", "--batch-size", 3), LEVELS, "leaves"),
        ("tagger", ("--batch-sizes", "40,33"), PACKED, "batch"),
    ],
)
def test_every_competitor_is_measured_in_its_phases(command: str, given: tuple, hand: str, unit: str, tmp_path: Path):
    result = iep_bench(command, *QUICK, *given, "--batching", "height,lookahead+defer", "--out", tmp_path)
    comparisons = report_of(result, tmp_path, command)
    assert [each["phase"] for each in comparisons] == ["train", "inference"] * 2
    assert [each[unit] for each in comparisons] == sorted(each[unit] for each in comparisons)
    for each in comparisons:
        deferred = ["lookahead+defer"] if each["phase"] == "train" else []
        assert [row["name"] for row in each["rows"]] == [PER_INSTANCE, "height", *deferred, hand, "limit"]
        rows = {row["name"]: row for row in each["rows"]}
        facts = rows["height"]["facts"]
        assert facts["ratio"] == pytest.approx(each["cells"] / facts["calls"])
        assert set(rows["height"]["seconds"]) == {"construction", "computation", "total"}
        assert rows["limit"]["share_of_limit"] in (1, None)


def test_pairs_are_measured_one_after_the_other_and_in_a_lazy_scope(tmp_path: Path):
    given = ("--cell", "child-sum", "--batch-sizes", 33, "--batching", "height,lookahead+defer")
    train, inference = report_of(iep_bench("tree-lstm", *QUICK, *given, "--out", tmp_path), tmp_path, "tree-lstm")
    operators = "lookahead+defer, operators"
    assert [row["name"] for row in train["rows"]] == [PER_INSTANCE, "height", "lookahead+defer", operators, "limit"]
    assert [row["name"] for row in inference["rows"]] == [PER_INSTANCE, "height", operators, "limit"]
    calls = {row["name"]: row["facts"].get("calls") for row in train["rows"]}
    assert calls["height"] < calls[operators] < 20 * train["cells"]


SST, WIKINER = "(3 (2 good) (2 film))\n(1 (2 bad) (2 film))\n", "Paris|NNP|I-LOC is|VBZ|O\nis|VBZ|O nice|JJ|O\n"


@pytest.mark.parametrize(
    ("command", "content", "words"), [("tree-lstm", SST, "4 words"), ("tagger", WIKINER, "rare words spelled")]
)
def test_samples_of_a_file_are_measured(command: str, content: str, words: str, tmp_path: Path):
    (tmp_path / "samples").write_text(content)
    quick = ("--repeat", 1, "--threads", 1, "--width", 4, "--batching", "height", "--phase", "inference")
    spelled = ("--characters",) if command == "tagger" else ()
    result = iep_bench(command, *quick, *spelled, "--data", tmp_path / "samples", "--batch-sizes", "2")
    assert result.exit_code == 0, result.output
    assert words in result.stdout
    result = iep_bench(command, *quick, "--data", tmp_path / "samples", "--batch-sizes", "3")
    assert_one_error(result, "2 samples, expected at least 3")
