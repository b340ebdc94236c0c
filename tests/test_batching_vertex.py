"""Vertex functions on any graphs against the same functions on one vertex at a time."""

import itertools

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from iep.batching import SCHEDULERS, Edges, VertexFunction, VertexNetwork, Vertices

ROWS = 5
SOURCE, MIX, LAST = range(3)
"""Pulls and gathers nothing; gathers all and pulls; gathers one state, pushes."""


class Model(nn.Module):
    """Three functions over two states of different shapes, `a` (3,) and `b` (2, 2), any number of children."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.source, self.mix, self.last = (nn.Linear(n, 7, dtype=dtype) for n in (2, 3 + 4 + 2, 3))
        self.tables = nn.ParameterDict({name: torch.randn(ROWS, 2, dtype=dtype) for name in ("x", "y")})
        self.network = VertexNetwork(
            [
                VertexFunction(self._source, pulls=("x",), pushes=("seen",)),
                VertexFunction(self._mix, gathers=("a", "b"), pulls=("x",)),
                VertexFunction(self._last, gathers=("a",), pulls=("y", "x"), pushes=("score", "seen")),
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
        return {**outcome.roots, **outcome.pushed}

    def one_by_one(self, samples):
        """Every vertex by itself, its children's states looked up."""
        returned = {name: [] for name in ("a", "b", "score", "seen")}
        for sample in samples:
            made = []
            for vertex, (children, function) in enumerate(zip(sample.children, sample.function, strict=True)):
                taken = [made[child] for child in children if child >= 0]
                gathered = {
                    name: torch.stack([each[name] for each in taken], 1)
                    if taken
                    else torch.zeros(1, 0, *shape).double()
                    for name, shape in self.network.shapes.items()
                }
                pulled = {name: self.tables[name][ids[vertex : vertex + 1]] for name, ids in sample.pulls.items()}
                alone = Vertices(len(taken), gathered, pulled)
                self.network.functions[function].run(alone)
                made.append(alone.results)
                for name in ("score", "seen"):
                    returned[name] += [alone.results[name]] if name in alone.results else []
            for name in ("a", "b"):
                returned[name].append(made[-1][name])
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


