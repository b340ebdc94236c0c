"""`iep-bench tree-lstm`, `tree-fc` and `tagger`: networks by hand equal one sample after the other; figures add up."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_cases import iep_bench, report_of
from tiny_data import assert_one_error
from torch import nn

from iep.bench.networks import PER_INSTANCE, Network, minibatches_of
from iep.bench.strategy import parse_strategies
from iep.bench.tagger import PACKED, pack, tagger_network
from iep.bench.tree_fc import tree_fc_network
from iep.bench.tree_lstm import HAND, binary_network, child_sum_network, levels_of
from iep.workloads.sentences import wikiner_like
from iep.workloads.trees import Tree, complete_trees, sick_like, sst_like

WORDS, WIDTH = 20, 6
STRATEGIES = parse_strategies("height,lookahead+sharing,lookahead+defer")
LONE = Tree(np.array([[-1, -1]]), np.array([3]), 2)
QUICK = ("--repeat", 1, "--threads", 1, "--words", 30, "--width", 4)
SST = "(3 (2 It) (4 (2 's) (4 good)))\n(1 (2 no) (0 way))\n"
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
def test_every_way_computes_the_same_loss_and_gradients(name: str):
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


@pytest.mark.parametrize("name", ["binary", "full of 7"])
def test_operations_are_those_of_the_linear_layers_that_the_network_by_hand_runs(name: str):
    network, samples = made(name)
    count = 0

    def add(layer: nn.Linear, arguments: tuple[torch.Tensor], result: torch.Tensor) -> None:
        nonlocal count
        count += 2 * layer.in_features * result.numel()

    for layer in network.model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(add)
    by_hand = network.ways[-1]
    by_hand.compute(by_hand.construct(samples), False)
    assert count == sum(map(network.flop, samples))


def test_letters_of_spelled_words_are_cells_and_operations_too():
    sentences = wikiner_like(6, WORDS, 9, np.random.default_rng(0), 8)
    letters = sum(len(word) for sentence in sentences for word in sentence.characters)
    plain, spelled = (tagger_network(WORDS, WIDTH, (), letters=count) for count in (None, 8))
    assert letters > 0
    assert sum(map(spelled.cells, sentences)) - sum(map(plain.cells, sentences)) == 2 * letters
    more = sum(map(spelled.flop, sentences)) - sum(map(plain.flop, sentences))
    assert more == 2 * letters * 2 * (64 + 64) * 4 * 64  # an LSTM each way of width 64
    assert PACKED not in [way.name for way in spelled.ways]


def test_a_child_sum_tree_has_products_for_words_inner_cells_edges_and_scores():
    network, pairs = made("child-sum")
    trees = [tree for pair in pairs for tree in (pair.left, pair.right)]
    vertices, edges = sum(map(len, trees)), sum(map(len, trees)) - len(trees)
    inner = sum(int((tree.children[:, 0] >= 0).sum()) for tree in trees)
    products = 4 * 300 * WIDTH * vertices + 3 * WIDTH * WIDTH * inner + WIDTH * WIDTH * edges
    scores = len(pairs) * (2 * WIDTH * 50 + 50 * 5)
    assert sum(map(network.flop, pairs)) == 2 * (products + scores)
    assert sum(map(network.cells, pairs)) == vertices


def test_a_level_is_all_vertices_of_a_height():
    assert levels_of(complete_trees(3, 8, WORDS, np.random.default_rng(0))).rows == [24, 12, 6, 3]


def test_packed_sentences_keep_every_word_beside_its_tag():
    sentences = wikiner_like(7, WORDS, 9, np.random.default_rng(0))
    packed = pack(sentences)
    expected = [pair for each in sentences for pair in zip(each.words.tolist(), each.tags.tolist(), strict=True)]
    assert sorted(zip(packed.words.data.tolist(), packed.tags.tolist(), strict=True)) == sorted(expected)
    longest = max(map(len, sentences))
    assert packed.words.batch_sizes.tolist() == [sum(len(each) > n for each in sentences) for n in range(longest)]


def test_small_minibatches_are_made_of_many_samples_and_large_ones_of_all():
    samples = list(range(70))
    assert [len(minibatches_of(samples, size)) for size in (1, 16, 64, 70)] == [64, 4, 1, 1]
    assert minibatches_of(samples, 16)[1] == samples[16:32]


@pytest.mark.parametrize(
    ("command", "given", "hand", "unit"),
    [
        ("tree-lstm", ("--batch-sizes", "40,33"), HAND, "batch"),
        ("tree-fc", ("--leaves", "8,2", "--batch-size", 3), HAND, "leaves"),
        ("tagger", ("--batch-sizes", "40,33"), PACKED, "batch"),
    ],
)
def test_every_way_is_measured_in_the_phases_that_it_is_for(
    command: str, given: tuple, hand: str, unit: str, tmp_path: Path
):
    result = iep_bench(command, *QUICK, *given, "--batching", "height,lookahead+defer", "--out", tmp_path)
    comparisons = report_of(result, tmp_path, command)
    assert [each["phase"] for each in comparisons] == ["train", "inference"] * 2
    assert [each[unit] for each in comparisons] == sorted(each[unit] for each in comparisons)
    for each in comparisons:
        deferred = ["lookahead+defer"] if each["phase"] == "train" else []
        assert [row["name"] for row in each["rows"]] == [PER_INSTANCE, "height", *deferred, hand, "limit"]
        rows = {row["name"]: row for row in each["rows"]}
        assert rows[PER_INSTANCE]["calls"] == each["cells"]
        assert rows["height"]["ratio"] == pytest.approx(each["cells"] / rows["height"]["calls"])
        assert set(rows["height"]["seconds"]) == {"construction", "computation", "total"}
        assert rows["limit"]["share_of_limit"] == 1


def test_pairs_are_measured_one_after_the_other_and_in_a_lazy_scope(tmp_path: Path):
    given = ("--cell", "child-sum", "--batch-sizes", 33, "--batching", "height,lookahead+defer")
    train, inference = report_of(iep_bench("tree-lstm", *QUICK, *given, "--out", tmp_path), tmp_path, "tree-lstm")
    operators = "lookahead+defer, operators"
    assert [row["name"] for row in train["rows"]] == [PER_INSTANCE, "height", "lookahead+defer", operators, "limit"]
    assert [row["name"] for row in inference["rows"]] == [PER_INSTANCE, "height", operators, "limit"]
    calls = {row["name"]: row.get("calls") for row in train["rows"]}
    assert calls["height"] < calls[operators] < 20 * calls[PER_INSTANCE]


def test_trees_of_a_file_are_measured(tmp_path: Path):
    (tmp_path / "train.txt").write_text(SST)
    given = ("--width", 4, "--batch-sizes", 2, "--repeat", 1, "--threads", 1, "--phase", "inference")
    result = iep_bench("tree-lstm", *given, "--sst", tmp_path / "train.txt", "--batching", "lookahead")
    assert result.exit_code == 0, result.output
    assert "6 words, trees of" in result.output
    assert "inference, threads 1, batch 2, cells 8, minibatches 1; milliseconds for 2 trees" in result.output


def test_several_numbers_of_threads_are_measured_each_once():
    given = ("--width", 4, "--leaves", 2, "--repeat", 1, "--words", 9, "--threads", "1,2,2", "--phase", "train")
    result = iep_bench("tree-fc", *given, "--batching", "height")
    assert result.exit_code == 0, result.output
    assert [result.output.count(f"train, threads {count}, leaves 2, cells") for count in (1, 2)] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tree-lstm", "--sst", "{tmp}/none.txt"), ["none.txt: no such file"]),
        (("tree-lstm", "--sst", "{tmp}/train.txt"), ["train.txt: 2 trees, expected at least 256", "--batch-sizes"]),
        (("tagger", "--wikiner", "{tmp}/none"), ["none: no such file"]),
        (("tagger", "--wikiner", "{tmp}/train.txt"), ["train.txt, line 1, token 1"]),
        (("tree-fc", "--out", "{tmp}/train.txt/x"), ["train.txt"]),
        (("tree-fc", "--out", "/proc/x"), ["/proc/x"]),
        (("tree-fc", "--width", "900000000", "--leaves", "2"), ["not enough memory"]),
    ],
)
def test_what_cannot_be_measured_is_named_in_one_line(tmp_path: Path, arguments: tuple[str, ...], words: list[str]):
    (tmp_path / "train.txt").write_text(SST)
    assert_one_error(iep_bench(*(argument.format(tmp=tmp_path) for argument in arguments)), *words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tree-lstm", "--sick", "."), "--sick is not for --cell binary"),
        (("tree-lstm", "--cell", "child-sum", "--sst", "x"), "--sst is not for --cell child-sum"),
        (("tree-lstm", "--sst", "x", "--words", "9"), "--words is not for --sst"),
        (("tagger", "--wikiner", "x", "--words", "9"), "--words is not for --wikiner"),
        (("tree-lstm", "--batching", "lokahead"), "did you mean 'lookahead'?"),
        (("tree-fc", "--batching", "height+bfloat16"), "expected one of sharing, defer"),
        (("tree-fc", "--threads", "some"), "'some'"),
        (("tree-fc", "--leaves", "1"), "1 is not in the range"),
        (("tree-lstm", "--threads", "99999"), "'99999' is not in the range"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: tuple[str, ...], words: str):
    result = iep_bench(*arguments)
    assert result.exit_code == 2
    assert words in result.output
