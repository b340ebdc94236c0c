"""Checkpoints in the original toolkit's layout, with random weights, and what its networks compute of them.

A second implementation that shares nothing with the product's: it reads the flat weights by their names and walks one
example at a time, in float64. Layers are lists; a layer's position in its list is its number in the names of its
weights.

Shapes: B examples, C H W feature maps, T question tokens, A answers.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_data import CHANNELS, VOCAB
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
Layers = list[tuple]
"""("conv", in, out, side), ("linear", in, out), ("norm", channels), ("block", channels, with norm), ("pool", side),
("relu",), ("flatten",), ("dropout",)"""


# Weights


def draw(random: torch.Generator, *shape: int) -> Tensor:
    fan_in = max(1, torch.Size(shape[1:]).numel())
    return torch.randn(*shape, generator=random) * (1.5 / fan_in) ** 0.5


def affine(weights: Weights, name: str, random: torch.Generator, *shape: int) -> None:
    weights[f"{name}.weight"] = draw(random, *shape)
    weights[f"{name}.bias"] = torch.randn(shape[0], generator=random) * 0.1


def norm_weights(weights: Weights, name: str, random: torch.Generator, channels: int, counted: bool) -> None:
    weights[f"{name}.weight"] = torch.rand(channels, generator=random) + 0.5
    weights[f"{name}.bias"] = torch.randn(channels, generator=random) * 0.2
    weights[f"{name}.running_mean"] = torch.randn(channels, generator=random) * 0.3
    weights[f"{name}.running_var"] = torch.rand(channels, generator=random) * 1.5 + 0.5
    if counted:  # by newer versions of PyTorch
        weights[f"{name}.num_batches_tracked"] = torch.tensor(12)


def weights_of(layers: Layers, name: str, random: torch.Generator, counted: bool) -> Weights:
    weights: Weights = {}
    for position, (kind, *sizes) in enumerate(layers):
        place = f"{name}.{position}"
        if kind == "conv":
            affine(weights, place, random, sizes[1], sizes[0], sizes[2], sizes[2])
        elif kind == "linear":
            affine(weights, place, random, sizes[1], sizes[0])
        elif kind == "norm":
            norm_weights(weights, place, random, sizes[0], counted)
        elif kind == "block":
            weights |= block_weights(place, random, sizes[0], sizes[1], counted)
    return weights


def block_weights(name: str, random: torch.Generator, dim: int, norm: bool, counted: bool) -> Weights:
    weights: Weights = {}
    for number in (1, 2):
        affine(weights, f"{name}.conv{number}", random, dim, dim, 3, 3)
        if norm:
            norm_weights(weights, f"{name}.bn{number}", random, dim, counted)
    return weights


def lstm_weights(name: str, random: torch.Generator, inputs: int, hidden: int, layers: int) -> Weights:
    weights: Weights = {}
    for layer in range(layers):
        for side, size in (("ih", hidden if layer else inputs), ("hh", hidden)):
            weights[f"{name}.weight_{side}_l{layer}"] = 2 * draw(random, 4 * hidden, size)
            weights[f"{name}.bias_{side}_l{layer}"] = torch.randn(4 * hidden, generator=random) * 0.1
    return weights


# Layers


def run_layers(layers: Layers, weights: Weights, name: str, x: Tensor) -> Tensor:
    for position, (kind, *sizes) in enumerate(layers):
        place = f"{name}.{position}"
        if kind == "conv":
            x = F.conv2d(x, weights[f"{place}.weight"], weights[f"{place}.bias"], padding=sizes[2] // 2)
        elif kind == "linear":
            x = x @ weights[f"{place}.weight"].T + weights[f"{place}.bias"]
        elif kind == "norm":
            x = normalised(x, weights, place)
        elif kind == "block":
            x = block(x, weights, place, residual=True, norm=sizes[1])
        elif kind == "relu":
            x = x.clamp(min=0)
        elif kind == "pool":
            x = pooled(x, sizes[0])
        elif kind == "flatten":
            x = x.reshape(len(x), -1)
    return x


def normalised(x: Tensor, weights: Weights, name: str) -> Tensor:
    mean, variance, scale, shift = (
        weights[f"{name}.{part}"].view(-1, *[1] * (x.dim() - 2))
        for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / (variance + 1e-5).sqrt() * scale + shift


def pooled(x: Tensor, side: int) -> Tensor:
    """The greatest of each whole window; what is left over is dropped."""
    rows, columns = x.shape[2] // side, x.shape[3] // side
    windows = x[:, :, : rows * side, : columns * side].reshape(len(x), x.shape[1], rows, side, columns, side)
    return windows.amax((3, 5))


def block(x: Tensor, weights: Weights, name: str, residual: bool, norm: bool) -> Tensor:
    inner = x
    for number in (1, 2):
        inner = F.conv2d(inner, weights[f"{name}.conv{number}.weight"], weights[f"{name}.conv{number}.bias"], padding=1)
        if norm:
            inner = normalised(inner, weights, f"{name}.bn{number}")
        if number == 1:
            inner = inner.clamp(min=0)
    return (x + inner if residual else inner).clamp(min=0)


# Settings and files

GRID = 7

GENERATOR = {"wordvec_dim": 5, "hidden_dim": 6, "rnn_num_layers": 2, "rnn_dropout": 0}
ENGINE = {
    "feature_dim": (CHANNELS, GRID, GRID),
    "stem_num_layers": 2,
    "stem_batchnorm": False,
    "module_dim": 4,
    "module_residual": True,
    "module_batchnorm": False,
    "classifier_proj_dim": 5,
    "classifier_downsample": "maxpool2",
    "classifier_fc_layers": (6,),
    "classifier_batchnorm": False,
    "classifier_dropout": 0,
}
BASELINE = {
    "rnn_wordvec_dim": 5,
    "rnn_dim": 6,
    "rnn_num_layers": 2,
    "rnn_dropout": 0,
    "fc_dims": (7,),
    "fc_use_batchnorm": False,
    "fc_dropout": 0,
}
CNN = {
    "cnn_feat_dim": (CHANNELS, GRID, GRID),
    "cnn_res_block_dim": 4,
    "cnn_num_res_blocks": 0,
    "cnn_proj_dim": 5,
    "cnn_pooling": "maxpool2",
}
ATTENTION = {"cnn_feat_dim": (CHANNELS, GRID, GRID), "stacked_attn_dim": 5, "num_stacked_attn": 2}


def vocab() -> dict[str, dict]:
    """The vocabulary as the original keeps it: both ways, indices as whole numbers."""
    held = VOCAB.to_json()
    inverse = {
        name.replace("token_to_idx", "idx_to_token"): {i: t for t, i in table.items()} for name, table in held.items()
    }
    return held | inverse


def write(path: Path, content: dict[str, Any], **how: Any) -> Path:
    """A torch file of all the keys that the original writes, `content` over those of a file without networks."""
    parts = ("program_generator", "execution_engine", "baseline")
    empty = {f"{part}_{what}": None for part in parts for what in ("kwargs", "state")}
    statistics = {"train_losses": [2.5, 1.25], "train_losses_ts": [1, 2], "val_accs": [0.5], "model_t": 2}
    arguments = {"args": {"model_type": "PG+EE", "batch_size": 64, "checkpoint_path": "data/checkpoint.pt"}}
    torch.save({**arguments, **empty, "baseline_type": None, "vocab": vocab(), **statistics, **content}, path, **how)
    return path


# The execution engine


def _is_binary(token: str) -> bool:
    return token in ("union", "intersect", "less_than", "greater_than") or token.startswith("equal_")


def _stem(options: dict[str, Any]) -> Layers:
    layers, width = [], options["feature_dim"][0]
    for _ in range(options["stem_num_layers"]):
        layers.append(("conv", width, options["module_dim"], 3))
        layers += [("norm", options["module_dim"])] if options["stem_batchnorm"] else []
        layers.append(("relu",))
        width = options["module_dim"]
    return layers


def _classifier(options: dict[str, Any], answers: int) -> Layers:
    layers, channels = [], options["module_dim"]
    norm = options["classifier_batchnorm"]
    if options["classifier_proj_dim"]:
        layers.append(("conv", channels, options["classifier_proj_dim"], 1))
        channels = options["classifier_proj_dim"]
        layers += [("norm", channels)] if norm else []
        layers.append(("relu",))
    side = {"none": 1, "maxpool2": 2, "maxpool4": 4}[options["classifier_downsample"]]
    layers += [("pool", side)] if side > 1 else []
    layers.append(("flatten",))
    _, height, width = options["feature_dim"]
    size = channels * (height // side) * (width // side)
    for hidden in options["classifier_fc_layers"]:
        layers.append(("linear", size, hidden))
        layers += [("norm", hidden)] if norm else []
        layers.append(("relu",))
        layers += [("dropout",)] if options["classifier_dropout"] else []
        size = hidden
    return [*layers, ("linear", size, answers)]


def engine_file(seed: int = 0, counted: bool = True, **options: Any) -> dict[str, Any]:
    """`execution_engine_kwargs` and `_state`; `counted`: norms hold `num_batches_tracked`."""
    random, options = torch.Generator().manual_seed(seed), ENGINE | options
    weights = weights_of(_stem(options), "stem", random, counted)
    weights |= weights_of(_classifier(options, len(VOCAB.answer)), "classifier", random, counted)
    dim, norm = options["module_dim"], options["module_batchnorm"]
    for token in VOCAB.program:
        block = token
        if _is_binary(token):
            affine(weights, f"{token}.proj", random, dim, 2 * dim, 1, 1)
            block = f"{token}.res_block"
        weights |= block_weights(block, random, dim, norm, counted)
    return {"execution_engine_kwargs": {"vocab": vocab(), **options}, "execution_engine_state": weights}


def engine_logits(file: dict[str, Any], features_BCHW: Tensor, programs_BL: Sequence[Sequence[int]]) -> Tensor:
    """(B, A) float64 logits, by recursion over one program after the other."""
    options = file["execution_engine_kwargs"]
    weights = {name: value.double() for name, value in file["execution_engine_state"].items()}
    found = []
    for image_CHW, program_L in zip(features_BCHW, programs_BL, strict=True):
        stem = run_layers(_stem(options), weights, "stem", image_CHW[None].double())
        tokens = iter([VOCAB.program[index] for index in program_L if VOCAB.program[index] != "<START>"])
        value = _value(tokens, weights, stem, options["module_residual"], options["module_batchnorm"])
        found.append(run_layers(_classifier(options, len(VOCAB.answer)), weights, "classifier", value))
    return torch.cat(found)


def _value(tokens: Any, weights: Weights, stem: Tensor, residual: bool, norm: bool) -> Tensor:
    token = next(tokens, "<NULL>")
    token = "scene" if token == "<NULL>" else token
    if token == "scene":
        return block(stem, weights, token, residual, norm)
    first = _value(tokens, weights, stem, residual, norm)
    if not _is_binary(token):
        return block(first, weights, token, residual, norm)
    both = torch.cat([first, _value(tokens, weights, stem, residual, norm)], dim=1)
    joined = F.conv2d(both, weights[f"{token}.proj.weight"], weights[f"{token}.proj.bias"]).clamp(min=0)
    return block(joined, weights, f"{token}.res_block", residual, norm)


# The program generator


def generator_file(seed: int = 0, **options: Any) -> dict[str, Any]:
    """`program_generator_kwargs` and `_state`."""
    random, options = torch.Generator().manual_seed(seed), GENERATOR | options
    questions, programs = len(VOCAB.question), len(VOCAB.program)
    words, hidden, layers = options["wordvec_dim"], options["hidden_dim"], options["rnn_num_layers"]
    weights = {"encoder_embed.weight": torch.randn(questions, words, generator=random)}
    weights |= lstm_weights("encoder_rnn", random, words, hidden, layers)
    weights["decoder_embed.weight"] = torch.randn(programs, words, generator=random)
    weights |= lstm_weights("decoder_rnn", random, hidden + words, hidden, layers)
    affine(weights, "decoder_linear", random, programs, hidden)
    weights["decoder_linear.weight"] *= 4  # so that what comes next depends on what came before
    sizes = {"encoder_vocab_size": questions, "decoder_vocab_size": programs}
    return {"program_generator_kwargs": sizes | options, "program_generator_state": weights}


def _lstm(weights: Weights, name: str, layers: int, x: Tensor, states: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One step of all layers; `states` (hidden, cell of each) go on."""
    for layer in range(layers):
        hidden, cell = states[layer]
        sums = x @ weights[f"{name}.weight_ih_l{layer}"].T + weights[f"{name}.bias_ih_l{layer}"]
        sums = sums + hidden @ weights[f"{name}.weight_hh_l{layer}"].T + weights[f"{name}.bias_hh_l{layer}"]
        into, forget, new, out = sums.chunk(4)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        x = out.sigmoid() * cell.tanh()
        states[layer] = (x, cell)
    return x