def results(model, run):
    model.zero_grad(set_to_none=True)
    outputs = run()
    sum((rows * torch.arange(1.0, rows.numel() + 1).view_as(rows)).sum() for rows in outputs.values()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {**{name: rows.detach() for name, rows in outputs.items() if len(rows)}, **gradients}


@given(minibatch=st.lists(samples(), min_size=1, max_size=6))
@settings(quick, max_examples=40)
def test_any_graphs_give_what_one_vertex_after_the_other_gives(minibatch):
    model = Model()
    expected = results(model, lambda: model.one_by_one(minibatch))
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        actual = results(model, lambda n=name, s=sharing, d=defer: model.batched(minibatch, n, s, d))
        for part, value in expected.items():
            if value is None:  # nothing ran through it
                actual[part] = None if actual[part] is None or not actual[part].any() else actual[part]
        assert_same(actual, expected, 1e-9)


CHAIN = Edges(
    np.array([[-1], [0], [1]]), np.array([SOURCE, MIX, LAST]), {"x": np.array([0, 1, 2]), "y": np.zeros(3, int)}
)


def test_all_activated_vertices_run_together():
    plan = Model().network.plan([CHAIN] * 4)
    assert [len(group.nodes) for group in plan.schedule] == [4, 4, 4]


def test_samples_of_the_same_shape_run_by_the_same_plan_on_rows_of_their_own():
    model = Model()
    other = changed(pulls={"x": np.array([4, 3, 0]), "y": np.ones(3, int)})
    first, second = model.network.plan([CHAIN, CHAIN]), model.network.plan([other, CHAIN])
    assert second.layout is first.layout
    assert first.rows["x"].tolist() == [0, 0, 1, 1, 2, 2]
    assert second.rows["x"].tolist() == [4, 0, 3, 1, 0, 2]
    expected = model.one_by_one([other, CHAIN])["a"]
    torch.testing.assert_close(model.batched([other, CHAIN])["a"], expected)
    assert model.network.plan([CHAIN] * 3).layout is not first.layout
    assert model.network.plan([CHAIN, CHAIN], "agenda").layout is not first.layout


def test_sharing_runs_equal_vertices_once_and_brings_each_row_once():
    model = Model()
    plan = model.network.plan([CHAIN] * 4, sharing=True)
    assert [len(group.nodes) for group in plan.schedule] == [1, 1, 1]
    assert plan.rows["x"].tolist() == [0, 1, 2]
    shared = model.batched([CHAIN] * 4, sharing=True)
    assert shared["a"].shape == (4, 3)
    assert shared["score"].shape == (4,)


def test_a_table_given_whole_is_read_where_its_rows_are():
    model = Model()
    plan = model.network.plan([CHAIN], tables={"x": ROWS})
    assert plan.rows["x"].tolist() == list(range(ROWS))
    outcome = model.network(plan, {"x": model.tables["x"], "y": model.tables["y"][plan.rows["y"]]})
    assert torch.equal(outcome.roots["a"], model.batched([CHAIN])["a"])


def test_a_plan_holds_no_sample_after_another_network_of_the_same_kind_has_run_it():
    plan = Model().network.plan([CHAIN])
    first, second = Model(), Model()
    with torch.no_grad():
        second.last.weight.mul_(2)
    inputs = {name: first.tables[name][plan.rows[name]] for name in plan.rows}
    assert not torch.equal(first.network(plan, inputs).roots["a"], second.network(plan, inputs).roots["a"])


def changed(**fields):
    return Edges(**{"children": CHAIN.children, "function": CHAIN.function, "pulls": CHAIN.pulls, **fields})


@pytest.mark.parametrize(
    ("minibatch", "message"),
    [
        ([], "there is no sample, expected one vertex or more"),
        ([CHAIN, Edges(np.empty((0, 1), int), np.empty(0, int))], "sample 1 has no vertices"),
        ([CHAIN, changed(children=np.array([[-1], [1], [1]]))], r"sample 1, vertex 1 has children \[1\], expected"),
        ([changed(children=np.array([[-1, -1], [-1, 0], [0, 1]]))], r"vertex 1 has children \[-1, 0\], expected"),
        ([changed(function=np.array([0, 1, 3]))], "sample 0: function 3, expected 0 to 2"),
        ([CHAIN, changed(function=None)], "sample 1 does not say which of 3 functions its vertices run"),
        ([CHAIN, changed(pulls={"x": CHAIN.pulls["x"]})], "sample 1 does not say which rows of 'y' its vertices pull"),
        ([changed(pulls=CHAIN.pulls | {"x": np.array([0, -1, 0])})], "sample 0, vertex 1: its function pulls 'x'"),
    ],
)
def test_a_sample_that_makes_no_graph_is_named(minibatch, message):
    with pytest.raises(ValueError, match=message):
        Model().network.plan(minibatch)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"children": np.array([-1, 0, 1])}, r"children int64 \(3,\), expected an array of integers \(V, A\)"),
        ({"function": np.array([0])}, "3 vertices, but 'function' of 1"),
        ({"pulls": {"x": np.array([0, 0])}}, "3 vertices, but 'x' of 2"),
    ],
)
def test_a_sample_of_arrays_of_different_lengths_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        changed(**fields)


def test_a_vertex_that_neither_pulls_nor_gathers_is_named():
    network = VertexNetwork([VertexFunction(print, gathers=("h",))], {"h": (1,)})
    with pytest.raises(ValueError, match="sample 0, vertex 0 neither pulls nor gathers"):
        network.plan([Edges(np.array([[-1], [0]])), Edges(np.array([[-1]]))][::-1])


def test_rows_that_are_not_given_or_not_there_are_named():
    model = Model()
    plan = model.network.plan([CHAIN])
    with pytest.raises(ValueError, match="no rows of 'y' are given"):
        model.network(plan, {"x": model.tables["x"][plan.rows["x"]]})
    with pytest.raises(ValueError, match="row 2 of 'x' is pulled, of which there are 2"):
        model.network.plan([CHAIN], tables={"x": 2})


def test_a_function_that_forgets_a_state_is_named():
    network = VertexNetwork([VertexFunction(lambda v: v.scatter(a=v.pull("x")), pulls=("x",))], {"a": (2,), "b": (2,)})
    plan = network.plan([Edges(np.array([[-1]]), pulls={"x": np.array([0])})])
    with pytest.raises(ValueError, match=r"function 0 hands on a \(Tensor\), expected tensors a, b"):
        network(plan, {"x": torch.zeros(1, 2)})


