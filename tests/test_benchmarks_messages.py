"""Networks of messages: what every node sends on; the experiments equal a walk in plain PyTorch and learn."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.graphs import (
    Deducer,
    PolarityRegressor,
    TypedGraph,
    deductions,
    molecules,
)
from benchmarks.message_networks import (
    ListReducer,
    Reduction,
    list_reductions,
)
from benchmarks.messages import (
    Apply,
    Bcast,
    Concat,
    Cond,
    Flatmap,
    Group,
    Isu,
    MessageGraph,
    Node,
    Reduce,
    Result,
    Split,
    Ungroup,
)
from iep.batching.execute import execute
from iep.batching.plan import Read

DOUBLE, SUBTRACT, BOTH, SUM, STACK = range(5)
MODULES: dict[int, Callable] = {
    DOUBLE: lambda x: 2 * x,
    SUBTRACT: lambda x, y: x - y,
    BOTH: lambda x: (x + 1, x + 100),
    SUM: lambda x: x.sum(1),
    STACK: lambda x, y: 1000 * x[:, 0] + 100 * x[:, 1] + 10 * y[:, 0] + y[:, 1],
}
JOIN: dict[str, Node] = {"join": Concat("subtract"), "subtract": Apply("end", SUBTRACT, reads=2)}


class At(NamedTuple):
    number: int
    total: int = 0


def run(network: MessageGraph, instances: list, values: list[float]) -> list[float]:
    """Return the results of a network whose inputs are numbers."""
    plan = network.plan(instances, np.zeros(len(values), dtype=np.int64))
    return execute(plan, MODULES, {0: torch.tensor(values, dtype=torch.float64)[:, None]})[0][:, 0].tolist()


def test_a_loop_runs_as_often_as_each_state_says():
    network = MessageGraph(
        more=Cond(lambda at: at.number < at.total, {True: "double", False: "end"}),
        double=Apply("next", DOUBLE),
        next=Isu("more", lambda at: at._replace(number=at.number + 1)),
        end=Result(),
    )
    instances = [[("more", [n], At(0, n))] for n in range(5)]
    assert run(network, instances, [1, 3, 5, 7, 9]) == [1, 6, 20, 56, 144]


def test_messages_are_joined_and_taken_apart_in_order():
    network = MessageGraph(
        both=Apply("group", BOTH, makes=(0, 0)),
        group=Group("stack", size=lambda total: total, key=lambda at: at.total, order=lambda at: -at.number),
        stack=Apply("end", STACK, (Read(0, 2), Read(2, 2))),
        end=Result(),
    )
    instances = [[("both", [0], At(0, 2)), ("both", [1], At(1, 2))]]
    assert run(network, instances, [1, 2]) == [3000 + 200 + 10 * 102 + 101]

    network = MessageGraph(
        start=Ungroup("both", lambda total: [At(number, total) for number in range(total)]),
        both=Apply("split", BOTH, makes=(0, 0)),
        split=Split(("bcast", "join.0")),
        bcast=Bcast(("join.1", "copies")),
        join=Concat("subtract"),
        subtract=Apply("differences", SUBTRACT, reads=2),
        differences=Result(order=lambda at: -at.number),
        copies=Flatmap("group", lambda at: [at._replace(number=copy) for copy in range(at.number)]),
        group=Group("sum", size=lambda at: at.total - 1 - at.number),
        sum=Reduce("sums", SUM, 2, neutral=0),
        sums=Result(order=lambda at: at.number),
    )
    plan = network.plan([[("start", [1, 2, 3], 3)]], np.zeros(4, dtype=np.int64))
    differences, sums = execute(plan, MODULES, {0: torch.tensor([0.0, 1, 2, 4])[:, None]})
    assert differences.flatten().tolist() == [99, 99, 99]
    assert sums.flatten().tolist() == [3 + 5, 5]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), arity=st.integers(2, 5))
@settings(quick, max_examples=20)
def test_a_group_of_any_size_is_reduced_in_few_calls(sizes: list[int], arity: int):
    network = MessageGraph(reduce=Reduce("end", SUM, arity, neutral=0), end=Result())
    values, instances = [0.0], []
    for size in sizes:
        instances.append([("reduce", range(len(values), len(values) + size), "any")])
        values += range(len(values), len(values) + size)
    expected = [sum(values[slot] for slot in slots) for ((_, slots, _),) in instances]
    assert run(network, instances, values) == expected
    calls = network.plan(instances, np.zeros(len(values), dtype=np.int64)).calls
    assert arity ** (len(calls) - 1) < max(2, max(sizes))


def test_instances_of_equal_states_do_not_exchange_messages():
    network = MessageGraph(**JOIN, end=Result())
    instances = [[("join.0", [n], "same"), ("join.1", [n + 1], "same")] for n in (0, 2)]
    swapped = [[("join.1", [0], "same"), ("join.0", [1], "same")]]
    assert run(network, [*instances, *swapped], [9, 4, 7, 1]) == [5, 6, -5]


@pytest.mark.parametrize(
    ("nodes", "instance", "message"),
    [
        (JOIN, [("join.1", [0], "a")], "node 'join', state 'a': only 1 messages have arrived"),
        (JOIN, 2 * [("join.1", [0], "a")], "node 'join', state 'a': several messages for one position"),
        ({}, [("double", [0, 0], "a")], "node 'double', state 'a': 2 tensors, but op 0 reads 1"),
        ({"start": Split(("emd",))}, [], "node 'start' sends to 'emd', expected one of start, double, end"),
    ],
)
def test_what_cannot_be_routed_is_an_error_that_names_the_node_and_the_state(nodes, instance: list, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        MessageGraph(**nodes, double=Apply("end", DOUBLE), end=Result()).unroll([instance], np.zeros(2, dtype=np.int64))


# The experiments


def random_graphs(number: int, rng: np.random.Generator) -> list[TypedGraph]:
    """Return graphs with loops, parallel edges and vertices of many edges, each of which is the target of one."""

    def one() -> TypedGraph:
        vertices = int(rng.integers(1, 8))
        targets = np.concatenate([np.arange(vertices), rng.integers(min(vertices, 2), size=rng.integers(9))])
        edges = [rng.integers(vertices, size=len(targets)), rng.integers(4, size=len(targets)), targets]
        return TypedGraph(rng.integers(2, size=vertices), np.column_stack(edges))

    return [one() for _ in range(number)]


def tokens_one_by_one(model: ListReducer, sample: Reduction) -> torch.Tensor:
    embedding, head, *cells = model.ops
    h = [head.weight.new_zeros(1, head.in_features)] * model.layers
    for token in torch.from_numpy(sample.tokens):
        x = embedding(token[None])
        for layer, cell in enumerate(cells):
            x = h[layer] = cell(x, h[layer])
    return head(h[-1])


def edges_one_by_one(model: Deducer | PolarityRegressor, graph: TypedGraph) -> torch.Tensor:
    embedding, cell, _, *layers = model.ops
    h_VH = embedding(torch.from_numpy(graph.kinds))
    for _ in range(model.steps):
        received = [torch.zeros_like(h_VH[0]) for _ in graph.kinds]
        for source, kind, target in graph.edges.tolist():
            received[target] = received[target] + layers[kind](h_VH[source])
        h_VH = cell(torch.stack(received), h_VH)
    return layers[4](h_VH) if isinstance(model, Deducer) else layers[5](layers[4](h_VH).sum(0))


CASES = {
    "list reduction": (lambda: ListReducer(5, layers=1), list_reductions),
    "list reduction in layers": (lambda: ListReducer(5, layers=3), list_reductions),
    "deduction": (lambda: Deducer(5), lambda number, rng: deductions(number, rng, 7)),
    "vertices of random graphs": (lambda: Deducer(5, steps=3), random_graphs),
    "molecules": (lambda: PolarityRegressor(6), molecules),
    "random graphs": (lambda: PolarityRegressor(6, steps=2), random_graphs),
}


def case_of(name: str, number: int, seed: int = 0) -> tuple[nn.Module, list]:
    """Return a network of float64 and samples."""
    construct, make = CASES[name]
    torch.manual_seed(0)
    return construct().double(), make(number, np.random.default_rng(seed))


@pytest.mark.parametrize("case", CASES)
@given(number=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), workers=st.integers(1, 7))
@settings(quick, max_examples=8)
def test_batched_and_placed_networks_equal_one_sample_at_a_time(case: str, number: int, seed: int, workers: int):
    model, samples = case_of(case, number, seed)
    one = tokens_one_by_one if isinstance(model, ListReducer) else edges_one_by_one
    leaves = dict(model.named_parameters())
    one_by_one = torch.cat([one(model, each).flatten() for each in samples])
    expected = with_gradients({"output": one_by_one}, leaves)
    assert_same(with_gradients({"output": model(samples).flatten()}, leaves), expected, 1e-9, none_is_zero=True)
    plan = model.plan(samples, model.placement(workers))
    (placed,) = execute(plan, dict(enumerate(model.ops)), model.inputs(samples))
    assert_same(with_gradients({"output": placed.flatten()}, leaves), expected, 1e-9, none_is_zero=True)
