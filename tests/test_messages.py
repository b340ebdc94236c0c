"""Networks of messages: what every node sends on, loops, sums of any size, and errors that name node and state."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from batching_cases import quick
from hypothesis import given, settings
from hypothesis import strategies as st

from iep.batching.execute import execute
from iep.batching.plan import Read
from iep.dynamic import messages
from iep.dynamic.messages import (
    Apply,
    Bcast,
    Concat,
    Cond,
    Flatmap,
    Group,
    Isu,
    MessageGraph,
    Node,
    Phi,
    Reduce,
    Result,
    Split,
    Ungroup,
)

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
        start=Phi("more"),
        more=Cond(lambda at: at.number < at.total, {True: "double", False: "end"}),
        double=Apply("next", DOUBLE),
        next=Isu("start", lambda at: at._replace(number=at.number + 1)),
        end=Result(),
    )
    instances = [[("start", [n], At(0, n))] for n in range(5)]
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
@settings(quick, max_examples=40)
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
    assert run(network, instances, [9, 4, 7, 1]) == [5, 6]
    swapped = [[("join.1", [0], "same"), ("join.0", [1], "same")]]
    assert run(network, [*instances, *swapped], [9, 4, 7, 1]) == [5, 6, -5]


@pytest.mark.parametrize(
    ("nodes", "instance", "message"),
    [
        (
            {"where": Cond(lambda state: state, {"left": "end", "right": "end"})},
            [("where", [0], "up")],
            "node 'where', state 'up': no route for 'up', expected one of 'left', 'right'",
        ),
        (
            {"group": Group("sum", lambda at: 3, lambda at: "all"), "sum": Reduce("end", SUM, 2, 0)},
            [("group", [0], 1), ("group", [1], 2)],
            "node 'group', state 'all': only 2 of 3 messages have arrived",
        ),
        (JOIN, [("join.1", [0], "a")], "node 'join', state 'a': only 1 of 2 messages have arrived"),
        (
            JOIN,
            [("join.1", [0], "a"), ("join.1", [1], "a")],
            "node 'join', state 'a': several messages for one position",
        ),
        (
            {"double": Apply("nowhere", DOUBLE), "nowhere": Cond(lambda _: 0, {0: None})},
            [("double", [0], "a"), ("end", [0], "b")],
            "node 'double', state 'a': no result depends on what it computes",
        ),
        (
            {"double": Apply("again", DOUBLE), "again": Phi("double")},
            [("double", [0], "a")],
            "node 'double', state 'a': a second message",
        ),
        (
            {"next": Isu("again", lambda number: number + 1), "again": Phi("next")},
            [("next", [0], 0)],
            "node 'next', state 50: one of 101 messages of one instance, expected that loops end",
        ),
        (
            {"double": Apply("end", DOUBLE)},
            [("double", [0, 1], "a")],
            "node 'double', state 'a': 2 tensors, but op 0 reads 1",
        ),
        ({"split": Split(("end", None))}, [("split", [0], "a")], "node 'split', state 'a': 1 tensors for 2 successors"),
        (
            {"parts": Ungroup("end", lambda state: [1, 2])},
            [("parts", [0, 1, 0], "a")],
            "node 'parts', state 'a': 3 tensors for 2 states",
        ),
        (
            {"group": Group("end", lambda at: 2, lambda at: "all")},
            [("group", [0], 1), ("group", [0, 1], 2)],
            "node 'group', state 2: a group of payloads of 1, 2 tensors",
        ),
        ({}, [("end", [0, 1], "a")], "node 'end', state 'a': a result of 2 tensors"),
        ({}, [("start", [0], "a")], "node 'start', state 'a': no such node, expected one of end"),
    ],
)
def test_what_cannot_be_routed_is_an_error_that_names_the_node_and_the_state(
    nodes: dict[str, Node], instance: list, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(messages, "MOST_MESSAGES", 101)
    with pytest.raises(ValueError, match=re.escape(message)):
        MessageGraph(**nodes, end=Result()).unroll([instance], np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"start": Phi("emd")}, "node 'start' sends to 'emd', expected one of start, end"),
        ({"start": Phi("join.2"), "join": Concat("end")}, "expected one of start, join.0, join.1, end"),
        ({"sum": Reduce("end", SUM, 1, 0)}, "node 'sum' reduces 1 tensors at a time, expected 2 or more"),
        (
            {"a": Apply("end", BOTH), "b": Apply("end", BOTH, makes=(0, 0))},
            "node 'a' and another one of op 2 have different signatures",
        ),
    ],
)
def test_a_network_that_cannot_run_is_an_error(nodes: dict[str, Node], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        MessageGraph(**nodes, end=Result())


@pytest.mark.parametrize(
    ("instances", "num_inputs", "message"),
    [
        ([], 1, "there is no instance, expected one or more"),
        ([[("sum", [0], "a")], [("sum", [0, 2], "a")]], 2, "instance 1 reads inputs [0 2], expected 0 to 1"),
        ([[("sum", [-1], "a")]], 2, "instance 0 reads inputs [-1], expected 0 to 1"),
        ([[("sum", [], "a")]], 0, "input 0 is neutral, but there are 0 inputs"),
    ],
)
def test_an_input_that_does_not_exist_is_an_error(instances: list, num_inputs: int, message: str):
    network = MessageGraph(sum=Reduce("end", SUM, 2, neutral=0), end=Result())
    with pytest.raises(ValueError, match=re.escape(message)):
        network.unroll(instances, np.zeros(num_inputs, dtype=np.int64))
