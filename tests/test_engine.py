"""The engine of either family of modules, on one device or several, against its one-example reference."""

import gc
import itertools
from collections import Counter
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from batching_cases import assert_same, quick, results
from device_cases import DEVICES, HAS_TRITON, ONE_GPU
from engine_cases import (
    DEVICE_LISTS,
    ENGINES,
    FULL_SIZE,
    INDEX,
    MANY_BL,
    ONE_KIND,
    PROGRAMS_BL,
    TOKENS,
    features,
    placed_copy,
    programs,
    programs_for,
    small_engine,
    tokens_of,
    vocabularies,
)
from hypothesis import given, settings
from tiny_data import build

from iep.asynchronous.trainer import AsynchronousTrainer, Instance
from iep.batching.execute import execute
from iep.batching.schedulers import SCHEDULERS
from iep.data.datasets import Batch
from iep.execution_engine.roles import types_of
from iep.vocab import END, NULL, START, UNK, index_tokens

EXECUTIONS = ["calls", pytest.param("triton", marks=HAS_TRITON)]
ENDS_BL = np.array([[END, UNK, START, END, INDEX["union"], NULL, START]])


def on_cpu(values):
    """Return copies, which stay on the CPU when the network moves to a GPU, and its gradients with it."""
    return {name: None if value is None else value.to("cpu", copy=True) for name, value in values.items()}


@pytest.mark.parametrize("devices", [("cpu",), *DEVICE_LISTS])
@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(quick, max_examples=6)
def test_every_schedule_placement_and_deferral_matches_the_reference_on_logits_and_all_gradients(
    name, devices, data, seed
):
    some = st.sampled_from([PROGRAMS_BL, MANY_BL, np.full((2, 3), NULL), ENDS_BL])
    programs_BL = data.draw(some | programs_for(tokens_of(name)))
    in_float32 = (torch.float32, 1e-4, torch.finfo(torch.float32).eps)
    dtype, relative, rounding = data.draw(st.sampled_from([(torch.float64, 1e-9, 0.0), in_float32]))
    engine, rows_B = small_engine(dtype, **ENGINES[name]), np.arange(len(programs_BL)) // 2
    placed, features_NCHW = placed_copy(engine, devices, seed), features(rows_B[-1] + 1, dtype)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for batching, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = placed.plan(programs_BL, rows_B, batching, sharing)

        def run(x, plan=plan, defer=defer):
            return placed(x.to(devices[0]), plan, defer).cpu()

        assert_same(on_cpu(results(run, placed, features_NCHW)), expected, relative, rounding=rounding)


@HAS_TRITON
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENGINES)
def test_tritons_kernels_match_the_reference_on_logits_and_all_gradients(name, device):
    engine, programs_BL = (
        small_engine(torch.float32, **ENGINES[name]),
        np.concatenate([PROGRAMS_BL[:2], PROGRAMS_BL[-1:]]),
    )
    rows_B, features_NCHW = np.array([0, 0, 1]), features(2, torch.float32)
    expected = on_cpu(results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW))
    engine.to(device)
    plan = engine.plan(programs_BL, rows_B, execution="triton")
    found = results(lambda x: engine(x.to(device), plan).cpu(), engine, features_NCHW)
    assert_same(on_cpu(found), expected, 1e-4)


FROZEN = [("stem",), ("count", "greater_than")]


@pytest.mark.parametrize(("name", "execution"), [("vector", "calls"), pytest.param("iep", "triton", marks=HAS_TRITON)])
@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts_have_no_gradients_and_the_others_those_of_the_reference(name, execution, frozen):
    engine, features_BCHW, found = small_engine(torch.float32, **ENGINES[name]), features(2, torch.float32), []
    for part, parameter in engine.named_parameters():
        parameter.requires_grad_(part.split(".")[0] not in frozen)
    plan = engine.plan(PROGRAMS_BL[:2], execution=execution)
    for logits_BA in (engine.reference(features_BCHW, PROGRAMS_BL[:2]), engine(features_BCHW, plan)):
        engine.zero_grad(set_to_none=True)
        logits_BA.square().sum().backward()
        found.append({part: parameter.grad for part, parameter in engine.named_parameters()})
    assert_same(found[1], found[0], 1e-3)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "vector"])  # whose weights have no worker
