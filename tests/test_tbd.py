"""An engine of attention modules, batched, is the one-example reference: logits, all gradients, the penalty."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from batching_cases import FULL_SIZE, assert_same, in_bfloat16, in_memory_formats, quick, results
from hypothesis import example, given, settings
from tbd_cases import ILL_FORMED, PROGRAMS_BL, TOKENS, WELL_FORMED, any_programs, features, programs, tbd_engine
from tiny_data import EXAMPLES, VOCAB, padded

from iep.batching.schedulers import SCHEDULERS
from iep.execution_engine.roles import tree_run
from iep.execution_engine.tbd import SameModule
from iep.execution_engine.trace import run_tree
from iep.models.build import build
from iep.vocab import NULL

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def rows_of(programs_BL):
    """Two programs about each image."""
    return np.arange(len(programs_BL)) // 2


@given(programs_BL=any_programs)
@example(programs_BL=PROGRAMS_BL)
@example(programs_BL=np.full((2, 3), NULL))
@settings(quick, max_examples=25)
def test_every_scheduler_sharing_and_deferral_matches_the_reference_on_logits_and_all_gradients(programs_BL):
    engine, rows_B = tbd_engine(), rows_of(programs_BL)
    features_NCHW = features(rows_B[-1] + 1)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = engine.plan(programs_BL, rows_B, name, sharing)
        actual = results(lambda x, plan=plan, defer=defer: engine(x, plan, defer), engine, features_NCHW)
        assert_same(actual, expected, 1e-9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("defer", [False, True])
def test_the_default_engine_at_full_size_matches_the_reference_with_channels_last_and_first(device, defer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a GPU's convolutions would keep ten bits
    torch.manual_seed(0)
    engine = build(
        "engine",
        {"program_tokens": TOKENS, "num_answers": 28, "modules": "tbd", "initialization": "torch"} | FULL_SIZE,
    ).to(device)
    programs_BL, rows_B = programs(*WELL_FORMED[:4], ILL_FORMED[4]), np.array([0, 1, 1, 1, 0])
    features_NCHW = torch.rand(2, 1024, 14, 14, device=device)
    for expected, actual in in_memory_formats(engine, features_NCHW, programs_BL, rows_B, defer):
        assert actual["output"].shape == (5, 28)
        assert_same(actual, expected, 1e-4)


@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_results_and_gradients_are_the_references_to_its_precision(defer):
    engine = tbd_engine(torch.float32)
    features_BCHW = features(len(PROGRAMS_BL), torch.float32)
    expected, actual = in_bfloat16(engine, features_BCHW, PROGRAMS_BL, defer)
    assert_same(actual, expected, 0.03)


def test_questions_of_every_type_run_as_the_reference_has_them():
    engine = tbd_engine(tokens=VOCAB.program)
    programs_BL = padded([[VOCAB.program_index[token] for token in program] for _, program, _ in EXAMPLES[:13]])
    assert len({program[0] for _, program, _ in EXAMPLES[:13]}) == 13
    features_BCHW = features(13)
    expected = results(lambda x: engine.reference(x, programs_BL), engine, features_BCHW)
    assert_same(results(lambda x: engine(x, engine.plan(programs_BL)), engine, features_BCHW), expected, 1e-9)


def test_same_takes_the_place_where_each_examples_own_attention_is_greatest():
    torch.manual_seed(0)
    module = SameModule(3)
    features_GCHW, attention_G1HW = torch.randn(2, 3, 2, 2), torch.zeros(2, 1, 2, 2)
    attention_G1HW[0, 0, 0, 1] = attention_G1HW[0, 0, 1, 0] = attention_G1HW[1, 0, 1, 1] = (
        0.5  # the first of two counts
    )
    weight, bias = module.conv.weight[0, :, 0, 0], module.conv.bias
    for row, (y, x) in enumerate([(0, 1), (1, 1)]):
        thing = features_GCHW[row, :, y, x]
        score = torch.einsum("c,chw->hw", weight[:3] * thing, features_GCHW[row]) + weight[3] * attention_G1HW[row, 0]
        by_hand = torch.sigmoid(score + bias)
        torch.testing.assert_close(module(features_GCHW, attention_G1HW)[row, 0], by_hand)


def test_in_one_minibatch_same_looks_at_another_place_for_each_image():
    """What the networks attend to is made plain by weights: filter_color[red] attends to a feature's size."""
    engine = tbd_engine(torch.float32)
    places = []
    engine.get_submodule("same_shape").register_forward_hook(
        lambda module, arguments, output: places.append(arguments[1].flatten(1).argmax(1).tolist())
    )
    programs_BL = programs(*["exist same_shape filter_color[red] scene"] * 3)
    features_BCHW = features(3, torch.float32)
    logits = engine(features_BCHW, engine.plan(programs_BL))
    assert [len(each) for each in places] == [3]
    assert len(set(places[0])) > 1, "all peaks are in one place, which shows nothing"
    for row in range(3):
        alone = engine(features_BCHW[row : row + 1], engine.plan(programs_BL[:1]))
        torch.testing.assert_close(alone[0], logits[row])
    assert places[0] == [place for (place,) in places[1:]]


