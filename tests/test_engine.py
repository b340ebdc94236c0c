import gc
import itertools
import pickle

import numpy as np
import pytest
import torch
from batching_cases import (
    FULL_SIZE,
    PUBLISHED_LAYERS,
    assert_same,
    in_bfloat16,
    in_memory_formats,
    matrix,
    quick,
    results,
    token_matrices,
)
from hypothesis import example, given, settings

from iep.batching.schedulers import SCHEDULERS
from iep.models.build import build
from iep.programs import arity
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


@pytest.mark.parametrize("scene", ["module", "stem"])
@given(programs_BL=any_programs)
@example(programs_BL=PROGRAMS_BL)
@example(programs_BL=np.full((2, 3), NULL))
@example(programs_BL=np.array([[END, UNK, START, END, INDEX["union"], NULL, START]]))
@settings(quick, max_examples=15)
def test_every_scheduler_sharing_and_deferral_matches_the_reference_on_logits_and_all_gradients(scene, programs_BL):
    engine = small_engine(scene)
    rows_B = np.arange(len(programs_BL)) // 2
    features_NCHW = torch.randn(rows_B[-1] + 1, 5, 3, 4, dtype=torch.float64)
    expected = results(lambda x: engine.reference(x[rows_B], programs_BL), engine, features_NCHW)
    for name, sharing, defer in itertools.product(SCHEDULERS, (False, True), (False, True)):
        plan = engine.plan(programs_BL, rows_B, name, sharing)
        actual = results(lambda x, plan=plan, defer=defer: engine(x, plan, defer), engine, features_NCHW)
        assert_same(actual, expected, 1e-9)


def test_without_sharing_every_program_runs_its_stem_and_all_its_nodes_and_with_it_each_image_and_subtree_once():
    engine = small_engine()
    programs_BL, rows_B = PROGRAMS_BL[[0, 0, 1, 0]], np.array([1, 1, 1, 0])
    seen = []
    engine.stem.register_forward_hook(lambda module, arguments, output: seen.append(len(output)))
    for sharing in (False, True):
        engine(torch.randn(2, 5, 3, 4).double(), engine.plan(programs_BL, rows_B, sharing=sharing))
    assert seen == [4, 2]
    assert engine.plan(programs_BL, rows_B, sharing=False).graph.num_nodes == 3 * 3 + 7
    # About image 1: scene, red(scene), count of it; and count(scene), left(scene), red(left), count of it, the root.
    assert engine.plan(programs_BL, rows_B, sharing=True).graph.num_nodes == 3 + 5 + 3


def test_left_to_itself_an_engine_shares_but_not_where_batch_norm_would_count_otherwise():
    programs_BL, rows_B = PROGRAMS_BL[[0, 0]], np.array([0, 0])
    for norm, training, nodes in ((False, True, 3), (False, False, 3), (True, True, 6), (True, False, 3)):
        engine = small_engine(stem_norm=norm).train(training)
        assert engine.plan(programs_BL, rows_B).graph.num_nodes == nodes
        assert engine.planner(training=training)(programs_BL, image_rows_B=rows_B).graph.num_nodes == nodes


@pytest.mark.parametrize("defer", [False, True])
def test_in_bfloat16_results_and_gradients_are_the_references_to_its_precision(defer):
    engine = small_engine(dtype=torch.float32)
    features_BCHW = torch.randn(4, 5, 3, 4)
    expected, actual = in_bfloat16(engine, features_BCHW, PROGRAMS_BL, defer)
    assert_same(actual, expected, 0.03)


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


def test_modules_that_no_program_uses_get_no_gradient():
    engine = small_engine()
    engine(torch.randn(4, 5, 3, 4).double(), engine.plan(PROGRAMS_BL)).sum().backward()
    used = {"count", "filter_color[red]", "greater_than", "relate[left]", "scene", "union", "stem", "classifier"}
    for name, child in engine.named_children():
        assert {p.grad is not None for p in child.parameters()} == {name in used}, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("defer", [False, True])
