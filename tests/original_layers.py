"""Layers of the original toolkit's networks as lists: random weights under its names, and what they compute.

A layer's position in its list is its number in the names of its weights. Everything is computed from the flat weights,
in evaluation, by no module of torch's nor of the product's.

Shapes: B examples, C H W feature maps.
"""

import torch
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
