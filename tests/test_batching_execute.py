import itertools

import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    MEANING,
    UNARY_A,
    UNARY_B,
    ToyModule,
    assert_same,
    matrix,
    quick,
    results,
    toy_modules,
    toy_programs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import images_graph, random_dag, tree_graph
from torch import nn

from iep.batching import SCHEDULERS, Graph, Group, execute, lay_out, make_schedule, run_prefix, share


def run_graph(graph, scheduler, modules, inputs, defer=False):
    return execute(lay_out(graph, make_schedule(graph, scheduler)), modules, inputs, defer)


def batched(tokens_BL, modules, inputs, scheduler, leaf_is_input=False, sharing=False, input_B=None, defer=False):
    graph = tree_graph(tokens_BL, leaf_is_input, input_B)
    return run_graph(share(graph) if sharing else graph, scheduler, modules, inputs, defer)


def one_by_one(tokens_BL, modules, inputs, leaf_is_input=False, input_B=None):
    def run(token, *args):
        return modules[token](*args)

    inputs = inputs if input_B is None else inputs[input_B]
    values = [
        run_prefix(tokens, lambda token: ARITY_V[token], run, value, leaf_is_input=leaf_is_input, **MEANING)
        for tokens, value in zip(tokens_BL.tolist(), inputs.split(1), strict=True)
    ]
    return torch.cat(values)


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@given(tokens_BL=toy_programs, leaf_is_input=st.booleans(), examples_an_input=st.integers(1, 4))
@settings(quick, max_examples=20)
def test_every_scheduler_sharing_and_deferral_matches_the_reference_on_outputs_and_all_gradients(
    dtype, relative, tokens_BL, leaf_is_input, examples_an_input
):
    modules = toy_modules(dtype=dtype)
    input_B = np.arange(len(tokens_BL)) // examples_an_input
    inputs = torch.randn(input_B[-1] + 1, 3, dtype=dtype)
    expected = results(lambda x: one_by_one(tokens_BL, modules, x, leaf_is_input, input_B), modules, inputs)
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):

        def run(x, name=name, options=(sharing, input_B, defer)):
            return batched(tokens_BL, modules, x, name, leaf_is_input, *options)

        assert_same(results(run, modules, inputs), expected, relative)


def test_the_comparison_notices_swapped_arguments():
    modules, inputs = toy_modules(), torch.randn(1, 3, dtype=torch.float64)
    there = results(lambda x: one_by_one(matrix([[BINARY_A, UNARY_A, LEAF, LEAF]]), modules, x), modules, inputs)
    swapped = results(lambda x: one_by_one(matrix([[BINARY_A, LEAF, UNARY_A, LEAF]]), modules, x), modules, inputs)
    with pytest.raises(AssertionError, match="output differs"):
        assert_same(swapped, there, 1e-9)


def test_binary_arguments_go_in_by_position_though_the_second_is_ready_first():
    rows = [[BINARY_A, *[UNARY_A] * 4, LEAF, LEAF], [BINARY_A, LEAF, *[UNARY_A] * 4, LEAF]]
    modules = {LEAF: lambda x: x, UNARY_A: lambda x: 10 * x, BINARY_A: lambda x, y: x - y}
    for name in SCHEDULERS:
        out = batched(matrix(rows), modules, torch.tensor([[1.0], [2.0]]), name)
        assert out.tolist() == [[9999.0], [2.0 - 20000.0]]


def test_one_module_call_per_group_with_its_rows_in_the_order_of_the_nodes():
    calls = []

    def record(op):
        def run(*args):
            calls.append((op, [x[:, 0].tolist() for x in args]))
            return args[0] + (100 if op == UNARY_A else 0)

        return run

    modules = {op: record(op) for op in (LEAF, UNARY_A, UNARY_B, BINARY_A)}
    rows = [[BINARY_A, UNARY_A, LEAF, LEAF], [BINARY_A, LEAF, UNARY_A, LEAF], [UNARY_B, LEAF]]
    out = batched(matrix(rows), modules, torch.tensor([[1.0], [2.0], [3.0]]), "improved")
    assert calls == [
        (LEAF, [[1.0, 2.0]]),
        (LEAF, [[1.0, 2.0, 3.0]]),
        (UNARY_A, [[1.0, 2.0]]),
        (UNARY_B, [[3.0]]),
        (BINARY_A, [[101.0, 2.0], [1.0, 102.0]]),
    ]
    assert out.tolist() == [[101.0], [2.0], [3.0]]


# Inputs 0 and 1; nodes: 2 = A(0), 3 = B(2), 4 = binary(2, 3), 5 = binary(4, 2), 6 = B(1), unused.
SHARED = Graph(
    num_inputs=2,
    op=np.array([UNARY_A, UNARY_B, BINARY_A, BINARY_A, UNARY_B]),
    args=np.array([[0, -1], [2, -1], [2, 3], [4, 2], [1, -1]]),
    example=np.array([0, 0, 0, 1, 1]),
    roots=np.array([4, 5, 1, 4]),
)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_node_with_several_takers_runs_once_and_gathers_all_their_gradients(name):
    modules = toy_modules()

    def by_hand(x):
        a, b, binary = modules[UNARY_A], modules[UNARY_B], modules[BINARY_A]
        two = a(x[:1])
        four = binary(two, b(two))
        return torch.cat([four, binary(four, two), x[1:], four])

    inputs = torch.randn(2, 3, dtype=torch.float64)
    expected = results(by_hand, modules, inputs)
    actual = results(lambda x: run_graph(SHARED, name, modules, x), modules, inputs)
    assert_same(actual, expected, 1e-9)


