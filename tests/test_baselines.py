"""The baselines' networks against a second implementation, and what training changes in them."""

import pytest
import torch
from device_cases import DEVICES
from engine_cases import draw_norms
from original_cases import baseline_logits
from sequence_cases import QUESTIONS, gradients, pad_rows
from torch import Tensor, nn

from iep.models.build import BASELINES, build, with_defaults

C, H, W, IMAGES = 3, 5, 4, 3
ROWS = [1, 0, 1, 2, 1, 0, 2]
"""The image of each of the seven questions: no order, and several questions on each."""
SIZES = {"num_question_tokens": 9, "num_answers": 4, "embedding_dim": 5, "hidden_dim": 6}
SHAPE = {"feature_dim": C, "feature_height": H, "feature_width": W}
NORM = {"classifier_norm": True, "classifier_dropout": 0.5}


def make(name: str, seed: int = 0, **options: object) -> nn.Module:
    """Return a small baseline in evaluation mode, running statistics of batch norms other than at their start."""
    torch.manual_seed(seed)
    sides = {"lstm": {}, "cnn_lstm": SHAPE, "cnn_lstm_sa": {"feature_dim": C}}[name]
    network = build(name, SIZES | sides | options)
    draw_norms(network)
    return network.eval()


def images(dtype: torch.dtype) -> Tensor:
    return torch.randn(IMAGES, C, H, W, generator=torch.Generator().manual_seed(5), dtype=dtype)


def naive_logits(name: str, network: nn.Module, features: Tensor, **settings: object) -> Tensor:
    """Return the logits of the seven questions by the original's rules, from a network's settings and weights."""
    kwargs, kind = (
        with_defaults(name, SIZES | settings),
        {"lstm": "LSTM", "cnn_lstm": "CNN+LSTM", "cnn_lstm_sa": "CNN+LSTM+SA"},
    )
    options = {f"fc_{new}": kwargs[f"classifier_{new}"] for new in ("dims", "dropout")}
    options |= {"fc_use_batchnorm": kwargs["classifier_norm"], "cnn_feat_dim": (C, H, W)}
    rnn = {"rnn_wordvec_dim": "embedding_dim", "rnn_dim": "hidden_dim", "rnn_num_layers": "num_layers"}
    options |= {old: kwargs[new] for old, new in rnn.items()}
    if name == "cnn_lstm":
        options |= {"cnn_num_res_blocks": kwargs["cnn_res_blocks"], "cnn_proj_dim": kwargs["cnn_projection"]}
        options |= {key: kwargs[key] for key in ("cnn_res_block_dim", "cnn_pooling")}
    if name == "cnn_lstm_sa":
        options |= {"num_stacked_attn": kwargs["attention_steps"], "stacked_attn_dim": kwargs["attention_dim"]}
    state = dict(network.named_parameters()) | dict(network.named_buffers())
    file = {"baseline_type": kind[name], "baseline_kwargs": options, "baseline_state": state}
    return baseline_logits(file, features[ROWS], QUESTIONS)


CASES = [
    ("lstm", {"classifier_dims": (7, 8), "num_layers": 1, **NORM}),
    ("cnn_lstm", {"cnn_projection": 0, "cnn_pooling": "none", "classifier_dims": ()}),
    ("cnn_lstm", {"cnn_res_blocks": 2, "cnn_res_block_dim": 3, "cnn_projection": 4, "classifier_dims": (7,), **NORM}),
    ("cnn_lstm_sa", {"attention_dim": 7, "classifier_dims": (7,)}),
    ("cnn_lstm_sa", {"attention_dim": 3, "attention_steps": 3, "classifier_dims": (7, 8), **NORM}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_logits_and_every_gradient_match_the_equations_one_question_at_a_time(name, options, device):
    network = make(name, **options).double()
    features = images(torch.float64)
    naive = naive_logits(name, network, features, **options)
    expected = gradients(network, naive.square().mean())

    network.to(device)
    for part in network.modules():  # On a GPU, only LSTMs in training mode have a backward pass.
        part.train(isinstance(part, nn.LSTM))
    logits = network(pad_rows(QUESTIONS).to(device), features.to(device), ROWS)
    found = {key: value.cpu() for key, value in gradients(network, logits.square().mean()).items()}
    torch.testing.assert_close(logits.cpu(), naive.detach())
    torch.testing.assert_close(found, expected)
    assert all(gradient.abs().max() > 0 for key, gradient in expected.items() if "Wp.bias" not in key)


# Training


def test_the_classifiers_batch_norm_is_over_questions_and_that_of_residual_blocks_over_images():
    options = {"cnn_res_blocks": 1, "cnn_res_block_dim": 3, "cnn_projection": 0, "cnn_pooling": "none"}
    network = make("cnn_lstm", **options, classifier_dims=(), classifier_norm=True).train()
    norms = {network.cnn[2].bn1: IMAGES, network.cnn[2].bn2: IMAGES, network.classifier[0]: len(ROWS)}
    before, seen = {norm: norm.running_mean.clone() for norm in norms}, {}
    for norm in norms:
        norm.register_forward_hook(lambda layer, given, _: seen.update({layer: given[0]}))
    network(pad_rows(QUESTIONS), images(torch.float32), ROWS)
    for norm, rows in norms.items():
        assert len(seen[norm]) == rows
        mean = seen[norm].transpose(0, 1).flatten(1).mean(1)
        torch.testing.assert_close(norm.running_mean, 0.9 * before[norm] + 0.1 * mean)


@pytest.mark.parametrize("name", BASELINES)
def test_dropout_is_of_the_classifiers_input_and_hidden_layers(name: str):
    network, widths = make(name, classifier_dims=(50,), classifier_dropout=0.5), []
    for layer in network.classifier:
        if isinstance(layer, nn.Dropout):
            layer.register_forward_hook(lambda _, given, left: widths.append(given[0].shape[1]))
    network(pad_rows(QUESTIONS), images(torch.float32), ROWS)
    assert widths == [network.classifier[1].in_features, 50]


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