def test_the_default_engine_at_full_size_matches_the_reference_with_channels_last_and_first(device, defer, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # a GPU's convolutions would keep ten bits
    torch.manual_seed(0)
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 28} | FULL_SIZE).to(device)
    programs_BL, rows_B = PROGRAMS_BL[[0, 1, 2, 1]], np.array([0, 1, 1, 1])
    features_NCHW = torch.rand(2, 1024, 14, 14, device=device)
    for expected, actual in in_memory_formats(engine, features_NCHW, programs_BL, rows_B, defer):
        assert actual["output"].shape == (4, 28)
        assert_same(actual, expected, 1e-4)


def test_the_default_engine_has_the_published_layers_under_the_published_names():
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 28} | FULL_SIZE)
    shapes = {name: tuple(value.shape) for name, value in engine.state_dict().items()}
    layers = dict(PUBLISHED_LAYERS)
    for token in TOKENS:
        if token in ("<NULL>", "<START>"):
            continue
        block = token
        if arity(token) == 2:
            layers[f"{token}.proj"] = (128, 256, 1, 1)
            block = f"{token}.res_block"
        layers |= {f"{block}.{conv}": (128, 128, 3, 3) for conv in ("conv1", "conv2")}
    expected = {f"{layer}.weight": shape for layer, shape in layers.items()}
    expected |= {f"{layer}.bias": shape[:1] for layer, shape in layers.items()}
    assert shapes == expected


def test_scene_as_the_stem_has_no_module_and_returns_the_stem():
    engine = small_engine("stem")
    assert "scene" not in dict(engine.named_children())
    features_BCHW = torch.randn(1, 5, 3, 4, dtype=torch.float64)
    logits = engine(features_BCHW, engine.plan(matrix([program("scene")])))
    assert logits.equal(engine.classifier(engine.stem(features_BCHW)))


def test_a_residual_block_and_a_binary_module_compute_what_the_paper_says():
    engine = small_engine()
    x, y = torch.randn(2, 1, 3, 3, 4, dtype=torch.float64)
    unary = engine.get_submodule("count")
    by_hand = torch.relu(x + unary.conv2(torch.relu(unary.conv1(x))))
    assert torch.allclose(unary(x), by_hand)
    binary = engine.get_submodule("union")
    joined = torch.relu(binary.proj(torch.cat([x, y], dim=1)))
    by_hand = torch.relu(joined + binary.res_block.conv2(torch.relu(binary.res_block.conv1(joined))))
    assert torch.allclose(binary(x, y), by_hand)


def test_weights_begin_kaiming_normal():
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 28} | FULL_SIZE)
    for weight in (engine.get_submodule("count").conv1.weight, engine.stem[0].weight, engine.classifier[4].weight):
        fan_in = weight[0].numel()
        assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.02)
        assert weight.abs().max().item() > 3.3 * (2 / fan_in) ** 0.5, "uniform weights end at 1.7 deviations"


def test_a_plan_survives_the_way_from_a_worker_process():
    engine = small_engine()
    features_BCHW = torch.randn(4, 5, 3, 4, dtype=torch.float64)
    plan = engine.plan(PROGRAMS_BL)
    assert engine(features_BCHW, pickle.loads(pickle.dumps(plan))).equal(engine(features_BCHW, plan))


def test_programs_may_be_a_torch_tensor():
    engine = small_engine("stem")
    assert str(engine.plan(torch.from_numpy(PROGRAMS_BL)).plan) == str(engine.plan(PROGRAMS_BL).plan)


def test_a_plan_runs_neither_null_nor_start_whatever_the_tokens():
    programs_BL = np.random.default_rng(0).integers(0, len(TOKENS), (64, 30))
    for scene in ("module", "stem"):
        ops = set(small_engine(scene).plan(programs_BL).graph.op.tolist())
        assert ops == set(range(len(TOKENS))) - {NULL, START} - ({INDEX["scene"]} if scene == "stem" else set())


