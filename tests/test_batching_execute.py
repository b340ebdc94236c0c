"""Whatever the schedule, sharing, deferral, op groups and placement, a run equals a walk node by node."""

import numpy as np
import pytest
import torch
from batching_cases import (
    ARITY_V,
    BINARY_A,
    LEAF,
    MEANING,
    UNARY_A,
    UNARY_B,
    assert_same,
    matrix,
    quick,
    results,
    toy_modules,
    toy_programs,
    tree_graph,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import CheckpointError, checkpoint

from iep.batching.execute import execute
from iep.batching.placement import OpPlacement, make_placed_plan
from iep.batching.plan import Read, Signature, Types, make_plan
from iep.batching.reference import run_prefix
from iep.batching.schedulers import SCHEDULERS, Group, make_schedule
from iep.batching.sharing import share
from iep.kernels.deferred import weight_grad_context

CPUS = (torch.device("cpu"), torch.device("cpu"))
OP_GROUP = 100
"""Op groups have numbers beyond the ops'."""


def images_graph(rows):
    """Return the graph of toy programs whose leaves are inputs."""
    return tree_graph(rows, leaf_is_input=True)


def plan_of(graph, scheduler="lookahead", op_groups=False, seed=None):
    """The plan of a graph of toy programs; with a seed, its ops are placed on two devices at random."""
    position = [0] * len(ARITY_V) if seed is None else np.random.default_rng(seed).integers(0, 2, len(ARITY_V)).tolist()
    # Functions of one arity are an op group, on each device.
    op_group = {op: OP_GROUP + 2 * int(ARITY_V[op]) + position[op] for op in range(len(ARITY_V))} if op_groups else None
    schedule = make_schedule(graph, scheduler, op_group)
    if seed is None:
        return make_plan(graph, schedule)
    return make_placed_plan(graph, schedule, OpPlacement(CPUS, dict(enumerate(position)), seed % 2, seed // 2 % 2))


def batched(tokens_BL, modules, inputs, scheduler="lookahead"):
    return execute(plan_of(tree_graph(tokens_BL), scheduler), modules, inputs)


def one_by_one(tokens_BL, modules, inputs, leaf_is_input=False, input_B=None):
    def run(token, *args):
        return modules[token](*args)

    inputs = inputs if input_B is None else inputs[input_B]
    values = [
        run_prefix(tokens, lambda token: ARITY_V[token], run, value, leaf_is_input=leaf_is_input, **MEANING)
        for tokens, value in zip(tokens_BL.tolist(), inputs.split(1), strict=True)
    ]
    return torch.cat(values)


@given(
    tokens_BL=toy_programs,
    precision=st.sampled_from([(torch.float64, 1e-9), (torch.float32, 1e-4)]),
    leaf_is_input=st.booleans(),
    examples_an_input=st.integers(1, 4),
    sharing=st.booleans(),
    defer=st.booleans(),
    op_groups=st.booleans(),
    seed=st.one_of(st.none(), st.integers(0, 2**16)),
)
@settings(quick, max_examples=50)
def test_every_run_equals_the_reference_on_outputs_and_all_gradients(
    tokens_BL, precision, leaf_is_input, examples_an_input, sharing, defer, op_groups, seed
):
    dtype, relative = precision
    modules = toy_modules(dtype=dtype)
    input_B = np.arange(len(tokens_BL)) // examples_an_input
    inputs = torch.randn(input_B[-1] + 1, 3, dtype=dtype)
    expected = results(lambda x: one_by_one(tokens_BL, modules, x, leaf_is_input, input_B), modules, inputs)
    graph = tree_graph(tokens_BL, leaf_is_input, input_B)
    by_op = dict(enumerate(modules))
    for name in SCHEDULERS:
        plan = plan_of(share(graph) if sharing else graph, name, op_groups, seed)

        def run(x, plan=plan):
            return execute(plan, by_op, x, weight_grad_context(defer))

        assert_same(results(run, modules, inputs), expected, relative)
        with torch.inference_mode():
            assert execute(plan, by_op, inputs).sub(expected["output"]).abs().max() <= relative


class Reaches(nn.Module):
    """A module with a weight that is not among its own parameters, or not used as it is."""

    def __init__(self, weight):
        super().__init__()
        self.reach = lambda x: torch.tanh(x @ weight)

    def forward(self, x):
        return self.reach(x)


def tied(modules):
    modules[UNARY_B].maps[0].weight = modules[UNARY_A].maps[0].weight


def closure(modules):
    weight = nn.Parameter(torch.eye(3, dtype=torch.float64) + 0.1)
    modules.register_parameter("outside", weight)
    modules[UNARY_A] = Reaches(weight)


def computed(modules):
    """A weight that another network computes, once for all calls."""
    weight = nn.Parameter(torch.rand(3, 3, dtype=torch.float64))
    modules.register_parameter("outside", weight)
    modules[UNARY_A] = Reaches(torch.sin(weight))


def reached_by(reach):
    """Let `reach(inner, x)` stand for a module, whose weights are reached in another way or not at all."""

    def change(modules):
        inner = modules[UNARY_B]
        modules[UNARY_B] = Reaches(torch.zeros(3, 3))
        modules[UNARY_B].reach = lambda x: reach(inner, x)
        modules.add_module("inner", inner)

    return change


def called_with_doubled_weights(inner, x):
    return torch.func.functional_call(inner, {name: 2 * value for name, value in inner.named_parameters()}, (x,))


checkpointed = reached_by(lambda inner, x: checkpoint(inner, x, use_reentrant=False))


def parametrized(modules):
    parametrizations.weight_norm(modules[UNARY_A].maps[0])


def hooked(modules):
    """Hooks on a module, on its output's gradient and on a weight."""
    modules[UNARY_A].register_forward_hook(lambda module, args, output: output * 1.5)
    modules[UNARY_A].register_full_backward_hook(lambda module, given, received: (given[0] * 0.5,))
    modules[UNARY_A].scale.register_hook(lambda gradient: gradient * 3)


def frozen(modules):
    modules[UNARY_A].requires_grad_(False)


CHANGES = [tied, closure, computed, parametrized, hooked, frozen, reached_by(called_with_doubled_weights)]
CHANGES += [reached_by(lambda inner, x: x), reached_by(lambda inner, x: x.detach())]
CHANGES += [reached_by(lambda inner, x: x.view(-1).view(x.shape))]


def both_ways(defer):
    """Return how to run programs one node at a time, and batched."""

    def batched(rows, modules, x):
        return execute(plan_of(tree_graph(rows)), modules, x, weight_grad_context(defer))

    return one_by_one, batched


@pytest.mark.parametrize(
    ("change", "defer"), [*((change, defer) for change in CHANGES for defer in (False, True)), (checkpointed, False)]
)
def test_a_weight_gets_its_gradient_however_a_module_reaches_it_and_what_it_returns(change, defer):
    first, second = [BINARY_A, UNARY_A, UNARY_B, UNARY_A, LEAF, UNARY_B, LEAF], [UNARY_B, UNARY_A, UNARY_A, LEAF]
    rows, inputs, found = matrix([first, second]), torch.randn(2, 3, dtype=torch.float64), []
    for run in both_ways(defer):
        modules = toy_modules()
        torch.manual_seed(1)
        change(modules)
        found.append(results(lambda x, r=run, m=modules: r(rows, dict(enumerate(m)), x), modules, inputs))
    assert_same(found[1], found[0], 1e-9, none_is_zero=True)


def test_checkpointing_inside_a_module_is_an_error_where_weight_gradients_are_stop_delayed():
    modules, inputs = toy_modules(), torch.randn(1, 3, dtype=torch.float64)
    checkpointed(modules)
    plan = plan_of(tree_graph([[UNARY_B, UNARY_B, LEAF]]))
    with pytest.raises(CheckpointError):
        results(
            lambda x: execute(plan, dict(enumerate(modules)), x, weight_grad_context(deferred=True)), modules, inputs
        )


def test_an_op_group_of_functions_runs_in_one_call_with_its_rows_sorted_by_function():
    seen = []

    def grouped(functions, x):
        seen.append((functions.index.tolist(), functions.ends.tolist(), x[:, 0].tolist()))
        return x + torch.tensor([[100.0], [200.0], [200.0]])

    graph = images_graph([[UNARY_B, LEAF], [UNARY_A, LEAF], [UNARY_B, LEAF]])
    plan = make_plan(graph, make_schedule(graph, "lookahead", {UNARY_A: OP_GROUP, UNARY_B: OP_GROUP}))
    out = execute(plan, {OP_GROUP: grouped}, torch.tensor([[1.0], [2.0], [3.0]]))
    assert seen == [([0, 1, 1], [1, 3], [2.0, 1.0, 3.0])]
    assert out.tolist() == [[201.0], [102.0], [203.0]]
    assert "op group 100 (op 6 on 1, op 7 on 2) on 3 nodes" in str(plan)


def test_a_placed_plan_copies_a_value_once_and_only_where_it_is_needed():
    graph = images_graph([[BINARY_A, UNARY_A, LEAF, UNARY_A, LEAF], [BINARY_A, UNARY_B, LEAF, UNARY_A, LEAF]])
    placement = OpPlacement(CPUS, {UNARY_A: 0, UNARY_B: 1, BINARY_A: 1}, inputs=0, roots=1)
    plan = make_placed_plan(share(graph), make_schedule(share(graph), "lookahead"), placement)
    # To the second device: both results of A, and the second input, which B reads.
    assert sum(call.size for call in plan.calls if call.op < 0) == 3
    assert "copy of 1 node to device 1, reads 0[1], writes 1[0]" in str(plan)


MODULES = {LEAF: lambda x: x, UNARY_A: lambda x: 3 * x, BINARY_A: lambda x, y: x - 2 * y}


def test_inputs_may_have_any_strides_and_the_output_their_dtype_and_be_changed_in_place():
    rows = matrix([[BINARY_A, UNARY_A, LEAF, LEAF], [UNARY_A, LEAF]])
    whole = torch.randn(2, 4, 6, 5).requires_grad_()
    modules = MODULES | {UNARY_A: lambda x: 3 * x.double()}
    for inputs in (whole, whole.transpose(1, 3), whole[:, :, ::2], whole.contiguous(memory_format=torch.channels_last)):
        out = batched(rows, modules, inputs).relu_()
        torch.testing.assert_close(out, torch.stack([inputs[0], 3 * inputs[1]]).relu())


def test_a_module_that_changes_a_slice_of_its_column_in_place_is_an_error():
    inputs = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified inplace"):
        execute(plan_of(images_graph([[UNARY_A, LEAF]] * 2)), {UNARY_A: lambda x: x.mul_(2)}, inputs)


@pytest.mark.parametrize(
    ("rows", "modules", "inputs", "message"),
    [
        ([], {}, torch.zeros(0, 3), "no roots: an empty minibatch cannot be run"),
        ([[LEAF]] * 2, MODULES, torch.zeros(3, 3), r"an input is \(3, 3\), expected \(2, 3\)"),
        ([[UNARY_A, LEAF]] * 2, {UNARY_A: lambda x: x[:1]}, torch.zeros(2, 3), r"op 6 returned \(1, 3\), expected \(2"),
        ([[UNARY_A, LEAF]], {UNARY_A: lambda x: (x, x)}, torch.zeros(1, 3), "op 6 returned 2 tensors, expected 1"),
        ([[UNARY_A, LEAF]], {UNARY_A: lambda x: None}, torch.zeros(1, 3), "op 6 returned NoneType, expected 1"),
        (
            [[UNARY_A, LEAF]],
            {UNARY_A: lambda x: x + 0.5},
            torch.zeros(1, 3).long(),
            "float32, which a column of .* cannot",
        ),
    ],
)
def test_inputs_and_results_that_do_not_fit_the_plan_are_errors(rows, modules, inputs, message):
    tokens_BL = matrix(rows) if rows else np.zeros((0, 4), dtype=np.int64)
    with pytest.raises(ValueError, match=message):
        batched(tokens_BL, MODULES | modules, inputs)


GRAPH = images_graph([[UNARY_A, UNARY_A, LEAF]] * 2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 1, 2, 3]], "reads a tensor that does not exist or that a later call computes"),
        ([[0], [1], [2]], "a schedule of 3 nodes for a graph of 4, expected each once"),
        ([[0], [1], [2], [2]], "expected each once"),
    ],
)
def test_an_invalid_schedule_is_an_error(groups, message):
    with pytest.raises(ValueError, match=message):
        make_plan(GRAPH, tuple(Group(UNARY_A, np.array(nodes)) for nodes in groups))


