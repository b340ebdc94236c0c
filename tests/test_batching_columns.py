"""Graphs whose nodes return several tensors of several shapes, against a walk over them node by node."""

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from columns_cases import JOIN, LIFT, PAIR, SIGNATURES, WIDE, inputs_of, typed_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iep.batching.execute import execute
from iep.batching.graph import Graph
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import Types, make_plan
from iep.batching.schedulers import SCHEDULERS, make_schedule
from iep.kernels.deferred import weight_grad_context


class Networks(nn.Module):
    """By op; every result depends on each argument in its own way."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.lift, self.split = nn.Linear(2, 7, dtype=dtype), nn.Linear(5, 7, dtype=dtype)
        self.join = nn.Linear(12, 5, dtype=dtype)

    def modules_of_ops(self):
        return [self._lift, self._split, self._join, self._count]

    def _lift(self, pair_G21):
        wide = torch.tanh(self.lift(pair_G21.flatten(1)))
        return wide[:, :5], wide[:, 5:].unsqueeze(2)

    def _split(self, wide_G5):
        wide = torch.tanh(self.split(wide_G5))
        return wide[:, :2].unsqueeze(2), wide[:, 2:]

    def _join(self, wide_G25, pair_G21):
        return torch.tanh(self.join(torch.cat([wide_G25.flatten(1), pair_G21.flatten(1)], dim=1)))

    def _count(self, whole_G, pair_G21):
        return whole_G + 1, pair_G21 * whole_G.view(-1, 1, 1)


def walked(graph, types, modules, inputs):
    """Return the results of `execute`, computed one node after the other."""
    pieces = {column: iter(rows.split(1)) for column, rows in inputs.items()}
    values = [(next(pieces[column]),) for column in types.inputs.tolist()]
    for op, args, fields in zip(graph.op.tolist(), graph.args.tolist(), types.fields.tolist(), strict=True):
        taken = [values[slot][field] for slot, field in zip(args, fields, strict=True) if slot >= 0]
        result = modules[op](torch.stack(taken[:2], dim=1), taken[2]) if op == JOIN else modules[op](*taken)
        values.append(result if isinstance(result, tuple) else (result,))
    return tuple(torch.cat([values[s][f] for s, f in zip(*root, strict=True)]) for root in types.roots)


def results(returned, networks, inputs):
    leaves = dict(networks.named_parameters()) | {f"inputs {column}": inputs[column] for column in (WIDE, PAIR)}
    return with_gradients({f"root {n}": rows for n, rows in enumerate(returned)}, leaves)


@given(
    case=typed_graphs(),
    precision=st.sampled_from([(torch.float64, 1e-9), (torch.float32, 1e-4)]),
    positions=st.none() | st.tuples(*[st.integers(0, 1)] * 6),
    defer=st.booleans(),
)
@settings(quick, max_examples=40)
def test_values_of_several_tensors_equal_a_walk_on_outputs_and_all_gradients(case, precision, positions, defer):
    """On one device, or with ops, inputs and roots at positions of two."""
    (graph, types), (dtype, relative) = case, precision
    networks, inputs = Networks(dtype), inputs_of(types, dtype)
    modules = networks.modules_of_ops()
    expected = results(walked(graph, types, modules, inputs), networks, inputs)
    for name in SCHEDULERS:
        schedule = make_schedule(graph, name)
        if positions is None:
            plan = make_plan(graph, schedule, types)
        else:
            places = OpPlacement((torch.device("cpu"),) * 2, dict(enumerate(positions[:4])), *positions[4:])
            plan = make_placed_plan(graph, schedule, places, types)
        actual = results(execute(plan, modules, inputs, weight_grad_context(defer)), networks, inputs)
        assert_same(actual, expected, relative, none_is_zero=True)
        with torch.no_grad():
            free = execute(plan, modules, inputs)
        assert all(torch.equal(actual[f"root {n}"], rows) for n, rows in enumerate(free))


ONE = Graph(1, np.array([LIFT]), np.array([[0]]), np.array([0]), np.array([1]))


def typed(**changes):
    return Types(**({"inputs": np.array([PAIR]), "signatures": SIGNATURES, "roots": ((ONE.roots, 0),)} | changes))


@pytest.mark.parametrize(
    ("graph", "types", "message"),
    [
        (ONE, typed(roots=((np.array([1, 1]), np.array([0, 1])),)), "root 0 reads tensors of several columns as one"),
        (
            Graph(2, np.array([LIFT, LIFT]), np.array([[0], [1]]), np.array([0, 0]), np.array([2])),
            typed(inputs=np.array([PAIR, WIDE])),
            "op 0 reads tensors of several columns as one",
        ),
    ],
)
def test_types_that_do_not_fit_the_graph_are_errors(graph, types, message):
    with pytest.raises(ValueError, match=message):
        make_plan(graph, make_schedule(graph, "improved"), types)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda x: x, "op 0 returned 1 tensors, expected 2"),
        (lambda x: (x.flatten(1), x[:0]), r"op 0 returned \(0, 2, 1\), expected \(1, 2, 1\)"),
        (lambda x: (x.flatten(1), x.to(torch.complex64)), "returned torch.complex64, which a column of"),
    ],
)
def test_results_that_do_not_fit_their_columns_are_errors(result, message):
    plan = make_plan(ONE, make_schedule(ONE, "improved"), typed())
    with pytest.raises(ValueError, match=message):
        execute(plan, {LIFT: result}, {PAIR: torch.zeros(1, 2, 1)})