@given(programs_BL=any_programs)
@example(programs_BL=PROGRAMS_BL)
@settings(quick, max_examples=10)
def test_the_sum_of_attentions_and_its_gradients_are_the_references_with_sharing_and_without(programs_BL):
    engine, rows_B = tbd_engine(), rows_of(programs_BL)
    penalized = {token for token, role in zip(TOKENS, engine.roles, strict=True) if role and role.is_penalized}

    def reference(x):
        results, penalty = [], torch.zeros((), dtype=x.dtype)
        for row, stem in zip(programs_BL.tolist(), engine.stem(x[rows_B]).split(1), strict=True):
            tree = tree_run([TOKENS[token] for token in row], engine.module_set)
            values, result = run_tree(engine, tree, stem)
            results.append(result)
            counted = [node.token in penalized and not node.unused for node in tree.nodes]
            penalty = penalty + sum(
                value.sum() for value, is_counted in zip(values, counted, strict=True) if is_counted
            )
        return torch.cat([engine.classifier(torch.cat(results)).flatten(), 3 * penalty[None]])

    features_NCHW = features(rows_B[-1] + 1)
    expected = results(reference, engine, features_NCHW)
    for name, sharing in itertools.product(("vanilla", "lookahead"), (False, True)):
        plan = engine.plan(programs_BL, rows_B, name, sharing, attentions=True)

        def run(x, plan=plan):
            logits, attention = engine.forward_with_attentions(x, plan)
            return torch.cat([logits.flatten(), 3 * attention[None]])

        assert_same(results(run, engine, features_NCHW), expected, 1e-9)


def test_attentions_are_not_summed_unless_the_plan_asks_for_them():
    engine = tbd_engine()
    assert engine.forward_with_attentions(features(8), engine.plan(PROGRAMS_BL, rows_of(PROGRAMS_BL)))[1] == 0


def test_modules_that_no_program_needs_get_no_gradient():
    engine = tbd_engine()
    programs_BL = programs("count filter_color[red] query_size same_shape scene")  # an encoding where none is wanted
    engine(features(1), engine.plan(programs_BL)).sum().backward()
    used = {"count", "filter_color[red]", "stem", "classifier"}
    for name, child in engine.named_children():
        assert {p.grad is not None for p in child.parameters()} <= {name in used}, name


def test_a_plan_survives_the_way_from_a_worker_process():
    engine = tbd_engine()
    plan = engine.plan(PROGRAMS_BL, attentions=True)
    ours = engine.forward_with_attentions(features(len(PROGRAMS_BL)), pickle.loads(pickle.dumps(plan)))
    assert all(map(torch.equal, ours, engine.forward_with_attentions(features(len(PROGRAMS_BL)), plan)))
