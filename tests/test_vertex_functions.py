"""Vertex functions on any graphs equal the same functions on one vertex at a time."""

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iep.batching.schedulers import SCHEDULERS
from iep.dynamic import Edges, VertexFunction, VertexNetwork, Vertices

ROWS = 5
SOURCE, MIX, LAST = range(3)


class Model(nn.Module):
    """Three functions over two states of different shapes, `a` (3,) and `b` (2, 2), with any number of children.

    The first gathers nothing; the second gathers all and pushes a state; the third gathers one state.
    """

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.mix, self.last = (nn.Linear(n, 7, dtype=dtype) for n in (2, 3 + 4 + 2, 3))
        self.tables = nn.ParameterDict({name: torch.randn(ROWS, 2, dtype=dtype) for name in ("x", "y")})
        self.network = VertexNetwork(
            [
                VertexFunction(self._source, pulls=("x",), pushes=("seen",)),
                VertexFunction(self._mix, gathers=("b", "a"), pulls=("x",), pushes=("b",)),
                VertexFunction(self._last, gathers=("a",), pulls=("y", "x"), pushes=("score", "b", "seen")),
            ],
            states={"a": (3,), "b": (2, 2)},
        )

    def _scatter(self, vertices, made_G7):
        made_G7 = made_G7.tanh()
        vertices.scatter(a=made_G7[:, :3], b=made_G7[:, 3:].unflatten(1, (2, 2)))

    def _source(self, vertices):
        self._scatter(vertices, self.source(vertices.pull("x")))
        vertices.push(seen=vertices.pull("x") * 2)

    def _mix(self, vertices):
        a, b = vertices.gather("a"), vertices.gather("b")
        factors = torch.arange(1, a.shape[1] + 1, dtype=a.dtype)  # the order of children counts
        a, b = (a * factors[:, None]).sum(1), (b * factors[:, None, None]).sum(1)
        self._scatter(vertices, self.mix(torch.cat([a, b.flatten(1), vertices.pull("x")], dim=1)))

    def _last(self, vertices):
        self._scatter(vertices, self.last(vertices.gather("a").sum(1)))
        vertices.push(score=vertices.pull("y").sum(1), seen=vertices.pull("x"))

    def batched(self, samples, scheduler="lookahead", sharing=False, defer=False):
        plan = self.network.plan(samples, scheduler, sharing)
        inputs = {name: self.tables[name][plan.rows[name]] for name in plan.rows}
        outcome = self.network(plan, inputs, defer)
        return {**{f"root's {name}": rows for name, rows in outcome.roots.items()}, **outcome.pushed}

    def one_by_one(self, samples):
        """Every vertex by itself, its children's states looked up."""
        returned = {name: [] for name in ("root's a", "root's b", "seen", "b", "score")}
        for sample in samples:
            made = []
            for vertex, (children, function) in enumerate(zip(sample.children, sample.function, strict=True)):
                of_children = [made[child] for child in children if child >= 0]
                gathered = {
                    name: torch.stack([each[name] for each in of_children], 1)
                    if of_children
                    else torch.zeros(1, 0, *shape).double()
                    for name, shape in self.network.shapes.items()
                }
                pulled = {name: self.tables[name][ids[vertex : vertex + 1]] for name, ids in sample.pulls.items()}
                alone = Vertices(len(of_children), gathered, pulled)
                self.network.functions[function].run(alone)
                made.append(alone.results)
                for name in self.network.functions[function].pushes:
                    returned[name].append(alone.results[name])
            for name in ("a", "b"):
                returned[f"root's {name}"].append(made[-1][name])
        return {name: torch.cat(rows) if rows else torch.empty(0) for name, rows in returned.items()}


@st.composite
def samples(draw):
    """A directed acyclic graph whose vertices may be gathered by several, by none, or twice by the same."""
    count = draw(st.integers(1, 10))
    children = np.full((count, draw(st.integers(1, 3))), -1)
    for vertex in range(1, count):
        chosen = draw(st.lists(st.integers(0, vertex - 1), max_size=children.shape[1]))
        children[vertex, : len(chosen)] = chosen
    function = [draw(st.sampled_from([MIX, LAST] if row[0] >= 0 else [SOURCE, MIX, LAST])) for row in children]
    pulls = {name: np.array(draw(st.lists(st.integers(0, ROWS - 1), min_size=count, max_size=count))) for name in "xy"}
    return Edges(children, np.array(function), pulls)