@given(data=st.data(), sharing=st.booleans(), workers=st.integers(1, 3), seed=st.integers(0, 2**16))
@settings(quick, max_examples=8)
def test_a_plan_with_stem_and_classifier_matches_the_reference_on_logits_and_all_gradients(
    name, data, sharing, workers, seed
):
    """Executed, and as an instance of asynchronous training, for any vocabulary."""
    tokens = data.draw(vocabularies(name))
    programs_BL = data.draw(programs_for(tokens))
    engine = small_engine(**ENGINES[name] | {"program_tokens": tokens})
    rows_B = np.arange(len(programs_BL)) // 2
    features_NCHW = features(rows_B[-1] + 1)
    scale_BA = torch.linspace(1, 2, 4 * len(rows_B), dtype=torch.float64).view(-1, 4)
    expected_BA = engine.reference(features_NCHW[rows_B], programs_BL)
    (expected_BA * scale_BA).sum().backward()
    placed = placed_copy(engine, ("cpu",) * workers, seed)
    for scheduler in SCHEDULERS:
        plan = placed.planner(scheduler, sharing, whole=True)(programs_BL, image_rows_B=rows_B)
        inputs = placed.inputs_of(features_NCHW, plan, torch.float64)
        modules = {op: getattr(placed, part) for op, part in placed.ops.items()}
        (logits_BA,) = execute(plan.plan, modules, inputs)
        assert_same({"logits": logits_BA}, {"logits": expected_BA}, 1e-9)
        logits_BA = placed(features_NCHW, placed.plan(programs_BL, rows_B, scheduler, sharing))
        assert_same({"logits": logits_BA}, {"logits": expected_BA}, 1e-9)
        trainer = AsynchronousTrainer(modules, partial(torch.optim.SGD, lr=0), workers)
        trainer.run([Instance(plan.plan, inputs, lambda logits_BA: (logits_BA * scale_BA).sum())])
        gradients = [{key: each.grad for key, each in net.named_parameters()} for net in (placed, engine)]
        assert_same(*gradients, 1e-9, none_is_zero=True)
        placed.zero_grad()