def zeros_for_none(gradients, others):
    """`gradients`, None as zeros where the others are not None."""
    missing = {key for key, value in gradients.items() if value is None and others[key] is not None}
    return gradients | {key: torch.zeros_like(others[key]) for key in missing}


def test_a_module_may_work_in_place_detach_or_hand_its_argument_on_and_the_result_may_be_changed():
    modules = toy_modules()
    inputs = torch.randn(2, 3, dtype=torch.float64)
    rows = matrix([[UNARY_A, UNARY_B, BINARY_A, LEAF, UNARY_A, LEAF], [UNARY_B, UNARY_A, LEAF]])

    def in_place(x):
        return x.mul_(2).sub_(1)

    for unary in (in_place, lambda x: x, lambda x: x.detach(), lambda x: x.view(-1).view(x.shape)):
        own = nn.ModuleDict({str(op): modules[op] for op in (LEAF, UNARY_A, BINARY_A)})
        runs = {op: modules[op] for op in (LEAF, UNARY_A, BINARY_A)} | {UNARY_B: unary}
        apart = runs | {UNARY_B: lambda x, unary=unary: unary(x.clone())}
        expected = results(lambda x, runs=apart: one_by_one(rows, runs, x).relu(), own, inputs)
        actual = results(lambda x, runs=runs: batched(rows, runs, x, "lookahead").relu_(), own, inputs)
        assert_same(zeros_for_none(actual, expected), zeros_for_none(expected, actual), 1e-9)


def test_inputs_may_lie_in_memory_in_any_way():
    modules = {LEAF: lambda x: x, UNARY_A: lambda x: 3 * x, BINARY_A: lambda x, y: x - 2 * y}
    rows = matrix([[BINARY_A, UNARY_A, LEAF, LEAF], [UNARY_A, LEAF]])
    whole = torch.randn(2, 4, 6, 5)
    for inputs in (whole, whole.transpose(1, 3), whole[:, :, ::2], whole.contiguous(memory_format=torch.channels_last)):
        out = batched(rows, modules, inputs, "lookahead")
        torch.testing.assert_close(out, torch.stack([inputs[0], 3 * inputs[1]]))


def test_results_are_kept_in_the_inputs_type_and_refused_where_it_cannot_hold_them():
    rows = matrix([[UNARY_A, LEAF]])
    inputs = torch.ones(1, 2)
    out = batched(rows, {LEAF: lambda x: x, UNARY_A: lambda x: x.double() / 3}, inputs, "vanilla")
    assert out.dtype == inputs.dtype
    with pytest.raises(ValueError, match=f"op {UNARY_A} returned torch.float32, expected what torch.int64 can hold"):
        batched(rows, {LEAF: lambda x: x, UNARY_A: lambda x: x + 0.5}, inputs.long(), "vanilla")


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_any_graph_matches_a_walk_and_what_leads_to_no_root_gets_no_gradient(seed, defer):
    graph = random_dag(seed, num_nodes=25)
    modules = nn.ModuleList(ToyModule(1 + op % 2, 3) for op in range(5)).double()
    inputs = torch.randn(graph.num_inputs, 3, dtype=torch.float64)

    def walk(x):
        values = {}

        def value(slot):
            if slot < graph.num_inputs:
                return x[slot : slot + 1]
            if slot not in values:
                node = slot - graph.num_inputs
                args = [value(arg) for arg in graph.args[node].tolist() if arg >= 0]
                values[slot] = modules[graph.op[node]](*args)
            return values[slot]

        return torch.cat([value(root) for root in graph.roots.tolist()])

    expected = results(walk, modules, inputs)
    for name in SCHEDULERS:
        actual = results(lambda x, name=name: run_graph(graph, name, modules, x, defer), modules, inputs)
        if name == "vanilla":
            assert_same(actual, expected, 1e-9)
        else:  # what leads to no root may be in one call with what does
            assert_same(actual, zeros_for_none(expected, actual), 1e-9)


def test_programs_that_are_all_one_leaf_return_the_inputs_themselves():
    inputs = torch.randn(3, 2)
    assert batched(matrix([[LEAF]] * 3), {}, inputs, "improved", leaf_is_input=True).equal(inputs)


def test_no_examples_at_all_are_refused():
    with pytest.raises(ValueError, match="0 inputs for a graph of 0 inputs and 0 roots"):
        batched(np.zeros((0, 4), dtype=np.int64), toy_modules(), torch.zeros(0, 3), "improved")


def test_another_number_of_inputs_than_the_graph_has_is_refused():
    with pytest.raises(ValueError, match="3 inputs for a graph of 2 inputs"):
        batched(matrix([[LEAF], [LEAF]]), toy_modules(), torch.zeros(3, 3), "improved")


@pytest.mark.parametrize(("module", "shape"), [(lambda x: x[:1], r"\(1, 3\)"), (lambda x: x[:, :1], r"\(2, 1\)")])
def test_a_module_that_returns_another_shape_is_named(module, shape):
    modules = {LEAF: lambda x: x, UNARY_A: module}
    with pytest.raises(ValueError, match=rf"op 6 returned {shape} for a group of 2, expected \(2, 3\)"):
        batched(matrix([[UNARY_A, LEAF]] * 2), modules, torch.zeros(2, 3), "improved")


def test_a_schedule_can_be_written_by_hand():
    graph = images_graph([[UNARY_A, LEAF]] * 2)
    schedule = (Group(UNARY_A, np.array([1])), Group(UNARY_A, np.array([0])))
    out = execute(lay_out(graph, schedule), {UNARY_A: lambda x: -x}, torch.tensor([[1.0], [2.0]]))
    assert out.tolist() == [[-1.0], [-2.0]]
