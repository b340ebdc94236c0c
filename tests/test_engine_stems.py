import pytest
import torch
from batching_cases import assert_same, matrix, results
from torch.nn import functional

from iep.execution_engine.classifier import make_classifier
from iep.execution_engine.stems import make_stem
from iep.models.build import build
from iep.vocab import END, START, index_tokens

OPTIONS = {"stride": 1, "norm": False, "bias": False, "pixels": 1}
POOLED = {"pool_rest": True, "norm": False, "dropout": 0.0}
TOKENS = index_tokens(["count", "scene", "union"])
PROGRAMS_BL = matrix([[START, TOKENS.index("count"), TOKENS.index("scene"), END], [START, TOKENS.index("union"), END]])


@pytest.mark.parametrize(
    ("patch", "widths", "stride", "grid"),
    [(8, (16, 32), 1, 14), (8, (16, 32, 48), 2, 7), (8, (16, 32, 48, 48), 1, 14), (4, (8,), 1, 14), (2, (), 1, 14)],
)
def test_the_pixel_stem_brings_patches_down_to_the_working_grid(patch, widths, stride, grid):
    stem = make_stem("pixels", 3 * patch**2, widths, 24, **OPTIONS | {"stride": stride, "norm": True})
    assert stem(torch.rand(2, 3 * patch**2, 14, 14)).shape == (2, 24, grid, grid)


def test_the_pixel_stem_sees_the_picture_that_was_cut_into_patches():
    image_B3HW = torch.rand(2, 3, 56, 56)
    stem = make_stem("pixels", 48, (8,), 6, **OPTIONS)
    patches_BCHW = functional.pixel_unshuffle(image_B3HW, 4)
    assert stem(patches_BCHW).equal(stem[1:](image_B3HW))
    assert stem[0](patches_BCHW).equal(image_B3HW)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_conv_stem_strides_in_its_last_convolution(stride):
    stem = make_stem("conv", 6, (5,), 4, **OPTIONS | {"stride": stride})
    grid = -(-14 // stride)
    assert stem(torch.rand(2, 6, 14, 14)).shape == (2, 4, grid, grid)
    assert stem[:2](torch.rand(2, 6, 14, 14)).shape == (2, 5, 14, 14)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kind", ["conv", "pixels"])
def test_an_engine_with_each_stem_matches_the_reference_while_it_normalises(kind, stride):
    torch.manual_seed(0)
    shapes = {"feature_dim": 12, "feature_height": 5, "feature_width": 6, "module_dim": 4, "stem_widths": (3, 5)}
    shapes |= {"classifier_projection": 6, "classifier_hidden": ()}
    options = {"stem": kind, "stem_stride": stride, "stem_norm": True}
    engine = build("engine", {"program_tokens": TOKENS, "num_answers": 3} | shapes | options).double()
    features_BCHW = torch.randn(2, 12, 5, 6, dtype=torch.float64)
    expected = results(lambda x: engine.reference(x, PROGRAMS_BL), engine, features_BCHW)
    actual = results(lambda x: engine(x, engine.plan(PROGRAMS_BL)), engine, features_BCHW)
    assert_same(actual, expected, 1e-9)


def test_classifier_pools_what_is_left_of_an_odd_grid():
    classifier = make_classifier((4, 7, 5), projection=3, hidden=(9, 8), num_answers=6, pool=2, **POOLED)
    assert classifier[4].in_features == 3 * 4 * 3
    x_BCHW = torch.zeros(2, 4, 7, 5)
    corner_BCHW = x_BCHW.clone()
    corner_BCHW[:, :, 6, 4] = 10.0
    assert classifier(x_BCHW).shape == (2, 6)
    assert not classifier(x_BCHW).equal(classifier(corner_BCHW))


def test_a_stem_of_little_patches_embeds_each_by_itself_and_then_halves_the_picture():
    stem = make_stem("pixels", 192, (16, 24), 8, **OPTIONS | {"stride": 2, "pixels": 4})
    patches_BCHW = torch.rand(2, 192, 14, 14)
    assert stem(patches_BCHW).shape == (2, 8, 7, 7)
    changed = patches_BCHW.clone()
    changed[:, :, 3, 5] += 1
    # One 8 x 8 patch is two by two little ones; an embedding of each by itself changes nowhere else.
    touched = (stem[:2](changed) != stem[:2](patches_BCHW)).any(dim=1)
    assert touched.any()
    assert {(y // 2, x // 2) for _, y, x in touched.nonzero().tolist()} == {(3, 5)}
