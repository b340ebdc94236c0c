"""An engine on several devices answers, and learns, as on one."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from hypothesis import example, given, settings
from hypothesis import strategies as st
from placement_cases import DEVICE_LISTS, ONE_GPU, CountedMoves, on_cpu, placed_copy
from test_engine import PROGRAMS_BL, any_programs, small_engine
from torch import nn

from iep.batching.schedulers import SCHEDULERS
from iep.datasets import Batch
from iep.execution_engine.engine import ExecutionEngine
from iep.networks import pack

ROWS_B = np.array([0, 0, 1, 1])


@pytest.mark.parametrize("devices", DEVICE_LISTS)
@pytest.mark.parametrize("scene", ["module", "stem"])
@given(programs_BL=any_programs, seed=st.integers(0, 2**16))
@example(programs_BL=PROGRAMS_BL, seed=0)
@settings(quick, max_examples=2)
def test_on_any_placement_logits_and_all_gradients_are_the_references(scene, devices, programs_BL, seed):
    engine = small_engine(scene)
    placed = placed_copy(engine, devices, seed)
    rows_B = np.arange(len(programs_BL)) // 2
    features_NCHW = torch.randn(rows_B[-1] + 1, 5, 3, 4, dtype=torch.float64)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    alone = engine.plan(programs_BL, rows_B)
    assert_same(results(lambda x: engine(x, alone), engine, features_NCHW), expected, 1e-9)
    home = torch.device(devices[0])
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = placed.plan(programs_BL, rows_B, name, sharing)

        def run(x, plan=plan, defer=defer):
            return placed(x.to(home), plan, defer).cpu()

        assert_same(on_cpu(results(run, placed, features_NCHW)), expected, 1e-9)


@pytest.mark.parametrize("devices", DEVICE_LISTS)
def test_what_crosses_is_what_the_plan_says_and_as_much_comes_back(devices):
    placed, home = placed_copy(small_engine(), devices), torch.device(devices[0])
    plan = placed.plan(PROGRAMS_BL, ROWS_B)
    returned = []
    with pytest.MonkeyPatch.context() as patch:
        moved = CountedMoves(patch)
        counted = moved._counted
        patch.setattr("iep.batching.threads.move", lambda rows, to: _watched(counted(rows, to), returned))
        placed(torch.randn(2, 5, 3, 4, dtype=torch.float64, device=home), plan).sum().backward()
    assert sum(moved.rows) == sum(returned) == plan.layout.rows_moved(0) > 0
    assert moved.bytes == plan.layout.rows_moved(0) * 3 * 3 * 4 * 8


def _watched(rows: torch.Tensor, returned: list[int]) -> torch.Tensor:
    """A stand-in for rows that notes how many gradients come back to it."""
    rows = rows.view_as(rows)
    rows.register_hook(lambda gradient: returned.append(len(gradient)))
    return rows


@pytest.mark.parametrize("devices", DEVICE_LISTS)
@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_all_devices_compute_in_it(devices, defer):
    engine = small_engine(dtype=torch.float32)
    placed, home = placed_copy(engine, devices), torch.device(devices[0])
    features_BCHW = torch.randn(4, 5, 3, 4)
    kinds = []
    for part in placed.parts:
        getattr(placed, part).register_forward_hook(lambda module, arguments, result: kinds.append(result.dtype))
    alone, plan = engine.plan(PROGRAMS_BL), placed.plan(PROGRAMS_BL)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(lambda x: engine(x, alone, defer).float(), engine, features_BCHW)
    with torch.autocast(home.type, torch.bfloat16):
        actual = results(lambda x: placed(x.to(home), plan, defer).float().cpu(), placed, features_BCHW)
    assert set(kinds) == {torch.bfloat16}
    assert_same(on_cpu(actual), expected, 0.03)


@pytest.mark.parametrize("devices", DEVICE_LISTS)
def test_a_step_of_the_optimiser_leaves_the_weights_that_one_device_has(devices):
    engine = small_engine()
    placed, home = placed_copy(engine, devices), torch.device(devices[0])
    features_BCHW = torch.randn(4, 5, 3, 4, dtype=torch.float64)
    for each, device in ((engine, torch.device("cpu")), (placed, home)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            each(features_BCHW.to(device), each.plan(PROGRAMS_BL)).pow(2).sum().backward()
            nn.utils.clip_grad_norm_(list(each.parameters()), 0.1)
            optimizer.step()
    weights = {name: weight.cpu() for name, weight in placed.state_dict().items()}
    assert_same(weights, engine.state_dict(), 1e-7)
    assert pack({"engine": with_kwargs(placed)})["engine"]["weights"].keys() == engine.state_dict().keys()


def with_kwargs(engine: ExecutionEngine) -> ExecutionEngine:
    engine.kwargs = {}
    return engine


def test_the_loaders_workers_make_placed_plans_which_travel():
    placed = placed_copy(small_engine(), ("cpu", "cpu"))
    planner = pickle.loads(pickle.dumps(placed.planner()))
    plan = pickle.loads(pickle.dumps(planner(PROGRAMS_BL, image_rows_B=ROWS_B)))
    features_NCHW = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    expected = placed(features_NCHW, placed.plan(PROGRAMS_BL, ROWS_B))
    assert placed(features_NCHW, plan).equal(expected)


@ONE_GPU
def test_a_batch_takes_each_devices_indices_there():
    placed = placed_copy(small_engine(dtype=torch.float32), ("cpu", "cuda:0"))
    plan = placed.planner()(PROGRAMS_BL, image_rows_B=ROWS_B)
    nothing = torch.zeros(4, dtype=torch.int64)
    batch = Batch(nothing, nothing, None, nothing, torch.randn(2, 5, 3, 4), ROWS_B, plan)
    there = batch.pin_memory().to(torch.device("cpu"))
    assert [part.columns[0].sources.device.type for part in there.plan.layout.layouts] == ["cpu", "cuda"]
    assert placed(there.features, there.plan).device.type == "cpu"


def test_a_plan_for_another_placement_is_refused():
    engine = small_engine()
    placed, other = placed_copy(engine, ("cpu", "cpu")), placed_copy(engine, ("cpu", "cpu"), seed=1)
    features_BCHW = torch.randn(4, 5, 3, 4, dtype=torch.float64)
    for runs, plans in ((placed, other), (placed, engine), (engine, placed)):
        with pytest.raises(ValueError, match="an engine that is placed on other devices"):
            runs(features_BCHW, plans.plan(PROGRAMS_BL))
