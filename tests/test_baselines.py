"""The baselines' networks against their equations, one question and one place of the image at a time."""

from itertools import product
from pathlib import Path

import pytest
import torch
from test_program_generator import DEVICES, QUESTIONS, gradients, naive_lstm_step, pad_rows
from torch import Tensor, nn
from torch.nn.functional import pad

from iep.baselines.networks import CNNLSTMBaseline, QuestionEncoder, StackedAttention, StackedAttentionBaseline
from iep.execution_engine.modules import UnaryModule
from iep.models.build import BASELINES, build
from iep.models.checkpoint import load_checkpoint, save_checkpoint
from iep.vocab import NULL

C, H, W, IMAGES, ANSWERS = 3, 5, 4, 3, 4
ROWS = [1, 0, 1, 2, 1, 0, 2]
"""The image of each of the seven questions: no order, and several questions on each."""
SIZES = {"num_question_tokens": 9, "num_answers": ANSWERS, "embedding_dim": 5, "hidden_dim": 6}
SHAPE = {"feature_dim": C, "feature_height": H, "feature_width": W}
NORM = {"classifier_norm": True, "classifier_dropout": 0.5}


def make(name: str, seed: int = 0, **options: object) -> nn.Module:
    """A small baseline in evaluation mode, running statistics of batch norms other than at their start."""
    torch.manual_seed(seed)
    sides = {"lstm": {}, "cnn_lstm": SHAPE, "cnn_lstm_sa": {"feature_dim": C}}[name]
    network = build(name, SIZES | sides | options)
    for layer in network.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
            nn.init.uniform_(layer.weight)
            nn.init.normal_(layer.bias)
    return network.eval()


def images(dtype: torch.dtype) -> Tensor:
    return torch.randn(IMAGES, C, H, W, generator=torch.Generator().manual_seed(5), dtype=dtype)


# The naive way


def naive_question(part: QuestionEncoder, question: list[int]) -> Tensor:
    zeros = part.embed.weight.new_zeros(part.rnn.hidden_size)
    state = [(zeros, zeros)] * part.rnn.num_layers
    for token in question:
        state = naive_lstm_step(part.rnn, part.embed.weight[token], state)
    return state[-1][0]


def naive_convolution(layer: nn.Conv2d, x_CHW: Tensor) -> Tensor:
    """A sum over the window's places."""
    _, height, width = x_CHW.shape
    side = layer.kernel_size[0]
    margin = side // 2
    padded = pad(x_CHW, (margin,) * 4)
    total = layer.bias[:, None, None].expand(-1, height, width)
    for row, column in product(range(side), repeat=2):
        window = padded[:, row : row + height, column : column + width]
        total = total + torch.einsum("oc,chw->ohw", layer.weight[:, :, row, column], window)
    return total


def naive_norm(layer: nn.Module, x: Tensor) -> Tensor:
    shape = (-1, *[1] * (x.dim() - 1))
    mean, variance, weight, bias = (
        part.view(shape) for part in (layer.running_mean, layer.running_var, layer.weight, layer.bias)
    )
    return (x - mean) / (variance + layer.eps).sqrt() * weight + bias


