"""Plans in the calls of a template have the same results as any other, also when CUDA graphs run them.

On a CPU, each pass runs again instead of a captured graph; everything else is the same.
"""

from collections.abc import Iterator

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from device_cases import DEVICES, HAS_TRITON
from engine_cases import PROGRAMS_BL, any_programs, features, programs, small_engine
from hypothesis import given
from torch.autograd.graph import get_gradient_edge

from iep.execution_engine.assembly import fit_template
from iep.execution_engine.engine import ExecutionEngine
from iep.execution_engine.parts import ProgramSample
from iep.kernels.template import make_template

SAMPLE = ProgramSample(PROGRAMS_BL, np.arange(len(PROGRAMS_BL)) // 2, "the sample")


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On a CPU, let passes run again instead of their capture, and fill memory that is not written with NaN."""
    from iep.kernels import cuda_graph

    if not torch.cuda.is_available():
        monkeypatch.setattr(cuda_graph, "capture", lambda *passes: passes)
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def captured_engine(device: str, **settings: object) -> ExecutionEngine:
    engine = small_engine(torch.float32, **settings).to(device)
    engine.execution = "cuda_graph"
    fit_template(engine, SAMPLE, len(PROGRAMS_BL), sharing=True)
    return engine


def assert_is_the_reference(engine: ExecutionEngine, programs_BL: np.ndarray, device: str, execution: str):
    rows_B = np.arange(len(programs_BL)) // 2
    features_NCHW = features(rows_B[-1] + 1, torch.float32)
    expected = results(lambda x: engine.reference(x.to(device)[rows_B], programs_BL), engine, features_NCHW)
    plan = engine.plan(programs_BL, rows_B)
    assert plan.execution == execution
    engine.zero_grad(set_to_none=True)
    found = results(lambda x: engine(x.to(device), plan), engine, features_NCHW)
    assert_same(found, expected, 1e-4)


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_one_capture_serves_many_minibatches_with_the_results_and_all_gradients_of_the_reference(device, replays):
    """Also for fewer programs than in the sample, and with functions that a minibatch does not call."""
    engine = captured_engine(device)
    for programs_BL in (PROGRAMS_BL[::-1], PROGRAMS_BL[-1:]):
        assert_is_the_reference(engine, programs_BL, device, "cuda_graph")


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_programs_that_do_not_fit_are_for_tritons_kernels(device, replays):
    engine = captured_engine(device)
    deeper_BL = programs("count " + "unique " * 12 + "scene")
    assert_is_the_reference(engine, deeper_BL, device, "triton")
    assert engine.plan(PROGRAMS_BL).execution == "cuda_graph"
    assert engine.plan(np.concatenate([PROGRAMS_BL, PROGRAMS_BL[:1]])).execution == "triton"


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_what_would_make_gradients_wrong_is_an_error(device, replays):
    engine, x = captured_engine(device), features(1, torch.float32).to(device)
    plan = engine.plan(PROGRAMS_BL[:1])
    first, second = engine(x, plan).sum(), engine(x, plan).sum()
    with pytest.raises(RuntimeError, match="another minibatch before the backward pass"):
        first.backward()
    second.backward()
    with pytest.raises(RuntimeError, match="would overwrite gradients"):
        engine(x, plan)
    with torch.no_grad():
        engine(x, plan)
    engine.zero_grad(set_to_none=True)
    logits_BA = engine(x, plan)
    logits_BA[:, 0].sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="would overwrite gradients"):
        logits_BA[:, 1].sum().backward()


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_a_captured_graph_keeps_no_nodes_of_parameters_alive(device, replays):
    """A later backward pass would wait for each of them."""
    engine = captured_engine(device)
    weight = engine.get_submodule("count").conv1.weight
    loss = engine(features(1, torch.float32).to(device), engine.plan(PROGRAMS_BL[:1])).sum()
    get_gradient_edge(weight).node.metadata["alive"] = True
    loss.backward()
    del loss
    assert "alive" not in get_gradient_edge(weight).node.metadata


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
def test_frozen_parts_have_no_gradients(device, replays):
    engine, gradients = captured_engine(device), []
    for part, parameter in engine.named_parameters():
        parameter.requires_grad_(part.split(".")[0] not in ("stem", "count", "union"))
    for execution in ("calls", "cuda_graph"):
        engine.zero_grad(set_to_none=True)
        plan = engine.plan(PROGRAMS_BL[:3], execution=execution)
        engine(features(3, torch.float32).to(device), plan).square().sum().backward()
        gradients.append({part: parameter.grad for part, parameter in engine.named_parameters()})
    assert_same(gradients[1], gradients[0], 1e-4)


@given(programs_BL=any_programs, sharing=st.booleans())
@quick
def test_a_plan_in_the_calls_of_a_template_runs_every_node_of_its_graph(programs_BL, sharing):
    """The rows of each function are followed one by one; padding belongs to none, and each row of it reads itself."""
    planner = small_engine().planner(sharing=sharing, training=True, execution="triton")
    graph = planner(programs_BL, image_rows_B=np.arange(len(programs_BL)) // 2).graph
    op_groups = small_engine().op_groups(by_kernels=True)
    plan = make_template([graph], op_groups).plan_of(graph)
    values, rows = {}, {op_group: [] for op_group in plan.op_groups}
    for call in plan.calls:
        ends_F = plan.functions(call).ends.tolist()
        padding = range(call.results[0].rows.start + ends_F[-1], call.results[0].rows.stop)
        assert all(plan.rows(each)[ends_F[-1] :].tolist() == [*padding] for each in call.arguments)
        for op, first, end in zip(plan.op_groups[call.op].ops, [0, *ends_F], ends_F, strict=False):
            for row in range(first, end):
                reads = [int(plan.rows(each)[row]) for each in call.arguments]
                values[call.results[0].rows.start + row] = (op, *(values.get(each, each) for each in reads))
                rows[call.op].append((op, call.in_op_group[1] + row))
    expected = [*range(graph.num_inputs)]
    for op, args in zip(graph.op.tolist(), graph.args.tolist(), strict=True):
        expected.append((op, *(expected[each] for each in args if each >= 0)))
    roots = plan.rows(plan.roots[0])[: len(graph.roots)].tolist()
    assert [values.get(row, row) for row in roots] == [expected[root] for root in graph.roots]
    assert len(values) == graph.num_nodes
    for number, op_group in plan.op_groups.items():
        order = [row for _, row in sorted(rows[number])]
        assert op_group.order[: len(order)].tolist() == order
        assert op_group.total_ends.tolist() == [sum(op <= each for op, _ in rows[number]) for each in op_group.ops]