def _zeros(layers: int, hidden: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.zeros(hidden).double(), torch.zeros(hidden).double()) for _ in range(layers)]


def _last_state(weights: Weights, embed: str, rnn: str, layers: int, hidden: int, question_T: Sequence[int]) -> Tensor:
    states, encoding = _zeros(layers, hidden), None
    length = max(place for place, token in enumerate(question_T) if token != 0) + 1
    for token in question_T[:length]:
        encoding = _lstm(weights, rnn, layers, weights[f"{embed}.weight"][token], states)
    return encoding


def decode(file: dict[str, Any], question_T: Sequence[int]) -> list[int]:
    """<START>, then the likeliest tokens one by one, until <END> or 30 of them. Any token may come, <NULL> too, and is
    what the decoder reads next."""
    options = file["program_generator_kwargs"]
    weights = {name: value.double() for name, value in file["program_generator_state"].items()}
    layers, hidden = options["rnn_num_layers"], options["hidden_dim"]
    encoding = _last_state(weights, "encoder_embed", "encoder_rnn", layers, hidden, question_T)
    states, program = _zeros(layers, hidden), [1]
    while len(program) <= 30 and program[-1] != 2:
        read = torch.cat([encoding, weights["decoder_embed.weight"][program[-1]]])
        top = _lstm(weights, "decoder_rnn", layers, read, states)
        logits = weights["decoder_linear.weight"] @ top + weights["decoder_linear.bias"]
        program.append(int(logits.argmax()))
    return program


