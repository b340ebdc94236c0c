"""The modules of Vector-NMN: what they compute, that they share their weights, and what cannot be done with them."""

import pytest
import torch
from engine_cases import MANY_BL, features, small_engine
from tiny_data import assert_one_error, tiny
from train_cases import iep_train

from iep.execution_engine.trace import trace


def test_a_function_modulates_the_shared_block_by_its_embedding_and_arguments_and_returns_maxima():
    """FiLM before each convolution, with the scale 1 + 2 tanh and the shift 2 tanh; zeros for missing arguments."""
    engine = small_engine(modules="vector")
    stem_1CHW, (first, second) = engine.stem(features(1)), torch.randn(2, 1, 3, 1, 1, dtype=torch.float64)
    down, right = torch.meshgrid(torch.linspace(-1, 1, 3), torch.linspace(-1, 1, 4), indexing="ij")
    for token, arguments in (("scene", ()), ("count", (first,)), ("union", (first, second))):
        module, shared = engine.get_submodule(token), engine.shared
        inputs = torch.cat([module.embedding, *(each.flatten() for each in arguments), torch.zeros(6).double()])[:9]
        shift1, scale1, shift2, scale2 = (2 * torch.tanh(shared.modulation(inputs))).view(4, 3, 1, 1)
        x_CHW = torch.cat([(1 + scale1) * stem_1CHW[0] + shift1, down[None].double(), right[None].double()])
        x_CHW = (1 + scale2) * torch.relu(shared.conv1(x_CHW)) + shift2
        expected_C = torch.relu(shared.conv2(x_CHW) + stem_1CHW[0]).flatten(1).max(1).values
        torch.testing.assert_close(module(stem_1CHW, *arguments)[0, :, 0, 0], expected_C)


def test_functions_have_only_an_embedding_of_their_own_and_checkpoints_hold_the_shared_weights_once():
    engine = small_engine(modules="vector")
    own = {f"{token}.embedding" for token in engine.parts[1:-1]}
    others = {name for name in engine.state_dict() if name.partition(".")[0] not in ("stem", "classifier", "shared")}
    assert others == own
    assert engine.classifier[0].in_channels == 3


def test_the_picture_shows_the_maps_whose_maxima_are_the_vectors():
    engine = small_engine(modules="vector")
    traced = trace(engine, features(1), MANY_BL[0].tolist())
    (logits_A,) = engine.classifier(traced.outputs[0].amax((2, 3), keepdim=True))
    assert traced.outputs[0].shape == (1, 3, 3, 4)
    torch.testing.assert_close(traced.logits[0], logits_A)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--placement", "balanced", "--devices", "cpu,cpu"], "the modules share their weights"),
        (["--asynchronous", "--threads", "2", "instance_size=4"], "cannot be placed on several devices or workers"),
    ],
)
def test_what_needs_weights_of_each_function_is_an_error(data, given, message, tmp_path):
    settings = [each for each in tiny("ee") if each != "device=cpu"]
    result = iep_train("--model", "ee", "--modules", "vector", "--data", data, "--out", tmp_path, *settings, *given)
    assert_one_error(result, message)