@given(minibatch=st.lists(samples(), min_size=1, max_size=6), sharing=st.booleans(), defer=st.booleans())
@settings(quick, max_examples=25)
def test_any_graphs_give_the_results_of_one_vertex_at_a_time(minibatch, sharing, defer):
    model = Model()
    parameters = dict(model.named_parameters())
    expected = with_gradients(model.one_by_one(minibatch), parameters)
    for name in SCHEDULERS:
        actual = with_gradients(model.batched(minibatch, name, sharing, defer), parameters)
        assert_same(actual, expected, 1e-9, none_is_zero=True)


CHAIN = Edges(
    np.array([[-1], [0], [1]]), np.array([SOURCE, MIX, LAST]), {"x": np.array([0, 1, 2]), "y": np.zeros(3, int)}
)


def changed(**fields):
    return Edges(**{"children": CHAIN.children, "function": CHAIN.function, "pulls": CHAIN.pulls, **fields})


def test_samples_of_one_shape_share_a_plan_and_have_their_own_rows():
    model = Model()
    other = changed(pulls={"x": np.array([4, 3, 0]), "y": np.ones(3, int)})
    first, second = model.network.plan([CHAIN, CHAIN]), model.network.plan([other, CHAIN])
    assert [len(group.nodes) for group in first.schedule] == [2, 2, 2]
    assert second.plan is first.plan
    assert first.rows["x"].tolist() == [0, 0, 1, 1, 2, 2]  # in the order in which calls read them
    assert second.rows["x"].tolist() == [4, 0, 3, 1, 0, 2]
    assert_same(model.batched([other, CHAIN]), model.one_by_one([other, CHAIN]), 1e-9)
    assert model.network.plan([CHAIN] * 3).plan is not first.plan
    assert model.network.plan([CHAIN, CHAIN], "agenda").plan is not first.plan


def test_sharing_runs_equal_vertices_and_reads_equal_rows_once():
    plan = Model().network.plan([CHAIN] * 4, sharing=True)
    assert [len(group.nodes) for group in plan.schedule] == [1, 1, 1]
    assert plan.rows["x"].tolist() == [0, 1, 2]
    shared = Model().batched([CHAIN] * 4, sharing=True)
    assert (shared["root's a"].shape, shared["score"].shape) == ((4, 3), (4,))


def run_one(run, pulls=("x",), states=("h",)):
    """A network of one function and states (2,), on one vertex."""
    network = VertexNetwork([VertexFunction(run, pulls=pulls)], dict.fromkeys(states, (2,)))
    return network(network.plan([Edges(np.array([[-1]]), pulls={"x": np.array([0])})]), {"x": torch.zeros(1, 2)})


def run_model(rows=None):
    model = Model()
    plan = model.network.plan([CHAIN])
    return model.network(plan, {name: torch.zeros(count, 2).double() for name, count in (rows or {}).items()})


def planned(*minibatch):
    return Model().network.plan(minibatch)


X = CHAIN.pulls["x"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(children=np.array([-1, 0, 1])), r"children int64 \(3,\), expected .* \(3, A\)"),
        (lambda: changed(function=np.array([0])), r"function int64 \(1,\), expected .* integers \(3\)"),
        (lambda: changed(pulls={"x": np.array([0.7, 0, 0])}), "x float64"),
        (planned, "there is no sample, expected one vertex or more"),
        (lambda: planned(CHAIN, changed(children=np.array([[-1], [1], [1]]))), r"sample 1, vertex 1 has .* \[1\], exp"),
        (lambda: planned(changed(function=np.array([0, 1, 3]))), "sample 0: function 3, expected 0 to 2"),
        (
            lambda: planned(changed(pulls={"x": -X, "y": X})),
            "sample 0, vertex 2: its function pulls 'x', but",
        ),
        (lambda: run_model({"x": 2, "y": 1}), r"an input is \(2, 2\), expected \(3, 2\)"),
        (
            lambda: run_one(lambda v: None, states=("h", "c")),
            "scatters and pushes nothing, expected h, c",
        ),
        (lambda: run_one(lambda v: v.scatter(h=v.pull("x")[:, :1])), r"shapes {'h': \(1,\)}, expected {'h': \(2,\)}"),
        (lambda: VertexNetwork([VertexFunction(print, pulls=("h",))], {"h": ()}), "an input has the name of a state"),
    ],
)
def test_samples_functions_and_inputs_that_do_not_fit_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
