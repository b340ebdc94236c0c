"""Cells against the same modules in plain PyTorch, among others in one network."""

import gc
import itertools
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from iep.batching import (
    SCHEDULERS,
    Cell,
    Edges,
    Graph,
    Read,
    Signature,
    Types,
    VertexFunction,
    VertexNetwork,
    execute,
    lay_out,
    make_schedule,
)
from iep.workloads import lstm_state
from iep.workloads.lstm import LSTMCell
from iep.workloads.sentences import Sentence
from iep.workloads.tagger import Tagger

ROWS = 4


class Plain(nn.Module):
    """Leaves and inner vertices of a Tree-LSTM as cells, or as plain code; and a third function that is plain code."""

    def __init__(self, as_cells, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.leaf, self.inner = nn.Linear(3, 6, bias=bias).double(), nn.Linear(4, 10, bias=bias).double()
        self.other = nn.Linear(3, 4).double()
        self.table = nn.Parameter(torch.randn(ROWS, 3).double())
        leaf, inner = (LSTMCell(self, "leaf"), LSTMCell(self, "inner")) if as_cells else (self._leaf, self._inner)
        functions = [
            VertexFunction(leaf, pulls=("x",)),
            VertexFunction(inner, gathers=("h", "c")),
            VertexFunction(self._other, pulls=("x",)),
        ]
        self.network = VertexNetwork(functions, {"h": (2,), "c": (2,)})

    def _state(self, vertices, gates, c_children):
        i, o, *forget, u = gates.split(2, dim=1)
        c = i.sigmoid() * u.tanh() + sum(f.sigmoid() * c_children[:, n] for n, f in enumerate(forget))
        vertices.scatter(h=o.sigmoid() * c.tanh(), c=c)

    def _leaf(self, vertices):
        self._state(vertices, self.leaf(vertices.pull("x")), None)

    def _inner(self, vertices):
        self._state(vertices, self.inner(vertices.gather("h").flatten(1)), vertices.gather("c"))

    def _other(self, vertices):
        h, c = self.other(vertices.pull("x")).tanh().chunk(2, dim=1)
        vertices.scatter(h=h, c=c)

    def forward(self, samples, scheduler, defer):
        plan = self.network.plan(samples, scheduler)
        return self.network(plan, {"x": self.table[plan.rows["x"]]}, defer).roots["h"]


@st.composite
def graphs(draw):
    """Binary graphs whose vertices may be gathered several times or never."""
    count = draw(st.integers(1, 12))
    children = np.full((count, 2), -1)
    for vertex in range(1, count):
        if draw(st.booleans()):
            children[vertex] = [draw(st.integers(0, vertex - 1)) for _ in range(2)]
    leaves = [draw(st.sampled_from([0, 2])) for _ in range(count)]
    function = np.where(children[:, 0] >= 0, 1, leaves)
    return Edges(children, function, {"x": np.array([draw(st.integers(0, ROWS - 1)) for _ in range(count)])})


def results(model, run):
    model.zero_grad(set_to_none=True)
    output = run()
    (output * torch.linspace(0.5, 1.5, output.numel()).double().view_as(output)).sum().backward()
    return {"output": output.detach(), **{name: each.grad for name, each in model.named_parameters()}}


@contextmanager
def cells_run(how):
    """In place, where there is a C compiler, or call by call."""
    with pytest.MonkeyPatch.context() as patch:
        if how == "call by call":
            patch.setattr(LSTMCell, "in_place", Cell.in_place)
        yield


HOW = ["in place", "call by call"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bias", [True, False])
@given(samples=st.lists(graphs(), min_size=1, max_size=5))
@settings(quick, max_examples=25)
def test_cells_give_what_plain_code_gives_among_plain_code(how, bias, samples):
    with cells_run(how):
        assert_as_plain_code(bias, samples)


def assert_as_plain_code(bias, samples):
    cells, plain = Plain(True, bias), Plain(False, bias)
    for name, defer in itertools.product(("vanilla", "lookahead"), (False, True)):
        expected = results(plain, lambda n=name: plain(samples, n, False))
        actual = results(cells, lambda n=name, d=defer: cells(samples, n, d))
        for part, value in expected.items():
            if actual[part] is None or value is None:
                assert value is None or not value.any()
                actual[part] = value
        assert_same(actual, expected, 1e-9)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("defer", [True, False])
def test_what_is_not_a_number_stays_where_no_root_depends_on_it(how, defer):
    model = Plain(True)
    children, function = np.array([[-1, -1], [-1, -1], [0, 0]]), np.array([0, 0, 1])
    plan = model.network.plan([Edges(children, function, {"x": np.array([0, 1, 0])})])
    with torch.no_grad():
        model.table[1] = float("nan")  # of the second leaf, which nothing gathers
    with cells_run(how):
        roots = model.network(plan, {"x": model.table[plan.rows["x"]]}, defer).roots["h"]
        roots.sum().backward()
    assert roots.isfinite().all()
    assert model.table.grad[0].isfinite().all()
    assert model.inner.weight.grad.isfinite().all()


@pytest.mark.parametrize("by_itself", [False, True])
@pytest.mark.skipif(lstm_state.kernel("state", torch.float64) is None, reason="there is no C compiler")
def test_cells_that_pull_and_push_give_the_same_in_place(by_itself):
    torch.manual_seed(0)
    sentences = [Sentence(np.array(words), np.zeros(len(words), int)) for words in ([1, 2, 3], [4], [2, 2, 1, 0])]
    tagger = Tagger(5, 3, None, 4, 3, 2).double()
    found = {}
    for how in HOW:
        with cells_run(how):
            plan = tagger.plan(sentences[:1] if by_itself else sentences)
            found[how] = results(tagger, lambda p=plan: tagger(p))
            with torch.inference_mode():
                assert torch.equal(tagger(plan), found[how]["output"])
    for each in found.values():
        each["embedding.weight"] = each["embedding.weight"].to_dense()
    assert_same(found["in place"], found["call by call"], 1e-12)


def test_cells_of_another_width_than_their_columns_are_refused():
    model = Plain(True)
    plan = model.network.plan([CHAIN])
    with pytest.raises((ValueError, RuntimeError), match=r"holds values \(2,\)|mat1 and mat2|shape"):
        model.network(plan, {"x": torch.zeros(1, 2).double()})


CHAIN = Edges(np.array([[-1, -1], [0, 0], [1, 0]]), np.array([0, 1, 1]), {"x": np.array([0, 0, 0])})


def test_a_second_way_back_over_a_kept_graph_gives_the_same_again():
    model = Plain(True)
    out = model([CHAIN], "lookahead", True).sum()
    out.backward(retain_graph=True)
    once = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    out.backward()
    assert all(torch.equal(once[name], each.grad) for name, each in model.named_parameters() if name in once)
    assert len(once) == 5


def test_gradients_of_the_inputs_alone_leave_nothing_for_the_weights():
    model = Plain(True)
    out = model([CHAIN], "lookahead", True).sum()
    (alone,) = torch.autograd.grad(out, model.table, retain_graph=True)
    out.backward()
    again = Plain(True)
    again([CHAIN], "lookahead", True).sum().backward()
    assert torch.equal(alone, again.table.grad)
    assert torch.equal(model.inner.weight.grad, again.inner.weight.grad)


def test_gradients_that_were_handed_out_stay_as_they_are():
    model = Plain(True)
    out = model([CHAIN], "lookahead", True).sum()
    (once,) = torch.autograd.grad(out, model.table, retain_graph=True)
    before = once.clone()
    torch.autograd.grad(3 * out, model.table, retain_graph=True)
    assert torch.equal(once, before)


@pytest.mark.parametrize("as_cells", [True, False])
def test_what_is_given_may_not_change_before_the_way_back(as_cells):
    model = Plain(as_cells)
    plan = model.network.plan([CHAIN])
    rows = model.table[plan.rows["x"]]
    out = model.network(plan, {"x": rows}).roots["h"].sum()
    with torch.no_grad():
        rows.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_departs_is_the_users_to_change():
    one = Edges(CHAIN.children[:1], CHAIN.function[:1], {"x": CHAIN.pulls["x"][:1]})
    model, again = Plain(True), Plain(True)
    plan = model.network.plan([one, CHAIN], sharing=True)  # a root of one sample is another's child
    expected = model.network(plan, {"x": model.table[plan.rows["x"]]}).roots["h"]
    (expected * torch.tensor([[2.0], [1.0]])).sum().backward()
    roots = again.network(plan, {"x": again.table[plan.rows["x"]]}).roots["h"]
    roots[0].mul_(2)
    roots.sum().backward()
    torch.testing.assert_close(again.inner.weight.grad, model.inner.weight.grad)
    assert again.inner.weight.grad.any()


def test_a_layer_that_is_replaced_is_used():
    model = Plain(True)
    before = model([CHAIN], "lookahead", False)
    model.inner = nn.Linear(4, 10).double()
    assert not torch.equal(model([CHAIN], "lookahead", False), before)


@pytest.mark.parametrize("defer", [True, False])
def test_under_autocast_the_way_back_is_run_too(defer):
    torch.manual_seed(0)
    tagger = Tagger(5, 3, None, 4, 3, 2)
    plan = tagger.plan([Sentence(np.array([1, 2, 3]), np.zeros(3, int)), Sentence(np.array([4]), np.zeros(1, int))])
    tagger(plan, defer).sum().backward()
    exact = {name: each.grad.to_dense() for name, each in tagger.named_parameters()}
    tagger.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        scores = tagger(plan, defer)
    scores.sum().backward()
    for name, each in tagger.named_parameters():
        assert (each.grad.to_dense() - exact[name]).abs().max() <= 0.1 * exact[name].abs().max(), name


def test_a_cell_that_cannot_be_what_it_says_is_refused():
    with pytest.raises(ValueError, match="a cell whose gates are pulled has a layer without bias"):
        LSTMCell(Plain(True), "leaf", gates_pulled=True)
    with pytest.raises(ValueError, match="a cell that is called by itself has no gradients"):
        LSTMCell(Plain(True), "leaf")(torch.zeros(1, 3).double())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_without_gradients_cells_give_the_same(name):
    model = Plain(True)
    with torch.inference_mode():
        free = model([CHAIN] * 2, name, True)
    assert torch.equal(free, model([CHAIN] * 2, name, True))


def test_a_cell_whose_results_have_another_number_of_rows_is_refused():
    class Wrong(LSTMCell):
        def results(self, *given):
            return tuple(rows[:0] for rows in super().results(*given))

    assert issubclass(Wrong, Cell)
    model = Plain(True)
    functions = [VertexFunction(Wrong(model, "leaf"), pulls=("x",))]
    network = VertexNetwork(functions, {"h": (2,), "c": (2,)})
    plan = network.plan([Edges(np.array([[-1]]), pulls={"x": np.array([0])})])
    with pytest.raises(ValueError, match=r"returned \(0, 2\) for a group of 1"):
        network(plan, {"x": model.table[:1]})


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("name", "sizes"), [("leaf", (3, 7)), ("leaf", (2, 6)), ("inner", (4, 11)), ("inner", (5, 10))]
)
def test_a_layer_of_other_sizes_is_refused(how, name, sizes):
    model = Plain(True)
    setattr(model, name, nn.Linear(*sizes).double())
    with cells_run(how), pytest.raises((ValueError, RuntimeError), match=r"layer of|holds values|gates|shapes|size"):
        model([CHAIN] * 5, "lookahead", True)


def test_weights_of_several_dtypes_are_left_to_pytorch():
    model = Plain(True)
    model.inner.bias = nn.Parameter(model.inner.bias.float())
    expected = Plain(True)
    with torch.no_grad():
        expected.inner.bias.copy_(model.inner.bias)
    assert torch.equal(model([CHAIN], "lookahead", True), expected([CHAIN], "lookahead", True))


def test_memory_that_hooks_move_is_read_where_it_then_is():
    found = []
    for hooks in (nullcontext(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda kept: kept)):
        model = Plain(True)
        with hooks:
            out = model([CHAIN] * 3, "lookahead", True).sum()
        gc.collect()
        rubbish = [torch.full((count,), float("nan")).double() for count in range(1, 200)]
        out.backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
        del rubbish
    assert_same(*found, 1e-12)


def test_a_network_may_be_checkpointed():
    found = []
    for checkpointed in (False, True):
        model = Plain(True)
        plan = model.network.plan([CHAIN] * 3)

        def run(table, model=model, plan=plan):
            return model.network(plan, {"x": table[plan.rows["x"]]}).roots["h"]

        out = checkpoint(run, model.table, use_reentrant=False) if checkpointed else run(model.table)
        out.sum().backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert_same(*found, 1e-12)


def test_weights_that_are_computed_are_computed_once_a_call():
    class Half(nn.Module):
        calls = 0

        def forward(self, weight):
            Half.calls += 1
            return weight / Half.calls

    model = Plain(True)
    parametrize.register_parametrization(model.inner, "weight", Half())
    out = model([CHAIN], "lookahead", True)
    before = Half.calls
    out.sum().backward()
    assert Half.calls == before
    assert model.inner.parametrizations.weight.original.grad.any()


@pytest.mark.parametrize("second", [torch.float32, torch.float64])
def test_cells_of_two_dtypes_in_one_network_are_left_to_pytorch(second):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two = nn.Linear(3, 6).float(), nn.Linear(2, 8, bias=False).to(second)
            functions = [
                VertexFunction(LSTMCell(self, "one"), pulls=("x",)),
                VertexFunction(LSTMCell(self, "two", gates_pulled=True), pulls=("y",)),
            ]
            self.network = VertexNetwork(functions, {"h": (2,), "c": (2,)})

    model, found = Two(), []
    one = Edges(np.array([[-1]]), np.array([0]), {"x": np.array([0]), "y": np.array([0])})
    other = Edges(np.array([[-1]]), np.array([1]), {"x": np.array([0]), "y": np.array([0])})
    plan = model.network.plan([one, other] * 20)
    tables = {"x": torch.ones(20, 3), "y": torch.ones(20, 8).to(second)}
    for how in HOW:
        with cells_run(how):
            found.append(model.network(plan, tables).roots["h"])
    torch.testing.assert_close(*found)


def test_children_that_do_not_fit_are_refused():
    """By a graph of one's own, of which c has fewer children than h."""
    model = Plain(True)
    graph = Graph(4, np.array([0]), np.array([[0, 1, 2]]), np.array([0]), np.array([4]))
    signature = Signature((Read(0, 2), Read(2, 1)), (0, 1))
    types = Types(np.array([0, 0, 1, 1]), {0: signature}, ((np.array([4]), 0), (np.array([4]), 1)))
    layout = lay_out(graph, make_schedule(graph, "height"), types, reuse=False)
    inputs = {0: torch.ones(2, 2).double(), 1: torch.ones(2, 2).double()}
    with pytest.raises(ValueError, match=r"expected \(G, \(3 \+ A\) H\)"):
        execute(layout, {0: LSTMCell(model, "inner")}, inputs, read_only=True)