# The baselines


def _mlp(options: dict[str, Any], inputs: int, answers: int) -> Layers:
    layers = [("dropout",)] if options["fc_dropout"] else []
    layers += [("norm", inputs)] if options["fc_use_batchnorm"] else []
    for hidden in options["fc_dims"]:
        layers.append(("linear", inputs, hidden))
        layers += [("norm", hidden)] if options["fc_use_batchnorm"] else []
        layers += [("dropout",)] if options["fc_dropout"] else []
        layers.append(("relu",))
        inputs = hidden
    return [*layers, ("linear", inputs, answers)]


def _cnn(options: dict[str, Any]) -> tuple[Layers, int]:
    layers, (channels, height, width) = [], options["cnn_feat_dim"]
    if options["cnn_num_res_blocks"]:
        layers += [("conv", channels, options["cnn_res_block_dim"], 3), ("relu",)]
        channels = options["cnn_res_block_dim"]
        layers += [("block", channels, True)] * options["cnn_num_res_blocks"]
    if options["cnn_proj_dim"]:
        layers += [("conv", channels, options["cnn_proj_dim"], 1), ("relu",)]
        channels = options["cnn_proj_dim"]
    if options["cnn_pooling"] == "maxpool2":
        layers.append(("pool", 2))
        height, width = height // 2, width // 2
    return layers, channels * height * width


