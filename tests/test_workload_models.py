"""The vertex functions' models equal the same networks vertex by vertex: outputs and all gradients."""

import copy
import pickle

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from device_cases import ONE_GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from iep.batching.schedulers import SCHEDULERS
from iep.workloads.binary_trees import BinaryTreeLSTM, TreeFC
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.sentences import Sentence
from iep.workloads.tagger import Tagger
from iep.workloads.trees import Tree, complete_trees, sst_like

WORDS, TAGS, LETTERS = 7, 3, 5


def made_sentences(lengths, rng):
    """Every third word is rare and spelled."""

    def one(length):
        words = rng.integers(1, WORDS, length)
        rare = rng.random(length) < 1 / 3
        letters = tuple(rng.integers(0, LETTERS, rng.integers(1, 5)) if r else np.empty(0, dtype=int) for r in rare)
        return Sentence(np.where(rare, 0, words), rng.integers(0, TAGS, length), letters)

    return [one(length) for length in lengths]


def made_trees(sizes, rng):
    """A lone leaf for a size of one."""
    return [(sst_like(1, WORDS, rng) if size > 1 else complete_trees(1, 1, WORDS, rng))[0] for size in sizes]


CASES = {
    "binary Tree-LSTM": (lambda: BinaryTreeLSTM(WORDS, width=4, classes=3), made_trees),
    "Tree-FC": (
        lambda: TreeFC(WORDS, width=4),
        lambda sizes, rng: [complete_trees(1, size, WORDS, rng)[0] for size in sizes],
    ),
    "tagger": (lambda: Tagger(WORDS, TAGS, None, 4, 3, 2), made_sentences),
    "tagger that spells": (lambda: Tagger(WORDS, TAGS, LETTERS, 4, 3, 2, 3), made_sentences),
}


def case_of(name, sizes, seed=0):
    """A model of float64 and samples."""
    construct, make = CASES[name]
    torch.manual_seed(0)
    return construct().double(), make(sizes, np.random.default_rng(seed))


def results(model, output):
    return with_gradients({"output": output}, dict(model.named_parameters()))


def one_by_one(model, samples):
    found = [model.one(sample) for sample in samples]
    return torch.cat(found) if isinstance(model, Tagger) else torch.stack(found)


@pytest.mark.parametrize("case", CASES)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
    sharing=st.booleans(),
    defer=st.booleans(),
)
@settings(quick, max_examples=10)
def test_every_scheduler_sharing_and_deferral_equals_one_sample_at_a_time(case, sizes, seed, sharing, defer):
    model, samples = case_of(case, sizes, seed)
    expected = results(model, one_by_one(model, samples))
    for name in SCHEDULERS:
        plan = model.plan(samples, name, sharing)
        assert_same(results(model, model(plan, defer)), expected, 1e-9, none_is_zero=True)
        with torch.inference_mode():
            assert_same({"output": model(plan)}, {"output": expected["output"]}, 1e-9)


@ONE_GPU
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_on_a_gpu_are_those_of_the_cpu(case):
    model, samples = case_of(case, [7, 3, 5])
    expected = results(model, model(model.plan(samples)))
    there = copy.deepcopy(model).cuda()
    actual = results(there, there(there.plan(samples).to("cuda")))
    actual = {name: None if value is None else value.cpu() for name, value in actual.items()}
    assert_same(actual, expected, 1e-9, none_is_zero=True)


def test_sharing_computes_equal_subtrees_and_beginnings_once():
    trees = complete_trees(3, 4, 1, np.random.default_rng(0))  # of one word: all subtrees of a height are equal
    assert BinaryTreeLSTM(1, 4).plan(trees, sharing=True).graph.num_nodes == 3
    sentences = [Sentence(np.array(words), np.zeros(3, dtype=int)) for words in ([1, 2, 3], [1, 2, 4])]
    plan = Tagger(WORDS, TAGS, None, 4, 3, 2).plan(sentences, sharing=True)
    assert plan.vocabulary.tolist() == [1, 2, 3, 4]
    assert sum(len(group.nodes) for group in plan.schedule) == 2 * 6 - 2


@pytest.mark.parametrize("case", CASES)
def test_copies_have_weights_of_their_own_and_pickled_plans_run_the_same(case):
    model, samples = case_of(case, [4, 5])
    plan, copied = model.plan(samples), copy.deepcopy(model)
    before = model(plan)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0)
    assert not copied(plan).any()
    assert before.any()
    assert torch.equal(model(pickle.loads(pickle.dumps(plan))), before)


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_grow_with_the_minibatch(case):
    model, samples = case_of(case, [6, 6, 6, 6])
    assert len(model.plan(samples * 4).schedule) == len(model.plan(samples).schedule)


@pytest.mark.parametrize("case", CASES)
def test_a_checkpointed_network_and_a_kept_graph_have_the_same_gradients(case):
    model, samples = case_of(case, [4, 5])
    plan = model.plan(samples)
    expected = results(model, model(plan, False))
    actual = results(model, checkpoint(model, plan, False, use_reentrant=False))
    assert_same(actual, expected, 1e-12, none_is_zero=True)
    for defer in (False, True):
        output = model(plan, defer).sum()
        found = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            output.backward(retain_graph=True)
            found.append({name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None})
        assert_same(*found, 1e-12)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_under_autocast_gradients_are_about_the_same(case, defer):
    construct, make = CASES[case]
    torch.manual_seed(0)
    model, samples = construct(), make([4, 5], np.random.default_rng(0))
    plan = model.plan(samples)
    expected = results(model, model(plan, defer))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(plan, defer)
    assert_same(results(model, output.float()), expected, 0.1, none_is_zero=True)


def test_a_layer_that_is_replaced_is_used():
    model, samples = case_of("binary Tree-LSTM", [4, 5])
    plan = model.plan(samples)
    before = model(plan)
    model.inner = nn.Linear(8, 20).double()
    assert not torch.equal(model(plan), before)


INNER_WORD = Tree(np.array([[-1, -1], [-1, -1], [0, 1]]), np.array([1, 2, 3]))
SENTENCES = [Sentence(np.zeros(count, int), np.zeros(count, int)) for count in (3, 0)]


@pytest.mark.parametrize(
    ("model", "samples", "message"),
    [
        (BinaryTreeLSTM(9, 2), [INNER_WORD], "tree 0, vertex 2 has children and a word, expected words at leaves"),
        (TreeFC(9, 2), [INNER_WORD], "tree 0, vertex 2 has children and a word, expected words at leaves"),
        (Tagger(9, 3, None, 4, 3, 2), [], "there is no sentence"),
        (Tagger(9, 3, None, 4, 3, 2), SENTENCES, "sentence 1 has no words"),
    ],
)
def test_samples_without_words_or_with_too_many_are_errors(model, samples, message):
    with pytest.raises(ValueError, match=message):
        model.plan(samples)


def test_no_pairs_have_no_scores():
    assert ChildSumTreeLSTM(9, 4, 3, ratings=5)([]).shape == (0, 5)
