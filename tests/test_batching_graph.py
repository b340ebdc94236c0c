"""Prefix programs become the graph that a naive recursion finds; invalid programs and graphs are errors."""

import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    MEANING,
    PAD,
    SKIP,
    TERNARY,
    UNARY_A,
    UNARY_B,
    matrix,
    quick,
    toy_programs,
    tree_graph,
)
from hypothesis import example, given, settings

from iep.batching.graph import Graph, graph_from_prefix
from iep.batching.plan import one_column


def naive_graph(tokens_BL, leaf_is_input):
    """Return the nodes and roots that one recursion per example appends in post-order."""
    nodes, roots = [], []
    for example_index, row in enumerate(tokens_BL.tolist()):
        queue = [LEAF if token == PAD else token for token in row if token != SKIP]

        def visit(queue=queue, example_index=example_index):
            op = queue.pop(0) if queue else LEAF
            if op == LEAF and leaf_is_input:
                return example_index
            args = [visit() for _ in range(ARITY_V[op])] or [example_index]
            nodes.append((op, example_index, args))
            return len(tokens_BL) + len(nodes) - 1

        roots.append(visit())
    return nodes, roots


@pytest.mark.parametrize("leaf_is_input", [False, True])
@given(tokens_BL=toy_programs)
@example(tokens_BL=matrix([[]]))
@example(tokens_BL=np.zeros((0, 5), dtype=np.int64))
@example(tokens_BL=matrix([[SKIP, SKIP], [PAD, UNARY_A]]))
@example(tokens_BL=matrix([[TERNARY] * 12]))
@settings(quick, max_examples=150)
def test_graph_equals_a_naive_recursion_over_every_token(tokens_BL, leaf_is_input):
    graph = tree_graph(tokens_BL, leaf_is_input)
    nodes, roots = naive_graph(tokens_BL, leaf_is_input)
    assert graph.num_inputs == len(tokens_BL)
    assert graph.op.tolist() == [op for op, _, _ in nodes]
    assert graph.example.tolist() == [example_index for _, example_index, _ in nodes]
    assert [[slot for slot in row if slot >= 0] for row in graph.args.tolist()] == [args for _, _, args in nodes]
    assert graph.roots.tolist() == roots


def test_token_matrices_of_numpy_and_torch_and_any_integer_width_give_one_graph():
    tokens_BL = matrix([[BINARY_A, UNARY_A, LEAF, LEAF], [UNARY_B]])
    expected = tree_graph(tokens_BL)
    for same in (tokens_BL.astype(np.int32), torch.from_numpy(tokens_BL), torch.from_numpy(tokens_BL).to(torch.int32)):
        graph = graph_from_prefix(same, ARITY_V, **MEANING)
        assert graph.args.tolist() == expected.args.tolist()
        assert graph.op.dtype == np.int64


@pytest.mark.parametrize(
    ("tokens_BL", "message"),
    [
        (matrix([[LEAF], [UNARY_A, UNARY_A, -1]]), "program 1, position 2: token -1, expected 0 to 10"),
        (np.zeros((2, 3)), "expected a matrix of integers"),
    ],
)
def test_invalid_programs_are_errors(tokens_BL, message):
    with pytest.raises(ValueError, match=message):
        graph_from_prefix(tokens_BL, ARITY_V, leaf=LEAF)


@pytest.mark.parametrize(
    ("op", "args", "roots", "message"),
    [
        ([0, 1], [[0], [2]], [2], r"node 1 has arguments \[2\], expected"),
        ([0], [[-1]], [1], r"node 0 has arguments \[-1\], expected"),
        ([0], [[]], [1], r"node 0 has arguments \[\], expected"),
        ([7, 7], [[0, -1], [0, 1]], [2], "nodes of op 7 have different numbers of arguments"),
    ],
    ids=["cycle", "no argument", "no column of arguments", "two arities"],
)
def test_an_invalid_graph_is_an_error(op, args, roots, message):
    with pytest.raises(ValueError, match=message):
        one_column(Graph(1, np.array(op), np.array(args), np.zeros(len(op), dtype=np.int64), np.array(roots)))
