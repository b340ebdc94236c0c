"""Random graphs over ops that return several tensors of several shapes, for the tests of columns and of asynchrony."""

import numpy as np
import torch
from hypothesis import strategies as st

from iep.batching.graph import Graph
from iep.batching.plan import Read, Signature, Types

LIFT, SPLIT, JOIN, COUNT = range(4)
"""A number pair -> (a vector, a pair); a vector -> (a pair, a vector); two vectors and a pair -> a vector; integers."""

WIDE, PAIR, WHOLE = range(3)
"""Columns: vectors of five, matrices of two by one, integers."""

SIGNATURES = {
    LIFT: Signature((Read(0),), (WIDE, PAIR)),
    SPLIT: Signature((Read(0),), (PAIR, WIDE)),
    JOIN: Signature((Read(0, count=2), Read(2)), (WIDE,)),
    COUNT: Signature((Read(0), Read(1)), (WHOLE, PAIR)),
}
READS = {LIFT: [PAIR], SPLIT: [WIDE], JOIN: [WIDE, WIDE, PAIR], COUNT: [WHOLE, PAIR]}
"""Column of every argument."""


@st.composite
def typed_graphs(draw):
    """A directed acyclic graph over the ops, its types, and the column of each tensor that can be read."""
    columns = [WIDE, PAIR, WHOLE, *draw(st.lists(st.sampled_from([WIDE, PAIR, WHOLE]), max_size=4))]
    readable = [[column] for column in columns]  # by slot, columns of its tensors
    ops, args, fields = [], [], []
    for op in draw(st.lists(st.sampled_from([LIFT, SPLIT, JOIN, COUNT]), min_size=1, max_size=40)):
        chosen = [draw(st.sampled_from(_places(readable, column))) for column in READS[op]]
        chosen += [(-1, 0)] * (3 - len(chosen))
        ops.append(op)
        args.append([slot for slot, _ in chosen])
        fields.append([field for _, field in chosen])
        readable.append(list(SIGNATURES[op].makes))
    roots = [
        np.array(draw(st.lists(st.sampled_from(_places(readable, column)), min_size=1, max_size=5)))
        for column in (PAIR, WIDE, WHOLE)
    ]
    slots = np.concatenate([root[:, 0] for root in roots])
    graph = Graph(len(columns), np.array(ops), np.array(args), np.zeros(len(ops), dtype=np.int64), slots)
    types = Types(np.array(columns), SIGNATURES, tuple((r[:, 0], r[:, 1]) for r in roots), np.array(fields))
    return graph, types


def _places(readable, wanted):
    return [(s, f) for s, columns in enumerate(readable) for f, column in enumerate(columns) if column == wanted]


def inputs_of(types, dtype):
    torch.manual_seed(1)
    shapes = {WIDE: (5,), PAIR: (2, 1)}
    counts = {column: int((types.inputs == column).sum()) for column in (WIDE, PAIR, WHOLE)}
    inputs = {c: torch.randn(counts[c], *shapes[c], dtype=dtype).requires_grad_() for c in (WIDE, PAIR)}
    return inputs | {WHOLE: torch.arange(counts[WHOLE])}
