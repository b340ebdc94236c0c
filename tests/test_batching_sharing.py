import numpy as np
import pytest
from batching_cases import BINARY_A, LEAF, UNARY_A, UNARY_B, quick, toy_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import images_graph

from iep.batching import sharing
from iep.batching.sharing import share


def meanings(graph):
    """What every slot computes, written out: nested tuples of ops and inputs."""
    written = list(range(graph.num_inputs))
    for op, args in zip(graph.op.tolist(), graph.args.tolist(), strict=True):
        written.append((op, *(written[slot] for slot in args if slot >= 0)))
    return written


@given(tokens_BL=toy_programs, examples_an_input=st.integers(1, 4), largest_key=st.sampled_from([sharing.LARGEST, 100]))
@settings(quick, max_examples=60)
def test_sharing_keeps_one_of_equal_subtrees_and_what_every_root_computes(tokens_BL, examples_an_input, largest_key):
    """Where slots are too many for one key, nodes are compared in steps."""
    graph = images_graph(tokens_BL, np.arange(len(tokens_BL)) // examples_an_input)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LARGEST", largest_key)
        shared = share(graph)
    before, after = meanings(graph), meanings(shared)
    assert len(set(after)) == len(after)
    assert set(after) == set(before)
    assert [after[root] for root in shared.roots] == [before[root] for root in graph.roots]
    assert meanings(share(shared)) == after


def test_equal_programs_are_run_once_for_each_image():
    program = [BINARY_A, UNARY_A, LEAF, UNARY_B, UNARY_A, LEAF]
    shared = share(images_graph([program] * 3, np.array([0, 0, 1])))
    assert shared.num_inputs == 2
    assert shared.op.tolist() == [UNARY_A, UNARY_B, BINARY_A] * 2
    assert shared.args.tolist() == [[0, -1], [2, -1], [2, 3], [1, -1], [5, -1], [5, 6]]
    assert shared.example.tolist() == [0, 0, 0, 2, 2, 2]
    assert shared.roots.tolist() == [4, 4, 7]
