"""`python -m benchmarks`: every comparison has its rows, its ways compute the same, and errors are one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batching_cases import assert_same, with_gradients
from bench_cases import laboratory, report_of
from tiny_data import assert_one_error
from torch import nn

from benchmarks import dynet, experts
from benchmarks.experts import BATCHED, ONE_BY_ONE, Experts, uniform_experts
from benchmarks.networks import PER_INSTANCE, ways_of
from benchmarks.tagger import PACKED, UNKNOWN_WORD, Tagger, tagger_ways, wikiner_like
from benchmarks.trees import (
    BinaryTreeLSTM,
    ChildSumTreeLSTM,
    Tree,
    TreeFC,
    complete_trees,
    scope_ways,
    sick_like,
    sst_like,
    tree_from_parents,
)
from iep.bench.strategy import parse_strategies

WORDS, TAGS, LETTERS = 20, 9, 5
LONE = Tree(np.array([[-1, -1]]), np.array([3]), 2)
QUICK = ("--repeat", 1, "--threads", 1, "--width", 4, "--words", 30)


# Networks


def sentences(rng: np.random.Generator) -> list:
    return wikiner_like(7, WORDS, TAGS, LETTERS, rng)


SAMPLES: dict[str, tuple[Callable[[], nn.Module], Callable, Callable[[np.random.Generator], list]]] = {
    "binary": (lambda: BinaryTreeLSTM(WORDS, 6), ways_of, lambda rng: [*sst_like(9, WORDS, rng), LONE]),
    "child-sum": (lambda: ChildSumTreeLSTM(WORDS, width=6), scope_ways, lambda rng: sick_like(5, WORDS, rng)),
    "full of 7": (lambda: TreeFC(WORDS, 6), ways_of, lambda rng: complete_trees(3, 7, WORDS, rng)),
    "tagger": (lambda: Tagger(WORDS, TAGS, None, width=6), tagger_ways, sentences),
    "tagger that spells": (lambda: Tagger(WORDS, TAGS, LETTERS, width=6), tagger_ways, sentences),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_way_computes_the_same_loss_and_gradients(name: str):
    torch.manual_seed(0)
    make, ways_of_model, draw = SAMPLES[name]
    model, samples, losses, gradients = make(), draw(np.random.default_rng(0)), [], []
    strategies = parse_strategies("height,lookahead+sharing,lookahead+defer")
    for each, way in ways_of_model(model, strategies).items():
        way.compute(way.construct(samples), False)
        losses.append(float(way.compute(way.construct(samples), True)))
        if each != PACKED:
            gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    for other in gradients[1:]:
        for weight, expected in gradients[0].items():
            dense = [each.to_dense() for each in (other[weight], expected) if each is not None]
            assert len(dense) != 1
            torch.testing.assert_close(*(dense or (0, 0)), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("command", "given", "own", "unit"),
    [
        ("tree-lstm", ("--batch-sizes", 33), [], "batch"),
        ("tree-fc", ("--leaves", "8,2", "--batch-size", 3), [], "leaves"),
        ("tagger", ("--batch-sizes", 33), [PACKED], "batch"),
    ],
)
def test_every_way_is_measured_in_its_phases(command: str, given: tuple, own: list[str], unit: str, tmp_path: Path):
    result = laboratory(command, *QUICK, *given, "--batching", "height,lookahead+defer", "--out", tmp_path)
    comparisons = report_of(result, tmp_path, command)
    assert [each["phase"] for each in comparisons] == ["train", "inference"] * (len(comparisons) // 2)
    assert [each[unit] for each in comparisons] == sorted(each[unit] for each in comparisons)
    for each in comparisons:
        deferred = ["lookahead+defer"] if each["phase"] == "train" else []
        assert [row["name"] for row in each["rows"]] == [PER_INSTANCE, "height", *deferred, *own]
        height = each["rows"][1]
        assert height["facts"]["ratio"] == pytest.approx(each["cells"] / height["facts"]["calls"])
        assert set(height["seconds"]) == {"construction", "computation", "total"}


@pytest.mark.skipif(dynet.dy is not None, reason="DyNet is installed")
def test_without_dynet_it_says_what_to_install():
    assert_one_error(laboratory("dynet"), "DyNet is not installed: pip install dynet38")


@pytest.mark.skipif(dynet.dy is None, reason="needs dynet38")
@pytest.mark.parametrize("network", dynet.NETWORKS)
def test_dynet_computes_the_same_losses_and_has_a_row(network: str):
    result = laboratory("dynet", "--network", network, "--batch-sizes", 2, "--repeat", 1)
    assert result.exit_code == 0, result.output
    assert "\nDyNet " in result.stdout


# Generated data


def test_vertices_of_dependency_trees_are_numbered_children_first():
    tree = tree_from_parents(np.array([1, -1, 1, 2]), np.array([5, 6, 7, 8]))
    assert tree.children.tolist() == [[-1, -1], [-1, -1], [1, -1], [0, 2]]
    assert tree.words.tolist() == [5, 8, 7, 6]


def test_generated_sentiment_trees_are_binary_and_as_long_as_the_treebanks_sentences():
    trees = sst_like(800, 1_000, np.random.default_rng(0))
    leaves = np.array([tree.num_leaves for tree in trees])
    assert all(tree.children.shape == (2 * count - 1, 2) for tree, count in zip(trees, leaves, strict=True))
    assert (leaves.mean(), leaves.std()) == pytest.approx((19.1, 9.3), abs=1.5)
    assert all(((tree.words >= 0) == (tree.children[:, 0] < 0)).all() for tree in trees)


def test_generated_sentences_are_as_long_as_wikiners_and_spell_the_rare_words_alone():
    sentences = wikiner_like(500, 1_000, 9, 60, np.random.default_rng(0))
    assert abs(np.mean([len(sentence.words) for sentence in sentences]) - 24.5) < 1.5
    words = np.concatenate([sentence.words for sentence in sentences])
    assert sum(len(sentence.spelled) for sentence in sentences) == (words == UNKNOWN_WORD).sum()
    assert 0.06 < (words == UNKNOWN_WORD).mean() < 0.1
    assert words.max() < 1_000


# Experts


def test_every_number_of_experts_and_minibatch_size_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(experts, "ENOUGH_TOKENS", 5)
    given = ("--experts", "3,1", "--tokens", "2,7", "--width", 4, 8, 12, "--repeat", 2)
    comparisons = report_of(laboratory("moe", *given, "--out", tmp_path), tmp_path, "moe")
    found = [(each["phase"], each["experts"], each["tokens"]) for each in comparisons]
    assert found == [(p, e, size) for p in ("train", "inference") for e in (1, 3) for size in (2, 7)]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == [ONE_BY_ONE, BATCHED]
        assert each["active"] == uniform_experts(each["tokens"], each["experts"], 1, seed=0).unique().numel()


@pytest.mark.parametrize("width", [(4, 8, 12), (3, 5, 7)])  # with and without a grouped product
@pytest.mark.parametrize("k", [1, 3])
def test_batched_experts_give_the_outputs_and_gradients_of_one_token_at_a_time(k: int, width: tuple[int, int, int]):
    torch.manual_seed(0)
    layer, chosen = Experts(*width, 5), uniform_experts(9, 5, k, seed=1)
    x, gates = torch.randn(9, width[0], requires_grad=True), torch.rand(9, k, requires_grad=True)
    leaves = {"tokens": x, "gates": gates, **dict(layer.named_parameters())}
    one_by_one = with_gradients({"outputs": layer.one_by_one(x, chosen, gates)}, leaves)
    assert_same(with_gradients({"outputs": layer(x, chosen, gates)}, leaves), one_by_one, 1e-4, rounding=1e-5)


# The loader


def test_every_source_has_a_row_and_generated_data_are_removed(tmp_path: Path):
    given = ("--images", 3, "--batch-size", 8, "--workers", "0,1", "--repeat", 2, "--out", tmp_path)
    comparisons = report_of(laboratory("loader", *given), tmp_path, "loader")
    assert [each["workers"] for each in comparisons] == [0, 1]
    names = [f"{source}, {order} order" for source in ("cold", "warm") for order in ("image", "random")]
    for each in comparisons:
        assert [row["name"] for row in each["rows"]] == names
        assert all(row["facts"]["GB/s"] > 0 and row["seconds"]["batch"]["repeats"] == 2 for row in each["rows"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("moe", "--experts", "3,2", "--k", 3), "--k is 3, expected at most 2"),
        (("tree-fc", "--batching", "lookahed"), "did you mean 'lookahead'"),
    ],
)
def test_options_that_do_not_fit_are_errors_with_their_reason(arguments: tuple[Any, ...], words: str):
    result = laboratory(*arguments)
    assert result.exit_code == (1 if "moe" in arguments else 2)
    assert words in " ".join(result.stderr.split())
