import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    OTHER_LEAF,
    PAD,
    SKIP,
    TERNARY,
    UNARY_A,
    UNARY_B,
    UNARY_END,
    matrix,
    quick,
    toy_programs,
)
from hypothesis import example, given, settings

from iep.batching.graph import Graph, graph_from_prefix


def make(rows, leaf_is_input=False):
    tokens_BL = rows if isinstance(rows, (np.ndarray, torch.Tensor)) else matrix(rows)
    return graph_from_prefix(tokens_BL, ARITY_V, leaf=LEAF, skip=SKIP, pad=PAD, leaf_is_input=leaf_is_input)


def naive_graph(tokens_BL, leaf_is_input):
    """One recursion per example, appending nodes to a list in post-order."""
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
@example(tokens_BL=matrix([[SKIP, SKIP], [PAD, UNARY_A]]))
@example(tokens_BL=matrix([[TERNARY] * 12]))
@settings(quick, max_examples=150)
def test_graph_equals_a_naive_recursion_over_every_token(tokens_BL, leaf_is_input):
    graph = make(tokens_BL, leaf_is_input)
    nodes, roots = naive_graph(tokens_BL, leaf_is_input)
    assert graph.num_inputs == len(tokens_BL)
    assert graph.op.tolist() == [op for op, _, _ in nodes]
    assert graph.example.tolist() == [example_index for _, example_index, _ in nodes]
    assert [[slot for slot in row if slot >= 0] for row in graph.args.tolist()] == [args for _, _, args in nodes]
    assert graph.roots.tolist() == roots


def test_a_binary_tree_is_numbered_in_post_order_with_arguments_in_order():
    graph = make([[BINARY_A, UNARY_A, LEAF, UNARY_B, LEAF]])
    assert graph.op.tolist() == [LEAF, UNARY_A, LEAF, UNARY_B, BINARY_A]
    assert graph.args[:, 0].tolist() == [0, 1, 0, 3, 2]
    assert graph.args[:, 1].tolist() == [-1, -1, -1, -1, 4]
    assert graph.roots.tolist() == [5]


def test_leaf_as_input_makes_no_nodes_and_points_at_the_example():
    graph = make([[BINARY_A, LEAF, UNARY_A, LEAF], [LEAF], [UNARY_B, LEAF]], leaf_is_input=True)
    assert graph.op.tolist() == [UNARY_A, BINARY_A, UNARY_B]
    assert graph.args.tolist() == [[0, -1], [0, 3], [2, -1]]
    assert graph.roots.tolist() == [4, 1, 5]


def test_a_token_without_arguments_other_than_the_leaf_reads_the_input_too():
    graph = make([[OTHER_LEAF]], leaf_is_input=True)
    assert graph.op.tolist() == [OTHER_LEAF]
    assert graph.args.tolist() == [[0]]


@pytest.mark.parametrize(
    ("tokens", "same_as"),
    [
        ([SKIP, UNARY_A, SKIP, LEAF, SKIP], [UNARY_A, LEAF]),
        ([UNARY_A, PAD], [UNARY_A, LEAF]),
        ([BINARY_A, PAD, UNARY_A], [BINARY_A, LEAF, UNARY_A, LEAF]),
        ([BINARY_A], [BINARY_A, LEAF, LEAF]),
        ([UNARY_A, LEAF, BINARY_A, UNARY_B], [UNARY_A, LEAF]),
        ([UNARY_END, UNARY_A], [UNARY_END, UNARY_A, LEAF]),
        ([], [LEAF]),
    ],
    ids=["skipped anywhere", "pad is leaf", "pad goes on", "end is leaf", "rest ignored", "special is unary", "empty"],
)
def test_an_ill_formed_program_means_the_same_as_a_well_formed_one(tokens, same_as):
    actual, expected = make([tokens]), make([same_as])
    assert (actual.op.tolist(), actual.args.tolist()) == (expected.op.tolist(), expected.args.tolist())
    assert actual.roots.tolist() == expected.roots.tolist()


def test_token_matrices_of_numpy_and_torch_and_any_integer_width_give_one_graph():
    tokens_BL = matrix([[BINARY_A, UNARY_A, LEAF, LEAF], [UNARY_B]])
    expected = make(tokens_BL)
    for same in (tokens_BL.astype(np.int32), torch.from_numpy(tokens_BL), torch.from_numpy(tokens_BL).to(torch.int32)):
        graph = make(same)
        assert graph.args.tolist() == expected.args.tolist()
        assert graph.op.dtype == np.int64


def test_no_programs_give_a_graph_without_nodes():
    graph = make(np.zeros((0, 5), dtype=np.int64))
    assert (graph.num_inputs, graph.num_nodes, len(graph.roots)) == (0, 0, 0)


@pytest.mark.parametrize("token", [-1, len(ARITY_V)])
def test_a_token_out_of_range_is_named_with_its_place(token):
    with pytest.raises(ValueError, match=rf"program 1, position 2: token {token}, expected 0 to 10"):
        make([[LEAF], [UNARY_A, UNARY_A, token]])


@pytest.mark.parametrize("tokens_BL", [np.zeros(3, dtype=np.int64), np.zeros((2, 3)), torch.zeros(2, 3)])
def test_anything_but_a_matrix_of_integers_is_refused(tokens_BL):
    with pytest.raises(ValueError, match="expected a matrix of integers"):
        make(tokens_BL)


def test_a_leaf_that_takes_arguments_is_refused():
    with pytest.raises(ValueError, match="the leaf, token 6, has 1 arguments, expected none"):
        graph_from_prefix(matrix([[LEAF]]), ARITY_V, leaf=UNARY_A)


@pytest.mark.parametrize(
    ("op", "args", "roots", "message"),
    [
        ([0, 1], [[0], [2]], [2], r"node 1 has arguments \[2\], expected"),
        ([0], [[-1]], [1], r"node 0 has arguments \[-1\], expected"),
        ([7, 7], [[0, -1], [0, 1]], [2], "other nodes of op 7 have 1"),
        ([0], [[0]], [2], "roots .2. are not all slots 0 to 1"),
        ([0, 1], [[0]], [1], "lengths 2, 1 and 2"),
        ([0, -3], [[0], [1]], [2], "node 1 has op -3, expected 0 or greater"),
    ],
    ids=["cycle", "no argument", "two arities", "root beyond", "lengths", "negative op"],
)
def test_an_impossible_graph_is_refused(op, args, roots, message):
    with pytest.raises(ValueError, match=message):
        Graph(1, np.array(op), np.array(args), np.zeros(len(op), dtype=np.int64), np.array(roots))