def test_a_plan_for_another_number_of_examples_is_refused():
    engine = small_engine()
    with pytest.raises(ValueError, match="features of 3 images for a plan of 4"):
        engine(torch.randn(3, 5, 3, 4).double(), engine.plan(PROGRAMS_BL))


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("rows", [[0, 1, 2], [[0], [1], [2], [3]], [0, 1, 2, -1], [0.0, 1.0, 2.0, 3.0], [True] * 4])
def test_image_rows_that_are_not_one_row_for_each_program_are_refused(rows, sharing):
    with pytest.raises(ValueError, match="for 4 programs, expected a whole number from 0 on for each"):
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
    features_NCHW = torch.randn(2, 5, 3, 4).double()
    expected = engine(features_NCHW, engine.plan(PROGRAMS_BL, rows_B))
    for kind in (np.uint8, np.int32, np.uint16):
        for sharing in (False, True):
            plan = engine.plan(PROGRAMS_BL, rows_B.astype(kind), sharing=sharing)
            torch.testing.assert_close(engine(features_NCHW, plan), expected)


@pytest.mark.parametrize("change", [{"scene": "stem"}, {"program_tokens": [*TOKENS, "exist"]}])
def test_a_plan_for_another_kind_of_engine_is_refused(change):
    plan = small_engine(**change).plan(PROGRAMS_BL)
    with pytest.raises(ValueError, match="another vocabulary, other modules or another scene"):
        small_engine()(torch.randn(4, 5, 3, 4).double(), plan)


def test_images_that_no_question_is_about_are_left_alone():
    engine = small_engine()
    features_NCHW = torch.randn(4, 5, 3, 4).double()
    rows_B = np.array([3, 1, 1, 3])
    logits = engine(features_NCHW, engine.plan(PROGRAMS_BL, rows_B))
    torch.testing.assert_close(logits, engine.reference(features_NCHW[rows_B], PROGRAMS_BL))


def test_a_batch_without_examples_is_an_error():
    engine = small_engine()
    with pytest.raises(ValueError, match="an empty minibatch"):
        engine(torch.zeros(0, 5, 3, 4).double(), engine.plan(PROGRAMS_BL[:0]))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"scene": "image"}, "scene is 'image', expected one of module, stem"),
        ({"stem": "resnet"}, "stem is 'resnet', expected one of conv, pixels"),
        ({"stem": "pixels", "feature_dim": 1024}, "1024 channels, expected 3 . P . P"),
        ({"stem": "pixels", "feature_dim": 27}, "patches of 3 pixels and a stride of 1 are not a power of two"),
        ({"stem": "pixels", "feature_dim": 192}, "make 2 convolutions, expected 3 or more to halve patches of 8"),
    ],
)
def test_settings_that_cannot_be_built_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        small_engine(**kwargs)


@pytest.mark.parametrize("token", ["forward", "stem", "training", "a.b", ""])
def test_a_token_that_cannot_name_a_module_is_refused(token):
    with pytest.raises(ValueError, match=f"program token '{token}' cannot name a module"):
        small_engine(program_tokens=[*TOKENS, token])


def test_a_vocabulary_without_scene_is_refused():
    with pytest.raises(ValueError, match="lacks 'scene'"):
        small_engine(program_tokens=index_tokens(["count"]))


def test_the_stem_runs_once_an_image_and_every_question_gets_its_own_images_maps():
    engine = small_engine("stem")
    images_NCHW = torch.randn(2, 5, 3, 4, dtype=torch.float64)
    rows_B = torch.tensor([1, 0, 0, 1])
    assert len(rows_B) == len(PROGRAMS_BL)
    seen = []
    engine.stem.register_forward_hook(lambda module, arguments, output: seen.append(len(output)))
    logits = engine(images_NCHW, engine.plan(PROGRAMS_BL, rows_B))
    assert seen == [2]
    torch.testing.assert_close(logits, engine.reference(images_NCHW[rows_B], PROGRAMS_BL))
