"""The vertex functions' models against the same networks vertex by vertex: outputs and all gradients."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick
from hypothesis import given, settings
from hypothesis import strategies as st

from iep.batching import SCHEDULERS
from iep.workloads.child_sum import ChildSumTreeLSTM
from iep.workloads.sentences import Sentence
from iep.workloads.tagger import Tagger
from iep.workloads.tree_fc import TreeFC
from iep.workloads.tree_lstm import BinaryTreeLSTM
from iep.workloads.trees import Tree, complete_trees, sst_like

WORDS, TAGS, LETTERS = 7, 3, 5

seeds = st.integers(0, 2**32 - 1)


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


def results(model, run):
    model.zero_grad(set_to_none=True)
    output = run()
    (output * torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    dense = {name: grad.to_dense() if grad is not None and grad.is_sparse else grad for name, grad in gradients.items()}
    return {"output": output.detach(), **dense}


def one_by_one(model, samples):
    return torch.cat(
        [model.one(sample) if isinstance(sample, Sentence) else model.one(sample)[None] for sample in samples]
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6), seed=seeds)
@settings(quick, max_examples=6)
def test_every_scheduler_sharing_and_deferral_gives_what_one_sample_after_the_other_does(
    case, dtype, relative, sizes, seed
):
    construct, make = CASES[case]
    torch.manual_seed(0)
    model, samples = construct().to(dtype), make(sizes, np.random.default_rng(seed))
    expected = results(model, lambda: one_by_one(model, samples))
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = model.plan(samples, name, sharing)
        assert_same_gradients(results(model, lambda p=plan, d=defer: model(p, d)), expected, relative)


def assert_same_gradients(actual, expected, relative):
    """As `assert_same`; a part that nothing ran through has no gradient, or one of zeros."""
    unused = {name for name, value in expected.items() if value is None or not value.any()}
    for name in unused:
        assert actual[name] is None or not actual[name].any(), name
    kept = expected.keys() - unused
    assert_same({name: actual[name] for name in kept}, {name: expected[name] for name in kept}, relative)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_results_and_gradients_are_those_of_the_cpu(case):
    construct, make = CASES[case]
    torch.manual_seed(0)
    model, samples = construct().double(), make([7, 3, 5], np.random.default_rng(0))
    expected = results(model, lambda: model(model.plan(samples)))
    there = copy.deepcopy(model).cuda()
    actual = results(there, lambda: there(there.plan(samples).to("cuda")))
    on_cpu = {name: None if value is None else value.cpu() for name, value in actual.items()}
    assert_same_gradients(on_cpu, expected, 1e-9)


def test_sharing_computes_equal_subtrees_and_beginnings_once():
    rng = np.random.default_rng(0)
    trees = complete_trees(3, 4, 1, rng)  # of one word: every subtree of a height is the same
    assert BinaryTreeLSTM(1, 4).plan(trees, sharing=True).graph.num_nodes == 3
    sentences = [Sentence(np.array(words), np.zeros(3, dtype=int)) for words in ([1, 2, 3], [1, 2, 4])]
    plan = Tagger(WORDS, TAGS, None, 4, 3, 2).plan(sentences, sharing=True)
    assert plan.vocabulary.tolist() == [1, 2, 3, 4]
    assert plan.words.graph.num_nodes == 2 * 6 - 2


@pytest.mark.parametrize("case", CASES)
def test_a_copy_of_a_model_runs_with_weights_of_its_own(case):
    construct, make = CASES[case]
    model, samples = construct(), make([4, 5], np.random.default_rng(0))
    plan, copied = model.plan(samples), copy.deepcopy(model)
    before = model(plan)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0)
    assert not copied(plan).any()
    assert torch.equal(model(plan), before)
    assert before.any()


@pytest.mark.parametrize("case", CASES)
def test_a_plan_that_was_sent_to_another_process_runs_the_same(case):
    construct, make = CASES[case]
    model, samples = construct(), make([4, 5], np.random.default_rng(0))
    plan = model.plan(samples)
    assert torch.equal(model(pickle.loads(pickle.dumps(plan))), model(plan))


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_grow_with_the_minibatch(case):
    construct, make = CASES[case]
    model, rng = construct(), np.random.default_rng(0)
    samples = make([6, 6, 6, 6], rng) * 4
    assert len(model.plan(samples).schedule) == len(model.plan(samples[:4]).schedule)


@pytest.mark.parametrize("model", [BinaryTreeLSTM(9, 2), TreeFC(9, 2)])
def test_an_inner_vertex_with_a_word_is_refused(model):
    tree = Tree(np.array([[-1, -1], [-1, -1], [0, 1]]), np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="tree 0, vertex 2 has children and a word, expected words at leaves alone"):
        model.plan([tree])


def test_no_pairs_have_no_scores():
    assert ChildSumTreeLSTM(9, 4, 3, ratings=5)([]).shape == (0, 5)


@pytest.mark.parametrize(("sentences", "message"), [([], "there is no sentence"), ([3, 0], "sentence 1 has no words")])
def test_a_sentence_without_words_is_refused(sentences, message):
    empty = [Sentence(np.zeros(count, int), np.zeros(count, int)) for count in sentences]
    with pytest.raises(ValueError, match=message):
        Tagger(9, 3, None, 4, 3, 2).plan(empty)