def planned_over(op_group, places=None, columns=(0, 0)):
    """Plan A and B as one op group, placed or with columns of their own."""
    graph = images_graph([[UNARY_A, LEAF], [UNARY_B, LEAF]])
    schedule = make_schedule(graph, "lookahead", {UNARY_A: op_group, UNARY_B: op_group})
    if places is not None:
        return make_placed_plan(graph, schedule, OpPlacement(CPUS, places, 0, 0))
    signatures = {op: Signature((Read(0),), (column,)) for op, column in zip((UNARY_A, UNARY_B), columns, strict=True)}
    return make_plan(graph, schedule, Types(np.zeros(2, dtype=np.int64), signatures, ((graph.roots[:1], 0),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((UNARY_A,), "op group 6 has the number of an op"),
        ((OP_GROUP, {UNARY_A: 0, UNARY_B: 1}), "functions of op group 100 are on several devices"),
        ((OP_GROUP, {UNARY_A: 0}), "op 7 runs, but is not placed on a device"),
        ((OP_GROUP, None, (0, 1)), "functions of op group 100 have different signatures"),
    ],
)
def test_op_groups_and_placements_that_do_not_fit_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        planned_over(*arguments)


@pytest.mark.parametrize("defer", [False, True])
def test_backward_passes_that_end_early_or_run_within_another_leave_each_other_alone(defer):
    rows, found = matrix([[UNARY_A, UNARY_B, LEAF]]), []
    for run in both_ways(defer):
        modules, seen = toy_modules(), []
        inner = modules[UNARY_B]

        def watched(x, inner=inner, seen=seen):
            seen.append(inner(x))
            return seen[-1]

        torch.manual_seed(1)
        inputs = torch.randn(1, 3, dtype=torch.float64)
        total = run(rows, {**dict(enumerate(modules)), UNARY_B: watched}, inputs).sum()
        last = modules[UNARY_A].maps[0].bias
        partial = torch.autograd.grad(total, seen[0], retain_graph=True)  # ends before the inputs
        seen[0].register_hook(lambda _, t=total, w=last: torch.autograd.grad(t, w, retain_graph=True) and None)
        (total + seen[0].sum()).backward(retain_graph=True)
        seen[0].sum().backward()
        gradients = {name: parameter.grad for name, parameter in modules.named_parameters()}
        found.append({"partial": partial[0], **gradients})
    assert_same(found[1], found[0], 1e-9)