def baseline_file(kind: str, seed: int = 0, counted: bool = True, **options: Any) -> dict[str, Any]:
    """`baseline_type`, `_kwargs` and `_state`."""
    random = torch.Generator().manual_seed(seed)
    options = BASELINE | {"LSTM": {}, "CNN+LSTM": CNN, "CNN+LSTM+SA": ATTENTION}[kind] | options
    words, hidden, layers = options["rnn_wordvec_dim"], options["rnn_dim"], options["rnn_num_layers"]
    weights = {"rnn.embed.weight": torch.randn(len(VOCAB.question), words, generator=random)}
    weights |= lstm_weights("rnn.rnn", random, words, hidden, layers)
    inputs = hidden
    if kind == "CNN+LSTM":
        cnn, size = _cnn(options)
        weights |= weights_of(cnn, "cnn", random, counted)
        inputs += size
    if kind == "CNN+LSTM+SA":
        affine(weights, "image_proj", random, hidden, options["cnn_feat_dim"][0], 1, 1)
        for step in range(options["num_stacked_attn"]):
            name, wide = f"stacked-attn-{step}", options["stacked_attn_dim"]
            affine(weights, f"{name}.Wv", random, wide, hidden, 1, 1)
            affine(weights, f"{name}.Wu", random, wide, hidden)
            affine(weights, f"{name}.Wp", random, 1, wide, 1, 1)
    weights |= weights_of(_mlp(options, inputs, len(VOCAB.answer)), "classifier", random, counted)
    return {"baseline_type": kind, "baseline_kwargs": {"vocab": vocab(), **options}, "baseline_state": weights}


