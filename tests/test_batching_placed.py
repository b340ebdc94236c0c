"""Several devices: results and gradients are those of one, a slot moves once and only where it is needed."""

import copy
import itertools
import pickle
import threading

import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    UNARY_A,
    UNARY_B,
    ToyModule,
    assert_same,
    matrix,
    quick,
    results,
    toy_modules,
    toy_programs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import DEVICE_LISTS, CountedMoves
from schedule_cases import images_graph, random_dag, tree_graph
from torch import nn

from iep.batching import (
    SCHEDULERS,
    Group,
    Homes,
    execute,
    lay_out,
    lay_out_placed,
    least_time,
    make_schedule,
    share,
)
from iep.batching.placed import Arrival, Departure

CPUS = (torch.device("cpu"),) * 3
few_programs = toy_programs.map(lambda tokens_BL: tokens_BL[:8, :30])
homes_of_ops = st.lists(st.integers(0, 2), min_size=len(ARITY_V) + 2, max_size=len(ARITY_V) + 2)


def make_homes(devices, positions) -> Homes:
    """Homes by a list of positions: of the inputs, of the roots, then of every op."""
    inputs, roots, *ops = (position % len(devices) for position in positions)
    return Homes(tuple(map(torch.device, devices)), dict(enumerate(ops)), inputs, roots)


def run_placed(graph, schedule, modules, homes, inputs, defer=False):
    """Values like those of one device, run on several with copies of the modules; inputs and results on the CPU."""
    layout = lay_out_placed(graph, schedule, homes).on_devices()
    there = inputs.to(homes.devices[homes.inputs])
    return execute(layout, modules, there, defer).to(inputs.device)


def placed_copy(modules, homes):
    modules = copy.deepcopy(modules)
    for op, module in enumerate(modules):
        module.to(homes.devices[homes.ops[op]])
    return modules


