import itertools

import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    PAD,
    SKIP,
    UNARY_A,
    UNARY_B,
    assert_same,
    matrix,
    quick,
    results,
    toy_modules,
    toy_programs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from iep.batching import SCHEDULERS, Graph, Group, execute, graph_from_prefix, lay_out, make_schedule, run_prefix, share

MEANING = {"leaf": LEAF, "skip": SKIP, "pad": PAD}


def run_graph(graph, scheduler, modules, inputs, defer=False):
    return execute(lay_out(graph, make_schedule(graph, scheduler)), modules, inputs, defer)


def batched(tokens_BL, modules, inputs, scheduler, leaf_is_input=False, sharing=False, input_B=None, defer=False):
    graph = graph_from_prefix(tokens_BL, ARITY_V, leaf_is_input=leaf_is_input, input_B=input_B, **MEANING)
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
    graph = graph_from_prefix(matrix([[UNARY_A, LEAF]] * 2), ARITY_V, leaf_is_input=True, **MEANING)
    schedule = (Group(UNARY_A, np.array([1])), Group(UNARY_A, np.array([0])))
    out = execute(lay_out(graph, schedule), {UNARY_A: lambda x: -x}, torch.tensor([[1.0], [2.0]]))
    assert out.tolist() == [[-1.0], [-2.0]]