def baseline_logits(
    file: dict[str, Any],
    features_BCHW: Tensor,
    questions_BT: Sequence[Sequence[int]],
    answers: int = len(VOCAB.answer),
) -> Tensor:
    """Return (B, A) float64 logits, one example after the other."""
    kind, options = file["baseline_type"], file["baseline_kwargs"]
    weights = {name: value.double() for name, value in file["baseline_state"].items()}
    see: Callable[[Tensor, Tensor], Tensor] = {
        "LSTM": lambda seen, query: query,
        "CNN+LSTM": lambda seen, query: torch.cat(
            [query, run_layers(_cnn(options)[0], weights, "cnn", seen).flatten()]
        ),
        "CNN+LSTM+SA": lambda seen, query: _attended(options, weights, seen, query),
    }[kind]
    found = []
    for image_CHW, question_T in zip(features_BCHW, questions_BT, strict=True):
        layers, hidden = options["rnn_num_layers"], options["rnn_dim"]
        query = _last_state(weights, "rnn.embed", "rnn.rnn", layers, hidden, question_T)
        joined = see(image_CHW[None].double(), query)[None]
        found.append(run_layers(_mlp(options, joined.shape[1], answers), weights, "classifier", joined))
    return torch.cat(found)


def _attended(options: dict[str, Any], weights: Weights, seen: Tensor, query: Tensor) -> Tensor:
    places = F.conv2d(seen, weights["image_proj.weight"], weights["image_proj.bias"]).flatten(2)[0].T
    for step in range(options["num_stacked_attn"]):
        parts = {
            name: (
                weights[f"stacked-attn-{step}.{name}.weight"].flatten(1),
                weights[f"stacked-attn-{step}.{name}.bias"],
            )
            for name in ("Wv", "Wu", "Wp")
        }
        wanted = parts["Wu"][0] @ query + parts["Wu"][1]
        hidden = torch.tanh(places @ parts["Wv"][0].T + parts["Wv"][1] + wanted)
        shares = (hidden @ parts["Wp"][0].T + parts["Wp"][1])[:, 0].softmax(0)
        query = query + shares @ places
    return query
