"""Norms, stems and classifiers of the engine: what they compute, in minibatches and one example at a time."""

import itertools

import numpy as np
import pytest
import torch
from batching_cases import quick, results
from engine_cases import PROGRAMS_BL, any_programs, draw_norms, features
from engine_cases import small_engine as make_engine
from hypothesis import given, settings
from torch import nn

from iep.batching.schedulers import SCHEDULERS
from iep.execution_engine.modules import ExampleNorm, UnaryModule
from iep.execution_engine.stem_and_classifier import make_classifier, make_stem

FORMATS = (torch.contiguous_format, torch.channels_last)


def small_engine(**kwargs):
    engine = make_engine(**kwargs)
    draw_norms(engine)
    return engine


def statistics(network):
    return {name: value.clone() for name, value in network.named_buffers()}


def assert_all_close(actual, expected):
    """Assert the same results; a bias before a norm has a gradient of zero, which rounding may make something else."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                actual[name], value, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
            )


# Norms of the modules


@pytest.mark.parametrize(("memory_format", "residual"), [(FORMATS[0], False), (FORMATS[1], True)])
@given(programs_BL=any_programs)
@settings(quick, max_examples=4)
def test_example_norm_is_by_every_schedule_as_one_example_at_a_time(memory_format, residual, programs_BL):
    one = small_engine(module_norm="example", module_residual=residual)
    x_BCHW, before = features(len(programs_BL)), one.state_dict() | statistics(one)
    expected = results(lambda x: one.reference(x, programs_BL), one, x_BCHW)
    after = statistics(one)
    for name, defer in itertools.product(SCHEDULERS, [False, True]):
        batched = small_engine(module_norm="example", module_residual=residual).to(memory_format=memory_format)
        batched.load_state_dict(before)
        plan = batched.plan(programs_BL, batching=name, sharing=False)
        actual = results(lambda x, e=batched, p=plan, d=defer: e(x, p, d), batched, x_BCHW)
        assert_all_close(actual, expected)
        found = statistics(batched)
        for key, value in after.items():
            if key.endswith("num_batches_tracked") or name == "vanilla":
                torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)


@given(programs_BL=any_programs)
@settings(quick, max_examples=5)
def test_in_evaluation_norms_are_the_same_by_every_schedule_with_and_without_sharing(programs_BL):
    engine = small_engine(module_norm="example", stem_norm=True, classifier_norm=True, classifier_dropout=0.5).eval()
    rows_B = np.arange(len(programs_BL)) // 2
    x_NCHW = features(rows_B[-1] + 1)
    before = statistics(engine)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, x_NCHW)
    for name, sharing in itertools.product(SCHEDULERS, (False, True)):
        plan = engine.plan(programs_BL, rows_B, name, sharing)
        assert_all_close(results(lambda x, plan=plan: engine(x, plan), engine, x_NCHW), expected)
    assert all(torch.equal(value, before[key]) for key, value in statistics(engine).items())


@pytest.mark.parametrize(("momentum", "rows"), [(0.1, 1), (0.7, 3)])
@pytest.mark.parametrize(("of_input", "of_gradient"), [FORMATS, FORMATS[::-1]])
def test_example_norm_is_batch_norm_of_each_row_however_maps_and_gradients_lie_in_memory(
    momentum, rows, of_input, of_gradient
):
    torch.manual_seed(0)
    mine, theirs = (norm(3, momentum=momentum).double() for norm in (ExampleNorm, nn.BatchNorm2d))
    draw_norms(mine)
    theirs.load_state_dict(mine.state_dict())
    x_GCHW = 2 + torch.randn(rows, 3, 4, 5, dtype=torch.float64).to(memory_format=of_input)
    gradient = torch.randn(rows, 3, 4, 5, dtype=torch.float64).to(memory_format=of_gradient)
    found = []
    for norm, run in ((mine, mine), (theirs, lambda x: torch.cat([theirs(row) for row in x.split(1)]))):
        x = x_GCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        y = run(x)
        y.backward(gradient)
        found.append([y, x.grad, norm.weight.grad, norm.bias.grad, *norm.buffers()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


# Stems and classifiers

POOLED = {"pool_rest": True, "norm": False, "dropout": 0.0}


def test_only_the_last_convolution_of_a_stem_has_a_stride():
    stem = make_stem("conv", 6, (5,), 24, stride=2, norm=False, bias=False)
    x_BCHW = torch.rand(2, 6, 14, 14)
    assert stem(x_BCHW).shape == (2, 24, 7, 7)
    assert stem[:2](x_BCHW).shape == (2, 5, 14, 14)


@pytest.mark.parametrize(
    "options",
    [
        *({"stem_stride": stride, "stem_widths": (3, 5), "stem_norm": True} for stride in (1, 2)),
        {"stem": "none", "module_dim": 12},
    ],
    ids=["stride 1", "stride 2", "none"],
)
def test_an_engine_with_each_stem_matches_the_reference_while_it_normalises(options):
    engine = small_engine(**options, feature_dim=12)
    x_BCHW = torch.randn(len(PROGRAMS_BL), 12, 3, 4, dtype=torch.float64)
    expected = results(lambda x: engine.reference(x, PROGRAMS_BL), engine, x_BCHW)
    assert_all_close(results(lambda x: engine(x, engine.plan(PROGRAMS_BL)), engine, x_BCHW), expected)


def test_classifier_pools_what_is_left_of_an_odd_grid():
    classifier = make_classifier((4, 7, 5), projection=3, hidden=(9, 8), num_answers=6, pool=2, **POOLED)
    assert classifier[4].in_features == 3 * 4 * 3
    x_BCHW = torch.zeros(2, 4, 7, 5)
    corner_BCHW = x_BCHW.clone()
    corner_BCHW[:, :, 6, 4] = 10.0
    assert classifier(x_BCHW).shape == (2, 6)
    assert not classifier(x_BCHW).equal(classifier(corner_BCHW))


def test_a_classifier_drops_in_training_alone():
    engine = small_engine(classifier_dropout=0.5, classifier_hidden=(64,))
    x_BCHW, plan = features(len(PROGRAMS_BL)), engine.plan(PROGRAMS_BL)
    assert not engine(x_BCHW, plan).equal(engine(x_BCHW, plan))
    engine.eval()
    assert engine(x_BCHW, plan).equal(engine(x_BCHW, plan))


@pytest.mark.parametrize("context", [False, True])
def test_only_a_block_with_context_reads_positions_beyond_its_convolutions(context):
    torch.manual_seed(0)
    x_GCHW = torch.rand(1, 4, 9, 9, requires_grad=True)
    UnaryModule(4, True, nn.Identity, context)(x_GCHW)[:, :, 0, 0].sum().backward()
    assert bool(x_GCHW.grad[:, :, 3:, 3:].any()) == context


def test_a_classifier_of_the_whole_grid_gives_an_object_the_same_logits_in_every_place():
    classifier = make_classifier((4, 7, 5), projection=3, hidden=(9,), num_answers=6, pool=0, **POOLED)
    x_BCHW = torch.zeros(2, 4, 7, 5)
    x_BCHW[0, :, 1, 1] = x_BCHW[1, :, 6, 4] = torch.rand(4)
    first_A, second_A = classifier(x_BCHW)
    torch.testing.assert_close(first_A, second_A)
    assert not classifier(2 * x_BCHW).allclose(classifier(x_BCHW))