@pytest.mark.parametrize("modules", ["iep", "tbd"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("defer", [False, True])
def test_the_default_engine_at_full_size_matches_the_reference_in_both_memory_formats(
    modules, device, defer, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # A GPU's convolutions would keep ten bits.
    torch.manual_seed(0)
    kwargs = {"program_tokens": TOKENS, "num_answers": 28, "modules": modules, "initialization": "torch"}
    engine = build("engine", kwargs | FULL_SIZE).to(device)
    programs_BL, rows_B = PROGRAMS_BL[[0, 1, 2, 1]], np.array([0, 1, 1, 1])
    features_NCHW = torch.rand(2, 1024, 14, 14, device=device)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        engine.to(memory_format=memory_format)
        plan = engine.plan(programs_BL, rows_B)
        expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
        actual = results(lambda x, plan=plan: engine(x, plan, defer), engine, features_NCHW)
        assert actual["output"].shape == (4, 28)
        assert_same(actual, expected, 1e-4)


@pytest.mark.parametrize("devices", [("cpu",), *ONE_KIND])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_all_devices_compute_in_it_and_match_the_reference_to_its_precision(name, defer, devices):
    engine = small_engine(torch.float32, **ENGINES[name])
    placed, features_BCHW, dtypes = placed_copy(engine, devices), features(len(MANY_BL), torch.float32), []
    for part in placed.parts:
        getattr(placed, part).register_forward_hook(lambda module, arguments, result: dtypes.append(result.dtype))
    plan, exact = placed.plan(MANY_BL), results(lambda x: engine.reference(x, MANY_BL), engine, features_BCHW)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(lambda x: engine.reference(x, MANY_BL).float(), engine, features_BCHW)
    with torch.autocast(torch.device(devices[0]).type, torch.bfloat16):
        actual = on_cpu(results(lambda x: placed(x.to(devices[0]), plan, defer).float(), placed, features_BCHW))
    assert torch.bfloat16 in dtypes
    assert name == "tbd" or set(dtypes) == {torch.bfloat16}
    if devices[0] == "cpu":
        assert_same(actual, expected, 0.03)
    # A GPU sums in another order, so that other units of a ReLU pass, and single gradients change as a whole: those of
    # the reference do, too, where the features change by their last digit.
    assert_same({"output": actual.pop("output")}, {"output": exact.pop("output")}, 0.03)
    found, exactly = (
        torch.cat([each[key].flatten() for key in exact if exact[key] is not None]) for each in (actual, exact)
    )
    assert (found - exactly).norm() < 0.2 * exactly.norm()


# Placements


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "vector"])  # which cannot be placed
@pytest.mark.parametrize("sharing", [False, True])
@given(seed=st.integers(0, 2**16))
@settings(quick, max_examples=5)
def test_a_value_is_copied_once_to_each_other_device_that_reads_it(name, sharing, seed):
    placed = placed_copy(small_engine(**ENGINES[name]), ("cpu", "cpu", "cpu"), seed)
    plan = placed.plan(MANY_BL, sharing=sharing)
    graph, parts, types = plan.graph, placed.placement.parts, types_of(plan.graph, plan.roles, 0)
    names = [plan.program_tokens[op] for op in graph.op.tolist()]
    columns = [*types.inputs.tolist(), *(plan.roles[op].result for op in graph.op)]
    position = [*[parts["stem"]] * graph.num_inputs, *(parts[name] for name in names)]
    reads = {(slot, parts[name]) for name, slots in zip(names, graph.args.tolist(), strict=True) for slot in slots}
    reads |= {(slot, parts["classifier"]) for slot in graph.roots.tolist()}
    expected = Counter(columns[slot] for slot, at in reads if slot >= 0 and position[slot] != at)
    copied: Counter[int] = Counter()
    for call in plan.plan.calls:
        if call.op < 0:
            copied[call.results[0].column // plan.plan.num_devices] += call.size
    assert copied == expected
    assert sum(call.size for call in plan.plan.calls if call.op < 0) == expected.total()


@ONE_GPU
def test_a_batch_moves_the_index_tensors_to_the_devices_of_their_columns():
    placed = placed_copy(small_engine(torch.float32), ("cpu", "cuda:0"))
    rows_B, nothing = np.array([0, 0, 1, 1]), torch.zeros(4, dtype=torch.int64)
    plan = placed.planner()(PROGRAMS_BL, image_rows_B=rows_B)
    batch = Batch(nothing, nothing, None, nothing, features(2, torch.float32), rows_B, plan)
    there = batch.pin_memory().to(torch.device("cpu"))
    assert [column.index.device.type for column in there.plan.plan.columns] == ["cpu", "cuda"]
    assert placed(there.features, there.plan).device.type == "cpu"


# Plans


@pytest.mark.parametrize(
    ("kwargs", "nodes_in_training"),
    [({}, 3), ({"stem_norm": True}, 6), ({"module_norm": "example"}, 6)],
)
def test_by_default_an_engine_shares_except_in_training_with_norms(kwargs, nodes_in_training):
    programs_BL, rows_B = PROGRAMS_BL[[0, 0]], np.array([0, 0])
    for training, nodes in ((True, nodes_in_training), (False, 3)):
        engine = small_engine(**kwargs).train(training)
        assert engine.plan(programs_BL, rows_B).graph.num_nodes == nodes
        assert engine.planner(training=training)(programs_BL, image_rows_B=rows_B).graph.num_nodes == nodes


def test_without_sharing_every_program_runs_its_stem_and_all_its_nodes_and_with_it_each_image_and_subtree_once():
    engine = small_engine()
    programs_BL, rows_B = PROGRAMS_BL[[0, 0, 1, 0]], np.array([1, 1, 1, 0])
    seen = []
    engine.stem.register_forward_hook(lambda module, arguments, output: seen.append(len(output)))
    for sharing in (False, True):
        engine(features(2), engine.plan(programs_BL, rows_B, sharing=sharing))
    assert seen == [4, 2]
    assert engine.plan(programs_BL, rows_B, sharing=False).graph.num_nodes == 3 * 3 + 7
    # About image 1: scene, red(scene), count of it; and count(scene), left(scene), red(left), count of it, the root.
    assert engine.plan(programs_BL, rows_B, sharing=True).graph.num_nodes == 3 + 5 + 3


def test_a_plan_runs_neither_null_nor_start_whatever_the_tokens():
    programs_BL = np.random.default_rng(0).integers(0, len(TOKENS), (64, 30))
    for scene in ("module", "stem"):
        ops = set(small_engine(scene=scene).plan(programs_BL).graph.op.tolist())
        assert ops == set(range(len(TOKENS))) - {NULL, START} - ({INDEX["scene"]} if scene == "stem" else set())


# Memory and initial weights


def maps_alive():
    """Return the ids of tensors of maps of 3 channels on a grid of 3 x 4, in any order and as rows of numbers."""
    gc.collect()
    shapes = {(3, 3, 4), (3, 4, 3), (36,)}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return {id(each) for each in alive if tuple(each.shape[1:]) in shapes}


@pytest.mark.parametrize("frozen", [(), ("stem",)])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_the_backward_pass_frees_values_and_gradients_even_where_the_loss_is_kept(execution, frozen):
    engine, before = small_engine(torch.float32), maps_alive()
    for part in frozen:
        engine.get_submodule(part).requires_grad_(False)
    plan = engine.plan(PROGRAMS_BL, execution=execution)
    loss = engine(torch.randn(4, 5, 3, 4), plan).sum()
    loss.backward()
    assert maps_alive() <= before
    assert loss.grad_fn is not None


@pytest.mark.parametrize(
    ("name", "execution"), [("iep", "calls"), ("vector", "calls"), pytest.param("iep", "triton", marks=HAS_TRITON)]
)
@pytest.mark.parametrize("part", ["relate[left]", "filter_color[red].conv1"])
def test_hooks_run_for_the_rows_of_their_own_function(part, name, execution):
    engine, seen = small_engine(torch.float32, **ENGINES[name]), []

    def double(module, arguments, result):
        seen.append(len(result))
        return 2 * result

    engine.get_submodule(part.partition(".")[0] if name == "vector" else part).register_forward_hook(double)
    features_BCHW = features(len(PROGRAMS_BL), torch.float32)
    expected_BA = engine.reference(features_BCHW, PROGRAMS_BL)
    rows = sum(seen)
    found_BA = engine(features_BCHW, engine.plan(PROGRAMS_BL, execution=execution))
    torch.testing.assert_close(found_BA, expected_BA)
    assert sum(seen) == 2 * rows > 0


def test_weights_begin_kaiming_normal():
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 28} | FULL_SIZE)
    for weight in (engine.get_submodule("count").conv1.weight, engine.stem[0].weight, engine.classifier[4].weight):
        fan_in = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
        assert weight.abs().max().item() > 3.3 * (2 / fan_in) ** 0.5, "uniform weights end at 1.7 deviations"


