"""Networks of messages for lists, trees and graphs equal a walk in plain PyTorch, and learn; their data are right."""

import pickle

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iep.asynchronous.drivers import run_virtual
from iep.asynchronous.trainer import AsynchronousTrainer, Instance
from iep.batching.execute import execute
from iep.workloads import molecules as chemistry
from iep.workloads.deduction import AFRAID, IS, Deducer, deductions
from iep.workloads.gated_graphs import TypedGraph
from iep.workloads.list_reduction import DIGITS, ListReducer, list_reductions
from iep.workloads.molecules import DEVIATION, MEAN, PolarityRegressor, molecules, polarity
from iep.workloads.sentiment import VALUES, SentimentTreeLSTM, sentiment_trees
from iep.workloads.trees import Tree


def random_graphs(number: int, rng: np.random.Generator, kinds: int = 2) -> list[TypedGraph]:
    """Return graphs with loops, parallel edges and vertices of many edges, each of which is the target of one."""

    def one() -> TypedGraph:
        vertices = int(rng.integers(1, 8))
        targets = np.concatenate([np.arange(vertices), rng.integers(min(vertices, 2), size=rng.integers(9))])
        edges = [rng.integers(vertices, size=len(targets)), rng.integers(4, size=len(targets)), targets]
        return TypedGraph(rng.integers(kinds, size=vertices), np.column_stack(edges))

    return [one() for _ in range(number)]


CASES = {
    "list reduction": (lambda: ListReducer(5, layers=1), list_reductions),
    "list reduction in layers": (lambda: ListReducer(5, layers=3), list_reductions),
    "sentiment": (lambda: SentimentTreeLSTM(5), sentiment_trees),
    "deduction": (lambda: Deducer(5), lambda number, rng: deductions(number, rng, 7)),
    "vertices of random graphs": (lambda: Deducer(5, steps=3), random_graphs),
    "molecules": (lambda: PolarityRegressor(6), molecules),
    "random graphs": (lambda: PolarityRegressor(6, steps=2), random_graphs),
}
LEARN = [name for name in CASES if "random" not in name]


def case_of(name: str, number: int, seed: int = 0) -> tuple[nn.Module, list]:
    """Return a network of float64 and samples."""
    construct, make = CASES[name]
    torch.manual_seed(0)
    return construct().double(), make(number, np.random.default_rng(seed))


@pytest.mark.parametrize("case", CASES)
@given(number=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), workers=st.integers(1, 7))
@settings(quick, max_examples=25)
def test_batched_and_placed_networks_equal_one_sample_at_a_time(case: str, number: int, seed: int, workers: int):
    model, samples = case_of(case, number, seed)
    leaves = dict(model.named_parameters())
    one_by_one = torch.cat([model.one(each).reshape(-1) for each in samples])
    expected = with_gradients({"output": one_by_one}, leaves)
    assert_same(with_gradients({"output": model(samples).flatten()}, leaves), expected, 1e-9, none_is_zero=True)
    plan = model.plan(samples, model.placement(workers))
    (placed,) = execute(plan, dict(enumerate(model.ops)), model.inputs(samples))
    assert_same(with_gradients({"output": placed.flatten()}, leaves), expected, 1e-9, none_is_zero=True)


@pytest.mark.parametrize("case", LEARN)
def test_asynchronous_training_of_one_instance_learns_as_execute_does(case: str):
    model, samples = case_of(case, 12)
    plain, _ = case_of(case, 0)
    loss, parts = plain.loss(samples), [samples[:6], samples[6:]]
    before = loss(plain(samples)).item()
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    for part in [part for _ in range(10) for part in parts]:
        optimizer.zero_grad()
        plain.loss(part)(plain(part)).backward()
        optimizer.step()
    placement = model.placement(3)
    instances = [Instance(model.plan(part, placement), model.inputs(part), model.loss(part)) for part in parts]
    trainer = AsynchronousTrainer(
        dict(enumerate(model.ops)), lambda weights: torch.optim.Adam(weights, 0.01), 3, flush_every=1
    )
    trainer.run(instances * 10, run_virtual)
    assert loss(plain(samples)).item() < 0.95 * before
    for name, weight in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), weight, rtol=1e-6, atol=1e-9, msg=name)
    assert pickle.loads(pickle.dumps(model)).score(samples) == pytest.approx(plain.score(samples), abs=1e-6)


@pytest.mark.parametrize("case", [name for name in LEARN if "list" not in name])
def test_the_op_with_the_most_weights_has_a_worker_of_its_own(case: str):
    model, _ = case_of(case, 0)
    weights = {op: sum(each.numel() for each in module.parameters()) for op, module in enumerate(model.ops)}
    for workers in range(1, 5):
        placed = model.placement(workers).ops
        heaviest = max(list(placed), key=lambda op: weights[op] * (type(model.ops[op]) is not nn.Embedding))
        beside = [op for op, worker in placed.items() if worker == placed[heaviest] and weights[op] and op != heaviest]
        assert set(placed) == set(weights)
        assert bool(beside) == (workers == 1)


