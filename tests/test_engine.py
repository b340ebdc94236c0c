"""The engine of either family of modules against its one-example reference, what a plan holds, what is refused."""

import gc
import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import tbd_cases
import torch
from batching_cases import (
    FULL_SIZE,
    assert_same,
    in_bfloat16,
    in_memory_formats,
    matrix,
    quick,
    results,
    token_matrices,
)
from hypothesis import given, settings

from iep.batching.schedulers import SCHEDULERS
from iep.models.build import build
from iep.vocab import END, NULL, START, UNK, index_tokens

FUNCTIONS = ("count", "equal_size", "filter_color[red]", "greater_than", "intersect", "relate[left]", "scene", "union")
TOKENS = index_tokens(FUNCTIONS)
INDEX = {token: index for index, token in enumerate(TOKENS)}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
UNARY = [INDEX[token] for token in ("count", "filter_color[red]", "relate[left]")]
BINARY = [INDEX[token] for token in ("equal_size", "greater_than", "intersect", "union")]


def program(*tokens):
    return [START, *(INDEX[token] for token in tokens), END]


PROGRAMS_BL = matrix(
    [
        program("count", "filter_color[red]", "scene"),
        program("greater_than", "count", "scene", "count", "filter_color[red]", "relate[left]", "scene"),
        program("count", "union", "filter_color[red]", "scene", "relate[left]", "scene"),
        program("scene"),
    ],
    pad=NULL,
)


def small_engine(scene="module", dtype=torch.float64, **kwargs):
    torch.manual_seed(0)
    settings = {"feature_dim": 5, "feature_height": 3, "feature_width": 4, "module_dim": 3, "stem_widths": (4,)}
    settings |= {"classifier_projection": 6, "classifier_hidden": (7,), "scene": scene}
    return build("engine", {"program_tokens": TOKENS, "num_answers": 4} | settings | kwargs).to(dtype)


any_programs = token_matrices(
    len(TOKENS), inner=[START, END, UNK, *UNARY, *BINARY], unary=UNARY, binary=BINARY, max_batch=6, wide=10
)


ENGINES = {
    "iep": (small_engine, PROGRAMS_BL, any_programs),
    "iep with scene as the stem": (lambda **kwargs: small_engine("stem", **kwargs), PROGRAMS_BL, any_programs),
    "tbd": (tbd_cases.tbd_engine, tbd_cases.PROGRAMS_BL, tbd_cases.any_programs),
}
"""By name: how to make an engine, some programs for it, and a strategy that draws others."""


def features(count, dtype=torch.float64):
    return torch.randn(count, 5, 3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data())
@settings(quick, max_examples=15)
def test_every_scheduler_sharing_and_deferral_matches_the_reference_on_logits_and_all_gradients(name, data):
    make, some_BL, others = ENGINES[name]
    ends_BL = np.array([[END, UNK, START, END, INDEX["union"], NULL, START]])
    programs_BL = data.draw(st.sampled_from([some_BL, np.full((2, 3), NULL), ends_BL]) | others)
    engine, rows_B = make(), np.arange(len(programs_BL)) // 2
    features_NCHW = features(rows_B[-1] + 1)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for batching, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = engine.plan(programs_BL, rows_B, batching, sharing)
        actual = results(lambda x, plan=plan, defer=defer: engine(x, plan, defer), engine, features_NCHW)
        assert_same(actual, expected, 1e-9)


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
    for expected, actual in in_memory_formats(engine, features_NCHW, programs_BL, rows_B, defer):
        assert actual["output"].shape == (4, 28)
        assert_same(actual, expected, 1e-4)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_results_and_gradients_match_the_reference_to_its_precision(name, defer):
    make, programs_BL, _ = ENGINES[name]
    engine = make(dtype=torch.float32)
    expected, actual = in_bfloat16(engine, features(len(programs_BL), torch.float32), programs_BL, defer)
    assert_same(actual, expected, 0.03)


@pytest.mark.parametrize(
    ("kwargs", "nodes_in_training"),
    [({}, 3), ({"stem_norm": True}, 6), ({"module_norm": "batch"}, 6), ({"module_norm": "example"}, 6)],
)
def test_by_default_an_engine_shares_except_in_training_with_norms(kwargs, nodes_in_training):
    programs_BL, rows_B = PROGRAMS_BL[[0, 0]], np.array([0, 0])
    for training, nodes in ((True, nodes_in_training), (False, 3)):
        engine = small_engine(**kwargs).train(training)
        assert engine.plan(programs_BL, rows_B).graph.num_nodes == nodes
        assert engine.planner(training=training)(programs_BL, image_rows_B=rows_B).graph.num_nodes == nodes