# Errors


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"modules": "film"}, "modules is 'film', expected one of iep, tbd, pooled, vector"),
        ({"stem": "pixels"}, "stem is 'pixels', expected one of conv, none"),
        ({"stem": "none", "module_dim": 4}, "features of 5 channels for modules of 4"),
        ({"module_norm": "layer"}, "module_norm is 'layer', expected one of none, example"),
        ({"classifier_pool": 4, "classifier_pool_rest": False}, "a pooling window of 4 leaves nothing"),
        ({"modules": "vector", "scene": "stem"}, "a setting of the modules iep; that of vector is .module."),
        ({"modules": "tbd", "program_tokens": [*TOKENS, "locate[cube]"]}, "'locate.cube.' has no module among tbd's"),
        ({"program_tokens": index_tokens(["count"])}, "has no 'scene'"),
        ({"program_tokens": [*TOKENS, "forward"]}, "program token 'forward' cannot name a module"),
    ],
)
def test_settings_and_vocabularies_that_cannot_be_built_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_engine(**kwargs)


@pytest.mark.parametrize("rows", [[0, 1, 2], [0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0]])
def test_image_rows_that_are_not_one_row_for_each_program_are_refused(rows):
    with pytest.raises(ValueError, match="for 4 programs, expected one whole number >= 0 for each"):
        small_engine().plan(PROGRAMS_BL, np.array(rows))


ROWS_B = np.array([0, 2, 1, 1])


@pytest.mark.parametrize(
    ("plan", "images", "message"),
    [
        (lambda engine: engine.plan(PROGRAMS_BL, ROWS_B, sharing=False), 2, "features of 2 images for a plan of 3"),
        (lambda engine: engine.plan(PROGRAMS_BL[:0]), 0, "an empty minibatch"),
        (lambda engine: small_engine(scene="stem").plan(PROGRAMS_BL), 4, "another vocabulary, other modules"),
        (lambda engine: placed_copy(engine, ("cpu", "cpu")).plan(PROGRAMS_BL), 4, "that is placed on other devices"),
    ],
)
def test_features_and_plans_that_do_not_fit_an_engine_are_errors(plan, images, message):
    engine = small_engine()
    with pytest.raises(ValueError, match=message):
        engine(features(images), plan(engine))


def test_attentions_are_summed_only_by_modules_that_make_them():
    with pytest.raises(ValueError, match="modules return no attentions"):
        small_engine().plan(programs("count scene"), attentions=True)