def naive_layer(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.Conv2d):
        return naive_convolution(layer, x)
    if isinstance(layer, nn.Linear):
        return layer.weight @ x + layer.bias
    if isinstance(layer, nn.ReLU):
        return x.clamp(min=0)
    if isinstance(layer, nn.MaxPool2d):
        places = product(range(H // 2), range(W // 2))
        windows = [x[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].flatten(1) for row, column in places]
        return torch.stack([window.max(1).values for window in windows], 1).view(-1, H // 2, W // 2)
    if isinstance(layer, UnaryModule):
        inner = naive_norm(layer.bn1, naive_convolution(layer.conv1, x)).clamp(min=0)
        return (x + naive_norm(layer.bn2, naive_convolution(layer.conv2, inner))).clamp(min=0)
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
        return naive_norm(layer, x)
    assert isinstance(layer, nn.Dropout)  # nothing in evaluation
    return x


def naive_layers(layers: nn.Sequential, x: Tensor) -> Tensor:
    for layer in layers:
        x = naive_layer(layer, x)
    return x


def naive_attention(step: StackedAttention, map_DHW: Tensor, query_D: Tensor) -> Tensor:
    places = [map_DHW[:, row, column] for row, column in product(range(H), range(W))]
    scores = []
    for place_D in places:
        hidden_K = step.Wv.weight[:, :, 0, 0] @ place_D + step.Wv.bias + step.Wu.weight @ query_D + step.Wu.bias
        scores.append(step.Wp.weight[0, :, 0, 0] @ hidden_K.tanh() + step.Wp.bias[0])
    shares = torch.stack(scores).exp() / torch.stack(scores).exp().sum()
    return query_D + sum(share * place_D for share, place_D in zip(shares, places, strict=True))


def naive_logits(network: nn.Module, question: list[int], image_CHW: Tensor) -> Tensor:
    state = naive_question(network.rnn, question)
    if isinstance(network, CNNLSTMBaseline):
        state = torch.cat([state, naive_layers(network.cnn, image_CHW).reshape(-1)])
    if isinstance(network, StackedAttentionBaseline):
        map_DHW = naive_convolution(network.image_proj, image_CHW)
        for name, step in network.named_children():
            if name.startswith("stacked-attn-"):
                state = naive_attention(step, map_DHW, state)
    return naive_layers(network.classifier, state)


CASES = [
    ("lstm", {}),
    ("lstm", {"classifier_dims": (7, 8), "num_layers": 1, **NORM}),
    ("cnn_lstm", {"cnn_projection": 4, "classifier_dims": (7,)}),
    ("cnn_lstm", {"cnn_projection": 0, "cnn_pooling": "none", "classifier_dims": ()}),
    ("cnn_lstm", {"cnn_res_blocks": 2, "cnn_res_block_dim": 3, "cnn_projection": 4, "classifier_dims": (7,), **NORM}),
    ("cnn_lstm", {"cnn_res_blocks": 1, "cnn_res_block_dim": 3, "cnn_projection": 0, "classifier_dims": (7,)}),
    ("cnn_lstm_sa", {"attention_dim": 7, "classifier_dims": (7,)}),
    ("cnn_lstm_sa", {"attention_dim": 3, "attention_steps": 3, "classifier_dims": (7, 8), **NORM}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_and_every_gradient_match_the_equations_one_question_at_a_time(name, options, device, dtype):
    network = make(name, **options).to(dtype)
    features = images(dtype)
    naive = torch.stack([naive_logits(network, *pair) for pair in zip(QUESTIONS, features[ROWS], strict=True)])
    expected = gradients(network, naive.square().mean())

    network.to(device)
    for part in network.modules():  # on a GPU gradients go back through LSTMs in training mode alone
        part.train(isinstance(part, nn.LSTM))
    logits = network(pad_rows(QUESTIONS).to(device), features.to(device), ROWS)
    found = {key: value.cpu() for key, value in gradients(network, logits.square().mean()).items()}
    close = {"rtol": 1e-4, "atol": 1e-6} if dtype is torch.float32 else {}
    torch.testing.assert_close(logits.cpu(), naive.detach(), **close)
    torch.testing.assert_close(found, expected, **close)
    assert all(gradient.abs().max() > 0 for key, gradient in expected.items() if "Wp.bias" not in key)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_answers_depend_on_neither_padding_nor_the_company_of_a_question(name: str, options: dict):
    network, features, questions = make(name, **options).double(), images(torch.float64), pad_rows(QUESTIONS)
    logits = network(questions, features, ROWS)
    torch.testing.assert_close(network(pad(questions, (0, 12), value=NULL), features, ROWS), logits)
    order = [4, 0, 6, 2, 1, 5, 3]
    torch.testing.assert_close(network(questions[order], features, [ROWS[n] for n in order]), logits[order])
    torch.testing.assert_close(network(questions, features[ROWS]), logits)
    alone = [network(questions[n : n + 1], features[ROWS[n] : ROWS[n] + 1]) for n in range(len(ROWS))]
    torch.testing.assert_close(torch.cat(alone), logits)


def test_the_image_matters_to_those_that_see_it():
    features, questions = images(torch.float32), pad_rows(QUESTIONS)
    for name in BASELINES:
        network = make(name)
        same = torch.equal(network(questions, features, ROWS), network(questions, features.flip(0), ROWS))
        assert same == (name == "lstm")


# Training


def test_batch_norm_of_the_classifier_is_over_questions_and_that_of_residual_blocks_over_images():
    options = {"cnn_res_blocks": 1, "cnn_res_block_dim": 3, "cnn_projection": 0, "cnn_pooling": "none"}
    network = make("cnn_lstm", **options, classifier_dims=(), classifier_norm=True).double().train()
    features, questions = images(torch.float64), pad_rows(QUESTIONS)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    logits = network(questions, features, ROWS)

    def normalised(x: Tensor, layer: nn.Module, over: tuple[int, ...]) -> Tensor:
        shape = (1, -1, *[1] * (x.dim() - 2))
        mean, variance = x.mean(over, keepdim=True), x.var(over, unbiased=False, keepdim=True)
        return (x - mean) / (variance + layer.eps).sqrt() * layer.weight.view(shape) + layer.bias.view(shape)

    block, norm = network.cnn[2], network.classifier[0]
    x = torch.stack([naive_convolution(network.cnn[0], image).clamp(min=0) for image in features])
    inner = torch.stack([naive_convolution(block.conv1, image) for image in x])
    inner = normalised(inner, block.bn1, (0, 2, 3)).clamp(min=0)
    inner = torch.stack([naive_convolution(block.conv2, image) for image in inner])
    maps = (x + normalised(inner, block.bn2, (0, 2, 3))).clamp(min=0).flatten(1)
    states = torch.stack([naive_question(network.rnn, question) for question in QUESTIONS])
    both = normalised(torch.cat([states, maps[ROWS]], 1), norm, (0,))
    torch.testing.assert_close(logits, both @ network.classifier[1].weight.T + network.classifier[1].bias)
    moved = {key for key, value in network.state_dict().items() if not torch.equal(value, before[key])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert moved == {f"{at}.{kind}" for at in ("cnn.2.bn1", "cnn.2.bn2", "classifier.0") for kind in statistics}


@pytest.mark.parametrize("name", BASELINES)
def test_dropout_is_of_the_classifier_s_input_and_hidden_layers(name: str):
    network = make(name, classifier_dims=(50,), classifier_dropout=0.5).train()
    layers = [layer for layer in network.classifier if isinstance(layer, nn.Dropout)]
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda _, given, left: seen.append((given[0], left)))
    network(pad_rows(QUESTIONS), images(torch.float32), ROWS)
    assert [given.shape[1] for given, _ in seen] == [network.classifier[1].in_features, 50]
    for given, left in seen:
        dropped = left == 0
        assert 0.2 < dropped.float().mean() < 0.8
        torch.testing.assert_close(left[~dropped], 2 * given[~dropped])


# Names and sizes


LSTM_NAMES = [f"rnn.rnn.{kind}_{way}_l{n}" for n in range(2) for kind in ("weight", "bias") for way in ("ih", "hh")]
STATISTICS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def layer_names(at: str, kind: str) -> list[str]:
    return [f"{at}.{name}" for name in (STATISTICS if kind == "norm" else ("weight", "bias"))]


def sequence_names(at: str, kinds: list[str]) -> set[str]:
    """Parameters and buffers of a sequence of layers, numbered from 0; only those with weights have any."""
    weighted = {n: kind for n, kind in enumerate(kinds) if kind in ("linear", "convolution", "norm")}
    return {name for n, kind in weighted.items() for name in layer_names(f"{at}.{n}", kind)}


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("dims", [(), (7,), (7, 8)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_question_s_and_the_classifier_s_names_are_those_of_the_original(name, dims, norm, dropout):
    """Written down from the original toolkit: dropout first, batch norm next, and again behind every linear layer."""
    drop, normed = ["dropout"] * (dropout > 0), ["norm"] * norm
    kinds = [*drop, *normed, *[kind for _ in dims for kind in ("linear", *normed, *drop, "relu")], "linear"]
    expected = sequence_names("classifier", kinds) | {"rnn.embed.weight", *LSTM_NAMES}
    network = make(name, classifier_dims=dims, classifier_norm=norm, classifier_dropout=dropout)
    held = {key for key in network.state_dict() if key.startswith(("rnn.", "classifier."))}
    assert held == expected
    types = {"dropout": nn.Dropout, "norm": nn.BatchNorm1d, "linear": nn.Linear, "relu": nn.ReLU}
    assert [type(layer) for layer in network.classifier] == [types[kind] for kind in kinds]


@pytest.mark.parametrize("blocks", [0, 1, 2])
@pytest.mark.parametrize("projection", [0, 4])
@pytest.mark.parametrize("pooling", ["maxpool2", "none"])
def test_the_cnn_s_names_are_those_of_the_original(blocks: int, projection: int, pooling: str):
    kinds = ["convolution", "relu", *["block"] * blocks] if blocks else []
    kinds += ["convolution", "relu"] if projection else []
    expected = sequence_names("cnn", kinds)
    for n in range(blocks):
        expected |= {f"cnn.{2 + n}.conv{i}.{part}" for i in (1, 2) for part in ("weight", "bias")}
        expected |= {f"cnn.{2 + n}.bn{i}.{part}" for i in (1, 2) for part in STATISTICS}
    options = {"cnn_res_blocks": blocks, "cnn_projection": projection, "cnn_pooling": pooling}
    network = make("cnn_lstm", cnn_res_block_dim=6, **options, classifier_dims=())
    assert {key for key in network.state_dict() if key.startswith("cnn.")} == expected
    assert len(network.cnn) == len(kinds) + (pooling == "maxpool2")
    places = (H // 2) * (W // 2) if pooling == "maxpool2" else H * W
    assert network.classifier[0].in_features == 6 + places * (projection or (6 if blocks else C))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_attention_s_names_and_sizes_are_those_of_the_original(steps: int):
    weights = make("cnn_lstm_sa", attention_steps=steps, attention_dim=7).state_dict()
    shapes = {
        "Wv.weight": (7, 6, 1, 1),
        "Wv.bias": (7,),
        "Wu.weight": (7, 6),
        "Wu.bias": (7,),
        "Wp.weight": (1, 7, 1, 1),
        "Wp.bias": (1,),
    }
    expected = {f"stacked-attn-{n}.{key}": shape for n in range(steps) for key, shape in shapes.items()}
    expected |= {"image_proj.weight": (6, C, 1, 1), "image_proj.bias": (6,)}
    seen = {key: tuple(value.shape) for key, value in weights.items() if not key.startswith(("rnn.", "classifier."))}
    assert seen == expected


def test_the_sizes_are_the_published_ones_unless_told_otherwise():
    shape = {"feature_dim": 1024, "feature_height": 14, "feature_width": 14}
    sides = {"lstm": {}, "cnn_lstm": shape, "cnn_lstm_sa": {"feature_dim": 1024}}
    sizes = {"num_question_tokens": 93, "num_answers": 32}
    blind, cnn, attention = (build(name, sizes | sides[name]) for name in BASELINES)
    for network, in_dim in ((blind, 256), (cnn, 256 + 512 * 7 * 7), (attention, 256)):
        assert (network.rnn.embed.embedding_dim, network.rnn.rnn.hidden_size, network.rnn.rnn.num_layers) == (
            300,
            256,
            2,
        )
        shapes = [tuple(parameter.shape) for parameter in network.classifier.parameters()]
        assert shapes == [(1024, in_dim), (1024,), (32, 1024), (32,)]
    assert tuple(cnn.cnn[0].weight.shape) == (512, 1024, 1, 1)
    steps = [child for name, child in attention.named_children() if name.startswith("stacked-attn-")]
    assert [tuple(step.Wv.weight.shape) for step in steps] == [(512, 256, 1, 1)] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cnn_pooling": "maxpool4"}, "cnn_pooling is 'maxpool4', expected one of maxpool2, none"),
        ({"feature_height": 1}, "cnn_pooling maxpool2 leaves nothing of a grid of 1x4"),
    ],
)
def test_a_cnn_that_cannot_be_is_refused(options: dict, problem: str):
    with pytest.raises(ValueError, match=problem):
        make("cnn_lstm", **SHAPE | options)


def test_weights_under_the_names_of_earlier_checkpoints_are_read(tmp_path: Path):
    network = make("lstm", num_layers=1)
    older = {key.removeprefix("rnn."): value for key, value in network.state_dict().items()}
    assert {"embed.weight", "rnn.weight_ih_l0", "rnn.bias_hh_l0", "classifier.0.weight"} <= set(older)
    save_checkpoint(tmp_path / "c.pt", {"weights": older})
    other = make("lstm", seed=1, num_layers=1)
    other.load_state_dict(load_checkpoint(tmp_path / "c.pt")["weights"])
    questions = pad_rows(QUESTIONS)
    assert torch.equal(other(questions), network(questions))
