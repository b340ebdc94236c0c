import numpy as np
import pytest
import torch
from batching_cases import BINARY_A, LEAF, UNARY_A, UNARY_B, assert_same, quick, results, toy_modules, toy_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import images_graph

from iep.batching import sharing
from iep.batching.execute import execute
from iep.batching.plan import make_plan
from iep.batching.schedulers import make_schedule
from iep.batching.sharing import share


def meanings(graph):
    """What every slot computes, written out: nested tuples of ops and inputs."""
    written = list(range(graph.num_inputs))
    for op, args in zip(graph.op.tolist(), graph.args.tolist(), strict=True):
        written.append((op, *(written[slot] for slot in args if slot >= 0)))
    return written


@given(tokens_BL=toy_programs, examples_an_input=st.integers(1, 4))
@settings(quick, max_examples=60)
def test_sharing_keeps_one_of_equal_subtrees_and_what_every_root_computes(tokens_BL, examples_an_input):
    graph = images_graph(tokens_BL, np.arange(len(tokens_BL)) // examples_an_input)
    shared = share(graph)
    before, after = meanings(graph), meanings(shared)
    assert len(set(after)) == len(after)
    assert set(after) == set(before)
    assert [after[root] for root in shared.roots] == [before[root] for root in graph.roots]


def test_equal_programs_are_run_once_for_each_image():
    program = [BINARY_A, UNARY_A, LEAF, UNARY_B, UNARY_A, LEAF]
    shared = share(images_graph([program] * 3, np.array([0, 0, 1])))
    assert shared.num_inputs == 2
    assert shared.op.tolist() == [UNARY_A, UNARY_B, BINARY_A] * 2
    assert shared.args.tolist() == [[0, -1], [2, -1], [2, 3], [1, -1], [5, -1], [5, 6]]
    assert shared.example.tolist() == [0, 0, 0, 2, 2, 2]
    assert shared.roots.tolist() == [4, 4, 7]


def test_nodes_with_swapped_arguments_are_not_shared():
    shared = share(images_graph([[BINARY_A, UNARY_A, LEAF, LEAF], [BINARY_A, LEAF, UNARY_A, LEAF]], np.array([0, 0])))
    assert shared.op.tolist() == [UNARY_A, BINARY_A, BINARY_A]


def test_sharing_twice_is_sharing_once():
    shared = share(images_graph([[UNARY_A, LEAF], [UNARY_B, UNARY_A, LEAF]], np.array([0, 0])))
    again = share(shared)
    for name in ("op", "args", "example", "roots"):
        np.testing.assert_array_equal(getattr(again, name), getattr(shared, name))


def test_a_graph_without_nodes_can_be_shared():
    assert share(images_graph([[LEAF], [LEAF]])).roots.tolist() == [0, 1]


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=30)
def test_sharing_is_the_same_where_slots_are_too_many_for_one_key(tokens_BL):
    graph = images_graph(tokens_BL, np.zeros(len(tokens_BL), dtype=np.int64))
    expected = share(graph)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LARGEST", 100)
        squeezed = share(graph)
    np.testing.assert_array_equal(squeezed.args, expected.args)
    np.testing.assert_array_equal(squeezed.roots, expected.roots)


def test_gradients_from_all_uses_of_a_shared_result_add_up():
    chain = [UNARY_A, UNARY_B, LEAF]
    rows = [[BINARY_A, *chain, *chain]] * 5 + [chain] * 3
    modules, inputs = toy_modules(), torch.randn(1, 3, dtype=torch.float64)
    plain = images_graph(rows, np.zeros(8, dtype=np.int64))
    runs = []
    for graph in (plain, share(plain)):
        plan = make_plan(graph, make_schedule(graph, "improved"))
        runs.append(results(lambda x, p=plan: execute(p, modules, x), modules, inputs))
    assert_same(runs[1], runs[0], 1e-12)
