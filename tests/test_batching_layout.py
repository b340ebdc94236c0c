import numpy as np
import pytest
from batching_cases import LEAF, UNARY_A, UNARY_B, quick, toy_programs
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import images_graph

from iep.batching import SCHEDULERS, Group, lay_out, make_schedule, share

shared_graphs = st.builds(
    lambda tokens_BL, examples_an_input: share(images_graph(tokens_BL, np.arange(len(tokens_BL)) // examples_an_input)),
    toy_programs,
    st.integers(1, 3),
)


def values_waiting(graph, schedule):
    """The most values that are needed after any one call, counted value by value."""
    call_of = dict.fromkeys(range(graph.num_inputs), 0)
    last_use = dict.fromkeys(range(graph.num_inputs + graph.num_nodes), -1)
    for call, group in enumerate(schedule, start=1):
        for node in group.nodes.tolist():
            call_of[graph.num_inputs + node] = call
            for slot in graph.args[node].tolist():
                if slot >= 0:
                    last_use[slot] = call
    last_use |= dict.fromkeys(graph.roots.tolist(), len(schedule) + 1)
    return max(sum(call_of[slot] <= call < last_use[slot] for slot in last_use) for call in range(len(schedule) + 1))


@pytest.mark.parametrize("name", SCHEDULERS)
@given(graph=shared_graphs)
@settings(quick, max_examples=30)
def test_every_use_reads_the_place_of_its_result_before_another_is_written_there(name, graph):
    schedule = make_schedule(graph, name)
    layout = lay_out(graph, schedule)
    arrival, *calls, departure = layout.calls
    (column,) = layout.columns
    places = [None] * column.num_places
    places[arrival.results[0].places] = range(graph.num_inputs)
    for call, group in zip(calls, schedule, strict=True):
        assert (call.op, call.rows) == (group.op, len(group.nodes))
        assert len(call.arguments) == (graph.args[group.nodes[0]] >= 0).sum()
        for position, argument in enumerate(call.arguments):
            read = [places[place] for place in column.sources[argument.uses].tolist()]
            assert read == graph.args[group.nodes, position].tolist()
        places[call.results[0].places] = (graph.num_inputs + group.nodes).tolist()
    roots = [places[place] for place in column.sources[departure.arguments[0].uses].tolist()]
    assert roots == graph.roots.tolist()
    assert len(places) == column.num_places


@pytest.mark.parametrize("name", SCHEDULERS)
@given(graph=shared_graphs)
@settings(quick, max_examples=30)
def test_every_result_takes_its_gradient_from_all_its_uses(name, graph):
    schedule = make_schedule(graph, name)
    layout = lay_out(graph, schedule)
    (column,) = layout.columns
    order = [
        *range(graph.num_inputs),
        *(graph.num_inputs + node for group in schedule for node in group.nodes.tolist()),
    ]
    used_by_slot = {slot: [] for slot in order}
    for call, group in zip(layout.calls[1:-1], schedule, strict=True):
        for position, (_, _, uses, *_) in enumerate(call.arguments):
            for use, slot in zip(range(uses.start, uses.stop), graph.args[group.nodes, position].tolist(), strict=True):
                used_by_slot[slot].append(use)
    roots = layout.calls[-1].arguments[0].uses
    for use, slot in zip(range(roots.start, roots.stop), graph.roots.tolist(), strict=True):
        used_by_slot[slot].append(use)

    taken = {slot: [] for slot in order}
    for call in layout.calls[:-1]:
        (made,) = call.results
        slots = order[made.results]
        for slot, use in zip(slots, column.takers[made.results].tolist(), strict=True):
            taken[slot] += [use] if use < column.num_uses else []
        for row, use in zip(column.extra_rows[made.extras], column.extra_uses[made.extras].tolist(), strict=True):
            taken[slots[row]].append(use)
        assert made.is_used == any(used_by_slot[slot] for slot in slots)
    assert {slot: sorted(uses) for slot, uses in taken.items()} == {k: sorted(v) for k, v in used_by_slot.items()}


@given(tokens_BL=toy_programs)
@settings(quick, max_examples=30)
def test_run_one_by_one_no_more_places_are_taken_than_values_wait(tokens_BL):
    graph = images_graph(tokens_BL)
    schedule = make_schedule(graph, "vanilla")
    # Inputs arrive together, and their places are free again together.
    assert lay_out(graph, schedule).columns[0].num_places <= graph.num_inputs + values_waiting(graph, schedule)


def test_a_chain_uses_the_same_places_again():
    graph = images_graph([[*[UNARY_A] * 50, LEAF]] * 4)
    assert lay_out(graph, make_schedule(graph, "improved")).columns[0].num_places == 4


TWO = images_graph([[UNARY_A, UNARY_B, LEAF]])


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0], "a schedule of 1 nodes for a graph of 2, expected each once"),
        ([0, 1, 1], "a schedule of 3 nodes for a graph of 2, expected each once"),
        ([0, 0], "a schedule of 2 nodes for a graph of 2, expected each once"),
        ([1, 0], "runs a node before its arguments"),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused(order, message):
    schedule = tuple(Group(int(TWO.op[node]), np.array([node])) for node in order)
    with pytest.raises(ValueError, match=message):
        lay_out(TWO, schedule)