def on_cpu(values):
    return {name: None if value is None else value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("devices", DEVICE_LISTS)
@given(
    kind=st.sampled_from([(torch.float64, 1e-9), (torch.float32, 1e-4)]),
    tokens_BL=few_programs,
    leaf_is_input=st.booleans(),
    examples_an_input=st.integers(1, 4),
    positions=homes_of_ops,
)
@settings(quick, max_examples=6)
def test_on_any_placement_results_and_all_gradients_are_those_of_one_device(
    devices, kind, tokens_BL, leaf_is_input, examples_an_input, positions
):
    dtype, relative = kind
    modules, homes = toy_modules(dtype=dtype), make_homes(devices, positions)
    input_B = np.arange(len(tokens_BL)) // examples_an_input
    inputs = torch.randn(input_B[-1] + 1, 3, dtype=dtype)
    tree = tree_graph(tokens_BL, leaf_is_input, input_B)
    placed = placed_copy(modules, homes)
    for graph in (tree, share(tree)):
        alone = lay_out(graph, make_schedule(graph, "improved"))
        expected = results(lambda x, alone=alone: execute(alone, modules, x), modules, inputs)
        for name, defer in itertools.product(SCHEDULERS, (False, True)):

            def run(x, graph=graph, name=name, defer=defer):
                return run_placed(graph, make_schedule(graph, name), placed, homes, x, defer)

            assert_same(on_cpu(results(run, placed, inputs)), expected, relative)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_on_any_graph_what_leads_to_no_root_gets_no_gradient(seed, defer):
    graph = random_dag(seed, num_nodes=25)
    modules = nn.ModuleList(ToyModule(1 + op % 2, 3) for op in range(5)).double()
    inputs = torch.randn(graph.num_inputs, 3, dtype=torch.float64)
    positions = np.random.default_rng(seed).integers(0, 3, 7).tolist()
    for name in SCHEDULERS:
        schedule = make_schedule(graph, name)
        alone = lay_out(graph, schedule)
        expected = results(lambda x, at=alone: execute(at, modules, x, defer), modules, inputs)
        homes = make_homes(CPUS, positions)
        actual = results(lambda x, s=schedule, h=homes: run_placed(graph, s, modules, h, x, defer), modules, inputs)
        assert_same(actual, expected, 1e-9)


@pytest.mark.parametrize("name", SCHEDULERS)
@given(tokens_BL=toy_programs, examples_an_input=st.integers(1, 3), positions=homes_of_ops)
@settings(quick, max_examples=15)
def test_a_slot_moves_to_a_device_once_and_only_if_it_is_needed_there(name, tokens_BL, examples_an_input, positions):
    graph = share(images_graph(tokens_BL, np.arange(len(tokens_BL)) // examples_an_input))
    homes = make_homes(CPUS, positions)
    layout = lay_out_placed(graph, make_schedule(graph, name), homes)
    home_of_slot = [homes.inputs] * graph.num_inputs + [homes.ops[op] for op in graph.op.tolist()]
    needed = {(slot, homes.roots) for slot in graph.roots.tolist()}
    for op, args in zip(graph.op.tolist(), graph.args.tolist(), strict=True):
        needed |= {(slot, homes.ops[op]) for slot in args if slot >= 0}
    expected = sum(home_of_slot[slot] != device for slot, device in needed)
    assert layout.rows_moved(0) == expected

    ops = [[call.op for call in part.calls] for part in layout.layouts]
    for number, move in enumerate(layout.moves):
        assert move.source != move.destination
        assert ops[move.source].count(Departure(number)) == ops[move.destination].count(Arrival(number)) == 1
    runs = [(op, device) for device, part in enumerate(ops) for op in part if isinstance(op, int)]
    assert all(homes.ops[op] == device for op, device in runs)
    assert len(runs) == len(make_schedule(graph, name))


@given(tokens_BL=toy_programs, positions=homes_of_ops)
@settings(quick, max_examples=10)
def test_what_is_seen_to_move_is_what_the_layout_says(tokens_BL, positions):
    graph, modules, homes = tree_graph(tokens_BL), toy_modules(), make_homes(CPUS, positions)
    layout = lay_out_placed(graph, make_schedule(graph, "lookahead"), homes)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        moved = CountedMoves(patch)
        execute(layout, modules, torch.randn(len(tokens_BL), 3, dtype=torch.float64))
    assert sorted(moved.rows) == sorted(sum(move.rows) for move in layout.moves)
    assert moved.bytes == 3 * 8 * layout.rows_moved(0)


def test_a_placed_layout_says_what_moves_after_which_call():
    graph = tree_graph([[BINARY_A, UNARY_A, LEAF, UNARY_A, LEAF], [UNARY_A, LEAF]])
    homes = Homes(CPUS[:2], {LEAF: 0, UNARY_A: 1, BINARY_A: 0}, inputs=0, roots=0)
    layout = lay_out_placed(graph, make_schedule(graph, "lookahead"), homes)
    moves = [(move.after, move.source, move.destination, move.rows) for move in layout.moves]
    assert moves == [(1, 0, 1, (3,)), (2, 1, 0, (3,))]
    again = pickle.loads(pickle.dumps(layout))
    assert again.moves == layout.moves
    assert [part.calls for part in again.layouts] == [part.calls for part in layout.layouts]


def test_groups_on_different_devices_run_at_the_same_time():
    meeting = threading.Barrier(2)

    def meet(x):
        meeting.wait(timeout=20)  # broken, and so an error, if the other group does not run meanwhile
        return x + 1

    graph = tree_graph([[UNARY_A, LEAF], [UNARY_B, LEAF]])
    modules = {LEAF: lambda x: x, UNARY_A: meet, UNARY_B: meet}
    homes = Homes(CPUS[:2], {LEAF: 0, UNARY_A: 0, UNARY_B: 1}, inputs=0, roots=0)
    out = execute(lay_out_placed(graph, make_schedule(graph, "improved"), homes), modules, torch.tensor([[1.0], [2.0]]))
    assert out.tolist() == [[2.0], [3.0]]


def test_on_cpus_every_run_gives_the_same_bits():
    graph = random_dag(1, num_nodes=200, num_ops=len(ARITY_V))
    modules = nn.ModuleList(ToyModule(1 + op % 2, 3) for op in range(len(ARITY_V)))
    homes = make_homes(CPUS, np.random.default_rng(0).integers(0, 3, len(ARITY_V) + 2))
    inputs, schedule = torch.randn(graph.num_inputs, 3), make_schedule(graph, "agenda")
    runs = [results(lambda x: run_placed(graph, schedule, modules, homes, x), modules, inputs) for _ in range(5)]
    for again in runs[1:]:
        assert_same(again, runs[0], 0.0)


def test_the_least_time_is_that_of_devices_which_wait_for_each_other_only():
    apart = tree_graph([[UNARY_A, LEAF], [UNARY_B, LEAF], [UNARY_B, LEAF]])
    homes = Homes(CPUS[:2], {LEAF: 0, UNARY_A: 0, UNARY_B: 1}, inputs=0, roots=0)
    costs = {LEAF: 1.0, UNARY_A: 10.0, UNARY_B: 4.0}
    layout = lay_out_placed(apart, make_schedule(apart, "improved"), homes)
    assert least_time(layout, costs) == 3 * 1.0 + max(10.0, 2 * 4.0)
    layout = lay_out_placed(CHAIN, make_schedule(CHAIN, "improved"), APART)
    assert least_time(layout, costs) == 2 * 10.0 + 2 * 4.0
    layout = lay_out_placed(CHAIN, make_schedule(CHAIN, "vanilla"), APART)  # the second example's while the first's
    assert least_time(layout, costs) == 4.0 + 2 * 10.0


CHAIN = images_graph([[UNARY_A, UNARY_B, LEAF]] * 2)
APART = Homes(CPUS[:2], {UNARY_A: 0, UNARY_B: 1}, inputs=0, roots=1)


def run_chain(modules, inputs, homes=APART):
    return execute(lay_out_placed(CHAIN, make_schedule(CHAIN, "improved"), homes), modules, inputs)


def test_what_a_devices_module_raises_is_raised_once_and_ends_the_others():
    def fail(x):
        raise ArithmeticError("no number")

    before = threading.active_count()
    for broken in (UNARY_A, UNARY_B):
        with pytest.raises(ArithmeticError, match="no number"):
            run_chain({UNARY_A: lambda x: x, UNARY_B: lambda x: x} | {broken: fail}, torch.ones(2, 3))
    with pytest.raises(ValueError, match=rf"op {UNARY_B} returned \(1, 3\) for a group of 2, expected \(2, 3\)"):
        run_chain({UNARY_A: lambda x: x, UNARY_B: lambda x: x[:1]}, torch.ones(2, 3))
    assert threading.active_count() == before


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_threads_compute_in_the_callers_modes(mode):
    seen = set()

    def look(x):
        kinds = "cpu", "cuda"
        seen.add((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_autocast_dtype(kinds[0])))
        seen.add(torch.is_autocast_enabled("cpu"))
        return x

    for enabled in (False, True):
        seen.clear()
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            run_chain({UNARY_A: look, UNARY_B: look}, torch.ones(2, 3))
            here = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_autocast_dtype("cpu")
            assert seen == {here, enabled}


@pytest.mark.parametrize("defer", [False, True])
def test_under_autocast_results_and_gradients_are_those_of_one_device(defer):
    modules = toy_modules(dtype=torch.float32)
    tokens_BL = matrix([[BINARY_A, UNARY_A, UNARY_A, LEAF, UNARY_B, UNARY_A, LEAF], [UNARY_A, UNARY_B, LEAF]] * 3)
    graph, inputs = tree_graph(tokens_BL), torch.randn(6, 3)
    schedule, homes = make_schedule(graph, "lookahead"), make_homes(CPUS, [0, 1, *range(len(ARITY_V))])
    with torch.autocast("cpu", torch.bfloat16):
        alone = lay_out(graph, schedule)
        expected = results(lambda x: execute(alone, modules, x, defer), modules, inputs)
        actual = results(lambda x: run_placed(graph, schedule, modules, homes, x, defer), modules, inputs)
    assert_same(actual, expected, 1e-6)


def test_a_schedule_may_leave_a_device_without_work():
    out = run_chain({UNARY_A: lambda x: -x, UNARY_B: lambda x: 2 * x}, torch.ones(2, 3), Homes(CPUS, APART.ops, 1, 1))
    assert out.equal(-2 * torch.ones(2, 3))


def test_what_is_returned_may_be_changed_in_place():
    modules, inputs = toy_modules(), torch.randn(2, 3, dtype=torch.float64)
    expected = results(lambda x: run_chain(modules, x).relu(), modules, inputs)
    assert_same(results(lambda x: run_chain(modules, x).relu_(), modules, inputs), expected, 0.0)


def test_an_op_without_a_device_and_a_wrong_schedule_are_refused():
    with pytest.raises(ValueError, match=f"op {UNARY_A} is to run, but is placed on no device"):
        run_chain({}, torch.ones(2, 3), Homes(CPUS[:2], {UNARY_B: 0}, 0, 0))
    with pytest.raises(ValueError, match="3 inputs for a graph of 2 inputs"):
        run_chain({}, torch.ones(3, 3))
    wrong = tuple(Group(int(CHAIN.op[node]), np.array([node])) for node in (1, 0, 2, 3))
    with pytest.raises(ValueError, match="runs a node before its arguments"):
        lay_out_placed(CHAIN, wrong, APART)