PIXELS = {"stem": "pixels", "feature_dim": 192}


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scene": "image"}, "scene is 'image', expected one of module, stem"),
        ({"modules": "film"}, "modules is 'film', expected one of iep, tbd"),
        ({"stem": "resnet"}, "stem is 'resnet', expected one of conv, pixels"),
        (PIXELS | {"feature_dim": 1024}, "1024 channels, expected 3 . P . P"),
        (PIXELS | {"feature_dim": 27}, "patches of 3 pixels and a stride of 1 are not a power of two"),
        (PIXELS, "make 2 convolutions, expected at least 3 to halve patches of 8"),
        (PIXELS | {"stem_pixels": 3}, "stem_pixels is 3, expected a divisor of the patches' 8 pixels"),
        ({"stem": "none", "module_dim": 4}, "features of 5 channels for modules of 4"),
        ({"stem": "none", "module_dim": 5, "stem_stride": 2}, "stem_stride is 2, and there is no stem"),
        ({"module_norm": "layer"}, "module_norm is 'layer', expected one of none, batch, example"),
        ({"module_norm": "example", "stem_stride": 4}, "needs maps of more than one position, and the grid is 1x1"),
        (
            {"classifier_pool": 4, "classifier_pool_rest": False},
            "a pooling window of 4 leaves nothing",
        ),
        (
            {"modules": "tbd", "module_residual": False},
            "settings of the modules iep",
        ),
        ({"modules": "tbd", "module_norm": "batch"}, "settings of the modules iep"),
        ({"modules": "tbd", "scene": "stem"}, "scene is 'stem', a setting of the modules iep"),
        ({"modules": "tbd", "program_tokens": [*TOKENS, "locate[cube]"]}, "'locate.cube.' has no module among tbd's"),
        ({"program_tokens": index_tokens(["count"])}, "has no 'scene'"),
        *(
            ({"program_tokens": [*TOKENS, token]}, f"program token '{token}' cannot name a module")
            for token in ("forward", "stem", "training", "a.b", "")
        ),
    ],
)
def test_settings_and_vocabularies_that_cannot_be_built_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_engine(**kwargs)


@pytest.mark.parametrize("change", [{"scene": "stem"}, {"modules": "tbd"}, {"program_tokens": [*TOKENS, "exist"]}])
def test_a_plan_for_another_kind_of_engine_is_refused(change):
    plan = small_engine(**change).plan(PROGRAMS_BL)
    with pytest.raises(ValueError, match="another vocabulary, other modules or another scene"):
        small_engine()(features(4), plan)


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


def test_steps_leave_nothing_behind():
    engine = small_engine(dtype=torch.float32)

    def tensors_after(steps):
        for _ in range(steps):
            engine.zero_grad(set_to_none=True)
            logits = engine(torch.randn(4, 5, 3, 4), engine.plan(PROGRAMS_BL), defer_weight_grads=True)
            logits.sum().backward()
        del logits
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    assert tensors_after(2) == tensors_after(5)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_the_backward_pass_frees_values_and_gradients_even_where_the_loss_is_kept(is_frozen):
    engine = small_engine(dtype=torch.float32)
    engine.stem.requires_grad_(not is_frozen)
    plan = engine.plan(PROGRAMS_BL)
    buffer_bytes = plan.plan.columns[0].num_rows * 3 * 3 * 4 * 4
    loss = engine(torch.randn(4, 5, 3, 4), plan).sum()
    loss.backward()
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    assert buffer_bytes not in {tensor.untyped_storage().nbytes() for tensor in tensors}
    assert loss.grad_fn is not None


def test_weights_begin_kaiming_normal():
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 28} | FULL_SIZE)
    for weight in (engine.get_submodule("count").conv1.weight, engine.stem[0].weight, engine.classifier[4].weight):
        fan_in = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
        assert weight.abs().max().item() > 3.3 * (2 / fan_in) ** 0.5, "uniform weights end at 1.7 deviations"


def test_a_plan_runs_neither_null_nor_start_whatever_the_tokens():
    programs_BL = np.random.default_rng(0).integers(0, len(TOKENS), (64, 30))
    for scene in ("module", "stem"):
        ops = set(small_engine(scene).plan(programs_BL).graph.op.tolist())
        assert ops == set(range(len(TOKENS))) - {NULL, START} - ({INDEX["scene"]} if scene == "stem" else set())


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("rows", [[0, 1, 2], [[0], [1], [2], [3]], [0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0], [True] * 4])
def test_image_rows_that_are_not_one_row_for_each_program_are_refused(rows, sharing):
    with pytest.raises(ValueError, match="for 4 programs, expected one whole number >= 0 for each"):
        small_engine().plan(PROGRAMS_BL, np.array(rows), sharing=sharing)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("images", [2, 4])
def test_features_of_more_or_fewer_images_than_the_plans_are_refused(images, sharing):
    engine = small_engine()
    plan = engine.plan(PROGRAMS_BL, np.array([0, 2, 1, 1]), sharing=sharing)
    with pytest.raises(ValueError, match=f"features of {images} images for a plan of 3"):
        engine(torch.randn(images, 5, 3, 4).double(), plan)


def test_image_rows_may_be_of_any_whole_type():
    engine = small_engine()
    rows_B = np.array([1, 0, 0, 1])
    features_NCHW = features(2)
    expected = engine(features_NCHW, engine.plan(PROGRAMS_BL, rows_B))
    for kind in (np.uint8, np.int32, np.uint16):
        for sharing in (False, True):
            plan = engine.plan(PROGRAMS_BL, rows_B.astype(kind), sharing=sharing)
            torch.testing.assert_close(engine(features_NCHW, plan), expected)


def test_a_batch_without_examples_is_an_error():
    engine = small_engine()
    with pytest.raises(ValueError, match="an empty minibatch"):
        engine(torch.zeros(0, 5, 3, 4).double(), engine.plan(PROGRAMS_BL[:0]))