def test_what_a_function_does_not_declare_it_cannot_read():
    network = VertexNetwork(
        [VertexFunction(lambda v: v.scatter(a=v.gather("b")), pulls=("x",))], {"a": (2,), "b": (2,)}
    )
    plan = network.plan([Edges(np.array([[-1]]), pulls={"x": np.array([0])})])
    with pytest.raises(ValueError, match="'b' is not among what the vertex function gathers, expected of nothing"):
        network(plan, {"x": torch.zeros(1, 2)})


@pytest.mark.parametrize(
    ("functions", "states", "message"),
    [
        ([VertexFunction(print, gathers=("c",))], {"h": ()}, "function 0 gathers 'c', expected of h"),
        ([VertexFunction(print, pulls=("h",))], {"h": ()}, "have a name in common"),
    ],
)
def test_networks_that_cannot_run_are_refused(functions, states, message):
    with pytest.raises(ValueError, match=message):
        VertexNetwork(functions, states)


def sum_and_push(vertices):
    vertices.scatter(**{name: vertices.gather(name).sum(1) for name in ("h", "c")})
    vertices.push(p=vertices.gather("h").sum(1))


@pytest.mark.parametrize("children", [[[-1]], [[-1], [0]]])
def test_what_no_vertex_of_a_minibatch_pushes_is_empty(children):
    functions = [
        VertexFunction(lambda v: v.scatter(h=v.pull("x"), c=v.pull("x")), pulls=("x",)),
        VertexFunction(sum_and_push, gathers=("h", "c"), pushes=("p",)),
    ]
    network, children = VertexNetwork(functions, {"h": (3,), "c": (3,)}), np.array(children)
    plan = network.plan([Edges(children, np.arange(len(children)), {"x": np.zeros(len(children), int)})])
    outcome = network(plan, {"x": torch.ones(1, 3)})
    assert torch.equal(outcome.roots["c"], torch.ones(1, 3))
    assert outcome.pushed["p"].shape == ((0,) if len(children) == 1 else (1, 3))


@pytest.mark.parametrize("pulled", [torch.int64, torch.float64])
def test_what_is_gathered_without_children_has_the_dtype_that_the_network_says(pulled):
    functions = [
        VertexFunction(lambda v: v.scatter(h=v.gather("h").sum(1) + v.pull("x")), gathers=("h",), pulls=("x",))
    ]
    plan_of = [Edges(np.array([[-1], [0]]), pulls={"x": np.array([0, 1])})]
    network = VertexNetwork(functions, {"h": (2,)}, dtype=torch.float64)
    roots = network(network.plan(plan_of), {"x": torch.ones(2, 2, dtype=pulled)}).roots["h"]
    assert roots.dtype == torch.float64
    assert roots.tolist() == [[2.0, 2.0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": np.array([0.0, 1.0, 2.0])}, r"function float64 \(3,\), expected an array of integers \(V,\)"),
        ({"function": [0, 1, 2]}, "function list, expected an array of integers"),
        ({"pulls": {"x": np.array([0.7, 0, 0])}}, "x float64"),
    ],
)
def test_a_sample_of_anything_but_integers_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        changed(**fields)


def test_names_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="pulls='word', expected a tuple of names"):
        VertexFunction(sum_and_push, pulls="word")
    network = VertexNetwork([VertexFunction(lambda v: v.scatter(h=v.pull("x")), pulls=("x",))], {"h": (1,)})
    sample = Edges(np.array([[-1]]), pulls={"x": np.array([0])})
    with pytest.raises(ValueError, match="no function pulls of a table 'y', expected of x"):
        network.plan([sample], tables={"y": 3})
    with pytest.raises(ValueError, match=r"children \[-2\], expected vertices before it"):
        network.plan([Edges(np.array([[-2]]), pulls={"x": np.array([0])})])
    pulls_a_state = VertexNetwork([VertexFunction(lambda v: v.scatter(h=v.pull("h")), pulls=("x",))], {"h": (1,)})
    with pytest.raises(ValueError, match="'h' is not among what the vertex function pulls, expected of x"):
        pulls_a_state(pulls_a_state.plan([sample]), {"x": torch.ones(1, 1)})
