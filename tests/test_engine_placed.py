"""An engine on several devices computes, and learns, what it does on one."""

import itertools
from collections import Counter

import numpy as np
import pytest
import tbd_cases
import torch
from batching_cases import assert_same, quick, results
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import DEVICE_LISTS, ONE_GPU, placed_copy
from test_engine import ENGINES, PROGRAMS_BL, features, small_engine

from iep.batching.schedulers import SCHEDULERS
from iep.data.datasets import Batch
from iep.execution_engine.placement import rows_copied
from iep.execution_engine.program_graph import types_of

ROWS_B = np.array([0, 0, 1, 1])


def on_cpu(values):
    return {name: None if value is None else value.cpu() for name, value in values.items()}


@pytest.mark.parametrize("devices", DEVICE_LISTS)
@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(quick, max_examples=6)
def test_on_any_placement_logits_and_all_gradients_match_the_reference(name, devices, data, seed):
    make, some_BL, others = ENGINES[name]
    programs_BL, families = data.draw(st.just(some_BL) | others), data.draw(st.booleans())
    engine, rows_B = make(), np.arange(len(programs_BL)) // 2
    placed, features_NCHW = placed_copy(engine, devices, seed), features(rows_B[-1] + 1)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for batching, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = placed.plan(programs_BL, rows_B, batching, sharing, families=families)

        def run(x, plan=plan, defer=defer):
            return placed(x.to(devices[0]), plan, defer).cpu()

        assert_same(on_cpu(results(run, placed, features_NCHW)), expected, 1e-9)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("sharing", [False, True])
@given(seed=st.integers(0, 2**16))
@settings(quick, max_examples=5)
def test_a_value_is_copied_once_to_each_other_device_that_reads_it(name, sharing, seed):
    make, programs_BL, _ = ENGINES[name]
    placed = placed_copy(make(), ("cpu", "cpu", "cpu"), seed)
    plan = placed.plan(programs_BL, sharing=sharing)
    graph, parts, types = plan.graph, placed.placement.parts, types_of(plan.graph, plan.roles, 0)
    names = [plan.program_tokens[op] for op in graph.op.tolist()]
    inputs = [0] * graph.num_inputs if types is None else types.inputs.tolist()
    columns = [*inputs, *(plan.roles[op].result for op in graph.op)]
    position = [*[parts["stem"]] * graph.num_inputs, *(parts[name] for name in names)]
    reads = {(slot, parts[name]) for name, slots in zip(names, graph.args.tolist(), strict=True) for slot in slots}
    reads |= {(slot, parts["classifier"]) for slot in graph.roots.tolist()}
    expected = Counter(columns[slot] for slot, at in reads if slot >= 0 and position[slot] != at)
    assert {column: rows_copied(plan.plan, column) for column in (0, 1)} == {0: expected[0], 1: expected[1]}
    assert sum(call.size for call in plan.plan.calls if call.op < 0) == expected.total()


@pytest.mark.parametrize("devices", DEVICE_LISTS)
@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_all_devices_compute_in_it(devices, defer):
    engine = small_engine(dtype=torch.float32)
    placed, features_BCHW, dtypes = placed_copy(engine, devices), features(4, torch.float32), []
    for part in placed.parts:
        getattr(placed, part).register_forward_hook(lambda module, arguments, result: dtypes.append(result.dtype))
    alone, plan = engine.plan(PROGRAMS_BL), placed.plan(PROGRAMS_BL)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(lambda x: engine(x, alone, defer).float(), engine, features_BCHW)
    with torch.autocast(torch.device(devices[0]).type, torch.bfloat16):
        actual = results(lambda x: placed(x.to(devices[0]), plan, defer).float().cpu(), placed, features_BCHW)
    assert set(dtypes) == {torch.bfloat16}
    assert_same(on_cpu(actual), expected, 0.03)


def test_attentions_have_the_same_sum_on_several_devices():
    engine = tbd_cases.tbd_engine()
    placed = placed_copy(engine, ("cpu", "cpu", "cpu"))
    look = [
        each.forward_with_attentions(features(16), each.plan(tbd_cases.PROGRAMS_BL, attentions=True))
        for each in (engine, placed)
    ]
    torch.testing.assert_close(look[0], look[1])
    assert look[0][1] > 0


@ONE_GPU
def test_a_batch_moves_the_index_tensors_to_the_devices_of_their_columns():
    placed = placed_copy(small_engine(dtype=torch.float32), ("cpu", "cuda:0"))
    plan, nothing = placed.planner()(PROGRAMS_BL, image_rows_B=ROWS_B), torch.zeros(4, dtype=torch.int64)
    batch = Batch(nothing, nothing, None, nothing, features(2, torch.float32), ROWS_B, plan)
    there = batch.pin_memory().to(torch.device("cpu"))
    assert [column.index.device.type for column in there.plan.plan.columns] == ["cpu", "cuda"]
    assert placed(there.features, there.plan).device.type == "cpu"


def test_a_plan_for_another_placement_is_an_error():
    engine = small_engine()
    placed, other = placed_copy(engine, ("cpu", "cpu")), placed_copy(engine, ("cpu", "cpu"), seed=1)
    for runs, plans in ((placed, other), (placed, engine), (engine, placed)):
        with pytest.raises(ValueError, match="an engine that is placed on other devices"):
            runs(features(4), plans.plan(PROGRAMS_BL))