@pytest.mark.parametrize("case", LEARN)
def test_a_score_is_that_of_one_sample_at_a_time(case: str):
    model, samples = case_of(case, 20)
    outputs = [model.one(each).detach() for each in samples]
    if case == "molecules":
        answers = torch.tensor([(each.answer - MEAN) / DEVIATION for each in samples])
        expected = (torch.cat(outputs) - answers).abs().mean().item()
    else:
        answers = [each.labels if case == "sentiment" else [each.answer] for each in samples]
        outputs = [output if case == "sentiment" else output.view(1, -1) for output in outputs]
        expected = np.mean(torch.cat([output.argmax(dim=1) for output in outputs]).numpy() == np.concatenate(answers))
    assert model.score(samples) == pytest.approx(expected, abs=1e-6)


def test_answers_are_the_reductions_modulo_ten():
    by_hand = [sum, min, max, lambda digits: (2 * sum(digits) + len(digits)) // (2 * len(digits))]
    sequences = list_reductions(400, np.random.default_rng(0))
    assert {int(each.tokens[0]) - DIGITS for each in sequences} == {0, 1, 2, 3}
    for each in sequences:
        kind, *digits = each.tokens.tolist()
        assert each.answer == by_hand[kind - DIGITS](digits) % 10


def test_a_deduction_follows_two_facts_from_the_animal_that_is_named():
    for graph in deductions(50, np.random.default_rng(0), 9):
        facts = {kind: {} for kind in range(4)}
        for source, kind, target in graph.edges.tolist():
            facts[kind].setdefault(source, set()).add(target)
        (named,) = np.flatnonzero(graph.kinds)
        (species,) = facts[IS][named]
        assert facts[AFRAID][species] == {graph.answer} != {species}
        for kind in (IS, AFRAID):  # every fact can be followed in both directions
            assert {(a, b) for a in facts[kind] for b in facts[kind][a]} == {
                (a, b) for b in facts[kind + 1] for a in facts[kind + 1][b]
            }
        assert min(graph.in_degrees) > 0
    with pytest.raises(ValueError, match="2 vertices, expected an animal and two species or more"):
        deductions(1, np.random.default_rng(0), 2)


def test_molecules_have_full_valences_and_many_sizes():
    found = molecules(300, np.random.default_rng(0))
    assert [len(each.kinds) for each in found] == sorted(len(each.kinds) for each in found)
    assert 20 < len(found[-1].kinds) <= 29
    for each in found:
        orders = np.bincount(each.edges[:, 0], chemistry.ORDERS[each.edges[:, 1]])
        assert orders.tolist() == np.array(chemistry.VALENCES)[each.kinds].tolist()
        pairs = list(map(frozenset, each.edges[:, [0, 2]].tolist()))
        assert {pairs.count(pair) for pair in pairs} == {2}
    assert {kind for each in found for kind in each.edges[:, 1].tolist()} == {0, 1, 2, 3}
    answers = [each.answer for each in found]
    assert np.mean(answers) == pytest.approx(MEAN, abs=0.2)
    assert np.std(answers) == pytest.approx(DEVIATION, abs=0.1)


def test_the_polarity_of_a_bond_is_that_of_charges_that_flow_in_rounds():
    first, second = chemistry.ELECTRONEGATIVITIES[[chemistry.H, chemistry.F]]
    charge = 0.0  # of hydrogen; fluorine has the negative charge
    for share in (0.5, 0.25, 0.125, 0.0625):
        charge += 0.1 * share * ((second - charge) - (first + charge))
    bond = np.array([[0, 1, chemistry.SINGLE]])
    assert polarity(np.array([chemistry.H, chemistry.F]), bond) == pytest.approx(1.5 * 2 * charge)
    assert polarity(np.array([chemistry.H, chemistry.H]), bond) == 0


def value_of(tree: Tree, vertex: int) -> int | None:
    children = [child for child in tree.children[vertex].tolist() if child >= 0]
    if not children:
        return VALUES[tree.words[vertex] % len(VALUES)]
    values = [value_of(tree, child) for child in children]
    if None in values:
        values.remove(None)
        return -(values[0] or 0)
    return int(np.clip(sum(values), -2, 2))


def test_labels_of_phrases_are_sums_that_some_words_negate():
    trees = sentiment_trees(40, np.random.default_rng(0))
    assert [len(each) for each in trees] == sorted(map(len, trees))
    for tree in trees:
        assert tree.labels.tolist() == [2 + (value_of(tree, vertex) or 0) for vertex in range(len(tree))]
        assert tree.label == tree.labels[-1]
    assert set(np.concatenate([tree.labels for tree in trees])) == {0, 1, 2, 3, 4}
